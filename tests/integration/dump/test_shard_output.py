"""Batches on their way to disk: an error costs no shard that is computed, and commits no other one."""

from typing import Any

import pytest

from minilm_cache.dump.shard_output import Segment
from minilm_cache.dump.shards import ShardJob
from minilm_cache.relations.transfer import Arrival
from minilm_cache.store.reader import CacheReader
from tests.integration.dump.test_dump import arrays_of
from tests.support import World


def test_a_shard_that_is_computed_is_committed_though_the_next_one_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ShardJob._encode_batch

    def fails(self: ShardJob, segment: Segment, chosen: Any) -> Arrival:
        if self.writer.ranges.shard_of(segment.first_sequence) == 1:
            raise ValueError("broken")
        return real(self, segment, chosen)

    with monkeypatch.context() as patch:
        patch.setattr(ShardJob, "_encode_batch", fails)
        with pytest.raises(ValueError, match="broken"):
            world.dump()

    assert [file.name for file in (world.root / "cache/commits").iterdir()] == ["00000.json"]
    assert arrays_of(world.dump().path) == arrays_of(world.dump("whole").path)


def test_a_shard_with_a_batch_that_did_not_arrive_is_not_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = int(CacheReader(world.dump("whole").path).ranges.num_sequences[0])
    real, calls = Segment.take, iter(range(1000))

    def fails(self: Segment, chosen: Any, arriving: Arrival) -> None:
        if next(calls) == 0:
            raise ValueError("broken")
        real(self, chosen, arriving)

    monkeypatch.setattr(Segment, "take", fails)
    with pytest.raises(ValueError, match="broken"):
        world.dump(batch_size=-(-sequences // 2))  # the second batch ends the shard

    assert next(calls) == 1  # nothing went on after it
    assert not list(world.root.glob("cache/commits/*"))
