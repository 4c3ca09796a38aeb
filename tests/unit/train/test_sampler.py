"""Order of sequences: pure, complete, and golden."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.store.ranges import Segments, ShardRanges
from minilm_cache.train.sampler import Buffer, SequenceOrder


def order_of(
    *sizes: int, held_out: int = 0, seed: int = 0, buffer_shards: int = 2, per_shard: int = 1
) -> SequenceOrder:
    """Return the order of shards of so many sequences, the last ones held out."""
    segments = Segments(ShardRanges(np.asarray(sizes), np.asarray(sizes)), per_shard)
    return SequenceOrder(
        segments=segments, num_train=sum(sizes) - held_out, seed=seed, buffer_shards=buffer_shards
    )


def sequences(order: SequenceOrder, epoch: int) -> list[int]:
    return [number for buffer in order.epoch(epoch) for number in buffer.sequences.tolist()]


@pytest.mark.parametrize("per_shard", [1, 2, 4])
@pytest.mark.parametrize("buffer_shards", [1, 2, 9])
def test_an_epoch_takes_every_training_sequence_once(buffer_shards: int, per_shard: int) -> None:
    order = order_of(5, 3, 7, 4, held_out=6, buffer_shards=buffer_shards, per_shard=per_shard)

    assert sorted(sequences(order, 0)) == list(range(13))
    assert sequences(order, 0) == sequences(order, 0)
    assert sequences(order, 0) != sequences(order, 1)


@pytest.mark.parametrize("per_shard", [1, 2])
def test_a_buffer_names_exactly_the_segments_of_its_sequences(per_shard: int) -> None:
    order = order_of(5, 3, 7, 4, seed=3, per_shard=per_shard)
    for buffer in order.epoch(0):
        expected = {number for segment in buffer.segments for number in order.segments.sequences(segment)}

        assert set(buffer.sequences.tolist()) == expected


@pytest.mark.parametrize("position", [0, 1, 4, 5, 18, 19, 20, 40])
def test_a_stream_from_a_position_is_the_rest_of_the_stream(position: int) -> None:
    order = order_of(5, 3, 7, 4, seed=1)

    def take(start: int, count: int) -> list[int]:
        taken: list[int] = []
        for buffer in order.stream(start):
            taken += buffer.sequences[buffer.skipped :].tolist()
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


def taken_by_all(order: SequenceOrder, num_streams: int, count: int) -> list[list[int]]:
    """Return the first sequences of every stream."""
    found = []
    for number in range(num_streams):
        stream = replace(order, stream_number=number, num_streams=num_streams).stream(0)
        taken: list[int] = []
        while len(taken) < count:
            taken += next(stream).sequences.tolist()
        found.append(taken[:count])
    return found


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    held_out=st.integers(0, 5),
    num_streams=st.integers(1, 9),
    buffer_shards=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_streams_see_every_training_sequence_equally_often(
    sizes: list[int], held_out: int, num_streams: int, buffer_shards: int
) -> None:
    """Whatever the shards and streams, after every step, to one: an epoch means the same for all."""
    num_train = max(1, sum(sizes) - held_out)
    num_streams = min(num_streams, num_train)
    order = order_of(*sizes, held_out=sum(sizes) - num_train, buffer_shards=buffer_shards)
    streams = taken_by_all(order, num_streams, 3 * num_train)
    counts = np.zeros(num_train, dtype=int)
    for step in range(3 * num_train):
        for stream in streams:
            counts[stream[step]] += 1
        assert counts.max() - counts.min() <= 1


def test_ranks_of_unlike_shards_take_the_same_epochs() -> None:
    """Six shards on four processes, five epochs: they were 3.5, 4.4, 7.0 and 7.0."""
    order = order_of(90, 80, 70, 60, 50, 12, held_out=7)
    steps = 5 * order.num_train // 4
    counts = [np.bincount(stream, minlength=order.num_train) for stream in taken_by_all(order, 4, steps)]

    assert set(np.sum(counts, axis=0).tolist()) <= {4, 5}
    assert {int(count.sum()) for count in counts} == {steps}


@pytest.mark.parametrize("num_streams", [2, 3, 5])
@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 6, 17, 40])
def test_one_of_several_streams_resumes_at_any_position(num_streams: int, position: int) -> None:
    order = replace(order_of(5, 3, 7, 4, seed=1), stream_number=1, num_streams=num_streams)

    def take(start: int, count: int) -> list[int]:
        stream, taken = order.stream(start), list[int]()
        while len(taken) < count:
            buffer = next(stream)
            taken += buffer.sequences[buffer.skipped :].tolist()
        return taken[:count]

    assert take(position, 30) == take(0, position + 30)[position:]


def test_a_stream_reads_its_own_shards_and_at_most_two_of_others() -> None:
    order = order_of(*[10] * 12)
    for number in range(3):
        stream = replace(order, stream_number=number, num_streams=3)
        shards = {shard for buffer in stream.epoch(0) for shard in buffer.segments}

        assert len(shards) == 4


def test_the_segments_of_a_shard_follow_each_other_in_an_order_of_their_own() -> None:
    order = order_of(*[64] * 9, buffer_shards=1, per_shard=8)
    taken = [order.segments.shard_of(buffer.segments[0]) for buffer in order.epoch(0)]
    orders = {tuple(buffer.segments[0] % 8 for buffer in order.epoch(epoch))[:8] for epoch in range(9)}

    assert [shard for shard, before in zip(taken, [None, *taken], strict=False) if shard != before] == list(
        dict.fromkeys(taken)
    )
    assert len(orders) == 9
    assert all(sorted(places) == list(range(8)) for places in orders)


@pytest.mark.parametrize("per_shard", [1, 4])
@pytest.mark.parametrize("num_streams", [2, 3])
def test_streams_take_every_sequence_once_whatever_the_segments(num_streams: int, per_shard: int) -> None:
    order = order_of(17, 3, 29, 4, held_out=6, per_shard=per_shard)
    taken = [
        number
        for stream in range(num_streams)
        for number in sequences(replace(order, stream_number=stream, num_streams=num_streams), 0)
    ]

    assert sorted(taken) == list(range(47))


# Batches of like lengths


@given(
    st.lists(st.integers(4, 200), min_size=1, max_size=400),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(0, 3),
)
def test_batches_by_length_hold_every_sequence_once(
    lengths: list[int], batch_size: int, head: int, epoch: int
) -> None:
    numbers = np.random.default_rng(0).permutation(len(lengths)) + 7
    buffer = Buffer(segments=(0,), sequences=numbers, epoch=epoch)
    sizes = np.asarray(lengths)
    ordered = buffer.in_order(sizes, batch_size, head=head)

    assert sorted(ordered.sequences.tolist()) == sorted(numbers.tolist())
    assert np.array_equal(ordered.sequences[:head], numbers[:head]), "they complete the batch before"
    assert np.array_equal(ordered.sequences, buffer.in_order(sizes, batch_size, head=head).sequences)


def test_batches_by_length_save_padding() -> None:
    generator = np.random.default_rng(1)
    lengths = generator.geometric(0.03, 6400) + 3
    buffer = Buffer(segments=(0,), sequences=np.arange(6400), epoch=0)
    ordered = buffer.in_order(lengths, 64, head=0)

    def padded(order: np.ndarray) -> int:
        return int((lengths[order].reshape(-1, 64).max(1) * 64).sum())

    assert padded(ordered.sequences) < 1.2 * lengths.sum() < padded(buffer.sequences) / 3
    means = lengths[ordered.sequences].reshape(-1, 64).mean(1)
    assert abs(np.corrcoef(means, np.arange(100))[0, 1]) < 0.3, "long and short batches come at any time"
