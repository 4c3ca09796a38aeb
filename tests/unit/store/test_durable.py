"""Writes that are whole or not there, and refusals of the file system."""

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError, InterruptedRunError, InvalidConfigError, StorageError
from minilm_cache.store.durable import (
    create_file,
    is_vacant,
    link_file,
    lock_if_free,
    locked,
    new_file,
    new_folder,
    read_bounded,
    refuse_existing,
    refuse_file,
    refuse_unwritable,
    remove_abandoned,
    remove_left_of,
    storage_errors,
    sync_directories,
    write_file,
)
from tests.unit.store.support import failing_sync, partials


def fill_new_file(path: Path, content: bytes) -> None:
    with new_file(path) as file:
        file.write(content)


WRITERS = [write_file, fill_new_file]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("content", [b"", b"new", bytes(2**17)], ids=["empty", "short", "long"])
def test_a_file_is_written_whole_in_place_of_another(
    tmp_path: Path, write: Callable[[Path, bytes], None], content: bytes
) -> None:
    file = tmp_path / "new/folder/file"
    write(file, b"old and longer than the new one")
    write(file, content)

    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("write", WRITERS)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(OSError, match="space"), failing_sync(0):
        write(file, b"new")

    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def create(path: Path, content: bytes) -> None:
    create_file(path, content)


@pytest.mark.parametrize("write", [*WRITERS, create])
def test_content_is_durable_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, write: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, events, real = tmp_path / "file", [], os.fsync

    def fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append((is_folder, file.exists(), os.fstat(descriptor).st_size if not is_folder else None))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(file, b"content")

    assert events == [(False, False, 7), (True, True, None)]


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_is_replaced_and_what_it_leads_to_left_alone(
    tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    outside, file = tmp_path / "outside", tmp_path / "file"
    outside.write_bytes(b"outside")
    file.symlink_to(outside)
    write(file, b"new")

    assert (outside.read_bytes(), file.read_bytes(), file.is_symlink()) == (b"outside", b"new", False)


def test_a_reader_sees_the_old_content_or_the_new_and_never_a_part(tmp_path: Path) -> None:
    file, contents = tmp_path / "file", [bytes([number]) * 50_000 for number in range(40)]
    write_file(file, contents[0])

    def write_all() -> None:
        for content in contents:
            write_file(file, content)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write_all)
        seen = [file.read_bytes()]
        while not writing.done():
            seen.append(file.read_bytes())
        writing.result()

    assert set(seen) <= set(contents)


def test_of_many_that_create_a_file_exactly_one_does(tmp_path: Path) -> None:
    together = Barrier(8)

    def attempt(number: int) -> bool:
        together.wait(timeout=30)
        try:
            create_file(tmp_path / "file", b"%d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(attempt, range(8)))

    assert created.count(True) == 1
    assert (tmp_path / "file").read_bytes() == b"%d" % created.index(True)
    assert partials(tmp_path) == []


def test_a_creation_that_fails_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="space"), failing_sync(0):
        create_file(tmp_path / "file", b"content")

    assert list(tmp_path.iterdir()) == []


def test_a_linked_file_is_the_same_file_until_one_of_them_is_written(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "folder/target"
    write_file(source, b"old")
    write_file(target, b"other")
    for _ in range(2):  # the second time they are the same file already
        link_file(source, target)
        assert target.stat().st_ino == source.stat().st_ino
        assert partials(tmp_path) == []
    write_file(target, b"new")

    assert (source.read_bytes(), target.read_bytes()) == (b"old", b"new")


def test_a_link_to_what_is_not_there_leaves_the_target_alone(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"content")
    with pytest.raises(FileNotFoundError):
        link_file(tmp_path / "none", tmp_path / "target")

    assert (tmp_path / "target").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("names", "vacant"),
    [
        ([], True),
        ([".a.0123.partial"], True),
        ([".a.partial", ".b.partial"], True),
        (["lock"], True),
        (["a.partial"], False),
        ([".a"], False),
        ([".a.partial", "lock", "file"], False),
    ],
)
def test_only_what_interrupted_writes_leave_is_nothing(
    tmp_path: Path, names: list[str], vacant: bool
) -> None:
    for name in names:
        (tmp_path / name).touch()

    assert is_vacant(tmp_path, apart_from=tmp_path / "lock") == vacant


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=64), max_bytes=st.integers(0, 80))
def test_a_file_is_read_whole_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, max_bytes: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "bounded"
    file.write_bytes(content)
    if len(content) <= max_bytes:
        assert read_bounded(file, max_bytes) == content
    else:
        with pytest.raises(CacheCorruptError):
            read_bounded(file, max_bytes)


@pytest.mark.timeout(20)
def test_a_link_and_a_pipe_are_damage_and_a_missing_file_is_the_file_systems_refusal(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(__file__)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(CacheCorruptError):
            read_bounded(tmp_path / name, 2**20)
    with pytest.raises(StorageError) as caught:
        read_bounded(tmp_path / "none", 2**20)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_new_folder_takes_the_place_of_another_whole(tmp_path: Path) -> None:
    target = tmp_path / "above/folder"
    for name in ("old", "new"):
        with new_folder(target) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / name).write_text(name)
            assert not (target / "sub" / name).exists()

    assert [file.name for file in (target / "sub").iterdir()] == ["new"]
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("disk_full", [False, True])
def test_a_new_folder_that_is_not_finished_changes_nothing(tmp_path: Path, disk_full: bool) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "old").touch()

    def fill() -> None:
        with new_folder(target) as folder:
            (folder / "new").touch()
            if not disk_full:
                raise ZeroDivisionError

    with pytest.raises(OSError if disk_full else ZeroDivisionError), failing_sync(0):
        fill()

    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "old"]


def test_each_folder_is_made_durable_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    sync_directories([tmp_path, tmp_path / "sub", tmp_path])

    assert sorted(synced) == sorted([tmp_path.stat().st_ino, (tmp_path / "sub").stat().st_ino])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, None])
def test_a_refusal_becomes_one_line_with_the_place(tmp_path: Path, number: int | None) -> None:
    with pytest.raises(StorageError) as caught, storage_errors("write", tmp_path / "place"):
        raise OSError("no number") if number is None else OSError(number, os.strerror(number))

    assert str(tmp_path / "place") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("error", [StorageError("said already"), CacheCorruptError("damage"), KeyError("k")])
def test_other_errors_pass_as_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, storage_errors("write", tmp_path):
        raise error

    assert caught.value is error


def test_a_wait_for_a_lock_ends_when_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minilm_cache.store.durable._LOCK_POLL_S", 0.01)
    path, holder = tmp_path / "new" / "lock", FileLock(tmp_path / "new" / "lock")
    path.parent.mkdir()
    holder.acquire()
    asked: list[str] = []

    def release_at_third() -> bool:
        asked.append("stop?")
        if len(asked) == 4:
            holder.release()
        return False

    with locked(path, should_stop=release_at_third, waits=lambda: asked.append("waits")):
        assert asked == ["waits", *["stop?"] * 3]
        assert lock_if_free(path) is None
    with locked(path, waits=lambda: asked.append("waits again")):
        assert len(asked) == 4


def test_a_wait_for_a_lock_can_be_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        FileLock(path),
        pytest.raises(InterruptedRunError, match="what to say"),
        locked(path, should_stop=lambda: True, interrupted="what to say"),
    ):
        pass
    assert lock_if_free(path) is not None


def test_what_exists_is_refused_and_what_does_not_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refuse_existing(tmp_path / "none")
    refuse_file(tmp_path)
    refuse_file(tmp_path / "none/deeper")
    for existing in (tmp_path, tmp_path / "file"):
        with pytest.raises(InvalidConfigError):
            refuse_existing(existing)
    for blocked in (tmp_path / "file", tmp_path / "file/below/it"):
        with pytest.raises(InvalidConfigError, match=str(tmp_path / "file")):
            refuse_file(blocked)


def test_where_nothing_may_be_written_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    refuse_file(tmp_path)  # it may hold what is asked for
    with pytest.raises(StorageError, match=f"you may not write in {tmp_path}"):
        refuse_file(tmp_path / "new/deeper")

    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "tmp123"))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(StorageError, match=f"cannot write in {tmp_path}: Permission denied"):
        refuse_unwritable(tmp_path)


def test_what_killed_writers_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    def aged(path: Path) -> Path:
        os.utime(path, (1, 1))
        return path

    left = tmp_path / ".out.0.partial"
    (left / "part").mkdir(parents=True)
    aged(left)
    (tmp_path / ".file.0.partial").write_bytes(b"half")
    aged(tmp_path / ".file.0.partial")
    (tmp_path / ".file.1.partial").write_bytes(b"a moment old: its writer may not have locked it yet")
    (tmp_path / ".file.2.partial").symlink_to(tmp_path / "file")
    with new_folder(tmp_path / "out") as written, new_file(tmp_path / "file"):
        aged(written)
        assert not left.exists()
        known = {".file.0.partial", ".file.1.partial", ".file.2.partial", written.name}
        (file,) = (path for path in partials(tmp_path) if path.name not in known)
        aged(file)
        remove_abandoned(partials(tmp_path))
        names = {path.name for path in partials(tmp_path)}
        assert names == {written.name, file.name, ".file.1.partial", ".file.2.partial"}
    assert (tmp_path / "out").is_dir()
    assert (tmp_path / "file").is_file()


def test_what_is_being_written_is_not_removed(tmp_path: Path) -> None:
    """Two processes may write one file, and the later one removes what killed ones have left."""
    target = tmp_path / "made[1]"
    killed = tmp_path / ".made[1].killed.partial"
    killed.touch()
    with new_file(target) as file:
        (partial,) = (path for path in tmp_path.iterdir() if path != killed)
        for each in (partial, killed):
            os.utime(each, (0, 0))
        remove_left_of(target)
        assert partial.exists()
        assert not killed.exists()
        file.write(b"whole")
    assert target.read_bytes() == b"whole"


def test_a_new_folder_replaces_nothing_that_has_come_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "new"

    def make() -> None:
        with new_folder(path, replaces=False):
            path.mkdir()
            (path / "of another").touch()

    with pytest.raises(InvalidConfigError, match="exists"):
        make()
    assert [file.name for file in path.iterdir()] == ["of another"]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidConfigError):
        refuse_existing(link)


def test_a_file_that_must_not_exist_is_not_replaced_by_who_comes_second(tmp_path: Path) -> None:
    path = tmp_path / "file"
    slow = ExitStack()
    slow.enter_context(new_file(path, replaces=False)).write(b"mine")
    with new_file(path, replaces=False) as fast:
        fast.write(b"theirs")
    with pytest.raises(FileExistsError):
        slow.close()
    assert path.read_bytes() == b"theirs"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_new_file_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "file"
    with new_file(path, replaces=False) as file:
        file.write(b"mine")
    late = ExitStack()
    late.enter_context(new_file(path, replaces=False)).write(b"theirs")
    with pytest.raises(FileExistsError):
        late.close()
    assert path.read_bytes() == b"mine"
