"""Parquet files of strangers: what ends pyarrow, or fills memory, is one error before Arrow sees it."""

import io
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minilm_cache.errors import CacheCorruptError
from minilm_cache.store.checked import open_table
from minilm_cache.store.parquet_headers import HeaderError, decoded_bytes, read_footer, refuse_bomb
from tests.mutations import mutations
from tests.unit.store.support import GOLDEN

pytestmark = pytest.mark.slow

TYPES = {"num_sequences": pa.int64(), "num_tokens": pa.int64()}
NAMES = [name.encode() for name in TYPES]
ROWS = 6
BOMB_BYTES = 96 << 20
Field = tuple[int, str, Any]
CODES = {"i32": 5, "i64": 6, "bin": 8, "list": 9, "struct": 12}


def varint(number: int) -> bytes:
    out = b""
    while number >= 128:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def value(kind: str, content: Any) -> bytes:
    """Return a value in Thrift's compact protocol."""
    if kind in ("i32", "i64"):
        return varint(content << 1)
    if kind == "bin":
        return varint(len(content)) + bytes(content)
    if kind == "struct":
        return struct(content)
    inner, items = content
    head = bytes([len(items) << 4 | CODES[inner]]) if len(items) < 15 else bytes([0xF0 | CODES[inner]])
    return (
        head
        + (b"" if len(items) < 15 else varint(len(items)))
        + b"".join(value(inner, item) for item in items)
    )


def struct(fields: Sequence[Field]) -> bytes:
    out, last = b"", 0
    for number, kind, content in fields:
        out += bytes([number - last << 4 | CODES[kind]]) + value(kind, content)
        last = number
    return out + b"\0"


def column(name: bytes, *, first: int, stored: int, dictionary: int | None = None) -> list[Field]:
    """Return what a footer says of a column of six numbers, compressed by zstd."""
    return [
        (1, "i32", 2),
        (2, "list", ("i32", [0, 3, 8])),
        (3, "list", ("bin", [name])),
        (4, "i32", 6),
        (5, "i64", ROWS),
        (6, "i64", 100),
        (7, "i64", stored),
        (9, "i64", first),
        *([] if dictionary is None else [(11, "i64", dictionary)]),
    ]


def written(body: bytes, columns: Sequence[list[Field]], more: Sequence[Field] = ()) -> bytes:
    """Return a file of these pages with this footer."""
    schema = [
        [(4, "bin", b"schema"), (5, "i32", 2)],
        *([(1, "i32", 2), (3, "i32", 0), (4, "bin", n)] for n in NAMES),
    ]
    chunks = [[(2, "i64", 0), (3, "struct", described), *more] for described in columns]
    group = [(1, "list", ("struct", chunks)), (2, "i64", 0), (3, "i64", ROWS)]
    fields = [
        (1, "i32", 2),
        (2, "list", ("struct", schema)),
        (3, "i64", ROWS),
        (4, "list", ("struct", [group])),
    ]
    return enclosed(body, struct(fields))


def enclosed(body: bytes, footer: bytes) -> bytes:
    return b"PAR1" + body + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def zeros(num_bytes: int) -> bytes:
    return bytes(pa.compress(bytes(num_bytes), codec="zstd", asbytes=True))


def hostile() -> Iterator[tuple[str, bytes]]:
    """Yield names and files, each of which ends a process, or takes far more memory than it has bytes."""
    yield (
        "more chunks than columns",
        written(b"", [column(name, first=4, stored=0) for name in [*NAMES, b"x"]]),
    )
    key = [(8, "struct", [(2, "struct", [(1, "list", ("bin", [b"x"]))])])]
    yield "encrypted", written(b"", [column(name, first=4, stored=10) for name in NAMES], key)
    histogram = [(16, "struct", [(2, "list", ("i64", [1, 1, 1]))])]
    yield "histogram", written(b"", [[*column(name, first=4, stored=10), *histogram] for name in NAMES])
    bomb = zeros(BOMB_BYTES)
    numbers = [(1, "i32", ROWS), (2, "i32", 0), (3, "i32", 3), (4, "i32", 3)]
    page = (
        struct([(1, "i32", 0), (2, "i32", BOMB_BYTES), (3, "i32", len(bomb)), (5, "struct", numbers)]) + bomb
    )
    yield "page", written(page, [column(name, first=4, stored=len(page)) for name in NAMES])
    words = [(1, "i32", BOMB_BYTES // 8), (2, "i32", 0)]
    table = (
        struct([(1, "i32", 2), (2, "i32", BOMB_BYTES), (3, "i32", len(bomb)), (7, "struct", words)]) + bomb
    )
    behind = 4 + len(table)
    yield (
        "dictionary",
        written(table, [column(name, first=behind, stored=len(table), dictionary=4) for name in NAMES]),
    )
    yield "deep", enclosed(b"", b"\x1c" * 100_000)
    yield "long name", enclosed(b"", b"\x18\xff\xff\xff\xff\x0f")
    yield "nested lists", enclosed(b"", b"\x19\xf9\x40" + b"\xf9\x40" * 50)
    yield "many chunks", enclosed(b"", b"\x19\x1c\x19\xfc" + varint(100_000) + b"\x26\x00\x00" * 100_000)
    yield "nothing", b"PAR1"


@pytest.mark.parametrize(("name", "content"), list(hostile()), ids=[name for name, _ in hostile()])
def test_hostile_tables_are_one_error_and_no_memory(name: str, content: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CacheCorruptError, match=r"^t "):
        open_table(content, TYPES, num_rows=range(1, 100), where=Path("t")).read()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40 * 2**10, f"{name} took {grown} KiB"


def test_the_88_bytes_that_aborted_every_command(tmp_path: Path) -> None:
    content = bytes.fromhex(
        "504152311504193c4806736368656d6115040015042500180d6e756d5f73657175656e6365730015042500180a6e756d5f746f6b656e"
        "7300160c191c193c2600002600002600001600160c00280178004c00000050415231"
    )
    with pytest.raises(CacheCorruptError):
        open_table(content, TYPES, num_rows=range(1, 100), where=tmp_path)


@pytest.mark.parametrize(
    "options", [{}, {"compression": "gzip"}, {"compression": "none"}, {"data_page_version": "2.0"}]
)
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_headers_say_what_arrow_writes(options: dict[str, Any], use_dictionary: bool) -> None:
    table = pa.table({"a": list(range(3000)), "b": [f"text {number % 7}" for number in range(3000)]})
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=1024, use_dictionary=use_dictionary, **options)
    footer = read_footer(out, most_columns=2, most_groups=3)
    assert [rows for rows, _ in footer.groups] == [1024, 1024, 952]
    assert footer.num_rows == 3000
    metadata = pq.ParquetFile(out).metadata
    for number, (rows, chunks) in enumerate(footer.groups):
        for at, chunk in enumerate(chunks):
            described = metadata.row_group(number).column(at)
            assert (chunk.path, chunk.num_values) == (described.path_in_schema, rows)
            # What Arrow counts has the headers of the pages, too.
            assert 0 <= described.total_uncompressed_size - decoded_bytes(out, chunk) < 200
    refuse_bomb(out, ["a", "b"])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["index/ranges.parquet", "index/shards.parquet", "sequences/part-00000.parquet"]
)
def test_mutated_tables_are_read_or_one_error(name: str) -> None:
    """Footers and headers of pages are hit more often than values, because they end a process."""
    seed, refused = (GOLDEN / "v2" / name).read_bytes(), 0
    table = pq.read_table(io.BytesIO(seed))
    types = {field.name: field.type for field in table.schema}
    allowed = range(table.num_rows, table.num_rows + 1)
    for content in mutations(seed, 300, near_end=0.7):
        try:
            open_table(content, types, num_rows=allowed, where=Path("t")).read()
        except CacheCorruptError:
            refused += 1
    assert refused > 30


def test_a_file_that_unpacks_to_far_more_than_it_is(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["same"] * 9_000_000, "n": [1.0] * 9_000_000}), file)
    with file.open("rb") as opened, pytest.raises(HeaderError, match="would unpack to"):
        refuse_bomb(opened, ["text", "n"])
