"""Measure the memory that shards of different sizes take when they are written and read."""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.scale.caches import begun
from benchmarks.scale.memory import peak
from benchmarks.scale.processes import run
from minilm_cache import DumpConfig, dump_cache
from minilm_cache.session import Session
from minilm_cache.storage_schema.arrays import entropy_column
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.durable import own_cores
from minilm_cache.store.layout import default_shard_tokens
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import CacheReader, Segment
from minilm_cache.store.writer import CacheWriter

SHARD_TOKENS: Final = (2**18, 2**21, 2**23)
CORPUS_TOKENS: Final = (10**9, 10**11, 3 * 10**12)
CODECS: Final[dict[str, dict[str, Any]]] = {
    "topk": {"codec": "topk", "k": 16},
    "vectors": {"codec": "vectors", "max_kl": 0.005},
}


def measure_large_shards(home: Path) -> dict[str, Any]:
    """Return seconds and memory of writing and reading a shard of each size, each in a new process.

    And the tokens that shards of large corpora have by default.
    """
    defaults: dict[str, dict[str, int]] = {}
    for name, settings in CODECS.items():
        manifest = _dumped(home, settings)
        defaults[name] = {
            str(size): default_shard_tokens(manifest.identity, manifest.calibration, size)
            for size in CORPUS_TOKENS
        }
    command = [sys.executable, "-m", "benchmarks.scale", "--part", "large", "--home", str(home)]
    rows = []
    for size in SHARD_TOKENS:
        child = [*command, "--child", str(home / f"large{size}"), "--length", str(size)]
        rows.append(json.loads(run(child).splitlines()[-1]))
        shutil.rmtree(home / f"large{size}")
    return {"default_shard_tokens": defaults, "shards": rows}


def _dumped(home: Path, settings: dict[str, Any]) -> CacheManifest:
    config = DumpConfig(teacher="mini", max_tokens=40_000, **settings)
    return dump_cache(config, out=home / f"of-{settings['codec']}", session=Session(home)).manifest


def written_and_read(path: Path, home: Path, shard_tokens: int) -> dict[str, Any]:
    """Write a shard of the rows of a small cache again and again, read it, and return seconds and memory."""
    source = CacheReader(home / "of-topk")
    (segment,) = source.segments_of(0)
    repeated = _repeated(segment, SHARD_TOKENS[0] // int(segment.lengths.sum()))
    times = shard_tokens // int(repeated.lengths.sum())
    num_tokens = times * int(repeated.lengths.sum())
    ranges = ShardRanges(np.asarray([times * len(repeated.lengths)]), np.asarray([num_tokens]))
    row: dict[str, Any] = {"tokens": num_tokens}

    def write() -> None:
        contents, manifest = begun(source, ranges, shard_tokens)
        writer = CacheWriter(path, manifest, ranges=ranges, attachments=contents)
        files = writer.begin_shard(0)
        with ThreadPoolExecutor(own_cores()) as threads:
            for number in range(times):
                files.append(repeated.rows, _table(repeated, number), threads=threads)
        writer.commit_shard(files)

    def read() -> None:
        for _ in CacheReader(path, partial=True).segments_of(0):
            pass

    for name, work in (("write", write), ("read", read)):
        started = time.perf_counter()
        with peak() as memory:
            work()
        row |= {f"{name}_s": round(time.perf_counter() - started, 1), f"{name}_mib": memory["anonymous_mib"]}
    row_bytes = sum(spec.row_bytes for spec in source.specs)
    return row | {
        "decoded_mib": round(row_bytes * num_tokens / 2**20),
        "segments": CacheReader(path, partial=True).segments.per_shard,
    }


def _repeated(segment: Segment, times: int) -> Segment:
    """Return a segment with the rows of another one several times."""
    lengths = np.tile(segment.lengths, times)
    return replace(
        segment,
        rows={name: np.concatenate([rows] * times) for name, rows in segment.rows.items()},
        lengths=lengths,
        starts=np.cumsum(lengths) - lengths,
        entropies={kind: np.tile(values, times) for kind, values in segment.entropies.items()},
    )


def _table(segment: Segment, number: int) -> pa.Table:
    """Return the sequence table of a segment that is the `number`-th of a shard."""
    count, tokens = len(segment.lengths), int(segment.lengths.sum())
    columns = {
        "sequence": number * count + np.arange(count),
        "offset": number * tokens + segment.starts,
        "length": segment.lengths,
        "document": np.arange(count),
    }
    return pa.table(columns | {entropy_column(kind): values for kind, values in segment.entropies.items()})
