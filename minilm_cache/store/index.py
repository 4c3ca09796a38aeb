"""What the shards of a cache consist of: an index of all shards once a cache is complete, records before.

A dump commits each shard by a small record, which it creates only if there is none. Sealing the cache writes
them all into one Parquet file, whose hash the manifest holds. A reader opens that file alone, and reads the
rows that it needs.
"""

import io
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.arrays import array_specs
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.documents import (
    MAX_FILE_BYTES,
    MAX_RECORD_BYTES,
    MAX_SHARDS,
    CommitRecord,
    FileDigest,
    ShardRange,
)
from minilm_cache.storage_schema.manifest import INDEX, PREVIEW, RANGES, CacheManifest
from minilm_cache.store.checked import READ_REMEDY, digest_file, open_table, read_checked
from minilm_cache.store.durable import (
    create_file,
    new_file,
    read_bounded,
    storage_errors,
    sync_directories,
    write_file,
)
from minilm_cache.store.layout import COMMITS, MANIFEST, below, commit_path, shard_files
from minilm_cache.store.ranges import ShardRanges

_GROUP_SHARDS: Final = 1024
"""Shards of a row group of the index; a reader reads whole row groups."""
_GROUPS_KEPT: Final = 16
_RECORDS_KEPT: Final = 256
_SEQUENCES: Final = "sequences"
"""What the index calls the sequence table of a shard; it calls an array's file by the array's path."""
_SHARD_BYTES: Final = 64
_FILE_BYTES: Final = 72
"""Most bytes that a shard and a file of it take in the index."""
_RANGE_COLUMNS = {"num_sequences": pa.int64(), "num_tokens": pa.int64()}


def encode_ranges(ranges: ShardRanges) -> bytes:
    """Return the table as it is stored: a row per shard, in order."""
    columns = {name: pa.array(getattr(ranges, name), kind) for name, kind in _RANGE_COLUMNS.items()}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def read_ranges(root: Path, manifest: CacheManifest) -> ShardRanges:
    """Read which sequences each shard of a cache holds.

    Raises:
        CacheCorruptError: the table is damaged, or its shards are not those of the manifest.
    """
    if manifest.shards:
        sequences = np.asarray([shard.num_sequences for shard in manifest.shards], dtype=np.int64)
        tokens = np.asarray([shard.num_tokens for shard in manifest.shards], dtype=np.int64)
        return ShardRanges(sequences, tokens)
    content = read_checked(root, RANGES, manifest.files.get(RANGES))
    allowed = range(1, min(manifest.num_sequences, MAX_SHARDS) + 1)
    file = open_table(content, _RANGE_COLUMNS, num_rows=allowed, where=root / RANGES)
    table = file.read()
    if any(column.null_count for column in table.columns):
        raise CacheCorruptError(f"{root / RANGES} leaves out numbers. {READ_REMEDY}")
    ranges = ShardRanges(*(column.to_numpy() for column in table.columns))
    _check_ranges(ranges, manifest, root / RANGES)
    return ranges


def _check_ranges(ranges: ShardRanges, manifest: CacheManifest, where: Path) -> None:
    sequences, tokens = ranges.num_sequences, ranges.num_tokens
    fits = (
        bool((sequences >= 1).all() and (sequences <= tokens).all())
        and int(tokens.max()) <= manifest.shard_tokens
        # Neither sum can overflow: tokens are at most 2**26 in each of at most 2**24 shards.
        and int(sequences.sum()) == manifest.num_sequences
        and int(tokens.sum()) == manifest.num_tokens
    )
    if not fits:
        raise CacheCorruptError(f"{where} does not describe the shards of the manifest. {READ_REMEDY}")


@dataclass(frozen=True, slots=True)
class CommittedShard:
    """What a committed shard consists of."""

    tokens_xxh3: str
    """XXH3-128 of the shard's token ids, as `CommitRecord` has it."""
    files: Mapping[str, FileDigest]
    """Digests of its files, by their paths below the cache's root."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(digest.size for digest in self.files.values())


class CommittedShards(ABC):
    """Committed shards of a cache, by number. What is said of a shard is read when it is needed."""

    numbers: Collection[int]
    """Numbers of the committed shards, in order."""

    def __len__(self) -> int:
        """Return the number of committed shards."""
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the committed shards, in order."""
        return iter(self.numbers)

    def __contains__(self, shard: object) -> bool:
        """Return whether a shard is committed."""
        return shard in self.numbers

    def items(self) -> Iterator[tuple[int, CommittedShard]]:
        """Yield the number of every committed shard and what it consists of."""
        return ((shard, self[shard]) for shard in self.numbers)

    def values(self) -> Iterator[CommittedShard]:
        """Yield what every committed shard consists of, in order."""
        return (self[shard] for shard in self.numbers)

    @abstractmethod
    def __getitem__(self, shard: int) -> CommittedShard:
        """Return what a committed shard consists of.

        Raises:
            KeyError: the shard is not committed.
            CacheCorruptError: the index, or the shard's record, is damaged.
        """

    @abstractmethod
    def bytes_by_name(self) -> dict[str, int]:
        """Return the bytes of all committed shards' files, by the path of their array, or `sequences`."""


class RecordedShards(CommittedShards):
    """Committed shards of a cache that is not complete, or is one of format 1, from their commit records."""

    def __init__(self, root: Path, manifest: CacheManifest, ranges: ShardRanges) -> None:
        """List the records of a cache."""
        self._root, self._manifest, self._ranges = root, manifest, ranges
        self.numbers = dict.fromkeys(sorted(committed_shards(root, len(ranges))))
        self._read = lru_cache(_RECORDS_KEPT)(self._read_record)

    def __getitem__(self, shard: int) -> CommittedShard:
        """Return what a committed shard consists of; errors: see `CommittedShards`."""
        if shard not in self.numbers:
            raise KeyError(shard)
        return self._read(shard)

    def bytes_by_name(self) -> dict[str, int]:
        """Return the bytes of all committed shards' files; see `CommittedShards`."""
        names = _file_names(self._manifest)
        totals = dict.fromkeys(names, 0)
        for number, shard in self.items():
            for name, path in zip(names, shard_files(self._manifest, number), strict=True):
                totals[name] += shard.files[path].size
        return totals

    def _read_record(self, shard: int) -> CommittedShard:
        record = read_record(self._root, self._manifest, ranges=self._ranges, shard=shard)
        return CommittedShard(record.tokens_xxh3, record.files)


class IndexedShards(CommittedShards):
    """All shards of a complete cache, from its index. Threads may share it."""

    def __init__(self, root: Path, manifest: CacheManifest, num_shards: int) -> None:
        """Open the index.

        Raises:
            CacheCorruptError: the index is damaged.
        """
        refuse_large_index(manifest, num_shards, root / INDEX)
        content = read_checked(root, INDEX, manifest.files.get(INDEX))
        self._where = root / INDEX
        self._manifest = manifest
        allowed = range(num_shards, num_shards + 1)
        self._file = open_table(content, _columns(manifest), num_rows=allowed, where=self._where)
        sizes = [rows for rows, _ in self._file.footer.groups]
        if any(size != _GROUP_SHARDS for size in sizes[:-1]) or sizes[-1] > _GROUP_SHARDS:
            raise CacheCorruptError(f"{self._where} has other row groups than the format. {READ_REMEDY}")
        self.numbers = range(num_shards)
        self._lock = Lock()
        self._rows_of = lru_cache(_GROUPS_KEPT)(self._read_group)
        self._committed = lru_cache(_RECORDS_KEPT)(self._read_row)

    def __getitem__(self, shard: int) -> CommittedShard:
        """Return what a shard consists of; errors: see `CommittedShards`."""
        if shard not in self.numbers:
            raise KeyError(shard)
        return self._committed(shard)

    def _read_row(self, shard: int) -> CommittedShard:
        with self._lock:
            group = self._rows_of(shard // _GROUP_SHARDS)
        row = shard % _GROUP_SHARDS

        def value(name: str) -> bytes:
            return bytes(group[name][row].as_py())

        files = {
            path: FileDigest(
                size=group[f"{name}/size"][row].as_py(),
                sha256=value(f"{name}/sha256").hex(),
                xxh3_128=value(f"{name}/xxh3_128").hex(),
            )
            for name, path in zip(
                _file_names(self._manifest), shard_files(self._manifest, shard), strict=True
            )
        }
        return CommittedShard(value("tokens_xxh3").hex(), files)

    def _read_group(self, number: int) -> Mapping[str, pa.ChunkedArray]:
        table = self._read([number])
        return dict(zip(table.column_names, table.columns, strict=True))

    def bytes_by_name(self) -> dict[str, int]:
        """Return the bytes of all shards' files; see `CommittedShards`."""
        names = _file_names(self._manifest)
        with self._lock:
            table = self._read(columns=[f"{name}/size" for name in names])
        return {name: int(pc.sum(table[f"{name}/size"]).as_py()) for name in names}

    def _read(self, groups: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        table = self._file.read(groups, columns)
        bounds = [pc.min_max(table[name]).as_py() for name in table.column_names if name.endswith("/size")]
        missing = any(column.null_count for column in table.columns)
        if missing or any(bound["min"] < 0 or bound["max"] > MAX_FILE_BYTES for bound in bounds):
            raise CacheCorruptError(f"{self._where} holds what no cache has. {READ_REMEDY}")
        return table


def open_shards(root: Path, manifest: CacheManifest, ranges: ShardRanges) -> CommittedShards:
    """Return the committed shards of a cache, by number.

    Raises:
        CacheCorruptError: the index is damaged.
    """
    if INDEX in manifest.files:
        return IndexedShards(root, manifest, len(ranges))
    return RecordedShards(root, manifest, ranges)


def committed_shards(root: Path, num_shards: int) -> list[int]:
    """Return the numbers of the shards that have a commit record, in no order."""
    folder = below(root, COMMITS)
    if not folder.is_dir():
        return []
    with storage_errors("list", folder):
        files = [file for file in folder.glob("[0-9]*.json") if file.stem.isdecimal()]
    # A name that is written otherwise, such as 2.json, is no record of the shard 00002.
    numbers = [int(file.stem) for file in files if Path(commit_path(int(file.stem))).name == file.name]
    return [number for number in numbers if number < num_shards]


def commit(
    root: Path,
    manifest: CacheManifest,
    shard: CommittedShard,
    *,
    part: ShardRange,
    number: int,
    rank: int = 0,
) -> None:
    """Create the commit record of a shard, whose files are durable.

    Args:
        root: folder of the cache.
        manifest: manifest of the cache.
        shard: what the shard consists of.
        part: which sequences it holds.
        number: number of the shard.
        rank: rank of the process that has written it.

    Raises:
        FileExistsError: it has one already.
    """
    record = CommitRecord(
        format_version=manifest.format_version,
        fingerprint=manifest.fingerprint,
        shard=number,
        attempt=uuid.uuid4().hex,
        rank=rank,
        range=part,
        tokens_xxh3=shard.tokens_xxh3,
        files=dict(shard.files),
    )
    create_file(below(root, commit_path(number)), record.to_json())


def read_record(root: Path, manifest: CacheManifest, *, ranges: ShardRanges, shard: int) -> CommitRecord:
    """Read a shard's commit record and check that it belongs to this cache and this shard.

    Raises:
        CacheCorruptError: the record is damaged, or belongs to another cache or shard.
    """
    path = below(root, commit_path(shard))
    content = read_bounded(path, MAX_RECORD_BYTES)
    return parse_record(content, manifest, ranges=ranges, shard=shard, where=str(path))


def parse_record(
    content: bytes, manifest: CacheManifest, *, ranges: ShardRanges, shard: int, where: str
) -> CommitRecord:
    """Parse a shard's commit record; arguments and errors: see `read_record`."""
    record = parse(CommitRecord, content, where)
    belongs = (
        record.fingerprint == manifest.fingerprint
        and record.shard == shard
        and record.range == ranges[shard]
        and set(record.files) == set(shard_files(manifest, shard))
    )
    if not belongs:
        raise CacheCorruptError(f"{where} is the record of another cache or shard. {READ_REMEDY}")
    return record


def unseal(root: Path, manifest: CacheManifest, ranges: ShardRanges, *, without: int | None) -> CacheManifest:
    """Make a complete cache an unfinished one again; the caller holds the lock on sealing.

    Records that are missing or damaged are first written from the index, if that is sound. A cache that was
    pulled has none.

    Args:
        root: folder of the cache.
        manifest: its manifest.
        ranges: sequences and tokens of each shard.
        without: number of a shard that gets no record. None means that all do.

    Returns:
        The manifest as it is now.

    Raises:
        StorageError: the file system refused.
    """
    if INDEX not in manifest.files:
        return manifest
    with storage_errors("write", root):
        _write_records(root, manifest, ranges, without=without)
    unfinished = unsealed(manifest)
    with storage_errors("write", root):
        write_file(root / MANIFEST, unfinished.to_json())
    return unfinished


def unsealed(manifest: CacheManifest) -> CacheManifest:
    """Return a manifest as a dump writes it first: not complete, and without what sealing adds."""
    files = {path: digest for path, digest in manifest.files.items() if path not in {INDEX, PREVIEW}}
    return manifest.model_copy(update={"complete": False, "measured": None, "files": files})


def _write_records(root: Path, manifest: CacheManifest, ranges: ShardRanges, *, without: int | None) -> None:
    """Write the commit records that are missing or damaged from the index, if that is sound."""
    try:
        indexed = IndexedShards(root, manifest, len(ranges))
    except CacheCorruptError:
        return
    recorded = RecordedShards(root, manifest, ranges)
    below(root, COMMITS).mkdir(exist_ok=True)
    for number, shard in indexed.items():
        with suppress(KeyError, CacheCorruptError):
            if recorded[number] == shard and number != without:
                continue
        below(root, commit_path(number)).unlink(missing_ok=True)
        if number != without:
            commit(root, manifest, shard, part=ranges[number], number=number)
    sync_directories([below(root, COMMITS)])


def write_index(root: Path, manifest: CacheManifest, shards: CommittedShards) -> FileDigest:
    """Write the index of a cache whose shards are all committed, and return its digest.

    Raises:
        CacheCorruptError: a commit record is damaged.
        StorageError: the file system refused.
    """
    path = below(root, INDEX)
    columns = _columns(manifest)
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    with (
        storage_errors("write", path),
        new_file(path) as file,
        pq.ParquetWriter(file, schema, write_page_checksum=True, **options) as writer,
    ):
        for first in range(0, len(shards), _GROUP_SHARDS):
            numbers = range(first, min(first + _GROUP_SHARDS, len(shards)))
            rows = [_row(manifest, number, shards[number]) for number in numbers]
            writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=_GROUP_SHARDS)
    return digest_file(path)


def _row(manifest: CacheManifest, number: int, shard: CommittedShard) -> dict[str, object]:
    row: dict[str, object] = {"tokens_xxh3": bytes.fromhex(shard.tokens_xxh3)}
    for name, path in zip(_file_names(manifest), shard_files(manifest, number), strict=True):
        digest = shard.files[path]
        row[f"{name}/size"] = digest.size
        row[f"{name}/sha256"] = bytes.fromhex(digest.sha256)
        row[f"{name}/xxh3_128"] = bytes.fromhex(digest.xxh3_128)
    return row


def _columns(manifest: CacheManifest) -> dict[str, pa.DataType]:
    digest = {"size": pa.int64(), "sha256": pa.binary(32), "xxh3_128": pa.binary(16)}
    columns = {f"{name}/{part}": kind for name in _file_names(manifest) for part, kind in digest.items()}
    return {"tokens_xxh3": pa.binary(16), **columns}


def _file_names(manifest: CacheManifest) -> Sequence[str]:
    """Return what the index calls the files of a shard, in the order of `shard_files`."""
    specs = array_specs(manifest.identity, manifest.calibration)
    return [*(spec.path for spec in specs), _SEQUENCES]


def refuse_large_index(manifest: CacheManifest, num_shards: int, where: Path | str) -> None:
    """Raise CacheCorruptError for an index that is said to be larger than its shards account for."""
    most = num_shards * (_SHARD_BYTES + _FILE_BYTES * len(_file_names(manifest))) + 2**20
    digest = manifest.files.get(INDEX)
    if digest is not None and digest.size > most:
        raise CacheCorruptError(
            f"{where} claims {digest.size} bytes, more than it can need. "
            "It was not written by `minilm-cache dump`."
        )
