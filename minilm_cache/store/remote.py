"""One interface to folders of stores, by obstore or fsspec, and transfers of many files.

obstore has its own retries. What it and fsspec raise becomes one line that names the place and a remedy.
Credentials come from the environment variables that each store's own tools use (AWS_ACCESS_KEY_ID, HF_TOKEN,
...), and never appear in a message.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import fsspec
import obstore.exceptions
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from obstore.store import from_url

from minilm_cache.errors import (
    CacheCorruptError,
    CacheNotFoundError,
    InterruptedRunError,
    InvalidConfigError,
    MiniLMCacheError,
    StorageError,
    first_line,
    is_panic,
    remedy_of,
)
from minilm_cache.session import ShouldStop
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.durable import (
    PARTIAL,
    NotRegularError,
    create_file,
    linked_part,
    new_file,
    regular_bytes,
    remove_abandoned,
    write_file,
)
from minilm_cache.store.index import CommittedShards
from minilm_cache.store.object_store import BucketFiles, refuse_bad_variables, request, variables_in
from minilm_cache.store.urls import (
    DENIED_REMEDY,
    NO_KEY_REMEDY,
    OBJECT_STORES,
    STORE_REMEDY,
    parts_of_url,
    without_secrets,
)

Result = TypeVar("Result")


TRANSFERS: Final = 8
"""Number of files that are transferred at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """What a push or a pull did."""

    place: str
    """URL or folder of the copy, which is complete now."""
    manifest: CacheManifest
    shards_copied: int
    """Shards of which any file was copied."""
    shards_kept: int
    """Shards that were there already."""


def num_bytes(manifest: CacheManifest, shards: CommittedShards) -> int:
    """Return the total size, in bytes, of a cache's files that have a hash."""
    return sum(shards.bytes_by_name().values()) + sum(digest.size for digest in manifest.files.values())


def for_each(
    work: Callable[[int], Result], numbers: range, *, should_stop: ShouldStop, place: str
) -> list[Result]:
    """Call `work` with each number, several at once, and return its results in order.

    Args:
        work: called in a thread. Its first error cancels the rest and is raised.
        numbers: numbers to call it with.
        should_stop: called before each number; True stops.
        place: URL or folder of the copy, for messages.

    Raises:
        InterruptedRunError: a stop was requested.
    """

    def guarded(number: int) -> Result:
        if should_stop():
            raise InterruptedRunError(
                f"interrupted: what has been copied from or to {place} is kept. Run the same command again."
            )
        return work(number)

    with ThreadPoolExecutor(TRANSFERS) as threads:
        return list(threads.map(guarded, numbers))  # an error cancels those that have not begun


_DENIED: Final = (
    PermissionError,
    obstore.exceptions.PermissionDeniedError,
    obstore.exceptions.UnauthenticatedError,
)
_MISSING: Final = (FileNotFoundError, obstore.exceptions.NotFoundError)
_METADATA: Final = ("169.254.16", "169.254.17")
"""Addresses of servers that are asked where no key is set."""
_DENIED_TEXTS: Final = ("403 Forbidden", "401 Unauth", "AccessDenied", *_METADATA)
"""What errors say that have no type of their own."""
_RETRY_REMEDY: Final = (
    "Check the URL and the network and run the same command again: what has arrived is kept"
)


_COPIED_BYTES: Final = 2**26
"""Bytes of a file that are copied at a time."""


class AccessDeniedError(StorageError):
    """A store does not let this process do something."""


@contextmanager
def _remote_errors(doing: str, url: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if error.args and str(error).endswith((".", ")")):
            raise
        raise StorageError(f"cannot {doing} {url}: {error}. {_RETRY_REMEDY}.") from error
    except MiniLMCacheError:
        raise
    except NotRegularError as error:
        raise CacheCorruptError(
            f"cannot {doing} {url}: {error.strerror}. Ask its publisher to push it again."
        ) from error
    except BaseException as error:  # fsspec's file systems raise any error of the libraries below them
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if "NoSuchBucket" in str(error):
            raise StorageError(
                f"cannot {doing} {url}: there is no such bucket. Check its name, or create it."
            ) from error
        denied = isinstance(error, _DENIED) or any(text in str(error) for text in _DENIED_TEXTS)
        remedy, kind = (DENIED_REMEDY, AccessDeniedError) if denied else (_RETRY_REMEDY, StorageError)
        if isinstance(error, OSError) and error.errno is not None and parts_of_url(url)[0] == "file":
            remedy = remedy_of(error)
        reason = first_line(error)
        if any(address in reason for address in _METADATA):
            reason, remedy = "the environment holds no credentials for it", NO_KEY_REMEDY
        raise kind(f"cannot {doing} {url}: {reason}. {remedy}.") from error


@dataclass(frozen=True, slots=True)
class _FileSystem:
    """Files of a file system that fsspec knows."""

    filesystem: AbstractFileSystem

    def read(self, path: str, num_bytes: int, first: int = 0) -> bytes:
        """Return `num_bytes` bytes of a file from the `first`-th on, or fewer if it ends before."""
        if isinstance(self.filesystem, LocalFileSystem):
            return regular_bytes(Path(path), num_bytes, first=first)
        return bytes(
            request(lambda: self.filesystem.cat_file(path, start=first, end=first + num_bytes), num_bytes)
        )

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file, replacing an older one."""
        if isinstance(self.filesystem, LocalFileSystem):
            write_file(Path(path), content)
        else:
            request(lambda: self.filesystem.pipe_file(path, content), len(content))

    def send(self, path: str, file: Path) -> None:
        """Write a file of this machine, in parts, replacing an older one."""
        if isinstance(self.filesystem, LocalFileSystem):
            with new_file(Path(path)) as copy, file.open("rb") as original:
                shutil.copyfileobj(original, copy, _COPIED_BYTES)
        else:
            request(lambda: self.filesystem.put_file(str(file), path), file.stat().st_size)

    def create(self, path: str, content: bytes) -> bool:
        """Write a whole file unless it exists, and return whether it was written.

        This is atomic for local files only. fsspec has no such call for other file systems, so two processes
        that check at the same time may both write.
        """
        if isinstance(self.filesystem, LocalFileSystem):
            try:
                create_file(Path(path), content)
            except FileExistsError:
                return False
            return True
        if self.filesystem.exists(path):
            return False
        self.filesystem.pipe_file(path, content)
        return True

    def copy(self, path: str, to: str) -> None:
        """Copy a file within the store, replacing an older one."""
        self.write(to, self.read(path, self.filesystem.size(path)))

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; one that does not exist is no error."""
        for path in paths:
            with suppress(FileNotFoundError):
                self.filesystem.rm_file(path)

    def sizes(self, path: str) -> dict[str, int]:
        """Return the paths and sizes, in bytes, of all files below a folder."""
        return {name: entry["size"] for name, entry in self.filesystem.find(path, detail=True).items()}

    def folders(self, path: str) -> list[str]:
        """Return the paths of the folders in a folder."""
        try:
            entries = self.filesystem.ls(path, detail=True, refresh=True)
        except FileNotFoundError:
            return []
        return [entry["name"] for entry in entries if entry["type"] != "file"]


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder of a store; names are relative to it, with `/` between parts."""

    url: str
    """URL for messages, without secrets."""
    files: BucketFiles | _FileSystem
    path: str
    """Path of the folder within `files`."""

    def _place(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def _own(self, name: str) -> str:
        """Return the path of a file that is read or written, which no link leads out of the folder.

        Raises:
            NotRegularError: a part of it is a symbolic link.
        """
        if isinstance(self.files, _FileSystem) and isinstance(self.files.filesystem, LocalFileSystem):
            link = linked_part(Path(self.path), name)
            if link is not None:
                raise NotRegularError(None, f"{link.name} is a symbolic link", str(link))
        return self._place(name)

    def below(self, name: str) -> "RemoteFolder":
        """Return a folder within this folder."""
        return RemoteFolder(f"{self.url}/{name}", self.files, self._place(name))

    def above(self) -> "RemoteFolder | None":
        """Return the folder that holds this folder, or None if this is a whole bucket."""
        if not self.path:
            return None
        return RemoteFolder(self.url.rpartition("/")[0] or ".", self.files, self.path.rpartition("/")[0])

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a file; at most `max_bytes` + 1 bytes are fetched.

        Raises:
            CacheNotFoundError: there is no such file.
            CacheCorruptError: the file is longer than `max_bytes`.
            StorageError: the store refused, or cannot be reached.
        """
        content = self.read_range(name, 0, max_bytes + 1)
        if len(content) > max_bytes:
            raise CacheCorruptError(
                f"{self.url}/{name} is longer than the {max_bytes} bytes it should have. "
                "Ask its publisher to push it again."
            )
        return content

    def read_range(self, name: str, first: int, num_bytes: int) -> bytes:
        """Return bytes of a file from the `first`-th on, counted from 0: fewer if the file ends before.

        Raises:
            CacheNotFoundError: there is no such file.
            StorageError: the store refused, or cannot be reached.
        """
        try:
            with _remote_errors("read", f"{self.url}/{name}"):
                return self.files.read(self._own(name), num_bytes, first)
        except StorageError as error:
            if isinstance(error.__cause__, _MISSING):
                raise CacheNotFoundError(
                    f"{self.url}/{name} is not there. If the rest of the cache is, ask its publisher to "
                    "run the same `minilm-cache push` again; or check the URL."
                ) from error
            raise

    def read_if_there(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of a file like `read`, or None if the file does not exist."""
        try:
            return self.read(name, max_bytes)
        except CacheNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file, replacing an older one.

        Raises:
            StorageError: the store refused, or cannot be reached.
        """
        with _remote_errors("write", f"{self.url}/{name}"):
            self.files.write(self._own(name), content)

    def send(self, name: str, file: Path) -> None:
        """Write a file of this machine, which need not fit into memory, replacing an older one.

        Raises:
            StorageError: the store refused, or cannot be reached, or the file cannot be read.
        """
        with _remote_errors("write", f"{self.url}/{name}"):
            self.files.send(self._own(name), file)

    def create(self, name: str, content: bytes) -> bool:
        """Write a whole file unless it exists, and return whether it was written.

        Raises:
            StorageError: the store refused, or cannot be reached.
        """
        with _remote_errors("write", f"{self.url}/{name}"):
            return self.files.create(self._own(name), content)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left in a folder of this machine; object stores keep no such files."""
        if isinstance(self.files, _FileSystem) and isinstance(self.files.filesystem, LocalFileSystem):
            remove_abandoned(Path(self.path).rglob(f".*{PARTIAL}"))

    def copy(self, name: str, to: str) -> None:
        """Have the store copy a file of this folder to another name, replacing an older one.

        Raises:
            StorageError: the store refused, or cannot be reached.
        """
        with _remote_errors("copy", f"{self.url}/{name}"):
            self.files.copy(self._own(name), self._own(to))

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of this folder; one that does not exist is no error.

        Raises:
            StorageError: the store refused, or cannot be reached.
        """
        with _remote_errors("remove files from", self.url):
            self.files.remove([self._own(name) for name in names])

    def sizes(self) -> dict[str, int]:
        """Return the names and sizes, in bytes, of all files below this folder.

        Raises:
            StorageError: the store refused, or cannot be reached.
        """
        with _remote_errors("list", self.url):
            sizes = self.files.sizes(self.path)
        return {path.removeprefix(self._place("")): size for path, size in sizes.items()}

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder, sorted.

        Raises:
            StorageError: the store refused, or cannot be reached.
        """
        with _remote_errors("list", self.url):
            paths = self.files.folders(self.path)
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)


def open_store(url: str) -> RemoteFolder:
    """Return the folder at a URL (`s3://`, `gs://`, `az://`, `hf://`, `file://`) or a path.

    Raises:
        InvalidConfigError: the kind of store is not known, or the URL names no bucket, or it holds a password
            or a signature.
    """
    scheme, bucket, path = parts_of_url(url)
    place = url.rstrip("/")
    shown = without_secrets(place)
    if scheme in OBJECT_STORES:
        return RemoteFolder(place, _bucket(scheme, bucket, shown), path)
    try:
        filesystem, path = fsspec.core.url_to_fs(place, skip_instance_cache=True)
    except (ValueError, TypeError, ImportError) as error:
        raise InvalidConfigError(f"cannot open {shown}: {first_line(error)}. {STORE_REMEDY}.") from error
    return RemoteFolder(place, _FileSystem(filesystem), path.rstrip("/"))


def _bucket(scheme: str, bucket: str, shown: str) -> BucketFiles:
    """Open a bucket with what the environment says of its store.

    Raises:
        InvalidConfigError: a variable holds what no store can be opened with, or the bucket has no such name.
    """
    if not re.fullmatch(r"[\w.-]+", bucket):
        raise InvalidConfigError(f"cannot open {shown}: {bucket!r} is no name of a bucket. Check the URL.")
    refuse_bad_variables(scheme)
    try:
        return BucketFiles(from_url(f"{scheme}://{bucket}"))
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        named = variables_in(scheme, str(error))
        raise InvalidConfigError(
            f"cannot open {shown}: {first_line(error).rstrip('.')}. Check {named}."
        ) from error
