"""Order of sequences: pure, complete, and golden."""

import numpy as np
import pytest

from minilm_cache.storage_schema.manifest import CacheManifest, ShardRange
from minilm_cache.train.sampler import SequenceOrder


def manifest_of(*sizes: int, held_out: int = 0) -> CacheManifest:
    """A manifest of shards of so many sequences, as far as an order looks at it."""
    firsts = np.cumsum([0, *sizes]).tolist()
    shards = tuple(
        ShardRange(first_sequence=first, num_sequences=size, num_tokens=size)
        for first, size in zip(firsts, sizes, strict=False)
    )
    return CacheManifest.model_construct(
        shards=shards, num_sequences=sum(sizes), num_held_out=held_out, num_tokens=sum(sizes)
    )


def sequences(order: SequenceOrder, epoch: int) -> list[int]:
    return [number for buffer in order.epoch(epoch) for number in buffer.sequences.tolist()]


@pytest.mark.parametrize("buffer_shards", [1, 2, 9])
def test_an_epoch_takes_every_training_sequence_once(buffer_shards: int) -> None:
    order = SequenceOrder(manifest=manifest_of(5, 3, 7, 4, held_out=6), seed=0, buffer_shards=buffer_shards)

    assert sorted(sequences(order, 0)) == list(range(13))
    assert sequences(order, 0) == sequences(order, 0)
    assert sequences(order, 0) != sequences(order, 1)


def test_a_buffer_names_exactly_the_shards_of_its_sequences() -> None:
    manifest = manifest_of(5, 3, 7, 4)
    for buffer in SequenceOrder(manifest=manifest, seed=3, buffer_shards=2).epoch(0):
        expected = {
            number
            for shard in buffer.shards
            for number in range(
                manifest.shards[shard].first_sequence,
                manifest.shards[shard].first_sequence + manifest.shards[shard].num_sequences,
            )
        }

        assert set(buffer.sequences.tolist()) == expected


@pytest.mark.parametrize("position", [0, 1, 4, 5, 18, 19, 20, 40])
def test_a_stream_from_a_position_is_the_rest_of_the_stream(position: int) -> None:
    order = SequenceOrder(manifest=manifest_of(5, 3, 7, 4), seed=1, buffer_shards=2)

    def take(start: int, count: int) -> list[int]:
        taken: list[int] = []
        for buffer in order.stream(start):
            taken += buffer.sequences.tolist()
            if len(taken) >= count:
                return taken[:count]
        raise AssertionError

    assert take(position, 30) == take(0, position + 30)[position:]


def test_golden_order() -> None:
    """Runs of released versions must resume: change these numbers only with the run format."""
    order = SequenceOrder(manifest=manifest_of(4, 3, 3, held_out=2), seed=0, buffer_shards=2)

    assert [sequences(order, epoch) for epoch in (0, 1)] == [
        [1, 3, 2, 0, 7, 5, 6, 4],
        [0, 2, 1, 7, 3, 5, 4, 6],
    ]
