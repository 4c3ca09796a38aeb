"""Segments of a dump: batches of any order come to their places, in memory that is used again."""

import numpy as np
import pytest
import torch

from minilm_cache.corpus.sequences import TokenBatch
from minilm_cache.dump.shard_output import Room, Segment
from minilm_cache.relations.transfer import Arrival

LENGTHS = [3, 1, 4, 1, 5, 2]


def segment_of(room: Room) -> Segment:
    ids = [np.full(length, number, np.int64) for number, length in enumerate(LENGTHS)]
    return Segment(
        first_sequence=0,
        tokens=TokenBatch(ids=ids, documents=np.arange(len(ids))),
        first_row=0,
        rows={"codes": room.array("codes", (sum(LENGTHS), 2), np.int64), "pooled": np.empty((len(ids), 1))},
        by_sequence=frozenset({"pooled"}),
        entropy={},
        ends_shard=True,
    )


@pytest.mark.parametrize(
    "batches",
    [[[0, 1, 2, 3, 4, 5]], [[2, 3], [0, 1], [4, 5]], [[1, 3], [5], [0, 2], [4]], [[5, 4, 3, 2, 1, 0]]],
)
def test_batches_come_to_their_places(batches: list[list[int]]) -> None:
    segment = segment_of(Room())
    for batch in batches:
        rows = torch.tensor([[number, at] for number in batch for at in range(LENGTHS[number])])
        pooled = torch.tensor(batch, dtype=torch.float64)[:, None]
        segment.take(np.asarray(batch), Arrival({"codes": rows, "pooled": pooled}))

    expected = [[number, at] for number, length in enumerate(LENGTHS) for at in range(length)]
    assert segment.rows["codes"].tolist() == expected
    assert segment.rows["pooled"].ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_memory_is_used_again_where_it_is_large_enough() -> None:
    room = Room()
    first = room.array("codes", (10, 2), np.int16)
    other = room.array("codes", (10, 2), np.int16)
    assert not np.shares_memory(first, other)

    room.give_back("codes", first)
    smaller = room.array("codes", (4, 2), np.int16)
    assert smaller.shape == (4, 2)
    assert np.shares_memory(smaller, first)

    room.give_back("codes", smaller)
    assert np.shares_memory(room.array("codes", (10, 2), np.int16), first)
    assert not np.shares_memory(room.array("codes", (10, 2), np.int16), first)
    assert room.array("codes", (11, 2), np.int16).shape == (11, 2)
