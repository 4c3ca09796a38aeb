"""The order in which a cache arrives in a store: claims first, the manifest last."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.errors import IdentityMismatchError, InterruptedRunError, InvalidConfigError, StorageError
from minilm_cache.session import Session
from minilm_cache.storage_schema.documents import CommitRecord
from minilm_cache.storage_schema.manifest import TEACHER_PROMPTS, TEACHER_WEIGHTS, CacheManifest
from minilm_cache.store.card import attach
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.layout import commit_path
from minilm_cache.store.pull import pull
from minilm_cache.store.push import push
from minilm_cache.store.reader import CacheReader, read_manifest
from minilm_cache.store.remote import RemoteFolder, num_bytes
from minilm_cache.store.verify import verify
from tests.support import change_record
from tests.unit.store.support import GOLDEN, Recorder, files_below, shared_files

pytestmark = pytest.mark.slow


def test_the_index_goes_first_and_the_manifest_last(
    complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        def record(self: RemoteFolder, name: str, content: bytes | Path) -> object:
            order.append(name)
            return method(self, name, content)

        return record

    for method in ("write", "send", "create"):
        monkeypatch.setattr(RemoteFolder, method, recording(getattr(RemoteFolder, method)))
    result = push(complete, str(tmp_path), session=Session(progress=Recorder()))

    assert order[0] == "index/shards.parquet"
    assert order[-1] == "manifest.json"
    assert files_below(Path(result.place)) == shared_files(complete)
    assert set(order) == shared_files(complete).keys()


def test_what_is_there_is_not_sent_again_unless_it_has_another_size(complete: Path, tmp_path: Path) -> None:
    place = Path(push(complete, str(tmp_path), session=Session(progress=Recorder())).place)
    (place / "tokens/c/3").write_bytes(b"short")
    (place / "sequences/part-00004.parquet").unlink()
    before = {path: (place / path).stat().st_ino for path in files_below(place)}
    progress = Recorder()
    result = push(complete, str(tmp_path), session=Session(progress=progress))
    after = {path: (place / path).stat().st_ino for path in files_below(place)}
    changed = {path for path, inode in after.items() if before.get(path) != inode}

    assert (result.shards_copied, result.shards_kept) == (2, 4)
    assert changed == {"tokens/c/3", "sequences/part-00004.parquet"}
    assert files_below(place) == shared_files(complete)
    assert progress.done == progress.totals


def test_a_cache_is_no_store_by_any_name(complete: Path, cache: Path, tmp_path: Path) -> None:
    places = (cache, cache / "tokens", f"file://{cache}", f"file://{cache}/tokens/inner")
    for place in places:
        with pytest.raises(InvalidConfigError, match="is no store of caches"):
            push(complete, str(place), session=Session())
    assert files_below(cache) == files_below(complete)
    (cache / "manifest.json").write_bytes(b"{")  # damaged, it is a cache still
    for place in places:
        with pytest.raises(InvalidConfigError, match="is no store of caches"):
            push(complete, str(place), session=Session())
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/unfinished.json").touch()
    with pytest.raises(InvalidConfigError, match="is no store of caches"):
        push(complete, str(tmp_path / "begun"), session=Session())


def test_other_programs_files_make_no_cache_of_a_store(complete: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    assert push(complete, str(tmp_path / "caches"), session=Session()).shards_copied == 6


def with_prompts(root: Path, text: str) -> CacheManifest:
    """Give a cache prompts of equal size, as a dump does whose teacher has got others."""
    return attach(root, read_manifest(root), path=TEACHER_PROMPTS, content=f'{{"query": "{text}"}}'.encode())


def named_files(root: Path) -> dict[str, bytes]:
    """Return the files beside the shards that a manifest names, each of which must be what it says."""
    files = {path: (root / path).read_bytes() for path in read_manifest(root).files}
    assert {path: digest_bytes(content) for path, content in files.items()} == read_manifest(root).files
    return files


@pytest.mark.parametrize("full", [False, True])
def test_files_that_are_others_now_arrive_and_what_only_the_store_has_stays(
    cache: Path, tmp_path: Path, full: bool
) -> None:
    with_prompts(cache, "one")
    plain = tmp_path / "plain"
    shutil.copytree(cache, plain)
    attach(cache, read_manifest(cache), path=TEACHER_WEIGHTS, content=b"weights")
    place = Path(push(cache, str(tmp_path), session=Session()).place)
    with_prompts(plain, "two")
    result = push(plain, str(tmp_path), session=Session(), full=full)

    assert named_files(place) == named_files(plain) | {TEACHER_WEIGHTS: b"weights"}
    assert result.manifest.files == read_manifest(place).files
    verdict = verify(place, full=True, num_threads=1, session=Session(), check_rows=lambda _: lambda _: None)
    assert not verdict.damage
    again = Recorder()
    push(plain, str(tmp_path), session=Session(progress=again))
    assert again.notes[-1].endswith("holds this cache already: nothing to do")


def test_a_push_that_was_stopped_after_other_files_were_sent_goes_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_prompts(cache, "one")
    place = Path(push(cache, str(tmp_path), session=Session()).place)
    with_prompts(cache, "two")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "write", failing)
        with pytest.raises(StorageError):
            push(cache, str(tmp_path), session=Session())
    push(cache, str(tmp_path), session=Session())

    assert named_files(place) == named_files(cache)


def failing(folder: RemoteFolder, name: str, _content: object) -> None:
    raise StorageError(f"cannot write {folder.url}/{name}")


@pytest.mark.parametrize("failing", range(0, 40, 6))
def test_a_push_that_fails_at_any_file_is_no_cache_and_goes_on(
    complete: Path, tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def failing_after(write: Callable[..., None]) -> Callable[..., None]:
        def failing_write(self: RemoteFolder, name: str, content: bytes | Path) -> None:
            written.append(name)
            if len(written) == failing + 1:
                raise StorageError("the store said no")
            write(self, name, content)

        return failing_write

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "write", failing_after(RemoteFolder.write))
        patch.setattr(RemoteFolder, "send", failing_after(RemoteFolder.send))
        with pytest.raises(StorageError):
            push(complete, str(tmp_path), session=Session(progress=Recorder()))
    assert not list(tmp_path.rglob("manifest.json"))
    result = push(complete, str(tmp_path), session=Session(progress=Recorder()))

    assert files_below(Path(result.place)) == shared_files(complete)


def test_an_interrupted_push_is_no_cache(complete: Path, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        push(complete, str(tmp_path), session=Session(progress=Recorder(), should_stop=lambda: True))

    assert list(tmp_path.rglob("index/*")) != []
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_claim_of_another_dump_is_respected(complete: Path, cache: Path, tmp_path: Path) -> None:
    change_record(cache, 2, tokens_xxh3="0" * 32)
    claim = (cache / "index/shards.parquet").read_bytes()
    place = Path(push(complete, str(tmp_path), session=Session(progress=Recorder())).place)
    manifest = (place / "manifest.json").read_bytes()
    (place / "index/shards.parquet").write_bytes(claim)
    result = push(complete, str(tmp_path), session=Session(progress=Recorder()))
    assert (result.shards_copied, files_below(place)) == (0, shared_files(complete))  # it was damage
    (place / "manifest.json").unlink()
    (place / "index/shards.parquet").write_bytes(claim)
    with pytest.raises(IdentityMismatchError):
        push(complete, str(tmp_path), session=Session(progress=Recorder()))
    assert (place / "index/shards.parquet").read_bytes() == claim
    assert not (place / "manifest.json").exists()
    (place / "manifest.json").write_bytes(manifest)
    with pytest.raises(IdentityMismatchError):
        push(cache, str(tmp_path), full=True, session=Session(progress=Recorder()))
    assert push(cache, str(tmp_path), session=Session(progress=Recorder())).shards_copied == 0


@pytest.mark.parametrize("name", ["v1", "v1-vectors"])
def test_a_cache_of_format_1_is_pushed_as_it_is_and_claims_shard_by_shard(tmp_path: Path, name: str) -> None:
    cache = Path(shutil.copytree(GOLDEN / name, tmp_path / "cache"))
    place = Path(push(cache, str(tmp_path / "a"), session=Session(progress=Recorder())).place)
    pull(str(place), tmp_path / "pulled", session=Session(progress=Recorder()))
    for copy in (place, tmp_path / "pulled"):  # a pull adds the checksum that the first releases left out
        copied, original = files_below(copy), files_below(cache)
        assert original.keys() - copied.keys() <= {"preview/sequences.parquet"}  # nor did they list it
        differing = {path for path, content in copied.items() if original[path] != content}
        assert differing <= {"README.md", "manifest.json"}
    (place / "manifest.json").unlink()
    (place / commit_path(2)).write_bytes(b"{")
    push(cache, str(tmp_path / "a"), session=Session(progress=Recorder()))
    assert (place / commit_path(2)).read_bytes() == (cache / commit_path(2)).read_bytes()
    record = CommitRecord.model_validate_json((cache / commit_path(2)).read_bytes())
    files = {path: digest.model_copy(update={"sha256": "0" * 64}) for path, digest in record.files.items()}
    claim = record.model_copy(update={"files": files}).to_json()
    (place / commit_path(2)).write_bytes(claim)
    (place / "manifest.json").unlink()
    with pytest.raises(IdentityMismatchError):
        push(cache, str(tmp_path / "a"), session=Session(progress=Recorder()))

    assert (place / commit_path(2)).read_bytes() == claim
    assert not (place / "manifest.json").exists()


def test_progress_of_a_push_is_the_bytes_of_the_cache(complete: Path, tmp_path: Path) -> None:
    progress, manifest = Recorder(), read_manifest(complete)
    push(complete, str(tmp_path), session=Session(progress=progress))
    expected = num_bytes(manifest, CacheReader(complete).records)

    assert list(progress.done.values()) == [expected]
    assert progress.done == progress.totals
