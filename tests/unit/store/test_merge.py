"""Parts of one cache joined: every committed shard once, to the byte, and nothing of what does not fit."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, ShardBusyError
from minilm_cache.session import Session
from minilm_cache.store.layout import commit_path, shard_files
from minilm_cache.store.merge import Merged, merge
from minilm_cache.store.reader import read_manifest
from tests.support import write_document
from tests.unit.store.support import Recorder, begin, files_below, keep_shards, unfinished


def part_of(complete: Path, folder: Path, shards: Collection[int]) -> Path:
    """Make a part of a cache, with these shards committed."""
    return keep_shards(Path(shutil.copytree(complete, folder)), shards)


def join(parts: list[Path], out: Path) -> Merged:
    return merge(parts, out, session=Session())


@settings(max_examples=6, deadline=None)
@given(held=st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=3))
def test_a_merge_holds_what_any_part_holds(
    complete: Path, tmp_path_factory: pytest.TempPathFactory, held: list[set[int]]
) -> None:
    root = tmp_path_factory.mktemp("merge")
    parts = [part_of(complete, root / str(number), shards) for number, shards in enumerate(held)]
    result = join(parts, root / "out")
    union = set().union(*held)
    manifest = read_manifest(complete)
    expected = {path for n in union for path in (commit_path(n), *shard_files(manifest, n))}
    begun = {"manifest.json", *unfinished(manifest).files}
    merged, source = files_below(root / "out"), files_below(complete)

    assert (result.num_shards, result.shards_copied, result.shards_missing) == (6, len(union), 6 - len(union))
    assert merged.keys() == expected | begun
    records = {commit_path(n) for n in range(6)}  # each names its own attempt
    assert all(merged[path] == source[path] for path in merged.keys() - {"manifest.json"} - records)
    assert not read_manifest(root / "out").complete


def test_a_merge_goes_on_with_what_there_is(complete: Path, tmp_path: Path) -> None:
    first, second = (
        part_of(complete, tmp_path / name, held) for name, held in (("a", {0, 2}), ("b", {1, 2}))
    )
    out, progress = tmp_path / "out", Recorder()
    assert join([first], out).shards_copied == 2
    before = (out / "tokens/c/2").stat().st_ino
    result = merge([second], out, session=Session(progress=progress))
    sizes = [(complete / path).stat().st_size for path in shard_files(read_manifest(complete), 1)]

    assert (result.shards_copied, result.shards_missing) == (1, 3)
    assert (out / "tokens/c/2").stat().st_ino == before
    assert list(progress.done.values()) == list(progress.totals.values()) == [sum(sizes)]


def test_a_complete_cache_is_a_part_like_any_other(complete: Path, tmp_path: Path) -> None:
    part = part_of(complete, tmp_path / "part", {4})
    result = join([part, complete], tmp_path / "out")

    assert (result.shards_copied, result.shards_missing) == (6, 0)
    assert not (tmp_path / "out/preview").exists()


def test_a_shard_of_two_dumps_is_refused_before_anything_is_written(complete: Path, tmp_path: Path) -> None:
    parts = [part_of(complete, tmp_path / name, {1, 2}) for name in "ab"]
    record = json.loads((parts[1] / commit_path(2)).read_text())
    write_document(parts[1] / commit_path(2), record | {"tokens_xxh3": "0" * 32})
    for order in (parts, parts[::-1]):
        with pytest.raises(IdentityMismatchError):
            join(order, tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("differing", ["identity", "codec's files"])
def test_parts_of_two_caches_are_refused(complete: Path, tmp_path: Path, differing: str) -> None:
    parts = [part_of(complete, tmp_path / name, ()) for name in "ab"]
    manifest = read_manifest(parts[1])
    if differing == "identity":
        packing = manifest.identity.packing.model_copy(update={"seed": 77})
        identity = manifest.identity.model_copy(update={"packing": packing})
        changed = manifest.model_copy(update={"identity": identity, "fingerprint": identity.fingerprint()})
    else:
        files = {path: digest for path, digest in manifest.files.items() if path != "teacher/config.json"}
        changed = manifest.model_copy(update={"files": files})
    (parts[1] / "manifest.json").write_bytes(changed.to_json())
    with pytest.raises(IdentityMismatchError):
        join(parts, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_a_damaged_shard_is_not_merged_and_those_before_it_are_kept(complete: Path, tmp_path: Path) -> None:
    part = part_of(complete, tmp_path / "part", {0, 1, 2})
    (part / "relations/value/weight/c/1/0/0").write_bytes(b"")
    with pytest.raises(CacheCorruptError):
        join([part], tmp_path / "out")

    assert [path.name for path in (tmp_path / "out/commits").iterdir()] == ["00000.json"]


def test_a_shard_that_somebody_is_writing_is_left_to_them(complete: Path, tmp_path: Path) -> None:
    part = part_of(complete, tmp_path / "part", {3})
    writer = begin(complete, tmp_path / "out")
    with writer.claim(3), pytest.raises(ShardBusyError):
        join([part], tmp_path / "out")

    assert 3 in writer.missing_shards()
    assert join([part], tmp_path / "out").shards_copied == 1
