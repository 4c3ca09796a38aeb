"""Order of sequences: pure, complete, and golden."""

from dataclasses import replace

import numpy as np
import pytest

from minilm_cache.storage_schema.manifest import ShardRange
from minilm_cache.train.sampler import SequenceOrder


def order_of(*sizes: int, held_out: int = 0, seed: int = 0, buffer_shards: int = 2) -> SequenceOrder:
    """Return the order of shards of so many sequences, the last ones held out."""
    firsts = np.cumsum([0, *sizes]).tolist()
    shards = tuple(
        ShardRange(first_sequence=first, num_sequences=size, num_tokens=size)
        for first, size in zip(firsts, sizes, strict=False)
    )
    return SequenceOrder(
        shards=shards, num_train=sum(sizes) - held_out, seed=seed, buffer_shards=buffer_shards
    )


def sequences(order: SequenceOrder, epoch: int) -> list[int]:
    return [number for buffer in order.epoch(epoch) for number in buffer.sequences.tolist()]


@pytest.mark.parametrize("buffer_shards", [1, 2, 9])
def test_an_epoch_takes_every_training_sequence_once(buffer_shards: int) -> None:
    order = order_of(5, 3, 7, 4, held_out=6, buffer_shards=buffer_shards)

    assert sorted(sequences(order, 0)) == list(range(13))
    assert sequences(order, 0) == sequences(order, 0)
    assert sequences(order, 0) != sequences(order, 1)


def test_a_buffer_names_exactly_the_shards_of_its_sequences() -> None:
    order = order_of(5, 3, 7, 4, seed=3)
    for buffer in order.epoch(0):
        expected = {
            number
            for shard in buffer.shards
            for number in range(
                order.shards[shard].first_sequence,
                order.shards[shard].first_sequence + order.shards[shard].num_sequences,
            )
        }

        assert set(buffer.sequences.tolist()) == expected


@pytest.mark.parametrize("position", [0, 1, 4, 5, 18, 19, 20, 40])
def test_a_stream_from_a_position_is_the_rest_of_the_stream(position: int) -> None:
    order = order_of(5, 3, 7, 4, seed=1)

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
    order = order_of(4, 3, 3, held_out=2)

    assert [sequences(order, epoch) for epoch in (0, 1)] == [
        [1, 3, 2, 0, 7, 5, 6, 4],
        [0, 2, 1, 7, 3, 5, 4, 6],
    ]


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_streams_divide_shards_among_themselves(num_streams: int) -> None:
    whole = order_of(5, 3, 7, 4, 6, held_out=8)
    streams = [replace(whole, stream_number=number, num_streams=num_streams) for number in range(num_streams)]
    found = [sequences(stream, 3) for stream in streams]

    assert sorted(number for one in found for number in one) == list(range(17))
    assert [len(one) for one in found] == [stream.num_sequences for stream in streams]
    for number, stream in enumerate(streams):
        taken = [shard for buffer in stream.epoch(3) for shard in buffer.shards]
        assert all(shard % num_streams == number for shard in taken)
