"""Measure what grows with the number of shards: sealing, opening, `info`, the first batch, a sequence.

    python -m benchmarks.scale --shards 1000 --shards 10000 --shards 100000
    python -m benchmarks.scale --part remote
    python -m benchmarks.scale --part ranks

Each cache is a small dump of `mini` whose first shard is listed again and again, with a commit record for
each shard, and then sealed. Files exist only for the shards that are read: opening a cache looks at none.
Part `remote` reads a cache from a folder that answers each request after 0.2 seconds. Part `ranks` dumps with
eight ranks, which are threads here that wait before each shard: one is stopped, one slow, one late.
"""

import argparse
import io
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.report import read_result, write_result
from minilm_cache import DumpConfig, TrainConfig, dump_cache, open_cache
from minilm_cache.cache import Cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.storage_schema.documents import CommitRecord, FileDigest
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import INDEX, RANGES, CacheManifest
from minilm_cache.storage_schema.metadata import zarr_documents
from minilm_cache.store.fingerprint import digest_bytes
from minilm_cache.store.index import RecordedShards, write_index
from minilm_cache.store.layout import commit_path, sequences_path
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.ranges_table import encode_ranges
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.sampler import SequenceOrder, plan_steps

SHARD_TOKENS = 512
SEQUENCES_READ = 200
WAIT_S = 0.2
"""Seconds that the slow store takes for each request."""
APPETITE = 1_000_000
"""Tokens per second that the consumer of an epoch takes."""
_WANTED = WantedTargets(kinds=(RelationKind.ATTENTION, RelationKind.VALUE))


def main() -> None:
    """Measure caches of several sizes, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path("scale"))
    parser.add_argument("--shards", type=int, action="append", default=[])
    parser.add_argument("--part", choices=["shards", "remote", "ranks"], default="shards")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(_opened(given.child) if given.part == "shards" else _epoch(given.child, given.home)))
        return
    if given.part == "remote":
        _write(remote=_remote(given.home))
        return
    if given.part == "ranks":
        _write(ranks=_ranks(given.home))
        return
    place = given.home / "dump"
    config = DumpConfig(teacher="mini", codec="topk", max_tokens=20_000, shard_tokens=SHARD_TOKENS)
    source = CacheReader(dump_cache(config, out=place, home=given.home).path)
    rows: list[Any] = read_result("scale").get("shards", [])  # type: ignore[assignment]
    for num_shards in given.shards:
        path = given.home / f"{num_shards}"
        row = {"shards": num_shards, **_made(source, path, num_shards), **_measured(path)}
        shutil.rmtree(path)
        rows = sorted([*(old for old in rows if old["shards"] != num_shards), row], key=lambda r: r["shards"])
        _write(shards=rows)


def _write(**parts: object) -> None:
    earlier = {
        name: value for name, value in read_result("scale").items() if name in {"shards", "remote", "ranks"}
    }
    write_result("scale", {**earlier, **parts})


class _Repeated:
    """The sequences of one shard, many times."""

    def __init__(self, lengths: npt.NDArray[np.int64], num_shards: int) -> None:
        self._ends = np.cumsum(np.tile(lengths, num_shards))
        self.num_sequences = len(self._ends)

    def tokens_before(self, number: int) -> int:
        """Return the number of tokens of the first sequences."""
        return int(self._ends[number - 1]) if number else 0

    def sequences_within(self, num_tokens: int) -> int:
        """Return how many first sequences have at most so many tokens."""
        return int(np.searchsorted(self._ends, num_tokens, side="right"))


def _made(source: CacheReader, path: Path, num_shards: int, *, whole: bool = False) -> dict[str, float]:
    """Make a cache of so many shards, and return the seconds that planning and sealing it took.

    It has files for all shards if it is `whole`, else for those that are read later.
    """
    part = source.ranges[0]
    sequences = _Repeated(source.table(0)["length"].to_numpy().astype(np.int64), num_shards)
    started = time.perf_counter()
    ranges = ShardRanges.split(sequences, part.num_tokens)
    planned = time.perf_counter() - started
    assert len(ranges) == num_shards
    manifest = _begun(source, path, ranges)
    (path / "commits").mkdir()
    read_later = range(num_shards) if whole else _read_later(manifest, ranges)
    for shard in range(num_shards):
        table = _place_files(source, path, shard) if shard in read_later else None
        record = _record(source, manifest, ranges=ranges, shard=shard, table=table)
        (path / commit_path(shard)).write_bytes(record.to_json())
    started = time.perf_counter()
    index = write_index(path, manifest, RecordedShards(path, manifest, ranges))
    measured = source.manifest.measured
    files = manifest.files | {INDEX: index}
    sealed = manifest.model_copy(update={"complete": True, "measured": measured, "files": files})
    (path / "manifest.json").write_bytes(sealed.to_json())
    sealing = time.perf_counter() - started
    return {"plan_s": round(planned, 3), "seal_s": round(sealing, 2), "index_bytes": index.size}


def _begun(source: CacheReader, path: Path, ranges: ShardRanges) -> CacheManifest:
    """Write everything of an unfinished cache but its shards, and return its manifest."""
    manifest = source.manifest
    shutil.rmtree(path, ignore_errors=True)
    contents = {
        **{name: source.attachment(name) for name in manifest.files if name not in {RANGES, INDEX}},
        **zarr_documents(
            manifest.identity,
            manifest.calibration,
            num_shards=len(ranges),
            shard_tokens=manifest.shard_tokens,
        ),
        RANGES: encode_ranges(ranges),
    }
    for name, content in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    num_sequences = int(ranges.num_sequences.sum())
    return manifest.model_copy(
        update={
            "complete": False,
            "measured": None,
            "num_sequences": num_sequences,
            "num_tokens": int(ranges.num_tokens.sum()),
            "num_held_out": max(1, num_sequences // 50),
            "files": {name: digest_bytes(content) for name, content in contents.items()},
        }
    )


def _record(
    source: CacheReader, manifest: CacheManifest, *, ranges: ShardRanges, shard: int, table: bytes | None
) -> CommitRecord:
    """Return the record of a shard that holds what the first shard of the dump holds.

    A shard without a `table` has no files, and random digests: equal ones would compress to nothing.
    """
    first = source.records[0]
    renamed = {path.replace("/c/0", f"/c/{shard}", 1): digest for path, digest in first.files.items()}
    renamed[sequences_path(shard)] = renamed.pop(sequences_path(0))
    if table is None:
        random = np.random.default_rng(shard)
        renamed = {
            path: FileDigest(size=digest.size, sha256=random.bytes(32).hex(), xxh3_128=random.bytes(16).hex())
            for path, digest in renamed.items()
        }
    else:
        renamed[sequences_path(shard)] = digest_bytes(table)
    return CommitRecord(
        fingerprint=manifest.fingerprint,
        shard=shard,
        attempt="0" * 32,
        rank=0,
        range=ranges[shard],
        tokens_xxh3=first.tokens_xxh3,
        files=renamed,
    )


def _read_later(manifest: CacheManifest, ranges: ShardRanges) -> set[int]:
    """Return the shards that the measurements read: those of the first batches."""
    config = _config()
    order = SequenceOrder(
        ranges=ranges, num_train=manifest.num_train, seed=config.seed, buffer_shards=config.buffer_shards
    )
    first = order.epoch(0)
    return {shard for buffer, _ in zip(first, range(3), strict=False) for shard in buffer.shards}


def _config() -> TrainConfig:
    return TrainConfig(arch=("3x192",), steps=10, batch_size=16)


def _sequences(num_sequences: int) -> list[int]:
    """Return numbers of sequences, spread over a cache."""
    return [int(number) for number in np.linspace(0, num_sequences - 1, SEQUENCES_READ)]


def _place_files(source: CacheReader, path: Path, shard: int) -> bytes:
    """Put a shard's files there, those of the dump's first shard; return the table, with its own numbers."""
    for spec in source.specs:
        target = path / spec.shard_path(shard)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.root / spec.shard_path(0), target)
    table, part = source.table(0), source.ranges[0]
    shifts = {"sequence": shard * part.num_sequences, "offset": shard * source.manifest.shard_tokens}
    for name, shift in shifts.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pa.array(table[name].to_numpy() + shift))
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    (path / sequences_path(shard)).parent.mkdir(exist_ok=True)
    (path / sequences_path(shard)).write_bytes(buffer.getvalue())
    return buffer.getvalue()


def _measured(path: Path) -> dict[str, Any]:
    """Return what a process of its own measures, and how long `minilm-cache info` takes."""
    row = json.loads(_run([sys.executable, "-m", "benchmarks.scale", "--child", str(path)]))
    seconds = []
    for place in (path, path.parent / "dump"):
        started = time.perf_counter()
        _run([sys.executable, "-m", "minilm_cache", "info", str(place)])
        seconds.append(time.perf_counter() - started)
    return {**row, "info_s": round(seconds[0], 2), "info_of_a_small_cache_s": round(seconds[1], 2)}


def _run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def _opened(path: Path) -> dict[str, Any]:
    """Return seconds and memory of opening a cache, of a sequence, and of the first batch of a training."""
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    cache = open_cache(path)
    opened = time.perf_counter() - started
    memory = process.memory_info().rss - before
    started = time.perf_counter()
    batches = BatchReader(cache, _WANTED, pad_token=0, device=torch.device("cpu"))
    next(iter(batches.train_batches(plan_steps(_config(), cache.reader), 0)))
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


@dataclass(frozen=True)
class _SlowFolder(RemoteFolder):
    """A folder that answers each request after `WAIT_S`, and counts the requests."""

    requests: list[str] = field(default_factory=list)

    def read_range(self, name: str, first: int, num_bytes: int) -> bytes:
        self.requests.append(name)
        time.sleep(WAIT_S)
        return super().read_range(name, first, num_bytes)


def _remote(home: Path) -> dict[str, Any]:
    """Return requests and seconds of reading a cache from a slow store: threads, processes, an epoch."""
    small = _dumped(home / "small", max_tokens=150_000, shard_tokens=2**13)
    source = _dumped(home / "large", max_tokens=80_000, shard_tokens=2**15)
    place = home / "many"
    _made(CacheReader(source), place, 100, whole=True)
    for name in ("threads1", "threads4", "shared", "alone"):
        shutil.rmtree(home / name, ignore_errors=True)
    threads = {}
    for number in (1, 4):
        folder, reader = _mirror(small, home / f"threads{number}")
        opened = len(folder.requests)
        started = time.perf_counter()
        with ThreadPoolExecutor(number) as pool:
            list(pool.map(reader.shard, range(16)))
        threads[number] = time.perf_counter() - started
    command = [sys.executable, "-m", "benchmarks.scale", "--part", "remote", "--home", str(home / "shared")]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: json.loads(_run([*command, "--child", str(place)])), range(2)))
    (alone,) = [json.loads(_run([*command[:-1], str(home / "alone"), "--child", str(place)]))]
    return {
        "wait_per_request_s": WAIT_S,
        "requests_to_open": opened,
        "threads_1_s": round(threads[1], 2),
        "threads_4_s": round(threads[4], 2),
        "ratio": round(threads[1] / threads[4], 2),
        "requests_of_one_process": alone["requests"],
        "requests_of_two_processes": sum(row["requests"] for row in both),
        "epoch": alone,
    }


def _dumped(place: Path, max_tokens: int, shard_tokens: int) -> Path:
    config = DumpConfig(teacher="mini", codec="topk", max_tokens=max_tokens, shard_tokens=shard_tokens)
    return dump_cache(config, out=place, home=place.parent).path


def _mirror(place: Path, home: Path) -> tuple[_SlowFolder, MirrorReader]:
    """Open the cache at `place` as if it were in a slow store, with nothing on this machine."""
    local = open_store(str(place))
    folder = _SlowFolder(local.url, local.files, local.path)
    with patch("minilm_cache.store.mirror.open_store", lambda url: folder):
        return folder, MirrorReader(str(place), home, 2**40)


def _epoch(place: Path, home: Path) -> dict[str, Any]:
    """Read an epoch's buffers as a training does that takes a million tokens a second."""
    folder, reader = _mirror(place, home)
    batches = BatchReader(Cache(reader), _WANTED, pad_token=0, device=torch.device("cpu"))
    order = plan_steps(_config(), reader).streams[0]
    num_buffers, waited, taken = sum(1 for _ in order.epoch(0)), 0.0, 0.0
    with closing(batches.shards_of(order.stream(0))) as buffers:
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


def _ranks(home: Path) -> dict[str, Any]:
    """Return how long eight uneven ranks take together, over what their speeds allow."""
    config = DumpConfig(
        teacher="mini", codec="topk", max_length=64, max_tokens=2**15, shard_tokens=128, batch_size=64
    )
    out, alone = home / "together", home / "one"
    for folder in (out, alone):
        shutil.rmtree(folder, ignore_errors=True)
    dump_cache(config, out=alone, home=home)
    ranks = [_Rank(number) for number in range(5)]
    ranks += [_Rank(5, pace_s=5.0), _Rank(6, late_s=10.0), _Rank(7, stops_after_s=10.0)]

    def dump(rank: _Rank) -> None:
        time.sleep(rank.late_s)
        own = config.with_changes(rank=rank.number, world_size=len(ranks))
        with suppress(InterruptedRunError):
            dump_cache(own, out=out, home=home, should_stop=rank.should_stop)

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


if __name__ == "__main__":
    main()
