"""Write files so that they survive a kill or a power cut, and report file system errors in one line."""

import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from filelock import FileLock, Timeout

from minilm_cache.errors import (
    CacheCorruptError,
    InterruptedRunError,
    InvalidConfigError,
    MiniLMCacheError,
    StorageError,
    remedy_of,
)
from minilm_cache.session import ShouldStop, never_stop
from minilm_cache.settings import refuse_url
from minilm_cache.storage_schema.base import REMEDY


class NotRegularError(OSError):
    """A link, a pipe, a device or a folder where a file should be."""


def regular_bytes(path: Path, num_bytes: int, *, first: int = 0, follow_links: bool = False) -> bytes:
    """Return bytes of a regular file, without waiting for a pipe.

    Args:
        path: path of the file.
        num_bytes: most bytes to read.
        first: first byte to read, counted from 0.
        follow_links: whether a symbolic link to a regular file is accepted.

    Raises:
        NotRegularError: it is not a regular file.
        OSError: the file is missing, or the file system refused.
    """
    with open_regular(path, follow_links=follow_links) as file:
        file.seek(first)
        return file.read(num_bytes)


def bounded_bytes(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return the whole content of a regular file that has at most `max_bytes` bytes.

    Raises:
        NotRegularError: it is not a regular file.
        OSError: it is missing or longer, or the file system refused.
    """
    content = regular_bytes(path, max_bytes + 1, follow_links=follow_links)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", str(path))
    return content


def linked_part(root: Path, path: str) -> Path | None:
    """Return the first part of a path below `root` that is a symbolic link; the root itself may be one.

    Args:
        root: a folder.
        path: path below it, with `/` between parts.

    Returns:
        The path of the link. None means that there is none.
    """
    file = root
    for part in path.split("/"):
        file = file / part
        if file.is_symlink():
            return file
    return None


@contextmanager
def open_regular(path: Path, *, follow_links: bool = False) -> Iterator[BufferedReader]:
    """Open a regular file for a block; arguments and errors: see `regular_bytes`."""
    if not follow_links and path.is_symlink():
        raise NotRegularError(None, "it is a symbolic link", str(path))
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegularError(None, "it is not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without hard links answer."""
PARTIAL = ".partial"
"""Suffix of files that are being written."""
_JUST_MADE_S = 1.0
"""Age in seconds below which a partial file may not be locked by its writer yet."""
_LOCK_POLL_S = 1.0
"""Seconds between two checks of `should_stop` while waiting for a lock."""


@contextmanager
def storage_errors(doing: str, where: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names the action, the place and a remedy."""
    try:
        yield
    except MiniLMCacheError:  # some are an OSError, too
        raise
    except OSError as error:
        place = error.filename or where
        raise StorageError(
            f"cannot {doing} {place}: {error.strerror or error}. {remedy_of(error)}."
        ) from error


def refuse_full_disk(folder: Path, num_bytes: int, doing: str) -> None:
    """Raise StorageError where a file system has less room than what is about to be written takes.

    Args:
        folder: where it is to be written; it need not exist yet.
        num_bytes: bytes that are still to be written.
        doing: what is done, for the message, like `dump the other shards into`.
    """
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    with storage_errors("measure the free space of", place):
        free = shutil.disk_usage(place).free
    if num_bytes > free:
        raise StorageError(
            f"cannot {doing} {folder}: that takes {num_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are "
            f"free there. {remedy_of(OSError(errno.ENOSPC, ''))}."
        )


@contextmanager
def locked(
    path: Path,
    *,
    should_stop: ShouldStop = never_stop,
    interrupted: str = "",
    waits: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold a lock for a block, after waiting for the process that holds it.

    Args:
        path: file of the lock.
        should_stop: asked while this process waits; True ends the wait.
        interrupted: message of the error then.
        waits: called once if this process has to wait. None means that nothing is called.

    Raises:
        InterruptedRunError: a stop was requested.
        StorageError: the file system refused.
    """
    lock, poll_s = FileLock(path), 0.0
    with storage_errors("lock", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=poll_s)
            except Timeout:
                if waits is not None and poll_s == 0:
                    waits()
                if should_stop():
                    raise InterruptedRunError(interrupted) from None
                poll_s = _LOCK_POLL_S
    try:
        yield
    finally:
        lock.release()


def lock_if_free(path: Path) -> FileLock | None:
    """Acquire and return a lock, which any thread may release. None means that somebody holds it.

    Raises:
        StorageError: the file system refused.
    """
    lock = FileLock(path, timeout=0, thread_local=False)
    with storage_errors("lock", path):
        path.parent.mkdir(exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            return None
    return lock


@runtime_checkable
class ShardLock(Protocol):
    """What the writer of a shard holds."""

    def __enter__(self) -> object:
        """Hold it for a block."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Let others have the shard."""
        ...

    def release(self) -> None:
        """Let others have the shard; any thread may call it."""
        ...


def sync_files(root: Path, paths: Iterable[str]) -> None:
    """Flush files below a folder to disk, and the entries of all directories that they are in."""
    directories = set()
    for path in paths:
        file = root / path
        sync_file(file)
        while file != root:
            file = file.parent
            directories.add(file)
    sync_directories(directories)


def sync_directories(paths: Iterable[Path]) -> None:
    """Flush the entries of directories to disk."""
    for path in sorted(set(paths)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file's content to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file completely or not at all, and replace an older one.

    Args:
        path: path of the file.
        content: its new content.
        durable: flush it to disk. Without that, a crash of the machine can leave an empty file.
    """
    with new_file(path, durable=durable) as file:
        file.write(content)


def create_file(path: Path, content: bytes) -> None:
    """Write a file durably if it does not exist yet.

    Raises:
        FileExistsError: the file exists; its content is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # of the folder, which must not be taken for the file
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from error
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            _hold(file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directories([path.parent])


def link_file(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, replacing a file that exists.

    Raises:
        OSError: the two are on different file systems, or on a file system without hard links.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(target)
    os.link(source, temporary)
    try:
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # a rename onto another link of the same file does nothing


def is_vacant(folder: Path, apart_from: Path | None = None) -> bool:
    """Return whether a folder holds nothing but `apart_from` and what interrupted writes left in it.

    `apart_from` None means that no other entry is allowed.
    """
    return all(
        entry == apart_from or (entry.name.startswith(".") and entry.name.endswith(PARTIAL))
        for entry in folder.iterdir()
    )


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes` bytes; a link, a pipe or a device is refused.

    Raises:
        CacheCorruptError: the file is longer, or not a regular file.
        StorageError: the file system refused.
    """
    try:
        with storage_errors("read", path):
            content = regular_bytes(path, max_bytes + 1)
    except StorageError as error:
        if isinstance(error.__cause__, NotRegularError):
            raise CacheCorruptError(
                f"{path}: {error.__cause__.strerror}. Put the file itself there, or fetch the cache again."
            ) from error
        raise
    if len(content) > max_bytes:
        raise CacheCorruptError(
            f"{path} is longer than the {max_bytes} bytes that the format allows. {REMEDY}"
        )
    return content


def _name_unless_there(temporary: Path, path: Path) -> None:
    """Give a file its name, or raise FileExistsError if another one has it."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.replace(path)


@contextmanager
def new_file(path: Path, *, durable: bool = True, replaces: bool = True) -> Iterator[BufferedIOBase]:
    """Yield a file to fill. It gets the name `path` if the block succeeds, else it is removed.

    Args:
        path: path of the file.
        durable: flush it to disk. Without that, a crash of the machine can leave an empty file.
        replaces: replace a file of that name.

    Raises:
        FileExistsError: there is one, which must not be replaced, and which another process may have written
            meanwhile; its content is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            _hold(file.fileno())
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if replaces:
                temporary.replace(path)  # while it is locked
            else:
                _name_unless_there(temporary, path)
        if durable:
            sync_directories([path.parent])
    finally:
        temporary.unlink(missing_ok=True)


def remove_partials(path: Path) -> None:
    """Remove what interrupted writes of a file have left next to it."""
    for partial in path.parent.glob(f".{path.name}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def remove_left_of(path: Path) -> None:
    """Remove what killed writers of a file or folder have left next to it; what is being written stays."""
    remove_abandoned(path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"))


def remove_abandoned(partials: Iterable[Path]) -> None:
    """Remove partial files and folders whose writers were killed: the lock of a writer ends with it."""
    for partial in partials:
        with suppress(OSError):  # its writer holds it, has just finished it, or the file system has no locks
            opened = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(opened).st_mtime < _JUST_MADE_S:
                    continue
                if partial.is_dir():
                    shutil.rmtree(partial)
                else:
                    partial.unlink()
            finally:
                os.close(opened)


def _hold(opened: int) -> None:
    """Lock a file or folder that is being written until it is closed, so that no process removes it."""
    with suppress(OSError):  # a file system without locks, where no process removes anything
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


def refuse_existing(out: Path, option: str = "--out") -> None:
    """Raise InvalidConfigError for a file or folder that exists, and for a URL."""
    refuse_url(out, option)
    if os.path.lexists(out):  # also a link to nowhere
        raise InvalidConfigError(f"{out} exists. Choose another {option}.")


def refuse_file(folder: Path, option: str = "--out") -> None:
    """Raise InvalidConfigError if a folder, or one of its parents, is a file, and for a URL.

    Raises:
        StorageError: the folder does not exist, and may not be made.
    """
    refuse_url(folder, option)
    file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if file is not None:
        raise InvalidConfigError(f"{option} {folder}: {file} is a file. Choose another folder.")
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if nearest != folder.absolute() and not os.access(nearest, os.W_OK | os.X_OK):
        raise StorageError(f"{option} {folder}: you may not write in {nearest}. Choose another folder.")


def refuse_unwritable(folder: Path) -> None:
    """Raise StorageError if no file can be written into a folder, which is made if it is not there."""
    with storage_errors("write in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            error.filename = str(folder)  # and not a name that nobody has given
            raise


def prepare_new(out: Path, option: str = "--out") -> None:
    """Refuse a file or folder that exists, and one that cannot be written, before long work."""
    refuse_existing(out, option)
    refuse_unwritable(out.parent)


@contextmanager
def new_folder(path: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Yield a folder to fill. It replaces `path` durably if the block succeeds, else it is removed.

    What a killed process has left of such a folder is removed, too.

    Args:
        path: the folder.
        replaces: whether what is at `path` in the end may be replaced.

    Raises:
        InvalidConfigError: something is there in the end, and it may not be replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_of(path)
    temporary = _temporary_name(path)
    temporary.mkdir()
    opened = os.open(temporary, os.O_RDONLY)
    _hold(opened)
    shared = stat.S_IMODE(temporary.stat().st_mode) & 0o666  # what the umask allows; safetensors forgets it
    try:
        yield temporary
        written = [temporary, *temporary.rglob("*")]
        for entry in written:
            if entry.is_file() and not entry.is_symlink():
                entry.chmod(stat.S_IMODE(entry.stat().st_mode) | shared)
                sync_file(entry)
        sync_directories(entry for entry in written if entry.is_dir())
        if not replaces:
            refuse_existing(path)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        sync_directories([path.parent])
    finally:
        os.close(opened)
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")


def machine_cores() -> int:
    """Return the cores of this machine that this process may use, if other processes leave them to it."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def own_cores() -> int:
    """Return the cores that this process may use; processes of torchrun share those of a machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, machine_cores() // max(1, int(local) if local.isdecimal() else 1))
