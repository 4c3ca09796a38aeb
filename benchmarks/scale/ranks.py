"""Measure a dump by eight ranks, which are threads that wait before each shard.

One is stopped, one is slow, and one begins late.
"""

import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minilm_cache import DumpConfig, dump_cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.session import Session
from minilm_cache.store.reader import CacheReader


@dataclass
class _Rank:
    """A rank that waits before each batch, and notes when it began."""

    number: int
    pace_s: float = 1.0
    late_s: float = 0.0
    stops_after_s: float = math.inf
    began: float = math.inf

    def should_stop(self) -> bool:
        self.began = min(self.began, time.time())
        time.sleep(self.pace_s)
        return time.time() - self.began > self.stops_after_s

    def capacity(self, until: float) -> float:
        """Return the shards that this rank can write until a time."""
        return max(0.0, min(until - self.began, self.stops_after_s)) / self.pace_s


def measure_ranks(home: Path) -> dict[str, Any]:
    """Return how long eight uneven ranks take together, over what their speeds allow."""
    config = DumpConfig(
        teacher="mini", codec="topk", max_length=64, max_tokens=2**15, shard_tokens=128, batch_size=64
    )
    out, alone = home / "together", home / "one"
    for folder in (out, alone):
        shutil.rmtree(folder, ignore_errors=True)
    dump_cache(config, out=alone, session=Session(home))
    ranks = [_Rank(number) for number in range(5)]
    ranks += [_Rank(5, pace_s=5.0), _Rank(6, late_s=10.0), _Rank(7, stops_after_s=10.0)]

    def dump(rank: _Rank) -> None:
        time.sleep(rank.late_s)
        own = config.with_changes(rank=rank.number, world_size=len(ranks))
        with suppress(InterruptedRunError):
            dump_cache(own, out=out, session=Session(home, should_stop=rank.should_stop))

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(dump, ranks))
    num_shards = len(CacheReader(out).ranges)
    began = min(rank.began for rank in ranks)
    took = max(file.stat().st_mtime for file in (out / "commits").iterdir()) - began
    moments = np.arange(0, took, 0.01)
    ideal = next(t for t in moments if sum(rank.capacity(began + t) for rank in ranks) >= num_shards)
    files = {file.relative_to(alone) for file in alone.rglob("*") if file.is_file()}
    same = all(
        (alone / file).read_bytes() == (out / file).read_bytes()
        for file in files
        if file.parts[0] not in {"commits", "locks"}
    )
    slowest = num_shards / len(ranks) * max(rank.pace_s for rank in ranks)
    return {
        "ranks": len(ranks),
        "shards": num_shards,
        "took_s": round(took, 2),
        "ideal_s": round(float(ideal), 2),
        "over_ideal": round(took / float(ideal), 3),
        "fixed_shares_s": round(slowest, 2),
        "as_one_rank": same,
    }
