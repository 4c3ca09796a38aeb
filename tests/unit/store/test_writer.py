"""Writing of caches: the record last, the manifest last of all, and one writer for each shard."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import xxhash

from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    IdentityMismatchError,
    ShardBusyError,
    StorageError,
)
from minilm_cache.store.checked import tokens_hash
from minilm_cache.store.layout import commit_path, lock_path, shard_files
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import CacheReader, read_manifest
from minilm_cache.store.writer import CacheWriter
from tests.unit.store.support import (
    begin,
    failing_sync,
    files_below,
    keep_shards,
    partials,
    plain_rows,
    plain_shard,
    plain_table,
    unfinished,
    write_shard,
)

pytestmark = pytest.mark.slow


def write(writer: CacheWriter, source: Path, shard: int, rank: int = 0) -> None:
    """Write a shard of the rows of a finished cache."""
    with writer.claim(shard):
        rows, table = plain_shard(source, shard), plain_table(source, shard)
        write_shard(writer, shard, rows, table=table, rank=rank)


def seal(writer: CacheWriter, source: Path) -> None:
    measured = read_manifest(source).measured
    assert measured is not None
    writer.seal(measured, pa.table({"text": ["preview"]}))


def test_a_cache_that_has_begun_is_its_manifest_metadata_and_attachments(
    complete: Path, tmp_path: Path
) -> None:
    writer = begin(complete, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    files = files_below(tmp_path / "out")

    assert not writer.is_complete
    assert writer.missing_shards() == list(range(6))
    assert (manifest["complete"], manifest["measured"]) == (False, None)
    assert files.keys() == {"manifest.json", *manifest["files"]}
    for path, digest in manifest["files"].items():
        assert digest["sha256"] == hashlib.sha256(files[path]).hexdigest()


@pytest.mark.parametrize("shard", [0, 5])
def test_a_shard_that_is_written_is_what_plain_zarr_reads(complete: Path, tmp_path: Path, shard: int) -> None:
    """Rows, and slack that is the fill value: no zeros."""
    out = tmp_path / "out"
    write(begin(complete, out), complete, shard)
    num_tokens = CacheReader(complete).ranges[shard].num_tokens
    for path, expected in plain_shard(complete, shard).items():
        rows = plain_rows(out, path, shard * 256, 256)
        fill_value = json.loads((out / path / "zarr.json").read_text())["fill_value"]
        np.testing.assert_array_equal(rows[:num_tokens], expected)
        assert np.all(rows[num_tokens:] == fill_value)
        assert fill_value != 0
    assert plain_table(out, shard).equals(plain_table(complete, shard))


def test_a_commit_record_says_what_is_on_disk(complete: Path, tmp_path: Path) -> None:
    write(begin(complete, tmp_path), complete, 5, rank=3)
    record = json.loads((tmp_path / commit_path(5)).read_text())
    tokens = plain_rows(tmp_path, "tokens", 5 * 256, record["range"]["num_tokens"])

    assert (record["shard"], record["rank"]) == (5, 3)
    assert record["tokens_xxh3"] == xxhash.xxh3_128_hexdigest(tokens.astype("<u2").tobytes())
    assert set(record["files"]) == set(shard_files(read_manifest(tmp_path), 5))
    for path, digest in record["files"].items():
        content = (tmp_path / path).read_bytes()
        assert digest == {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "xxh3_128": xxhash.xxh3_128_hexdigest(content),
        }


def test_the_hash_of_tokens_does_not_depend_on_how_they_lie_in_memory() -> None:
    rows = np.arange(100, dtype=np.uint16)

    assert tokens_hash(rows[::2]) == xxhash.xxh3_128_hexdigest(rows[::2].tobytes())


def test_a_shard_whose_writing_fails_anywhere_is_not_there_or_is_whole(
    complete: Path, tmp_path: Path
) -> None:
    """The disk is full at each fsync in turn; writing the shard again mends whatever was left."""
    writer, out = begin(complete, tmp_path), tmp_path
    expected, at, failures = plain_shard(complete, 1), 0, 0
    while True:
        with failing_sync(at) as calls:
            try:
                write(writer, complete, 1)
            except StorageError:
                failures += 1
        if writer.is_committed(1):
            rows = CacheReader(out, partial=True).segment(1).rows
            assert all(np.array_equal(rows[path], values) for path, values in expected.items())
            with writer.claim(1):
                writer.withdraw(1)
        assert partials(out) == []
        if len(calls) <= at:
            break
        at += 1

    assert failures == at > 5


def test_a_record_is_made_only_after_all_files_are_durable(
    complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every fsync but the last, which is of the record's folder, no record is there."""
    writer, seen = begin(complete, tmp_path), []
    monkeypatch.setattr("os.fsync", lambda descriptor: seen.append(writer.is_committed(1)))
    write(writer, complete, 1)

    assert seen == [False] * (len(seen) - 1) + [True]


def test_a_shard_is_claimed_by_one_at_a_time(complete: Path, tmp_path: Path) -> None:
    first, second = begin(complete, tmp_path), begin(complete, tmp_path)
    lock = first.claim(2)
    with pytest.raises(ShardBusyError):
        second.claim(2)
    second.claim(3).release()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lock.release).result()
    with second.claim(2), pytest.raises(ShardBusyError):
        first.claim(2)
    first.claim(2).release()


@pytest.mark.parametrize("way", ["write", "copy"])
def test_a_committed_shard_is_not_touched(complete: Path, tmp_path: Path, way: str) -> None:
    writer, reader = begin(complete, tmp_path), CacheReader(complete)
    write(writer, complete, 0)
    before = {path: (tmp_path / path).stat() for path in files_below(tmp_path)}
    again = partial(write, writer, complete, 0) if way == "write" else partial(writer.copy_shard, 0, reader)
    with pytest.raises(ShardBusyError):
        again()
    after = {path: (tmp_path / path).stat() for path in files_below(tmp_path)}

    assert {path: (s.st_ino, s.st_mtime_ns) for path, s in after.items()} == {
        path: (s.st_ino, s.st_mtime_ns) for path, s in before.items()
    }


def test_a_shard_that_is_withdrawn_does_not_exist_until_it_is_written_again(
    complete: Path, tmp_path: Path
) -> None:
    writer = begin(complete, tmp_path)
    for shard in range(2):
        write(writer, complete, shard)
    with writer.claim(0):
        writer.withdraw(0)
    reader = CacheReader(tmp_path, partial=True)

    assert writer.missing_shards() == [0, 2, 3, 4, 5]
    assert reader.segment(1).number == 1
    with pytest.raises(CacheIncompleteError):
        reader.segment(0)
    write(writer, complete, 0)
    assert CacheReader(tmp_path, partial=True).segment(0).number == 0


def test_a_copied_shard_is_the_same_to_the_byte(complete: Path, tmp_path: Path) -> None:
    writer = begin(complete, tmp_path)
    with writer.claim(4):
        writer.copy_shard(4, CacheReader(complete))
    for path in shard_files(read_manifest(complete), 4):
        assert (tmp_path / path).read_bytes() == (complete / path).read_bytes()


def test_a_shard_that_is_damaged_where_it_comes_from_is_not_committed(cache: Path, tmp_path: Path) -> None:
    writer, reader = begin(cache, tmp_path / "out"), CacheReader(cache)
    (cache / "sequences/part-00002.parquet").write_bytes(b"PAR1")
    with writer.claim(2), pytest.raises(CacheCorruptError):
        writer.copy_shard(2, reader)

    assert 2 in writer.missing_shards()


def test_an_unfinished_cache_is_taken_up_and_its_damaged_attachment_written_again(
    complete: Path, tmp_path: Path
) -> None:
    write(begin(complete, tmp_path), complete, 3)
    (tmp_path / "teacher/config.json").write_bytes(b"{}")
    (tmp_path / "zarr.json").unlink()
    writer = begin(complete, tmp_path)

    assert writer.missing_shards() == [0, 1, 2, 4, 5]
    for path in ("teacher/config.json", "zarr.json"):
        assert (tmp_path / path).read_bytes() == (complete / path).read_bytes()


def test_a_folder_of_another_cache_or_of_other_things_is_left_alone(complete: Path, tmp_path: Path) -> None:
    other = unfinished(read_manifest(complete)).model_copy(update={"shard_tokens": 512})
    attachments = {
        path: (complete / path).read_bytes() for path in other.files if not path.endswith("zarr.json")
    }
    begin(complete, tmp_path / "cache")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/notes.txt").write_text("mine")
    for name in ("cache", "notes"):
        before = files_below(tmp_path / name)
        with pytest.raises(IdentityMismatchError):
            CacheWriter(tmp_path / name, other, ranges=CacheReader(complete).ranges, attachments=attachments)
        assert files_below(tmp_path / name) == before


def test_attachments_must_be_those_that_the_manifest_names(complete: Path, tmp_path: Path) -> None:
    manifest = unfinished(read_manifest(complete))
    with pytest.raises(IdentityMismatchError):
        CacheWriter(
            tmp_path / "out",
            manifest,
            ranges=CacheReader(complete).ranges,
            attachments={"teacher/config.json": b"{}"},
        )

    assert not (tmp_path / "out/teacher/config.json").exists()


def test_a_cache_is_sealed_once_and_only_when_every_shard_is_there(cache: Path, complete: Path) -> None:
    writer = begin(complete, keep_shards(cache, {0, 1, 2, 3, 4}))
    with writer.sealing() as ready:
        assert not ready
    with pytest.raises(StorageError):
        seal(writer, complete)
    assert not read_manifest(cache).complete
    write(writer, complete, 5)
    with writer.sealing() as ready:
        assert ready
        seal(writer, complete)
    with begin(complete, cache).sealing() as ready:
        assert not ready
    reader = CacheReader(cache)

    assert reader.manifest.measured == read_manifest(complete).measured
    assert writer.is_complete


def test_a_seal_that_fails_anywhere_leaves_an_unfinished_cache_or_a_whole_one(
    cache: Path, complete: Path
) -> None:
    begun = keep_shards(cache, range(6))
    (cache / "preview/sequences.parquet").unlink()
    (left := cache / "tokens/c/.0.12.partial").touch()
    at = 0
    while not read_manifest(begun).complete:
        with failing_sync(at) as calls:
            try:
                seal(begin(complete, begun), complete)
            except StorageError:
                assert len(calls) == at + 1
        at += 1

    assert at > 4
    CacheReader(begun).attachment("preview/sequences.parquet")
    assert not left.exists(), "a complete cache has what a kill has left"


def test_what_kills_have_left_goes_when_the_cache_is_sealed(cache: Path, complete: Path) -> None:
    writer = begin(complete, keep_shards(cache, range(6)))
    leftovers = [cache / lock_path(1), cache / "tokens/c/.0.12.partial", cache / "commits/.x.partial"]
    for file in leftovers:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    seal(writer, complete)

    assert not any(file.exists() for file in leftovers)


def shifted(rows: dict[str, npt.NDArray[np.generic]]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the rows of a shard with its tokens in another order."""
    return {**rows, "tokens": np.roll(rows["tokens"], 1)}


@pytest.mark.parametrize("state", ["same", "other tokens", "damaged", "not committed"])
def test_tokens_of_another_cache_are_linked_only_if_they_are_the_same(
    cache: Path, complete: Path, tmp_path: Path, state: str
) -> None:
    if state == "not committed":
        keep_shards(cache, {0})
    other = CacheReader(cache, partial=True)
    if state == "damaged":
        (cache / "tokens/c/1").write_bytes(b"x" * (cache / "tokens/c/1").stat().st_size)
    rows = plain_shard(complete, 1)
    writer = begin(complete, tmp_path / "out", tokens_of=other)
    with writer.claim(1):
        write_shard(
            writer, 1, shifted(rows) if state == "other tokens" else rows, table=plain_table(complete, 1)
        )
    linked = (tmp_path / "out/tokens/c/1").samefile(cache / "tokens/c/1")
    found = plain_rows(tmp_path / "out", "tokens", 256, 256)

    assert linked == (state == "same")
    np.testing.assert_array_equal(found, (shifted(rows) if state == "other tokens" else rows)["tokens"])


def test_what_a_cache_adds_to_is_linked_and_its_tokens_must_be_the_same(cache: Path, tmp_path: Path) -> None:
    parts = CacheReader(cache)
    writer = begin(cache, tmp_path / "out", parts_of=parts)
    rows, table = plain_shard(cache, 1), plain_table(cache, 1)
    with writer.claim(1):
        with pytest.raises(IdentityMismatchError):
            write_shard(writer, 1, shifted(rows), table=table)
        write_shard(writer, 1, {"tokens": rows["tokens"]}, table=table)

    assert all(writer.takes_over(spec) for spec in parts.specs)
    for path in shard_files(parts.manifest, 1):
        assert (tmp_path / "out" / path).samefile(cache / path)
    (cache / "relations/value/gap/c/2/0/0").unlink()
    with writer.claim(2), pytest.raises(CacheCorruptError):
        write_shard(writer, 2, {"tokens": plain_rows(cache, "tokens", 512, 256)}, table=table)
    assert not writer.is_committed(2)


def test_a_cache_of_other_shards_cannot_be_added_to(complete: Path, tmp_path: Path) -> None:
    parts = CacheReader(complete)
    numbers = parts.ranges.num_sequences
    other = ShardRanges(numbers + np.asarray([1, -1, 0, 0, 0, 0]), parts.ranges.num_tokens)
    with pytest.raises(IdentityMismatchError, match="its shards differs"):
        CacheWriter(
            tmp_path / "out", unfinished(parts.manifest), ranges=other, attachments={}, parts_of=parts
        )

    assert not (tmp_path / "out").exists()
