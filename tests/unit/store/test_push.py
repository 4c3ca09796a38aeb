"""The order in which a cache arrives in a store: claims first, the manifest last."""

from pathlib import Path

import pytest

from minilm_cache.errors import IdentityMismatchError, InterruptedRunError, StorageError
from minilm_cache.progress import never_stop
from minilm_cache.storage_schema.manifest import CommitRecord
from minilm_cache.store.layout import commit_path
from minilm_cache.store.push import push
from minilm_cache.store.reader import read_manifest
from minilm_cache.store.remote import RemoteFolder
from minilm_cache.store.transfer import num_bytes
from tests.unit.store.support import Recorder, files_below


def test_a_claim_goes_before_the_files_of_its_shard_and_the_manifest_last(
    complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    write, create = RemoteFolder.write, RemoteFolder.create

    def recording_write(self: RemoteFolder, name: str, content: bytes) -> None:
        order.append(name)
        write(self, name, content)

    def recording_create(self: RemoteFolder, name: str, content: bytes) -> bool:
        order.append(name)
        return create(self, name, content)

    monkeypatch.setattr(RemoteFolder, "write", recording_write)
    monkeypatch.setattr(RemoteFolder, "create", recording_create)
    result = push(complete, str(tmp_path), progress=Recorder(), should_stop=never_stop)

    assert order[0] == commit_path(0)
    assert order[-1] == "manifest.json"
    for shard in range(6):
        record = CommitRecord.model_validate_json((complete / commit_path(shard)).read_bytes())
        assert all(order.index(commit_path(shard)) < order.index(path) for path in record.files)
    assert files_below(Path(result.place)) == files_below(complete)
    assert len(set(order)) == len(files_below(complete))


def test_what_is_there_is_not_sent_again_unless_it_has_another_size(complete: Path, tmp_path: Path) -> None:
    place = Path(push(complete, str(tmp_path), progress=Recorder(), should_stop=never_stop).place)
    (place / "tokens/c/3").write_bytes(b"short")
    (place / "sequences/part-00004.parquet").unlink()
    before = {path: (place / path).stat().st_ino for path in files_below(place)}
    progress = Recorder()
    result = push(complete, str(tmp_path), progress=progress, should_stop=never_stop)
    after = {path: (place / path).stat().st_ino for path in files_below(place)}
    changed = {path for path, inode in after.items() if before.get(path) != inode}

    assert (result.shards_copied, result.shards_kept) == (2, 4)
    assert changed == {"tokens/c/3", "sequences/part-00004.parquet"}
    assert files_below(place) == files_below(complete)
    assert progress.done == progress.totals


@pytest.mark.parametrize("failing", range(0, 40, 6))
def test_a_push_that_fails_at_any_file_is_no_cache_and_goes_on(
    complete: Path, tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = RemoteFolder.write, []

    def failing_write(self: RemoteFolder, name: str, content: bytes) -> None:
        written.append(name)
        if len(written) == failing + 1:
            raise StorageError("the store said no")
        write(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "write", failing_write)
        with pytest.raises(StorageError):
            push(complete, str(tmp_path), progress=Recorder(), should_stop=never_stop)
    assert not list(tmp_path.rglob("manifest.json"))
    result = push(complete, str(tmp_path), progress=Recorder(), should_stop=never_stop)

    assert files_below(Path(result.place)) == files_below(complete)


def test_an_interrupted_push_is_no_cache(complete: Path, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        push(complete, str(tmp_path), progress=Recorder(), should_stop=lambda: True)

    assert list(tmp_path.rglob("commits/*")) != []
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_claim_of_another_dump_is_respected_and_a_damaged_one_replaced(
    complete: Path, tmp_path: Path
) -> None:
    place = Path(push(complete, str(tmp_path), progress=Recorder(), should_stop=never_stop).place)
    (place / "manifest.json").unlink()
    (place / commit_path(2)).write_bytes(b"{")
    push(complete, str(tmp_path), progress=Recorder(), should_stop=never_stop)
    assert files_below(place) == files_below(complete)
    record = CommitRecord.model_validate_json((complete / commit_path(2)).read_bytes())
    files = {path: digest.model_copy(update={"sha256": "0" * 64}) for path, digest in record.files.items()}
    claim = record.model_copy(update={"files": files}).to_json()
    (place / commit_path(2)).write_bytes(claim)
    (place / "manifest.json").unlink()
    with pytest.raises(IdentityMismatchError):
        push(complete, str(tmp_path), progress=Recorder(), should_stop=never_stop)

    assert (place / commit_path(2)).read_bytes() == claim
    assert not (place / "manifest.json").exists()


def test_progress_of_a_push_is_the_bytes_of_the_cache(complete: Path, tmp_path: Path) -> None:
    progress, manifest = Recorder(), read_manifest(complete)
    push(complete, str(tmp_path), progress=progress, should_stop=never_stop)
    records = [
        CommitRecord.model_validate_json((complete / commit_path(shard)).read_bytes()) for shard in range(6)
    ]

    assert list(progress.done.values()) == [num_bytes(manifest, records)]
    assert progress.done == progress.totals
