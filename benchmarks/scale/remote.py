"""Measure reading from a store that answers each request after 0.2 seconds: threads, processes, an epoch."""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.scale.caches import WANTED, make_cache, train_config
from benchmarks.scale.processes import run
from minilm_cache import DumpConfig, dump_cache
from minilm_cache.cache import Cache
from minilm_cache.session import Session
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.sampler import plan_steps

WAIT_S = 0.2
"""Seconds that the slow store takes for each request."""
_EPOCHS = 5
"""Epochs that are read, each with nothing on this machine; the median counts."""
APPETITE = 1_000_000
"""Tokens per second that the consumer of an epoch takes."""


@dataclass(frozen=True)
class _SlowFolder(RemoteFolder):
    """A folder that answers each request after `WAIT_S`, and counts the requests."""

    requests: list[str] = field(default_factory=list)

    def read_range(self, name: str, first: int, num_bytes: int) -> bytes:
        self.requests.append(name)
        time.sleep(WAIT_S)
        return super().read_range(name, first, num_bytes)


def measure_remote(home: Path) -> dict[str, Any]:
    """Return requests and seconds of reading a cache from a slow store: threads, processes, an epoch."""
    small = _dumped(home / "small", max_tokens=150_000, shard_tokens=2**13)
    source = _dumped(home / "large", max_tokens=80_000, shard_tokens=2**15)
    place = home / "many"
    make_cache(CacheReader(source), place, 100, whole=True)
    for name in ("threads1", "threads4", "shared", "alone"):
        shutil.rmtree(home / name, ignore_errors=True)
    threads = {}
    for number in (1, 4):
        folder, reader = _mirror(small, home / f"threads{number}")
        opened = len(folder.requests)
        started = time.perf_counter()
        with ThreadPoolExecutor(number) as pool:
            list(pool.map(reader.segment, range(16)))
        threads[number] = time.perf_counter() - started
    command = [sys.executable, "-m", "benchmarks.scale", "--part", "remote", "--home", str(home / "shared")]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: json.loads(run([*command, "--child", str(place)])), range(2)))
    epochs = []
    for _ in range(_EPOCHS):
        shutil.rmtree(home / "alone", ignore_errors=True)
        epochs.append(json.loads(run([*command[:-1], str(home / "alone"), "--child", str(place)])))
    alone = sorted(epochs, key=lambda epoch: float(epoch["share_waiting"]))[_EPOCHS // 2]
    return {
        "wait_per_request_s": WAIT_S,
        "requests_to_open": opened,
        "threads_1_s": round(threads[1], 2),
        "threads_4_s": round(threads[4], 2),
        "ratio": round(threads[1] / threads[4], 2),
        "requests_of_one_process": alone["requests"],
        "requests_of_two_processes": sum(row["requests"] for row in both),
        "epoch": alone,
        "epochs_share_waiting": [epoch["share_waiting"] for epoch in epochs],
    }


def _dumped(place: Path, max_tokens: int, shard_tokens: int) -> Path:
    config = DumpConfig(teacher="mini", codec="topk", max_tokens=max_tokens, shard_tokens=shard_tokens)
    return dump_cache(config, out=place, session=Session(place.parent)).path


def _mirror(place: Path, home: Path) -> tuple[_SlowFolder, MirrorReader]:
    """Open the cache at `place` as if it were in a slow store, with nothing on this machine."""
    local = open_store(str(place))
    folder = _SlowFolder(local.url, local.files, local.path)
    with patch("minilm_cache.store.mirror.open_store", lambda url: folder):
        return folder, MirrorReader(str(place), home, 2**40)


def read_epoch(place: Path, home: Path) -> dict[str, Any]:
    """Read an epoch's buffers as a training does that takes a million tokens a second."""
    folder, reader = _mirror(place, home)
    batches = BatchReader(Cache(reader), WANTED, pad_token=0, device=torch.device("cpu"))
    order = plan_steps(train_config(), reader).streams[0]
    num_buffers, waited, taken = sum(1 for _ in order.epoch(0)), 0.0, 0.0
    with closing(batches.segments_of(order.stream(0))) as buffers:
        next(buffers)  # nothing can be ready before the first
        for _ in range(num_buffers - 2):
            started = time.perf_counter()
            shards, _ = next(buffers)
            waited += time.perf_counter() - started
            consuming = sum(len(shard.rows["tokens"]) for shard in shards.values()) / APPETITE
            time.sleep(consuming)
            taken += consuming
    share = waited / (waited + taken)
    return {"requests": len(folder.requests), "buffers": num_buffers, "share_waiting": round(share, 4)}
