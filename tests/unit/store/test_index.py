"""What shards consist of: records and index say the same, and neither is believed unchecked."""

import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.store.checked import digest_bytes, digest_file
from minilm_cache.store.index import (
    CommittedShard,
    CommittedShards,
    IndexedShards,
    RecordedShards,
    committed_shards,
    open_shards,
    write_index,
)
from minilm_cache.store.layout import shard_files
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import CacheReader
from tests.support import write_document
from tests.unit.store.support import keep_shards

pytestmark = pytest.mark.slow

INDEX = "index/shards.parquet"


def test_records_and_index_say_the_same(complete: Path) -> None:
    reader = CacheReader(complete)
    recorded = RecordedShards(complete, reader.manifest, reader.ranges)
    indexed = reader.records

    assert isinstance(indexed, IndexedShards)
    assert dict(indexed.items()) == dict(recorded.items())
    assert list(indexed.values()) == [indexed[number] for number in indexed]
    assert indexed.bytes_by_name() == recorded.bytes_by_name()
    assert sum(indexed.bytes_by_name().values()) == sum(shard.num_bytes for shard in recorded.values())


def test_the_index_is_what_plain_pyarrow_reads(complete: Path) -> None:
    rows = pq.read_table(complete / INDEX).to_pylist()
    for number, row in enumerate(rows):
        record = json.loads((complete / f"commits/{number:05d}.json").read_text())
        files = {}
        for path in record["files"]:
            name = path.split("/c/")[0] if "/c/" in path else "sequences"
            files[path] = {
                "size": row[f"{name}/size"],
                "sha256": row[f"{name}/sha256"].hex(),
                "xxh3_128": row[f"{name}/xxh3_128"].hex(),
            }
        assert files == record["files"]
        assert row["tokens_xxh3"].hex() == record["tokens_xxh3"]


def test_only_committed_shards_are_listed(cache: Path) -> None:
    keep_shards(cache, {1, 4})
    for name in ("00009.json", "notes.json", ".00002.json.12.partial", "00002.json.bak", "1².json"):
        (cache / "commits" / name).write_text("{}")
    reader = CacheReader(cache, partial=True)

    assert list(reader.records) == sorted(committed_shards(cache, 6)) == [1, 4]
    assert len(reader.records) == 2
    assert [number for number in range(-1, 8) if number in reader.records] == [1, 4]
    with pytest.raises(KeyError):
        reader.records[2]
    shutil.rmtree(cache / "commits")
    assert committed_shards(cache, 6) == []


@pytest.mark.parametrize("number", [-1, 6, 2**40])
def test_a_shard_that_there_is_not_is_not_in_the_index(complete: Path, number: int) -> None:
    records = CacheReader(complete).records
    assert number not in records
    with pytest.raises(KeyError):
        records[number]


class Made(CommittedShards):
    """Shards whose digests are drawn from their number."""

    def __init__(self, reader: CacheReader, num_shards: int) -> None:
        self.numbers = range(num_shards)
        self._manifest = reader.manifest

    def __getitem__(self, shard: int) -> CommittedShard:
        random = np.random.default_rng(shard)
        paths = shard_files(self._manifest, shard)
        files = {
            path: FileDigest(
                size=int(random.integers(2**40)),
                sha256=random.bytes(32).hex(),
                xxh3_128=random.bytes(16).hex(),
            )
            for path in paths
        }
        return CommittedShard(random.bytes(16).hex(), files)

    def bytes_by_name(self) -> dict[str, int]:
        raise NotImplementedError


def test_an_index_of_several_row_groups_is_read_where_it_is_asked(complete: Path, tmp_path: Path) -> None:
    reader = CacheReader(complete)
    made = Made(reader, 2500)
    digest = write_index(tmp_path, reader.manifest, made)
    manifest = reader.manifest.model_copy(update={"files": {INDEX: digest}})
    ones = np.ones(2500, np.int64)
    indexed = open_shards(tmp_path, manifest, ShardRanges(ones, ones))
    numbers = [0, 1023, 1024, 2047, 2048, 2499, 5, 2400]

    assert digest == digest_bytes((tmp_path / INDEX).read_bytes()) == digest_file(tmp_path / INDEX)
    assert pq.ParquetFile(tmp_path / INDEX).num_row_groups == 3
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(indexed.__getitem__, numbers * 3)) == [made[n] for n in numbers * 3]


def plant(cache: Path, content: bytes) -> None:
    """Replace the index of a cache, and its digest with it."""
    (cache / INDEX).write_bytes(content)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["files"][INDEX] = digest_bytes(content).model_dump()
    write_document(cache / "manifest.json", manifest)


def rewritten(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def of_size(table: pa.Table, size: int | None) -> pa.Table:
    at = table.schema.get_field_index("tokens/size")
    return table.set_column(at, "tokens/size", pa.array([size] * len(table), pa.int64()))


def of_any_width(table: pa.Table) -> pa.Table:
    fields = [pa.field(f.name, pa.binary()) if f.name.endswith("sha256") else f for f in table.schema]
    return table.cast(pa.schema(fields))


LIES: dict[str, Callable[[pa.Table], bytes]] = {
    "a shard less": lambda table: rewritten(table.slice(1)),
    "a shard more": lambda table: rewritten(pa.concat_tables([table, table.slice(0, 1)])),
    "a column less": lambda table: rewritten(table.drop_columns("tokens/sha256")),
    "other types": lambda table: rewritten(of_any_width(table)),
    "small row groups": lambda table: rewritten(table, row_group_size=2),
    "negative sizes": lambda table: rewritten(of_size(table, -1)),
    "enormous sizes": lambda table: rewritten(of_size(table, 2**40 + 1)),
    "values left out": lambda table: rewritten(of_size(table, None)),
    "no table": lambda table: b"PAR1" * 10,
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused_whatever_its_digest(cache: Path, lie: str) -> None:
    plant(cache, LIES[lie](pq.read_table(cache / INDEX)))
    with pytest.raises(CacheCorruptError, match=r"index/shards\.parquet"):
        CacheReader(cache).segment(0)


def test_an_index_in_one_row_group_is_not_read_at_once(complete: Path, tmp_path: Path) -> None:
    """Equal values are few bytes of Parquet: all rows together could take thousands of times as much."""
    reader = CacheReader(complete)
    write_index(tmp_path, reader.manifest, Made(reader, 1025))
    content = rewritten(pq.read_table(tmp_path / INDEX), row_group_size=2000)
    (tmp_path / INDEX).write_bytes(content)
    manifest = reader.manifest.model_copy(update={"files": {INDEX: digest_bytes(content)}})
    ones = np.ones(1025, np.int64)
    with pytest.raises(CacheCorruptError, match="other row groups"):
        open_shards(tmp_path, manifest, ShardRanges(ones, ones))


def test_an_index_that_claims_more_than_it_can_need_is_not_read(cache: Path) -> None:
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["files"][INDEX]["size"] = 2**39
    write_document(cache / "manifest.json", manifest)
    with pytest.raises(CacheCorruptError, match="claims 549755813888 bytes"):
        CacheReader(cache)


@pytest.mark.parametrize(("kept", "end"), [(-1, b""), (-1, b"?"), (0, b"")])
def test_a_damaged_index_is_found_on_opening(cache: Path, kept: int, end: bytes) -> None:
    (cache / INDEX).write_bytes((cache / INDEX).read_bytes()[:kept] + end)
    with pytest.raises(CacheCorruptError, match=r"index/shards\.parquet is damaged"):
        CacheReader(cache, partial=True)
