"""Which sequences each shard holds: the table, against plain pyarrow, and what is refused of it."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.index import encode_ranges, read_ranges
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import read_manifest
from tests.support import write_document
from tests.unit.store.support import GOLDEN

NUMBERS = st.lists(st.tuples(st.integers(1, 2**20), st.integers(0, 2**20)), min_size=1, max_size=50)


@settings(max_examples=30, deadline=None)
@given(NUMBERS)
def test_the_table_is_what_plain_pyarrow_reads(numbers: list[tuple[int, int]]) -> None:
    sequences = np.asarray([first for first, _ in numbers])
    ranges = ShardRanges(sequences, sequences + np.asarray([more for _, more in numbers]))
    rows = pq.read_table(io.BytesIO(encode_ranges(ranges))).to_pylist()

    assert rows == [{"num_sequences": r.num_sequences, "num_tokens": r.num_tokens} for r in ranges]
    assert encode_ranges(ranges) == encode_ranges(ShardRanges(ranges.num_sequences, ranges.num_tokens))


def test_ranges_are_equal_if_their_shards_are() -> None:
    one, same = (ShardRanges(np.asarray([2, 3]), np.asarray([5, 6])) for _ in range(2))
    others = [
        ShardRanges(np.asarray([2, 3]), np.asarray([5, 7])),
        ShardRanges(np.asarray([3, 2]), np.asarray([5, 6])),
        ShardRanges(np.asarray([2]), np.asarray([5])),
    ]

    assert one == same
    assert all(one != other for other in others)
    assert one != "ranges"


def test_both_formats_are_read_and_hold_every_sequence() -> None:
    for name in ("v1", "v2"):
        manifest = read_manifest(GOLDEN / name)
        ranges = read_ranges(GOLDEN / name, manifest)

        assert int(ranges.num_sequences.sum()) == manifest.num_sequences
        assert int(ranges.num_tokens.sum()) == manifest.num_tokens
        assert [r.first_sequence for r in ranges] == ranges.first_sequences.tolist()


def plant(cache: Path, content: bytes) -> None:
    """Replace the table of a cache, and its digest with it."""
    (cache / "index/ranges.parquet").write_bytes(content)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["files"]["index/ranges.parquet"] = digest_bytes(content).model_dump()
    write_document(cache / "manifest.json", manifest)


def changed(column: str, change: Callable[[list[int]], list[int | None]]) -> Callable[[pa.Table], pa.Table]:
    def apply(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(column)
        return table.set_column(at, column, pa.array(change(table[column].to_pylist()), pa.int64()))

    return apply


LIES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "a shard less": lambda table: table.slice(1),
    "no shards": lambda table: table.slice(0, 0),
    "other columns": lambda table: table.append_column("more", table["num_tokens"]),
    "other types": lambda table: table.cast(pa.schema([(n, pa.int32()) for n in table.column_names])),
    "an empty shard": changed("num_sequences", lambda n: [0, n[0] + n[1], *n[2:]]),
    "a negative shard": changed("num_sequences", lambda n: [-1, n[0] + n[1] + 1, *n[2:]]),
    "other totals": changed("num_tokens", lambda n: [n[0] - 1, *n[1:]]),
    "sums that overflow": changed("num_tokens", lambda n: [2**62, 2**62, *n[2:]]),
    "too many tokens": changed("num_tokens", lambda n: [n[0] + 1, n[1] - 1, *n[2:]]),
    "a number left out": changed("num_tokens", lambda n: [None, *n[1:]]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_is_refused_whatever_its_digest(tmp_path: Path, lie: str) -> None:
    cache = Path(shutil.copytree(GOLDEN / "v2", tmp_path / "cache"))
    buffer = io.BytesIO()
    pq.write_table(LIES[lie](pq.read_table(cache / "index/ranges.parquet")), buffer)
    plant(cache, buffer.getvalue())
    with pytest.raises(CacheCorruptError, match=r"index/ranges\.parquet"):
        read_ranges(cache, read_manifest(cache))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"\0" * 100, b"PAR1" * 20])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    cache = Path(shutil.copytree(GOLDEN / "v2", tmp_path / "cache"))
    plant(cache, content)
    with pytest.raises(CacheCorruptError, match="is not a Parquet file"):
        read_ranges(cache, read_manifest(cache))


def test_a_table_of_a_billion_equal_shards_fills_no_memory(tmp_path: Path) -> None:
    """Encoded as one value and a count, so that its bytes are few."""
    cache = Path(shutil.copytree(GOLDEN / "v2", tmp_path / "cache"))
    manifest = json.loads((cache / "manifest.json").read_text())
    write_document(cache / "manifest.json", manifest | {"num_sequences": 2**40, "num_tokens": 2**40})
    ones = pa.array(np.ones(2**21, np.int64))
    buffer = io.BytesIO()
    pq.write_table(pa.table({"num_sequences": ones, "num_tokens": ones}), buffer, compression="zstd")
    assert len(buffer.getvalue()) < 2**15
    plant(cache, buffer.getvalue())
    with pytest.raises(CacheCorruptError, match="does not describe the shards"):
        read_ranges(cache, read_manifest(cache))
