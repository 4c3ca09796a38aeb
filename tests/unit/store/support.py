"""What the tests of the store share: caches begun by hand, plain readings, and disks that fail."""

import errno
import io
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from minilm_cache.storage_schema.arrays import ArraySpec
from minilm_cache.storage_schema.manifest import INDEX, PREVIEW, RANGES, CacheManifest
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.index import read_ranges
from minilm_cache.store.reader import CacheReader, read_manifest
from minilm_cache.store.shards import ShardEncoder, decode_rows
from minilm_cache.store.writer import CacheWriter

GOLDEN = Path(__file__).parents[2] / "golden"
VECTORS = GOLDEN / "v1-vectors"


class Recorder:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.notes: list[str] = []
        self._task = ""

    def start(self, task: str, total: int, unit: str) -> None:
        self._task = task
        self.totals[task] = total
        self.done[task] = 0

    def advance(self, amount: int, detail: str = "") -> None:
        self.done[self._task] += amount

    def note(self, message: str) -> None:
        self.notes.append(message)


def unfinished(manifest: CacheManifest) -> CacheManifest:
    """Return the manifest that the dump of a complete cache began with."""
    files = {path: digest for path, digest in manifest.files.items() if path not in {PREVIEW, INDEX}}
    return manifest.model_copy(update={"complete": False, "measured": None, "files": files})


def begin(source: Path, out: Path, **options: Any) -> CacheWriter:
    """Begin a cache that is to become a copy of a complete one."""
    reader = CacheReader(source)
    manifest = unfinished(reader.manifest)
    names = [path for path in manifest.files if path != RANGES and not path.endswith("zarr.json")]
    attachments = {path: reader.attachment(path) for path in names}
    return CacheWriter(out, manifest, ranges=reader.ranges, attachments=attachments, **options)


def write_shard(
    writer: CacheWriter, shard: int, rows: Mapping[str, npt.NDArray[Any]], *, table: pa.Table, rank: int = 0
) -> int:
    """Write and commit a shard as one segment."""
    files = writer.begin_shard(shard)
    try:
        with ThreadPoolExecutor(2) as threads:
            files.append(rows, table, threads=threads)
        return writer.commit_shard(files, rank)
    except BaseException as error:
        files.abandon(error)
        raise


def encoded(rows: npt.NDArray[Any], spec: ArraySpec, shard_tokens: int, *, at_once: int = 10**9) -> bytes:
    """Return the file of a shard, whose rows are appended `at_once` at a time."""
    file = io.BytesIO()
    encoder = ShardEncoder(file, spec, shard_tokens)
    for first in range(0, len(rows), at_once):
        encoder.append(rows[first : first + at_once])
    assert encoder.finish() == digest_bytes(file.getvalue())
    return file.getvalue()


def decoded(content: bytes, spec: ArraySpec, shard_tokens: int, rows: range) -> npt.NDArray[Any]:
    """Return rows of the file of a shard."""
    return decode_rows(io.BytesIO(content), spec, shard_tokens=shard_tokens, rows=rows)


def keep_shards(cache: Path, shards: Collection[int]) -> Path:
    """Make of a complete cache an unfinished one with these shards committed; return it."""
    manifest = read_manifest(cache)
    (cache / "manifest.json").write_bytes(unfinished(manifest).to_json())
    for shard in range(len(read_ranges(cache, manifest))):
        if shard not in shards:
            (cache / f"commits/{shard:05d}.json").unlink(missing_ok=True)
    return cache


def plain_rows(cache: Path, path: str, first: int, num_rows: int) -> npt.NDArray[Any]:
    """Return rows as plain zarr reads them."""
    array = zarr.open_group(cache, mode="r", zarr_format=3)[path]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[first : first + num_rows])


def plain_shard(cache: Path, number: int) -> dict[str, npt.NDArray[Any]]:
    """Return the rows of a shard as plain zarr reads them: array path to rows."""
    reader = CacheReader(cache, partial=True)
    size, num_tokens = reader.manifest.shard_tokens, reader.ranges[number].num_tokens
    return {spec.path: plain_rows(cache, spec.path, number * size, num_tokens) for spec in reader.specs}


def plain_table(cache: Path, number: int) -> pa.Table:
    """Return the sequence table of a shard as plain pyarrow reads it."""
    return pq.read_table(cache / f"sequences/part-{number:05d}.parquet")


def plain_row_bytes(cache: Path) -> int:
    """Return, by the metadata of zarr alone, what a token takes in all arrays, bytes."""
    documents = [json.loads(file.read_text()) for file in cache.rglob("zarr.json")]
    arrays = [one for one in documents if one.get("dimension_names", [""])[0] == "token"]
    return sum(math.prod(one["shape"][1:]) * np.dtype(one["data_type"]).itemsize for one in arrays)


def files_below(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder but locks: path to content."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".lock"
    }


def shared_files(cache: Path) -> dict[str, bytes]:
    """Return the files of a complete cache that a copy of it has, too: path to content."""
    return {path: content for path, content in files_below(cache).items() if not path.startswith("commits/")}


def partials(folder: Path) -> list[Path]:
    """Return files and folders that an interrupted write left behind."""
    return list(folder.rglob(".*.partial"))


@contextmanager
def failing_sync(at: int) -> Iterator[list[int]]:
    """Let the disk be full at the `at`-th fsync of the block, counted from 0; yields the calls so far."""
    calls: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with patch("os.fsync", fsync):
        yield calls
