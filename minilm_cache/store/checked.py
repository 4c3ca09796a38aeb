"""Hashes of files, and files of a cache read as untrusted input: whole files, and Parquet tables."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from xxhash import (
    xxh3_128_hexdigest as xxh3,
)  # It is fast enough for every read, and not safe against tampering.

from minilm_cache.errors import CacheCorruptError, StorageError, first_line
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.manifest import TEACHER_WEIGHTS, CacheManifest
from minilm_cache.store.durable import NotRegularError, open_regular, storage_errors
from minilm_cache.store.layout import below
from minilm_cache.store.parquet_headers import Footer, HeaderError, decoded_bytes, read_footer


def tokens_hash(tokens: npt.NDArray[np.generic]) -> str:
    """Return the hash of a shard's token ids, `(tokens,)`, as its commit record holds it."""
    return xxh3(np.ascontiguousarray(tokens).data.cast("B"))


_PART_BYTES: Final = 2**22
"""Bytes of a file that are read at once."""


def sha256_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths: Iterable[Path]) -> str:
    """Return a single SHA-256 (hex) for a set of files.

    For one file it is the digest of that file, which can be compared with published digests. For several it
    is the digest over their names and digests, sorted by name.
    """
    ordered = sorted(paths)
    if len(ordered) == 1:
        return sha256_file(ordered[0])
    lines = "".join(f"{sha256_file(path)}  {path.name}\n" for path in ordered)
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256_texts(texts: Iterable[str]) -> str:
    """Return the SHA-256 (hex) over UTF-8 texts, each preceded by its length (8 bytes, little-endian)."""
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def xxh3_file(file: BufferedIOBase) -> str:
    """Return the XXH3-128 (hex) of a file on disk from where it stands; it need not fit into memory."""
    return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_file(path: Path) -> FileDigest:
    """Return size and both hashes of a file, which need not fit into memory."""
    hasher = Hasher()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            hasher.update(part)
    return hasher.digest()


class Hasher:
    """Computes size and both hashes of a file from its parts."""

    def __init__(self) -> None:
        """Begin with an empty file."""
        self._size = 0
        self._sha256 = hashlib.sha256()
        self._xxh3 = xxhash.xxh3_128()

    def update(self, part: bytes) -> None:
        """Add the next part."""
        self._size += len(part)
        self._sha256.update(part)
        self._xxh3.update(part)

    def digest(self) -> FileDigest:
        """Return size and hashes of all parts."""
        return FileDigest(size=self._size, sha256=self._sha256.hexdigest(), xxh3_128=self._xxh3.hexdigest())


def digest_bytes(content: bytes) -> FileDigest:
    """Return size and both hashes of a file's content."""
    return FileDigest(size=len(content), sha256=hashlib.sha256(content).hexdigest(), xxh3_128=xxh3(content))


_LEAST_GROUP: Final = 1024
"""Rows of each row group but the last, at least."""
FileState = tuple[int, int, int]
"""Inode of a file, and when its content and its entry were changed last (nanoseconds)."""

READ_REMEDY: Final = (
    "Run `minilm-cache verify --full` for the extent of the damage, then the `minilm-cache dump` command of "
    "this cache with `--check full` to write damaged shards again. The same `minilm-cache pull` mends a copy."
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


@dataclass(frozen=True)
class Table:
    """A Parquet table of a cache whose footer was checked; its pages are checked before they are read.

    Metadata of pyarrow is not at hand: where a file is hostile, asking it for a column ends the process.
    """

    content: bytes
    footer: Footer
    where: Path
    """Path of the file, for messages."""

    def read(self, groups: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Return rows.

        Args:
            groups: numbers of the row groups to read. None means all.
            columns: names of the columns to read. None means all.

        Raises:
            CacheCorruptError: a page is damaged, or would decompress to more bytes than its rows can take.
        """
        numbers = range(len(self.footer.groups)) if groups is None else groups
        try:
            for number in numbers:
                self._refuse_pages(number, columns)
            return self._file.read_row_groups(list(numbers), columns)
        except (HeaderError, pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise not_a_table(self.where, error) from error

    @cached_property
    def _file(self) -> pq.ParquetFile:
        return pq.ParquetFile(pa.BufferReader(self.content))

    def _refuse_pages(self, group: int, columns: Sequence[str] | None) -> None:
        num_rows, chunks = self.footer.groups[group]
        file = BytesIO(self.content)
        wanted = [chunk for chunk in chunks if columns is None or chunk.path in columns]
        num_bytes = sum(decoded_bytes(file, chunk) for chunk in wanted)
        if num_bytes > num_rows * len(wanted) * _MAX_VALUE_BYTES + _MAX_TABLE_HEADERS:
            raise HeaderError(f"{num_bytes} bytes for {num_rows} rows")


def open_table(content: bytes, types: Mapping[str, pa.DataType], *, num_rows: range, where: Path) -> Table:
    """Open a Parquet file without reading its rows.

    Args:
        content: bytes of the file.
        types: columns that it must have, in order, with their types.
        num_rows: numbers of rows that it may have.
        where: path of the file, for messages.

    Raises:
        CacheCorruptError: it is no Parquet file, or has other columns or rows.
    """
    most_groups = -(-num_rows.stop // _LEAST_GROUP)
    try:
        footer = read_footer(BytesIO(content), most_columns=len(types), most_groups=most_groups)
        schema = pq.read_schema(pa.BufferReader(content))
        kinds = [(field.name, field.type) for field in schema]
    except (HeaderError, pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise not_a_table(where, error) from error
    is_whole = all(
        [(chunk.path, chunk.num_values) for chunk in chunks] == [(name, rows) for name in types]
        for rows, chunks in footer.groups
    )
    if kinds != list(types.items()) or footer.num_rows not in num_rows or not is_whole:
        raise CacheCorruptError(f"{where} has other rows or columns than the format. {READ_REMEDY}")
    return Table(content, footer, where)


def not_a_table(where: Path, error: Exception) -> CacheCorruptError:
    """Return the error for a file that Arrow cannot read."""
    reason = first_line(error)  # Arrow appends its own stack trace
    return CacheCorruptError(f"{where} is not a Parquet file: {reason}. {READ_REMEDY}")


def is_damaged(root: Path, manifest: CacheManifest, path: str) -> bool:
    """Return whether a file that a manifest names is missing or damaged."""
    return not is_sound(root, path, manifest.files[path])
