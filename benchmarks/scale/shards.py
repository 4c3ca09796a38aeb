"""Measure what grows with the number of shards: opening, `info`, the first batch, a sequence."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.scale.caches import WANTED, train_config
from benchmarks.scale.processes import run
from minilm_cache import open_cache
from minilm_cache.store.reader import CacheReader
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.sampler import plan_steps

SEQUENCES_READ = 200


def measure_shards(path: Path) -> dict[str, Any]:
    """Return what a process of its own measures, and how long `minilm-cache info` takes."""
    row = json.loads(run([sys.executable, "-m", "benchmarks.scale", "--child", str(path)]))
    seconds = []
    for place in (path, path.parent / "dump"):
        started = time.perf_counter()
        run([sys.executable, "-m", "minilm_cache", "info", str(place)])
        seconds.append(time.perf_counter() - started)
    return {**row, "info_s": round(seconds[0], 2), "info_of_a_small_cache_s": round(seconds[1], 2)}


def opened(path: Path) -> dict[str, Any]:
    """Return seconds and memory of opening a cache, of a sequence, and of the first batch of a training."""
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    cache = open_cache(path)
    opened = time.perf_counter() - started
    memory = process.memory_info().rss - before
    started = time.perf_counter()
    batches = BatchReader(cache, WANTED, pad_token=0, device=torch.device("cpu"))
    next(iter(batches.train_batches(plan_steps(train_config(), cache.reader), 0)))
    first_batch = time.perf_counter() - started
    times = sorted(_sequence_times(path))
    return {
        "open_s": round(opened, 3),
        "open_mib": round(memory / 2**20, 1),
        "first_batch_s": round(first_batch, 3),
        "sequence_ms": round(1000 * times[len(times) // 2], 3),
    }


def _sequence_times(path: Path) -> Iterator[float]:
    """Yield the seconds that finding the shard of a sequence and its files takes, without reading them."""
    reader = CacheReader(path)
    for number in _sequences(reader.manifest.num_sequences):
        started = time.perf_counter()
        assert reader.records[reader.ranges.shard_of(number)].files
        yield time.perf_counter() - started


def _sequences(num_sequences: int) -> list[int]:
    """Return numbers of sequences, spread over a cache."""
    return [int(number) for number in np.linspace(0, num_sequences - 1, SEQUENCES_READ)]
