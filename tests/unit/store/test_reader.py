"""Reading of whole shards: against plain zarr and pyarrow, and with checks that nobody has to ask for."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    CacheNotFoundError,
    UnsupportedFormatError,
)
from minilm_cache.storage_schema.arrays import all_small_arrays
from minilm_cache.storage_schema.documents import CommitRecord
from minilm_cache.storage_schema.identity import DenseParameters, RelationKind
from minilm_cache.storage_schema.manifest import MAX_MANIFEST_BYTES
from minilm_cache.store.checked import digest_bytes, read_checked
from minilm_cache.store.index import parse_record, read_record
from minilm_cache.store.layout import commit_path, shard_files
from minilm_cache.store.reader import CacheReader, check_size, read_manifest, small_array
from tests.support import write_document
from tests.unit.store.support import GOLDEN, VECTORS, keep_shards, plain_shard, plain_table


def test_shards_hold_what_plain_zarr_and_pyarrow_read(complete: Path) -> None:
    reader = CacheReader(complete)
    for number in range(len(reader.ranges)):
        shard, rows, table = (
            reader.segment(number),
            plain_shard(complete, number),
            plain_table(complete, number),
        )
        assert shard.rows.keys() == rows.keys()
        for path, expected in rows.items():
            np.testing.assert_array_equal(shard.rows[path], expected)
        assert shard.lengths.tolist() == table["length"].to_pylist()
        assert shard.first_sequence == table["sequence"][0].as_py()
        assert (shard.starts + number * 256).tolist() == table["offset"].to_pylist()


def test_a_sequence_is_its_rows_and_nothing_of_its_neighbours(complete: Path) -> None:
    reader, rows, table = CacheReader(complete), plain_shard(complete, 5), plain_table(complete, 5)
    shard = reader.segment(5)
    for row in table.to_pylist():
        number, first = row["sequence"], row["offset"] - 5 * 256
        sequence = shard.sequence(number)
        assert shard.length(number) == row["length"]
        assert shard.entropy(RelationKind.VALUE, number) == row["entropy_value"]
        for path, values in rows.items():
            np.testing.assert_array_equal(sequence[path], values[first : first + row["length"]])
            np.testing.assert_array_equal(sequence[path], shard.rows_of(path, number))


def test_a_shard_knows_which_sequences_it_holds(complete: Path) -> None:
    reader = CacheReader(complete)
    shard, listed = reader.segment(2), plain_table(complete, 2)["sequence"].to_pylist()

    assert [number for number in range(-1, reader.manifest.num_sequences + 1) if number in shard] == listed


@pytest.mark.parametrize("paths", [[], ["tokens"], ["relations/value/gap", "relations/attention/weight"]])
def test_only_what_is_asked_for_is_read_and_counted(complete: Path, paths: list[str]) -> None:
    reader = CacheReader(complete)
    shard = reader.segment(1, paths)
    expected = {"tokens", *paths}
    files = [file for path in expected for file in (complete / path / "c/1").rglob("0") if file.is_file()]
    files += [complete / "tokens/c/1", complete / "sequences/part-00001.parquet"]

    assert set(shard.rows) == expected
    assert reader.bytes_read == sum(file.stat().st_size for file in files)


def test_threads_share_a_reader_and_lose_no_bytes_of_its_count(complete: Path) -> None:
    reader = CacheReader(complete)
    sizes = [sum(os.stat(complete / p).st_size for p in shard_files(reader.manifest, n)) for n in range(6)]  # noqa: PTH116
    with ThreadPoolExecutor(8) as threads:
        shards = list(threads.map(reader.segment, list(range(6)) * 4))

    assert reader.bytes_read == 4 * sum(sizes)
    assert [shard.number for shard in shards] == list(range(6)) * 4


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=60), stored=st.binary(max_size=60))
def test_bytes_are_returned_only_if_they_are_those_committed(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, stored: bytes
) -> None:
    root = tmp_path_factory.getbasetemp()
    expected = digest_bytes(content)
    (root / "checked").write_bytes(content)
    assert read_checked(root, "checked", expected) == content
    (root / "checked").write_bytes(stored)
    if stored != content:
        with pytest.raises(CacheCorruptError):
            read_checked(root, "checked", expected)


PLANT: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link to the same bytes": lambda path: path.symlink_to(path.with_name("elsewhere")),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", PLANT)
@pytest.mark.parametrize("content", [b"", b"content"])
def test_what_is_no_file_is_damage_and_never_empty(tmp_path: Path, kind: str, content: bytes) -> None:
    (tmp_path / "elsewhere").write_bytes(content)
    PLANT[kind](tmp_path / "file")
    with pytest.raises(CacheCorruptError):
        read_checked(tmp_path, "file", digest_bytes(content))


def test_a_file_that_would_fill_memory_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as sparse:
        sparse.truncate(2**40)
    claim = digest_bytes(b"").model_copy(update={"size": 2**40})
    with pytest.raises(CacheCorruptError, match="1,099,511,627,776 bytes, more than it can need"):
        read_checked(tmp_path, "file", claim)


def test_a_file_that_no_document_lists_is_not_read(complete: Path) -> None:
    reader = CacheReader(complete)
    (listed, unlisted) = ("teacher/config.json", "README.md")

    assert reader.attachment(listed) == (complete / listed).read_bytes()
    for path in (unlisted, "../corpus.txt", "tokens/c/0"):
        with pytest.raises(CacheCorruptError):
            reader.attachment(path)


def test_an_unfinished_cache_opens_only_where_that_is_asked_for(cache: Path) -> None:
    keep_shards(cache, {1, 4})
    with pytest.raises(CacheIncompleteError):
        CacheReader(cache)
    reader = CacheReader(cache, partial=True)

    assert sorted(reader.records) == [1, 4]
    assert reader.segment(4).number == 4
    for read in (reader.segment, reader.table):
        with pytest.raises(CacheIncompleteError):
            read(0)  # its files are all there, but no record says so


def test_a_lost_record_of_a_complete_cache_of_format_1_is_damage(tmp_path: Path) -> None:
    cache = Path(shutil.copytree(GOLDEN / "v1", tmp_path / "cache"))
    (cache / commit_path(1)).unlink()
    with pytest.raises(CacheCorruptError, match=r"00001\.json"):
        CacheReader(cache)
    assert sorted(CacheReader(cache, partial=True).records) == [0, 2]


def test_a_complete_cache_is_read_without_its_records(cache: Path) -> None:
    shutil.rmtree(cache / "commits")

    assert CacheReader(cache).segment(3).number == 3


def test_shards_that_nobody_reads_may_be_damaged(cache: Path) -> None:
    keep_shards(cache, {1, 2, 3})
    (cache / commit_path(3)).write_bytes(b"{")
    (cache / "tokens/c/2").unlink()
    reader = CacheReader(cache, partial=True)

    assert reader.segment(1).number == 1
    with pytest.raises(CacheCorruptError, match="tokens/c/2"):
        reader.segment(2)
    with pytest.raises(CacheIncompleteError):
        reader.segment(0)
    with pytest.raises(CacheCorruptError, match=r"00003\.json"):
        reader.segment(3)


def test_damage_in_an_array_that_nobody_reads_is_no_hindrance(cache: Path) -> None:
    (cache / "relations/value/gap/c/0/0/0").unlink()
    reader = CacheReader(cache)

    assert set(reader.segment(0, ["relations/attention/gap"]).rows) == {"tokens", "relations/attention/gap"}
    with pytest.raises(CacheCorruptError, match="relations/value/gap"):
        reader.segment(0)


def test_metadata_must_be_what_the_manifest_implies_even_if_the_manifest_agrees(cache: Path) -> None:
    """Written with a digest that fits: a fill value of 0, so that plain zarr would fill in zeros."""
    path = "tokens/zarr.json"
    metadata = json.loads((cache / path).read_text())
    metadata["fill_value"] = 0
    content = json.dumps(metadata, indent=1).encode()
    (cache / path).write_bytes(content)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["files"][path] = digest_bytes(content).model_dump()
    write_document(cache / "manifest.json", manifest)
    with pytest.raises(CacheCorruptError, match=path):
        CacheReader(cache)


def test_manifests_that_are_not_there_too_new_or_too_long(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    with pytest.raises(CacheNotFoundError):
        read_manifest(tmp_path)
    file.write_bytes(b'{"format_version": 3}')
    with pytest.raises(UnsupportedFormatError):
        read_manifest(tmp_path)
    with file.open("wb") as opened:
        opened.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(CacheCorruptError):
        read_manifest(tmp_path)


@pytest.mark.timeout(20)
def test_a_manifest_that_is_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to(GOLDEN / "v1/manifest.json")
    with pytest.raises(CacheCorruptError):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CacheNotFoundError):
        read_manifest(tmp_path)


CHANGES: dict[str, Callable[[CommitRecord], dict[str, Any]]] = {
    "nothing": lambda record: {},
    "fingerprint": lambda record: {"fingerprint": "0" * 64},
    "shard": lambda record: {"shard": 2},
    "range": lambda record: {"range": record.range.model_copy(update={"num_tokens": 1})},
    "a file less": lambda record: {"files": dict(list(record.files.items())[1:])},
    "a file more": lambda record: {"files": record.files | {"tokens/c/9": digest_bytes(b"")}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_must_be_of_this_cache_and_this_shard(complete: Path, change: str) -> None:
    reader = CacheReader(complete)
    record = read_record(complete, reader.manifest, ranges=reader.ranges, shard=1)
    changed = record.model_copy(update=CHANGES[change](record))
    with nullcontext() if changed == record else pytest.raises(CacheCorruptError):
        parse_record(changed.to_json(), reader.manifest, ranges=reader.ranges, shard=1, where="here")


@pytest.mark.parametrize(
    ("max_length", "shard_tokens", "is_refused"),
    [(128, 2**16, False), (128, 2**20, True), (2048, 2**11, False), (8192, 2**13, True)],
)
def test_files_and_segments_are_refused_from_four_gibibytes_on(
    max_length: int, shard_tokens: int, is_refused: bool
) -> None:
    """A segment holds a sequence at least, whose dense rows may be long."""
    manifest = read_manifest(GOLDEN / "v1")
    packing = manifest.identity.packing.model_copy(update={"max_length": max_length})
    changes = {"codec": DenseParameters(), "relation_heads": 64, "packing": packing}
    identity = manifest.identity.model_copy(update=changes)
    large = manifest.model_copy(update={"shard_tokens": shard_tokens, "identity": identity})
    with pytest.raises(CacheCorruptError) if is_refused else nullcontext():
        check_size(large, "here")


def test_small_arrays_are_what_plain_zarr_reads() -> None:
    manifest = read_manifest(VECTORS)
    for small in all_small_arrays(manifest.identity, manifest.calibration):
        array = zarr.open_group(VECTORS, mode="r", zarr_format=3)[small.path]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(
            small_array((VECTORS / small.chunk_path).read_bytes(), small), np.asarray(array[:])
        )


@pytest.mark.parametrize("damage", ["not finite", "short", "no whole values"])
def test_a_small_array_that_is_none_is_refused_whatever_its_digest(damage: str) -> None:
    manifest = read_manifest(VECTORS)
    small = all_small_arrays(manifest.identity, manifest.calibration)[1]
    content = (VECTORS / small.chunk_path).read_bytes()
    changed = {
        "not finite": np.float32("inf").tobytes() + content[4:],
        "short": content[:-4],
        "no whole values": content[:-1],
    }[damage]
    assert small.dtype == "float32"
    with pytest.raises(CacheCorruptError, match=small.chunk_path):
        small_array(changed, small)
