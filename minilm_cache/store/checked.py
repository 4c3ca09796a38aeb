"""Read files of a cache as untrusted input: whole files against their hashes, and Parquet tables."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from minilm_cache.errors import CacheCorruptError, StorageError, first_line
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.manifest import TEACHER_WEIGHTS
from minilm_cache.store.durable import storage_errors
from minilm_cache.store.fingerprint import xxh3, xxh3_file
from minilm_cache.store.layout import below
from minilm_cache.store.regular_files import NotRegularError, open_regular

FileState = tuple[int, int, int]
"""Inode of a file, and when its content and its entry were changed last (nanoseconds)."""

READ_REMEDY: Final = (
    "Run `minilm-cache verify --full` for the extent of the damage, then the `minilm-cache dump` command of "
    "this cache with `--check full` to write damaged shards again, or fetch the cache again."
)
"""What helps where a file of a cache is damaged."""
_MAX_BYTES: Final = 2**32
"""Most bytes of a file that is read whole."""
MAX_WEIGHTS_BYTES: Final = 2**34
"""Most bytes of a teacher's weights: an encoder of 8 billion weights in float16."""
_MAX_VALUE_BYTES = 64
"""Most decompressed bytes of a table for each value, headers of its pages included."""
_MAX_TABLE_HEADERS = 2**20
"""Most decompressed bytes of a table in addition to its values."""


def read_checked(root: Path, path: str, expected: FileDigest | None) -> bytes:
    """Read a whole file, and compare its size (before reading) and its XXH3-128 with what was committed.

    Raises:
        CacheCorruptError: the file is not listed, missing, not a regular file, too large, or differs.
    """
    with _opened(root, path, expected) as (file, committed):
        if committed.size > (MAX_WEIGHTS_BYTES if path == TEACHER_WEIGHTS else _MAX_BYTES):
            raise CacheCorruptError(
                f"{below(root, path)} has {committed.size:,} bytes, more than it can need. It was not "
                "written by `minilm-cache dump`."
            )
        content = file.read(committed.size)
    if xxh3(content) != committed.xxh3_128:
        raise _other_bytes(below(root, path))
    return content


@contextmanager
def _opened(
    root: Path, path: str, expected: FileDigest | None
) -> Iterator[tuple[BufferedIOBase, FileDigest]]:
    """Open a file that has the size that was committed.

    Raises:
        CacheCorruptError: the file is not listed, missing, not a regular file, or of another size.
    """
    file = below(root, path)
    if expected is None:
        raise CacheCorruptError(f"{file} is not listed in the cache. {READ_REMEDY}")
    try:
        with storage_errors("read", file), open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != expected.size:
                raise CacheCorruptError(
                    f"{file} is damaged: {size} bytes, committed {expected.size}. {READ_REMEDY}"
                )
            yield opened, expected
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | NotRegularError):
            raise CacheCorruptError(f"{file} is missing. {READ_REMEDY}") from error
        raise


def _other_bytes(file: Path) -> CacheCorruptError:
    return CacheCorruptError(f"{file} is damaged: its bytes are not those committed. {READ_REMEDY}")


def checked_file(root: Path, path: str, expected: FileDigest | None) -> Path:
    """Return the path of a file after comparing it with what was committed; it is not held in memory.

    Raises:
        CacheCorruptError: see `open_checked`.
    """
    with open_checked(root, path, expected, known={}):
        return below(root, path)


@contextmanager
def open_checked(
    root: Path, path: str, expected: FileDigest | None, *, known: dict[str, FileState]
) -> Iterator[BufferedIOBase]:
    """Open a file of which parts are read, after comparing all of it with what was committed.

    Args:
        root: folder of the cache.
        path: path of the file below it.
        expected: size and hashes that were committed. None means that the file is not listed.
        known: path to state of files that have been compared, which are not read as a whole again until
            they change; this one is added. What is read of them has a checksum of its own.

    Raises:
        CacheCorruptError: the file is not listed, missing, not a regular file, or differs.
    """
    with _opened(root, path, expected) as (file, committed):
        state = file_state(os.fstat(file.fileno()))
        if known.get(path) != state and xxh3_file(file) != committed.xxh3_128:
            raise _other_bytes(below(root, path))
        known[path] = state
        yield file


def file_state(stat: os.stat_result) -> FileState:
    """Return what changes when a file is changed or replaced."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def is_sound(root: Path, path: str, expected: FileDigest | None) -> bool:
    """Return whether a file is there as it was committed; it is not held in memory."""
    try:
        checked_file(root, path, expected)
    except CacheCorruptError:
        return False
    return True


def open_table(
    content: bytes, types: Mapping[str, pa.DataType], *, num_rows: range, where: Path
) -> pq.ParquetFile:
    """Open a Parquet file without reading its rows.

    Args:
        content: bytes of the file.
        types: columns that it must have, in order, with their types.
        num_rows: numbers of rows that it may have.
        where: path of the file, for messages.

    Raises:
        CacheCorruptError: it is no Parquet file, has other columns or rows, or would decompress to more bytes
            than its rows can take.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        schema = {field.name: field.type for field in file.schema_arrow}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # names may not be UTF-8
        raise not_a_table(where, error) from error
    if list(schema.items()) != list(types.items()) or not _has_rows(file.metadata, num_rows):
        raise CacheCorruptError(f"{where} has other rows or columns than the format. {READ_REMEDY}")
    return file


def not_a_table(where: Path, error: Exception) -> CacheCorruptError:
    """Return the error for a file that Arrow cannot read."""
    reason = first_line(error)  # Arrow appends its own stack trace
    return CacheCorruptError(f"{where} is not a Parquet file: {reason}. {READ_REMEDY}")


def _has_rows(metadata: pq.FileMetaData, allowed: range) -> bool:
    """Return whether a table's row counts agree and are allowed, and its bytes no more than its rows need."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    num_values = metadata.num_rows * metadata.num_columns
    return bool(
        metadata.num_rows in allowed
        and metadata.num_rows == sum(group.num_rows for group in groups)
        and sum(column.num_values for column in columns) == num_values
        and sum(column.total_uncompressed_size for column in columns)
        <= num_values * _MAX_VALUE_BYTES + _MAX_TABLE_HEADERS
    )
