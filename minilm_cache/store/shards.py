"""The file of one array and shard: decoded as untrusted input, encoded chunk by chunk, written with others.

The layout is that of Zarr v3's sharding codec, which any Zarr library opens. But zarr-python fills in inner
chunks that a shard leaves out, and decompresses without a bound. Here a missing chunk is an error, and a
chunk that decodes to more than its size is refused before the memory is allocated. And zarr-python 3.1.6
writes a shard as a whole, which must then fit into memory, and codes wrongly: numcodecs reads a transposed
chunk in memory order, which undoes the transposition.
"""

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from numcodecs.zstd import Zstd
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, standalone

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.arrays import PCODEC_ROWS, ArraySpec, sequence_columns
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.metadata import PCODEC_LEVEL, ZSTD_LEVEL
from minilm_cache.store.checked import Hasher
from minilm_cache.store.durable import new_file, remove_partials, storage_errors
from minilm_cache.store.layout import below

_CRC_BYTES: Final = 4
_TRANSPOSED_ROWS: Final = 32
"""Rows that are transposed at once, so few that they stay in the fastest cache."""
_PAGE_CODES: Final = 8 * PCODEC_ROWS
"""Codes that pcodec describes by one distribution: eight components (benchmarks/compressors.py)."""
_HEADER_BYTES: Final = 2**16
"""Bytes that a chunk may have in addition to twice its decoded size."""
_ENTRY_BYTES: Final = 16
"""Bytes of an entry in the index at the end of a shard: offset and size of an inner chunk, uint64 each."""


def encode_table(table: pa.Table, relations: tuple[RelationKind, ...]) -> bytes:
    """Return the file of a shard's sequence table, in the columns and types of the format."""
    fields = sequence_columns(relations).items()
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in fields])
    buffer = io.BytesIO()
    pq.write_table(table.cast(schema), buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def decode_rows(
    file: io.BufferedIOBase, spec: ArraySpec, *, shard_tokens: int, rows: range
) -> npt.NDArray[np.generic]:
    """Return rows of a shard, `(rows, ...)`. Only the chunks that hold them are read.

    Args:
        file: the file.
        spec: description of the array.
        shard_tokens: rows of a shard, slack included.
        rows: numbers of the rows, which follow each other.

    Raises:
        CacheCorruptError: a chunk is missing, fails its checksum, or has the wrong size.
    """
    chunk_rows = spec.chunk_tokens(shard_tokens)
    file_bytes = file.seek(0, os.SEEK_END)
    index = _read_index(file, file_bytes, shard_tokens // chunk_rows)
    decode = _decode_pcodec if spec.compressor == "pcodec" else _decode_zstd
    decoded = np.empty((len(rows), *spec.row_shape), np.dtype(spec.dtype).newbyteorder("<"))
    for number in range(rows.start // chunk_rows, -(-rows.stop // chunk_rows)):
        part = _checked(_read_chunk(file, file_bytes, index[number], most=2 * chunk_rows * spec.row_bytes))
        chunk = number * chunk_rows
        first, last = max(chunk, rows.start), min(chunk + chunk_rows, rows.stop)
        try:
            values = decode(part, spec, chunk_rows)[first - chunk : last - chunk]
            _copy(values, decoded[first - rows.start : last - rows.start])
        except (OSError, RuntimeError, ValueError) as error:
            raise CacheCorruptError(f"an inner chunk cannot be decompressed: {error}") from error
    return decoded


def _copy(rows: npt.NDArray[np.generic], to: npt.NDArray[np.generic]) -> None:
    """Copy rows, which may lie component by component."""
    if rows.flags.c_contiguous:
        to[:] = rows
        return
    for first in range(0, len(rows), _TRANSPOSED_ROWS):
        part = rows[first : first + _TRANSPOSED_ROWS].copy(order="K")
        to[first : first + _TRANSPOSED_ROWS] = part


def _decode_zstd(part: bytes, spec: ArraySpec, chunk_rows: int) -> npt.NDArray[np.generic]:
    decoded = pa.Codec("zstd").decompress(part, chunk_rows * spec.row_bytes)
    return np.frombuffer(decoded, np.dtype(spec.dtype).newbyteorder("<")).reshape(-1, *spec.row_shape)


def _decode_pcodec(part: bytes, spec: ArraySpec, chunk_rows: int) -> npt.NDArray[np.generic]:
    """Decode a chunk whose components are coded one after the other."""
    values = np.empty(chunk_rows * math.prod(spec.row_shape), np.dtype(spec.dtype))
    progress = standalone.simple_decompress_into(part, values)
    if progress.n_processed != values.size or not progress.finished:
        raise ValueError("it does not decompress to its size")
    return values.reshape(*spec.row_shape, chunk_rows).T


class ShardEncoder:
    """Writes the file of one array and shard as its rows come. Its slack holds the fill value."""

    def __init__(self, file: io.BufferedIOBase, spec: ArraySpec, shard_tokens: int) -> None:
        """Begin a shard.

        Args:
            file: empty file to write into.
            spec: description of the array.
            shard_tokens: rows of a shard, slack included.
        """
        self._file = file
        self._spec = spec
        self._chunk_rows = spec.chunk_tokens(shard_tokens)
        self._num_chunks = shard_tokens // self._chunk_rows
        self._entries: list[tuple[int, int]] = []
        self._size = 0
        self._hasher = Hasher()
        self._left = np.empty((0, *spec.row_shape), spec.dtype)
        """Rows of the chunk that is not full yet."""

    def append(self, rows: npt.NDArray[np.generic]) -> None:
        """Write the next rows, `(rows, ...)`, one chunk after the other."""
        for chunk in self.full_chunks(rows):
            self.write(self.encoded(chunk))

    def append_by(self, threads: Executor, rows: npt.NDArray[np.generic]) -> Future[None]:
        """Let threads compress the next rows' chunks, and then one of them write them; return its result.

        What waits was submitted after what it waits for, so it may take a thread while others compress.
        """
        encoded = [threads.submit(self.encoded, chunk) for chunk in self.full_chunks(rows)]

        def write() -> None:
            for chunk in encoded:
                self.write(chunk.result())

        return threads.submit(write)

    def full_chunks(self, rows: npt.NDArray[np.generic]) -> Iterator[npt.NDArray[np.generic]]:
        """Yield the chunks that the next rows fill; each must be encoded and written, in order."""
        head = rows[: self._chunk_rows - len(self._left)] if len(self._left) else rows[:0]
        if len(head):
            self._left = np.concatenate([self._left, head])
            if len(self._left) == self._chunk_rows:
                yield self._left
                self._left = self._left[:0]
        for first in range(len(head), len(rows), self._chunk_rows):
            part = rows[first : first + self._chunk_rows]
            if len(part) == self._chunk_rows:
                yield part
            else:
                self._left = part.astype(self._spec.dtype)

    def finish(self) -> FileDigest:
        """Write the slack and the index of the chunks; return size and hashes of the file."""
        slack = np.full((self._chunk_rows, *self._spec.row_shape), self._spec.fill_value, self._spec.dtype)
        if len(self._left):
            self.write(self.encoded(np.concatenate([self._left, slack[len(self._left) :]])))
        if len(self._entries) < self._num_chunks:
            encoded = self.encoded(slack)
            while len(self._entries) < self._num_chunks:
                self.write(encoded)
        index = _with_checksum(np.asarray(self._entries, "<u8").tobytes())
        self._file.write(index)
        self._hasher.update(index)
        return self._hasher.digest()

    def encoded(self, chunk: npt.NDArray[np.generic]) -> bytes:
        """Return a chunk as it is written; any thread may do it, since compressing releases Python's lock."""
        values = np.ascontiguousarray(chunk, np.dtype(self._spec.dtype).newbyteorder("<"))
        if self._spec.compressor == "pcodec":
            return _with_checksum(_encode_pcodec(values))
        return _with_checksum(bytes(Zstd(level=ZSTD_LEVEL, checksum=False).encode(values)))

    def write(self, encoded: bytes) -> None:
        """Write the next chunk, which is encoded already."""
        self._file.write(encoded)
        self._hasher.update(encoded)
        self._entries.append((self._size, len(encoded)))
        self._size += len(encoded)


def _encode_pcodec(rows: npt.NDArray[np.generic]) -> bytes:
    """Return rows, `(rows, components)`, coded component by component.

    Neighbours and multiples say nothing about codes, so pcodec need not look for them, which takes a fifth of
    the time.
    """
    by_component = np.empty(rows.shape[::-1], rows.dtype)
    for first in range(0, len(rows), _TRANSPOSED_ROWS):
        by_component[:, first : first + _TRANSPOSED_ROWS] = rows[first : first + _TRANSPOSED_ROWS].T
    config = ChunkConfig(
        compression_level=PCODEC_LEVEL,
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.equal_pages_up_to(_PAGE_CODES),
    )
    return bytes(standalone.simple_compress(by_component.ravel(), config))


def _with_checksum(content: bytes) -> bytes:
    return content + int(google_crc32c.value(content)).to_bytes(_CRC_BYTES, "little")


def _read_index(file: io.BufferedIOBase, file_bytes: int, num_chunks: int) -> npt.NDArray[np.uint64]:
    """Return the offset and size of every inner chunk, `(chunks, 2)`, bytes."""
    size = num_chunks * _ENTRY_BYTES + _CRC_BYTES
    if file_bytes < size:
        raise CacheCorruptError("the index of its chunks is missing")
    file.seek(file_bytes - size)
    return np.frombuffer(_checked(file.read(size)), "<u8").reshape(num_chunks, 2)


def _read_chunk(
    file: io.BufferedIOBase, file_bytes: int, entry: npt.NDArray[np.uint64], *, most: int
) -> bytes:
    offset, size = (int(number) for number in entry)
    if offset + size > file_bytes:  # the index gives a missing chunk the greatest uint64 as offset
        raise CacheCorruptError("an inner chunk is missing")
    if size > most + _HEADER_BYTES:  # compressors add little to what they cannot compress
        raise CacheCorruptError("an inner chunk is longer than it can be")
    file.seek(offset)
    return file.read(size)


def _checked(part: bytes) -> bytes:
    """Check the crc32c at the end of `part`, and return the bytes before it."""
    body, stored = part[:-_CRC_BYTES], part[-_CRC_BYTES:]
    if len(stored) < _CRC_BYTES or google_crc32c.value(body) != int.from_bytes(stored, "little"):
        raise CacheCorruptError("an inner chunk does not match its crc32c")
    return body


class ShardWriter:
    """The files of a shard that is being written. They are in their places after `finish`."""

    def __init__(self, root: Path, shard: int, *, specs: Iterable[ArraySpec], shard_tokens: int) -> None:
        """Begin the files.

        Args:
            root: folder of the cache.
            shard: number of the shard.
            specs: arrays to write, without `tokens`.
            shard_tokens: rows of a shard, slack included.

        Raises:
            StorageError: the file system refused.
        """
        self.shard = shard
        self._root = root
        self._tokens: list[npt.NDArray[np.generic]] = []
        self._tables: list[pa.Table] = []
        self._encoders: dict[str, tuple[str, ShardEncoder]] = {}
        self._files = ExitStack()
        with storage_errors("write", root):
            try:
                for spec in specs:
                    path = spec.shard_path(shard)
                    remove_partials(below(root, path))  # of attempts that were killed
                    file = self._files.enter_context(new_file(below(root, path), durable=False))
                    self._encoders[spec.path] = path, ShardEncoder(file, spec, shard_tokens)
            except BaseException as error:
                self.abandon(error)
                raise

    @property
    def tokens(self) -> npt.NDArray[np.generic]:
        """Token ids that have been appended, `(tokens,)`."""
        return np.concatenate(self._tokens)

    @property
    def table(self) -> pa.Table:
        """Sequence table of what has been appended."""
        return pa.concat_tables(self._tables)

    def append(
        self, rows: Mapping[str, npt.NDArray[np.generic]], table: pa.Table, *, threads: Executor
    ) -> None:
        """Write the next segment.

        Args:
            rows: array path to rows, `(tokens of the segment, ...)`, or one row for each sequence.
            table: sequence table of the segment.
            threads: threads that compress the chunks of all arrays, and write each file in order.

        Raises:
            StorageError: the file system refused.
        """
        with storage_errors("write", self._root):
            written = [
                encoder.append_by(threads, rows[path]) for path, (_, encoder) in self._encoders.items()
            ]
            wait(written)  # also after an error: nothing may write into files that are removed
            for file in written:
                file.result()
        self._tokens.append(rows["tokens"])
        self._tables.append(table)

    def finish(self) -> dict[str, FileDigest]:
        """Put the files in their places, and return what they are by path. They are not flushed to disk.

        Raises:
            StorageError: the file system refused.
        """
        with storage_errors("write", self._root):
            digests = {path: encoder.finish() for path, encoder in self._encoders.values()}
            self._files.close()
        return digests

    def abandon(self, error: BaseException) -> None:
        """Remove the files, because of an error. After `finish` it does nothing."""
        with suppress(OSError):  # what is still to be written of them does not fit on a full disk, either
            self._files.__exit__(type(error), error, error.__traceback__)
