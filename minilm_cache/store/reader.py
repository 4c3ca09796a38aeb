"""Read a cache: segments of shards, from files that are checked against what was committed.

The index (the commit records, before a cache is complete), not the directory, defines what a cache holds. A
listed file that is missing, short or changed is an error that names the file and the remedy; nothing is ever
filled in.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from minilm_cache.errors import CacheCorruptError, CacheIncompleteError, IdentityMismatchError
from minilm_cache.storage_schema.arrays import (
    ArraySpec,
    SmallArray,
    array_specs,
    entropy_column,
    sequence_columns,
)
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import MAX_MANIFEST_BYTES, CacheManifest
from minilm_cache.storage_schema.metadata import zarr_documents
from minilm_cache.store.checked import (
    READ_REMEDY,
    FileState,
    digest_bytes,
    open_checked,
    open_table,
    read_checked,
)
from minilm_cache.store.durable import own_cores, read_bounded
from minilm_cache.store.index import CommittedShard, committed_shards, open_shards, read_ranges
from minilm_cache.store.layout import (
    MANIFEST,
    MAX_FILE_BYTES,
    MAX_SEGMENT_BYTES,
    commit_path,
    decoded_bytes,
    file_bytes,
    refuse_no_cache,
    segment_tokens,
    sequences_path,
)
from minilm_cache.store.ranges import Segments
from minilm_cache.store.shards import decode_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One decoded segment of a shard (`store.ranges`)."""

    number: int
    first_sequence: int
    """Number in the cache of the first sequence."""
    rows: Mapping[str, npt.NDArray[np.generic]]
    """Array path to rows, `(tokens of the segment, ...)`, without slack; `(sequences of the segment, ...)`
    for paths in `by_sequence`."""
    by_sequence: frozenset[str]
    """Paths of arrays with one row for each sequence."""
    starts: npt.NDArray[np.int64]
    """First row of each sequence within `rows`, `(sequences,)`."""
    lengths: npt.NDArray[np.int64]
    """Tokens of each sequence, `(sequences,)`."""
    entropies: Mapping[RelationKind, npt.NDArray[np.float32]]
    """Mean row entropy of each sequence, `(sequences,)`, nats."""

    def __contains__(self, number: int) -> bool:
        """Return whether this segment holds a sequence, given its number in the cache."""
        return 0 <= number - self.first_sequence < len(self.lengths)

    def length(self, number: int) -> int:
        """Return the number of tokens of a sequence."""
        return int(self.lengths[number - self.first_sequence])

    def entropy(self, kind: RelationKind, number: int) -> float:
        """Return the teacher's mean row entropy of a sequence, nats."""
        return float(self.entropies[kind][number - self.first_sequence])

    def rows_of(self, path: str, number: int) -> npt.NDArray[np.generic]:
        """Return a sequence's rows of the array at `path`, `(length, ...)`, or `(1, ...)`."""
        at = number - self.first_sequence
        if path in self.by_sequence:
            return self.rows[path][at : at + 1]
        start = int(self.starts[at])
        return self.rows[path][start : start + self.length(number)]

    def sequence(self, number: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return a sequence's rows of all arrays: array path to `(length, ...)`."""
        return {path: self.rows_of(path, number) for path in self.rows}


def documents_of(manifest: CacheManifest, num_shards: int) -> dict[str, bytes]:
    """Return the Zarr metadata that a manifest implies, by path below the cache's root."""
    return zarr_documents(
        manifest.identity, manifest.calibration, num_shards=num_shards, shard_tokens=manifest.shard_tokens
    )


def refuse_other_metadata(
    manifest: CacheManifest, num_shards: int, url: str, *, remedy: str = "Ask its publisher to push it again."
) -> None:
    """Raise CacheCorruptError if a manifest does not imply the metadata that it names; no file is read."""
    documents = documents_of(manifest, num_shards)
    _refuse_other_documents(manifest, documents, url)
    for path, content in documents.items():
        if manifest.files.get(path) != digest_bytes(content):
            raise CacheCorruptError(
                f"{url}: {path} is not the metadata that the manifest of this cache implies. {remedy}"
            )


def _refuse_other_documents(manifest: CacheManifest, documents: Collection[str], place: str) -> None:
    """Raise CacheCorruptError if a manifest names metadata of arrays that the cache does not have."""
    others = [path for path in manifest.files if path.endswith("zarr.json") and path not in documents]
    if others:
        raise CacheCorruptError(
            f"{place} names {others[0]}, which is no file of the format. Remove the cache, and get it again."
        )


_ROUNDED: Final = 1e-3
"""Nats by which a mean of entropies may be off, having been summed in float32."""


class CacheReader:
    """Reader of one cache. Threads may share it.

    `bytes_read` counts the compressed bytes that were read of shard files, each as often as it was read: a
    segment counts as its share of the files of its shard.
    """

    reads_at_once: ClassVar[int] = min(8, max(2, own_cores()))
    """Segments that are best read at the same time; reading them is mostly decompressing."""
    bytes_ahead: ClassVar[int] = 0
    """Decoded bytes that are best read ahead of use, where the next buffer of segments has fewer."""

    def __init__(self, root: Path, partial: bool = False) -> None:
        """Open a cache.

        Args:
            root: folder of the cache.
            partial: also open a cache whose dump has not finished; only committed shards can be read.

        Raises:
            CacheNotFoundError: there is no cache.
            CacheIncompleteError: the dump has not finished, and `partial` is false.
            CacheCorruptError: the manifest, metadata or tables of shards are damaged.
            UnsupportedFormatError: a newer release wrote the cache.
        """
        self.root = root
        self._is_partial = partial
        self.bytes_read = 0
        self._counting = Lock()
        self._known_files: dict[str, FileState] = {}
        self.manifest = read_manifest(root)
        self.ranges = read_ranges(root, self.manifest)
        self.segments = Segments.of(self.manifest, self.ranges)
        if not (self.manifest.complete or partial):
            committed = len(committed_shards(root, len(self.ranges)))
            raise CacheIncompleteError(
                f"{root} is unfinished: {committed} of {len(self.ranges)} shards are committed. "
                "Finish it with the same `minilm-cache dump` command; it resumes. If it is one machine's "
                "part, join all parts with `minilm-cache merge`."
            )
        self._check_metadata()
        self.records = open_shards(root, self.manifest, self.ranges)
        """Committed shards, by number."""
        if self.manifest.complete and not partial and len(self.records) < len(self.ranges):
            shard = next(number for number in range(len(self.ranges)) if number not in self.records)
            raise CacheCorruptError(
                f"{root / commit_path(shard)} is missing: shard {shard} was committed once. {READ_REMEDY}"
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as what opens the cache anew, so that other processes can have it."""
        return _open_again, (type(self), self._opening(), self.manifest.fingerprint)

    @property
    def place(self) -> str:
        """Folder or URL of the cache."""
        return str(self._opening()[0])

    def _opening(self) -> tuple[object, ...]:
        """Return the arguments that open this cache again, in any process of this machine."""
        return (self.root.absolute(), self._is_partial)

    def _check_metadata(self) -> None:
        documents = documents_of(self.manifest, len(self.ranges))
        _refuse_other_documents(self.manifest, documents, str(self.root / MANIFEST))
        for path, expected in documents.items():
            content = read_checked(self.root, path, self.manifest.files.get(path))
            if content != expected:
                raise CacheCorruptError(
                    f"{self.root / path} is not the metadata that the manifest implies. {READ_REMEDY}"
                )

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """All arrays with a row per token or sequence."""
        return array_specs(self.manifest.identity, self.manifest.calibration)

    def attachment(self, path: str) -> bytes:
        """Return the checked content of a file outside the shards, such as `teacher/config.json`."""
        return read_checked(self.root, path, self.manifest.files.get(path))

    def segment(self, number: int, paths: Collection[str] | None = None) -> Segment:
        """Read one segment that has sequences.

        Args:
            number: number of the segment.
            paths: paths of the arrays to read in addition to `tokens`. None means all.

        Raises:
            CacheIncompleteError: its shard is not committed.
            CacheCorruptError: a file of its shard is missing or changed.
        """
        shard, sequences = self.segments.shard_of(number), self.segments.sequences(number)
        first = int(self.ranges.first_sequences[shard])
        places = range(sequences.start - first, sequences.stop - first)
        table = self._table(shard)[places.start : places.stop]
        lengths = table["length"].to_numpy().astype(np.int64)
        start = table["offset"][0].as_py() - shard * self.manifest.shard_tokens
        tokens = range(start, start + int(lengths.sum()))
        specs = [spec for spec in self.specs if paths is None or spec.path == "tokens" or spec.path in paths]
        self._refuse_large(shard, specs, len(tokens))
        rows = {spec.path: self._rows(spec, shard, places if spec.by_sequence else tokens) for spec in specs}
        self._count(shard, [sequences_path(shard), *(spec.shard_path(shard) for spec in specs)])
        if int(rows["tokens"].max()) >= self.manifest.identity.teacher.vocab_size:
            raise CacheCorruptError(
                f"shard {shard} of {self.root} holds token ids outside the vocabulary. {READ_REMEDY}"
            )
        return Segment(
            number=number,
            first_sequence=sequences.start,
            rows=rows,
            by_sequence=frozenset(spec.path for spec in specs if spec.by_sequence),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            entropies={
                kind: table[entropy_column(kind)].to_numpy() for kind in self.manifest.identity.relations
            },
        )

    def sequences(self, numbers: range, paths: Collection[str] = ()) -> Iterator[tuple[Segment, int]]:
        """Yield consecutive sequences, each as its segment and its number.

        `bytes_read` does not count what is read here: it is about the steps of a training.

        Args:
            numbers: numbers of the sequences, ascending by 1.
            paths: paths of the arrays to read in addition to `tokens`.

        Raises:
            CacheIncompleteError: a shard is not committed.
            CacheCorruptError: a file of a shard is missing or changed.
        """
        number = numbers.start
        while number < numbers.stop:
            counted = self.bytes_read
            segment = self.segment(self.segments.segment_of(number), paths)
            self.bytes_read = counted
            last = min(segment.first_sequence + len(segment.lengths), numbers.stop)
            for within in range(number, last):
                yield segment, within
            number = last

    def segments_of(self, shard: int, paths: Collection[str] | None = None) -> Iterator[Segment]:
        """Read the segments of a shard, in order; arguments and errors: see `segment`."""
        for number in self.segments.of_shard(shard):
            if self.segments.sequences(number):
                yield self.segment(number, paths)

    def _count(self, shard: int, paths: Sequence[str]) -> None:
        """Count the bytes of a segment: its share of those of the shard's files."""
        with self._counting:
            size = sum(self.records[shard].files[path].size for path in paths)
            self.bytes_read += size // self.segments.per_shard

    def _rows(self, spec: ArraySpec, shard: int, rows: range) -> npt.NDArray[np.generic]:
        path = spec.shard_path(shard)
        expected = self._require(shard).files[path]
        with open_checked(self.root, path, expected, known=self._known_files) as file:
            try:
                return decode_rows(file, spec, shard_tokens=self.manifest.shard_tokens, rows=rows)
            except CacheCorruptError as error:
                raise CacheCorruptError(f"{self.root / path} is damaged: {error}. {READ_REMEDY}") from error

    def _refuse_large(self, shard: int, specs: Sequence[ArraySpec], num_tokens: int) -> None:
        """Raise CacheCorruptError for a segment that is too large to be read into memory."""
        if num_tokens * sum(spec.row_bytes for spec in specs) > MAX_SEGMENT_BYTES:
            raise CacheCorruptError(
                f"a segment of shard {shard} of {self.root} decodes to more than {MAX_SEGMENT_BYTES >> 20} "
                "MiB, because its longest texts lie together. Dump the cache again with smaller "
                "--shard-tokens."
            )

    def table(self, number: int) -> pa.Table:
        """Read the sequence table of a shard, and check that it describes the shard that was committed."""
        return self._table(number)

    def _table(self, number: int) -> pa.Table:
        path = sequences_path(number)
        content = read_checked(self.root, path, self._require(number).files[path])
        columns = sequence_columns(self.manifest.identity.relations)
        types = {name: pa.type_for_alias(kind) for name, kind in columns.items()}
        num_rows = self.ranges[number].num_sequences
        exactly = range(num_rows, num_rows + 1)
        file = open_table(content, types, num_rows=exactly, where=self.root / path)
        table = file.read()
        self._check_table(table, number)
        return table

    def _check_table(self, table: pa.Table, number: int) -> None:
        expected = self.ranges[number]
        lengths = table["length"].to_numpy().astype(np.int64)
        offsets = number * self.manifest.shard_tokens + np.cumsum(lengths) - lengths
        first = expected.first_sequence
        valid = (
            table.num_rows == expected.num_sequences
            and all(column.null_count == 0 for column in table.columns)
            and int(lengths.sum()) == expected.num_tokens
            and int(lengths.min()) >= 1
            and int(lengths.max()) <= self.manifest.identity.packing.max_length
            and np.array_equal(table["offset"].to_numpy(), offsets)
            and all(
                _are_entropies(table[entropy_column(kind)].to_numpy(), lengths)
                for kind in self.manifest.identity.relations
            )
            and _are_within(table["document"].to_numpy(), self.manifest.identity.corpus.num_documents)
            and np.array_equal(table["sequence"].to_numpy(), np.arange(first, first + len(lengths)))
        )
        if not valid:
            raise CacheCorruptError(
                f"{self.root / sequences_path(number)} does not describe shard {number}. {READ_REMEDY}"
            )

    def _require(self, number: int) -> CommittedShard:
        if number not in self.records:
            raise CacheIncompleteError(
                f"shard {number} of {self.root} is not committed. Finish the cache with the same "
                "`minilm-cache dump` command; it resumes."
            )
        return self.records[number]


def _are_entropies(values: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64]) -> bool:
    """Return whether mean entropies of rows, nats, are between none and that of equal columns."""
    return bool(((values >= -_ROUNDED) & (values <= np.log(lengths) + _ROUNDED)).all())


def _are_within(numbers: npt.NDArray[np.int64], most: int) -> bool:
    return bool(((numbers >= 0) & (numbers < most)).all())


def read_manifest(root: Path) -> CacheManifest:
    """Read and check a cache's manifest.

    Raises:
        CacheNotFoundError: there is no cache.
        CacheCorruptError: the manifest is damaged.
        UnsupportedFormatError: a newer release wrote the cache.
    """
    refuse_no_cache(root)
    path = root / MANIFEST
    manifest = parse(CacheManifest, read_bounded(path, MAX_MANIFEST_BYTES), str(path))
    check_size(manifest, str(path))
    return manifest


def check_size(manifest: CacheManifest, place: str) -> None:
    """Raise CacheCorruptError for segments that are too large for memory, or files too large for stores."""
    if file_bytes(manifest.identity, manifest.calibration, manifest.shard_tokens) > MAX_FILE_BYTES:
        raise CacheCorruptError(
            f"{place} names files of more than {MAX_FILE_BYTES >> 20} MiB. Dump the cache again with smaller "
            "--shard-tokens."
        )
    tokens = min(manifest.shard_tokens, segment_tokens(manifest.identity, manifest.calibration))
    if decoded_bytes(manifest.identity, manifest.calibration, tokens) > MAX_SEGMENT_BYTES:
        raise CacheCorruptError(
            f"{place} names segments that decode to more than {MAX_SEGMENT_BYTES >> 20} MiB. Dump the cache "
            "again with smaller --shard-tokens."
        )


def small_array(content: bytes, small: SmallArray) -> npt.NDArray[np.generic]:
    """Return an array that applies to all tokens, in the shape of `small`, from the bytes of its file.

    Raises:
        CacheCorruptError: the array is damaged.
    """
    dtype = np.dtype(small.dtype).newbyteorder("<")
    values = np.frombuffer(content, dtype) if len(content) % dtype.itemsize == 0 else np.empty(0)
    if values.size != math.prod(small.shape) or not np.isfinite(values).all():
        raise CacheCorruptError(f"{small.chunk_path} is not the array it should be. {READ_REMEDY}")
    return values.reshape(small.shape)


def _open_again(kind: type[CacheReader], arguments: tuple[Any, ...], fingerprint: str) -> CacheReader:
    """Open a cache as another process has it open.

    Raises:
        IdentityMismatchError: another cache is there now.
    """
    reader = kind(*arguments)
    if reader.manifest.fingerprint != fingerprint:
        raise IdentityMismatchError(f"{reader.root} holds another cache than it did. Open it again.")
    return reader
