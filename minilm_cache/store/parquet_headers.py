"""What the headers of a Parquet file say, read before Arrow believes them.

Arrow allocates what a page's header says, before it decompresses; and pyarrow ends the process where a footer
describes a column that it cannot make (`RowGroupMetaData.column` lets C++ exceptions pass). So the footer and
the headers of pages are read here first. They are in Thrift's compact protocol.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any, Final

_MAGIC: Final = b"PAR1"
_TAIL: Final = 8
_DEPTH: Final = 12
_MAX_BINARY: Final = 2**20
_PAGES: Final = 2**16
_BOOLS: Final = (1, 2)
_BYTE, _DOUBLE, _BINARY, _STRUCT = 3, 7, 8, 12
_INTEGERS: Final = (4, 5, 6)
_LISTS: Final = (9, 10)
_LONG_LIST: Final = 15
_MORE: Final = 128


_MAX_FOOTER: Final = 2**24
_ANY_COLUMNS: Final = 4096
_ANY_GROUPS: Final = 2**14
_RATIO: Final = 64
"""Times its own size that a file may unpack to: vectors of +-1 in float32 are 32 times their bits."""
_ROWS: Final = 1024
_BATCH_BYTES: Final = 2**28
"""Most rows and bytes that are read at a time."""
_FREE: Final = 2**24
"""Bytes that any file may unpack to."""
_BYTES_OF_VALUE: Final = 4
"""Memory of a value that repeats another one, which takes next to nothing in the file."""


class HeaderError(ValueError):
    """A header that no writer of Parquet writes, or that asks for more than the reader allows."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where the pages of a column of a row group lie."""

    path: str
    """Path of the column in the schema, with dots between its parts."""
    column: str
    """First part of the path."""
    num_values: int
    first: int
    """First byte in the file."""
    num_bytes: int
    """Bytes in the file, headers of pages included."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file says of itself at its end."""

    num_rows: int
    groups: tuple[tuple[int, tuple[Chunk, ...]], ...]
    """Rows and chunks of each row group."""


def read_footer(file: BufferedIOBase, *, most_columns: int, most_groups: int) -> Footer:
    """Return the footer of a Parquet file.

    Args:
        file: the file.
        most_columns: number of columns that it may have.
        most_groups: number of row groups that it may have.

    Raises:
        HeaderError: it has no footer that a writer of tables writes, or a larger one.
    """
    most = min(_MAX_FOOTER, 2**16 + 2**10 * most_columns * most_groups)
    end = file.seek(0, 2)
    file.seek(max(0, end - _TAIL))
    tail = file.read(_TAIL)
    size = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or not 0 < size <= min(end - _TAIL - len(_MAGIC), most):
        raise HeaderError("it has no footer")
    file.seek(end - _TAIL - size)
    fields = _Compact(file, most_items=max(64, 2 * most_columns + 1, most_groups)).struct()
    try:
        groups = tuple((group[3], tuple(map(_chunk, group[1]))) for group in fields.get(4, []))
        footer = Footer(fields[3], groups)
        columns = {tuple(chunk.path for chunk in chunks) for _, chunks in groups}
        rows = [num_rows for num_rows, _ in groups]
        is_odd = min(footer.num_rows, *rows, 0) < 0 or footer.num_rows != sum(rows)
        stored = sum(chunk.num_bytes for _, chunks in groups for chunk in chunks)
    except (KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError) as error:
        raise HeaderError("its footer lacks what a footer has") from error
    if len(columns) > 1 or any(len(names) > most_columns for names in columns):
        raise HeaderError("its row groups have different columns, or too many")
    if is_odd:
        raise HeaderError("its numbers of rows do not agree")
    if stored > end:
        raise HeaderError("its columns overlap")
    return footer


def _chunk(fields: Mapping[int, Any]) -> Chunk:
    if not {8, 9}.isdisjoint(fields) or 1 in fields:
        raise HeaderError("a column is encrypted, or in another file")
    meta = fields[3]
    first, dictionary = meta[9], meta.get(11, 0)
    chunk = Chunk(
        ".".join(part.decode() for part in meta[3]),
        meta[3][0].decode(),
        meta[5],
        dictionary if 0 < dictionary < first else first,
        meta[7],
    )
    lies_nowhere = chunk.first < len(_MAGIC) and chunk.num_values > 0
    if min(chunk.num_values, chunk.num_bytes) < 0 or lies_nowhere:
        raise HeaderError("a column lies nowhere")
    return chunk


def refuse_bomb(file: BufferedIOBase, columns: Collection[str]) -> int:
    """Return how many rows of a file can be read at a time: their values may all be the longest one.

    Args:
        file: a Parquet file of any schema.
        columns: names of the columns that will be read.

    Raises:
        HeaderError: it has no sound headers, or unpacks to far more than a file of its size holds.
    """
    size = file.seek(0, 2)
    footer = read_footer(file, most_columns=_ANY_COLUMNS, most_groups=_ANY_GROUPS)
    chunks = [chunk for _, group in footer.groups for chunk in group if chunk.column in columns]
    sizes = [decoded_bytes(file, chunk) for chunk in chunks]
    unpacked = sum(sizes) + _BYTES_OF_VALUE * sum(chunk.num_values for chunk in chunks)
    if unpacked > _FREE + _RATIO * size:
        raise HeaderError(f"its {size:,} bytes would unpack to {unpacked:,}")
    return max(1, min(_ROWS, _BATCH_BYTES // max(1, *sizes, 1)))


def decoded_bytes(file: BufferedIOBase, chunk: Chunk) -> int:
    """Return the bytes that the pages of a chunk decompress to, as their headers say: Arrow allocates them.

    Raises:
        HeaderError: a page has no sound header.
    """
    if chunk.num_values == 0:  # nothing of it is read
        return 0
    total, at, end = 0, chunk.first, chunk.first + chunk.num_bytes
    reader = _Compact(file, most_items=64)
    for _ in range(_PAGES):
        if at >= end:
            return total
        file.seek(at)
        page = reader.struct()
        values = page.get(5) or page.get(8) or page.get(7) or {}
        try:
            decoded, stored, num_values = page[2], page[3], values.get(1, 0)
            if min(decoded, stored, num_values) < 0 or num_values > chunk.num_values:
                raise HeaderError("a page has more values than its column")
        except (KeyError, TypeError, AttributeError) as error:
            raise HeaderError("a page has no size") from error
        total += decoded
        at = file.tell() + stored
    raise HeaderError(f"a column of more than {_PAGES} pages")


class _Compact:
    """Reads structs of Thrift's compact protocol, as dictionaries of their fields by number."""

    def __init__(self, file: BufferedIOBase, most_items: int) -> None:
        self._file, self._most = file, most_items

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > _DEPTH:
            raise HeaderError("structs too deep")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number in fields:  # of two, Arrow may take the other one
                raise HeaderError("a field twice")
            kind = head & 15
            fields[number] = kind == 1 if kind in _BOOLS else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:  # noqa: ANN401 - what the type says
        if depth > _DEPTH:
            raise HeaderError("nested too deep")
        if kind in _INTEGERS:
            return self._integer()
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in _LISTS:
            head = self._byte()
            size = head >> 4 if head >> 4 < _LONG_LIST else self._varint()
            if size > self._most:
                raise HeaderError(f"a list of {size} items")
            return [self._value(head & 15, depth + 1) for _ in range(size)]
        if kind in (*_BOOLS, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(8)
        raise HeaderError("a type that Parquet has not")

    def _integer(self) -> int:
        number = self._varint()
        return number >> 1 ^ -(number & 1)

    def _varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < _MORE:
                return number
        raise HeaderError("an integer of more than 10 bytes")

    def _byte(self) -> int:
        byte = self._file.read(1)
        if not byte:
            raise HeaderError("it ends early")
        return byte[0]

    def _bytes(self, size: int) -> bytes:
        content = self._file.read(min(size, _MAX_BINARY))
        if len(content) != size:
            raise HeaderError("it ends early, or has a name of more than 1 MiB")
        return content
