"""Writes that survive a kill and a power cut, and refusals of the file system told in one line."""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from minilm_cache.errors import CacheCorruptError, InterruptedRunError, InvalidConfigError, StorageError
from minilm_cache.progress import ShouldStop
from minilm_cache.store.regular_files import NotRegularError, first_bytes

PARTIAL = ".partial"
"""Ending of files that are being written, ours and zarr's."""
_LOCK_POLL_S = 1.0
_REMEDIES = {
    errno.ENOSPC: "Free some space and run the same command again: what is committed is kept",
    errno.EDQUOT: "Free some quota and run the same command again: what is committed is kept",
    errno.EROFS: "Choose a folder on a writable file system",
    errno.ENOTDIR: "A file stands where a folder is needed: choose another place",
    errno.EEXIST: "Something of that name is there: choose another place",
    errno.EISDIR: "A folder stands where a file is needed: choose another place",
    errno.EACCES: "Choose a folder you may write to, or change its permissions",
    errno.EPERM: "Choose a folder you may write to, or change its permissions",
}


@contextmanager
def storage_errors(doing: str, where: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that says what was being done, where, and a remedy."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Check the disk and run the same command again")
        place = error.filename or where
        raise StorageError(f"cannot {doing} {place}: {error.strerror or error}. {remedy}.") from error


def wait_for(lock: FileLock, should_stop: ShouldStop, interrupted: str) -> None:
    """Acquire a lock that another process may hold.

    Raises:
        InterruptedRunError: it was asked to stop meanwhile; says `interrupted`.
    """
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_LOCK_POLL_S)
        except Timeout:
            if should_stop():
                raise InterruptedRunError(interrupted) from None


def sync_directories(paths: Iterable[Path]) -> None:
    """Make the entries of directories durable."""
    for path in sorted(set(paths)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes) -> None:
    """Write a file durably: whole or not at all, replacing an older one."""
    with _temporary(path, content) as temporary:
        temporary.replace(path)
    sync_directories([path.parent])


def create_file(path: Path, content: bytes) -> None:
    """Write a file durably if it does not exist yet.

    Raises:
        FileExistsError: it exists; its content is left alone.
    """
    with _temporary(path, content) as temporary:
        os.link(temporary, path)
    sync_directories([path.parent])


def link_file(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, replacing what was there.

    Raises:
        OSError: they are on different file systems, or on one without links.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(target)
    os.link(source, temporary)
    try:
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # a rename onto another link of the same file does nothing


def is_vacant(folder: Path, beside: Path | None = None) -> bool:
    """Return whether a folder holds nothing, `beside` apart, but what an interrupted write left behind."""
    return all(
        entry == beside or (entry.name.startswith(".") and entry.name.endswith(PARTIAL))
        for entry in folder.iterdir()
    )


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most so many bytes; never a link, a pipe or a device.

    Raises:
        CacheCorruptError: it is longer, or no regular file.
        StorageError: the file system refused.
    """
    try:
        with storage_errors("read", path):
            content = first_bytes(path, max_bytes + 1)
    except StorageError as error:
        if isinstance(error.__cause__, NotRegularError):
            raise CacheCorruptError(
                f"{path}: {error.__cause__.strerror}. Put the file itself there, or fetch the cache again."
            ) from error
        raise
    if len(content) > max_bytes:
        raise CacheCorruptError(
            f"{path} is longer than the {max_bytes} bytes that the format allows. "
            "Fetch the cache again or redo the dump."
        )
    return content


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to fill; it takes `path`'s place durably when the block ends well, else it goes away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directories([path.parent])
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(out: Path, option: str = "--out") -> None:
    """Raise InvalidConfigError for a file or folder that exists."""
    if out.exists():
        raise InvalidConfigError(f"{out} exists. Choose another {option}.")


def refuse_file(folder: Path, option: str = "--out") -> None:
    """Raise InvalidConfigError for a folder where a file is, or above it."""
    file = next((one for one in (folder, *folder.parents) if one.exists() and not one.is_dir()), None)
    if file is not None:
        raise InvalidConfigError(f"{option} {folder}: {file} is a file. Choose another folder.")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill; it takes `path`'s place durably when the block ends well, else it goes away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        written = [temporary, *temporary.rglob("*")]
        for file in written:
            if file.is_file():
                sync_file(file)
        sync_directories(folder for folder in written if folder.is_dir())
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        sync_directories([path.parent])
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")


@contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
