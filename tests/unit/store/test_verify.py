"""Audits: every file is looked at, each damage is named once, and sums are those of the disk."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from minilm_cache.errors import CacheCorruptError, CacheNotFoundError
from minilm_cache.session import Session
from minilm_cache.store.checked import digest_bytes, sha256_file
from minilm_cache.store.durable import own_cores
from minilm_cache.store.layout import commit_path
from minilm_cache.store.pull import pull
from minilm_cache.store.reader import CacheReader, Segment
from minilm_cache.store.verify import Verdict, default_threads, unsound_shards, verify, verify_url
from tests.support import change_record, write_document
from tests.unit.store.support import GOLDEN, Recorder, keep_shards

pytestmark = pytest.mark.slow


def accept(reader: CacheReader) -> Callable[[Segment], None]:
    """Find nothing wrong with any rows."""
    return lambda shard: None


def audit(cache: Path, *, full: bool) -> Verdict:
    return verify(cache, full=full, num_threads=2, check_rows=accept, session=Session())


@pytest.mark.parametrize("content", [b'{"a":', None])
def test_a_copy_whose_manifest_is_damaged_or_lost_is_damaged(
    complete: Path, tmp_path: Path, content: bytes | None
) -> None:
    """A pulled copy has no records of commits, and its index shows that it is a cache."""
    out = tmp_path / "out"
    pull(str(complete), out, session=Session())
    (out / "manifest.json").unlink()
    if content is not None:
        (out / "manifest.json").write_bytes(content)
    assert [damage.path for damage in audit(out, full=False).damage] == ["manifest.json"]


def listed_files(cache: Path) -> dict[str, int | None]:
    """Return, by plain JSON, every file that a document lists, and its shard."""
    manifest = json.loads((cache / "manifest.json").read_text())
    listed: dict[str, int | None] = dict.fromkeys(manifest["files"])
    for record in sorted((cache / "commits").glob("*.json")):
        content = json.loads(record.read_text())
        listed |= dict.fromkeys(content["files"], content["shard"])
    return listed


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kept", [range(6), (0, 3)])
def test_files_and_bytes_are_those_on_disk_and_progress_reaches_its_end(
    cache: Path, full: bool, kept: tuple[int, ...]
) -> None:
    if len(kept) < 6:
        keep_shards(cache, kept)
    progress = Recorder()
    verdict = verify(cache, full=full, num_threads=3, check_rows=accept, session=Session(progress=progress))
    sizes = [(cache / path).stat().st_size for path in listed_files(cache)]
    ranges = pq.read_table(cache / "index/ranges.parquet").to_pylist()

    assert verdict == Verdict(complete=len(kept) == 6, num_files=len(sizes), num_bytes=sum(sizes), damage=())
    expected = {"verify": sum(sizes)}
    if full:
        expected["decode"] = sum(ranges[shard]["num_tokens"] for shard in kept)
    assert sorted(progress.totals.values()) == sorted(expected.values())
    assert progress.done == progress.totals


@pytest.mark.parametrize("damage", ["changed", "longer", "missing"])
def test_damage_of_each_single_file_is_named_and_nothing_else(cache: Path, damage: str) -> None:
    for path, shard in listed_files(cache).items():
        if shard in {1, 2, 3, 4}:  # one of the full shards and the last will do
            continue
        content = (cache / path).read_bytes()
        if damage == "missing":
            (cache / path).unlink()
        else:
            tail = bytes([content[-1] ^ 1])
            (cache / path).write_bytes(content[:-1] + (tail if damage == "changed" else content[-1:] + tail))
        verdicts = {full: audit(cache, full=full) for full in (False, True)}
        (cache / path).write_bytes(content)

        assert [(one.path, one.shard) for one in verdicts[True].damage] == [(path, shard)]
        quick = [(one.path, one.shard) for one in verdicts[False].damage]
        is_read = path.startswith("index/") or path.endswith("zarr.json")
        needs_reading = damage == "changed" and not is_read
        assert quick == ([] if needs_reading else [(path, shard)])


def test_a_missing_record_is_damage_of_a_complete_cache_of_format_1_only(cache: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(GOLDEN / "v1", tmp_path / "old"))
    for place in (cache, old):
        (place / commit_path(2)).unlink()

    assert [(one.path, one.shard) for one in audit(old, full=True).damage] == [(commit_path(2), 2)]
    assert audit(cache, full=True).damage == audit(keep_shards(cache, {0, 1, 2}), full=True).damage == ()


def test_every_damaged_file_is_named_and_not_only_the_first(cache: Path) -> None:
    damaged = ["teacher/config.json", "tokens/c/0", "tokens/c/4", "relations/zarr.json"]
    for path in damaged:
        (cache / path).write_bytes(b"")

    assert sorted(one.path for one in audit(cache, full=False).damage) == sorted(damaged)


def test_a_damaged_manifest_is_all_that_can_be_said(cache: Path, tmp_path: Path) -> None:
    (cache / "manifest.json").write_bytes(b"{")
    verdict = audit(cache, full=True)

    assert verdict.complete is None
    assert [one.path for one in verdict.damage] == ["manifest.json"]
    (cache / "manifest.json").unlink()
    assert [one.path for one in audit(cache, full=False).damage] == ["manifest.json"]
    with pytest.raises(CacheNotFoundError):
        audit(tmp_path / "none", full=False)


def test_a_file_that_the_disk_cannot_read_is_damage_and_the_others_are_checked(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "tokens/c/4").unlink()

    def read(file: Path) -> str:
        if file == cache / "tokens/c/2":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sha256_file(file)

    monkeypatch.setattr("minilm_cache.store.verify.sha256_file", read)
    unread, missing = sorted(audit(cache, full=True).damage, key=lambda damage: damage.path)
    assert (unread.path, unread.shard, missing.path) == ("tokens/c/2", 2, "tokens/c/4")
    assert "Input/output error" in unread.reason


@pytest.mark.parametrize("content", [b"{", None])
def test_a_damaged_record_in_a_store_is_named_as_that_of_a_folder(
    tmp_path: Path, content: bytes | None
) -> None:
    old, path = Path(shutil.copytree(GOLDEN / "v1", tmp_path / "old")), commit_path(1)
    (old / path).unlink()
    if content is not None:
        (old / path).write_bytes(content)
    found = verify_url(f"file://{old}", tmp_path, full=True, session=Session()).damage

    for damage in (*found, *audit(old, full=True).damage):
        assert (damage.path, damage.shard) == (path, 1)
        assert "verify --full" not in damage.reason  # the remedy is said once, below all of them
    assert len(found) == 1


def test_token_ids_must_be_those_that_the_record_hashes(cache: Path) -> None:
    """Every file has the committed bytes, but the record says other tokens."""
    change_record(cache, 2, tokens_xxh3="0" * 32)

    assert audit(cache, full=False).damage == ()
    named = [(one.path, one.shard) for one in audit(cache, full=True).damage]
    assert named == [("index/shards.parquet", 2)]


def refuse(*numbers: int) -> Callable[[CacheReader], Callable[[Segment], None]]:
    """Make a check of rows that some shards do not pass."""

    def check(shard: Segment) -> None:
        if shard.number in numbers:
            raise CacheCorruptError("rows that mean nothing")

    return lambda reader: check


def test_rows_are_judged_by_whoever_knows_codecs(complete: Path) -> None:
    for full, expected in ((False, []), (True, [1, 4])):
        verdict = verify(complete, full=full, num_threads=4, check_rows=refuse(1, 4), session=Session())
        assert [one.shard for one in verdict.damage] == expected


def test_unsound_shards_are_those_of_the_ones_asked_about(cache: Path) -> None:
    keep_shards(cache, range(6))
    (cache / commit_path(0)).write_bytes(b"{")
    (cache / "tokens/c/2").unlink()
    (cache / "relations/value/gap/c/3/0/0").write_bytes(b"")
    progress = Recorder()

    def ask(*shards: int) -> list[int]:
        return unsound_shards(cache, shards=shards, check_rows=refuse(5), session=Session(progress=progress))

    assert ask(5, 4, 3, 2, 1, 0) == [5, 3, 2, 0]
    assert ask(1, 4) == []
    assert sum(progress.totals.values()) == 2 * 256 == sum(progress.done.values())


def test_damage_outside_the_shards_is_not_laid_on_them(cache: Path) -> None:
    content = (cache / "tokens/zarr.json").read_bytes() + b" "
    (cache / "tokens/zarr.json").write_bytes(content)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["files"]["tokens/zarr.json"] = digest_bytes(content).model_dump()
    write_document(cache / "manifest.json", manifest)
    with pytest.raises(CacheCorruptError):
        unsound_shards(cache, shards=[0], check_rows=accept, session=Session())
    assert [one.path for one in audit(cache, full=True).damage] == ["manifest.json"]


def test_there_are_one_to_eight_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 2), (2, 4), (4, 8), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: range(cores))
        assert default_threads() == expected


def test_processes_of_torchrun_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    for processes, expected in (("8", 2), ("1", 16), ("64", 1), ("", 16)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert own_cores() == expected
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert own_cores() == 1


@pytest.mark.parametrize("path", ["tokens/c/1", "index/shards.parquet", "teacher/config.json"])
def test_a_link_is_damage_like_any_other(cache: Path, tmp_path: Path, path: str) -> None:
    (cache / path).rename(tmp_path / "outside")
    (cache / path).symlink_to(tmp_path / "outside")

    assert [one.path for one in audit(cache, full=False).damage] == [path]
