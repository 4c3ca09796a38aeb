"""Remove caches and runs, and caches of stores: only what is one, nobody writes, and nothing else needs."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minilm_cache.errors import CacheNotFoundError, InvalidConfigError, MiniLMCacheError, ShardBusyError
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.manifest import MAX_MANIFEST_BYTES, CacheManifest
from minilm_cache.store.creation import STAGING
from minilm_cache.store.durable import bounded_bytes, lock_if_free, storage_errors
from minilm_cache.store.layout import BEGUN, LOCKS, MANIFEST
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.store.urls import is_url
from minilm_cache.train.folder import REMOVED, RUN_FILE, RunFolder, is_run, runs_in
from minilm_cache.train.record import load_record

_MARK: Final = ".being-removed"
_FILE: Final = "file://"
_BESIDE: Final = {MANIFEST: ("zarr.json", "tokens/"), BEGUN: (f"{STAGING}/",)}
"""Records of caches, and what lies beside a damaged one: other programs have files of these names, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A cache or a run that is to be removed."""

    path: Path | RemoteFolder
    num_bytes: int
    """Bytes of its files. Caches made with `--add` share some of them with others, which keep theirs."""
    needed_by: tuple[Path, ...]
    """Runs of the home, here or beside it that were trained from this cache, or that began with this run's
    students."""
    is_unfinished: bool = False
    """Whether it is a dump into a store that a process may still be writing."""

    @property
    def place(self) -> str:
        """Absolute path of the folder, or its URL without secrets."""
        return self.path.url if isinstance(self.path, RemoteFolder) else str(self.path.resolve())


def find_removal(name: str, home: Path) -> Removal:
    """Return what would be removed.

    Args:
        name: a folder, the name of a cache or a run of the home, or the URL of a cache.
        home: folder of caches and runs.

    Raises:
        CacheNotFoundError: there is no such cache or run.
        InvalidConfigError: the folder is neither.
        StorageError: a store cannot be reached.
    """
    name = _local(name)
    if is_url(name):
        return _find_remote(name, home)
    places = [Path(name), home / "caches" / name, home / "runs" / name]
    path = next((place for place in places if place.is_dir()), None)
    leftover = next(filter(_is_leftover, map(_removed_name, places)), None)
    if path is None and leftover is not None:
        return Removal(path=leftover, num_bytes=_num_bytes(leftover), needed_by=())
    if path is None:
        raise CacheNotFoundError(
            f"there is no cache or run {name}, neither here nor in {home}. `minilm-cache ls` lists them."
        )
    if path.is_symlink() or not (_is_run(path) or _is_cache(path)):
        raise InvalidConfigError(f"{path} is neither a cache nor a run. Remove it by other means.")
    names = {MANIFEST, BEGUN, RUN_FILE}
    inside = {file.parent for file in path.rglob("*.json") if file.name in names and file.parent != path}
    held = next((each for each in sorted(inside) if _is_run(each) or _is_cache(each)), None)
    if held is not None:
        raise InvalidConfigError(f"{path} holds another cache or run, {held}. Remove or move that one first.")
    needed_by, is_begun = tuple(_needing(path, home)), (path / BEGUN).is_file()
    return Removal(path=path, num_bytes=_num_bytes(path), needed_by=needed_by, is_unfinished=is_begun)


def _is_cache(path: Path) -> bool:
    files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return _has_record(files, lambda name: bounded_bytes(path / name, MAX_MANIFEST_BYTES))


def _has_record(files: Iterable[str], read: Callable[[str], bytes]) -> bool:
    """Return whether files are those of a cache, whose record may be damaged.

    `files` are the names of all files, relative to their folder; `read` returns the content of one.
    """
    names = set(files)
    for record in _BESIDE.keys() & names:
        with suppress(MiniLMCacheError, OSError):
            parse(CacheManifest, read(record), record)
            return True
        if all(any(name.startswith(beside) for name in names) for beside in _BESIDE[record]):
            return True
    return False


def _is_run(path: Path) -> bool:
    """Return whether a folder is a run: its record can be read, or is damaged and has the files of one."""
    if not is_run(path):
        return False
    with suppress(MiniLMCacheError):
        load_record(path)
        return True
    return RunFolder(path=path).log.is_file()


def _find_remote(url: str, home: Path) -> Removal:
    folder = open_store(url)
    sizes = folder.sizes()
    records = tuple(f"/{record}" for record in _BESIDE)
    below = next((name for name in sizes if name.endswith(records)), None)
    if below is not None:
        raise InvalidConfigError(
            f"{folder.url} holds another cache, {below.rpartition('/')[0]}. Remove that one first."
        )
    is_cache = _MARK in sizes or _has_record(sizes, lambda name: folder.read(name, MAX_MANIFEST_BYTES))
    if not is_cache and _BESIDE.keys() & sizes.keys():
        raise InvalidConfigError(f"{folder.url} is neither a cache nor a run. Remove it by other means.")
    if not is_cache:
        raise CacheNotFoundError(
            f"no cache at {folder.url}, complete or begun. `minilm-cache ls STORE` lists those of a store."
        )
    needed_by = tuple(run for run, places in _runs(home / "runs", Path()) if url.rstrip("/") in places)
    is_unfinished = BEGUN in sizes and MANIFEST not in sizes
    return Removal(
        path=folder, num_bytes=sum(sizes.values()), needed_by=needed_by, is_unfinished=is_unfinished
    )


def _num_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def _removed_name(path: Path) -> Path:
    """Return the name that a folder has while it is removed."""
    return path.with_name(f".{path.name}{REMOVED}") if path.name else path


def _is_leftover(path: Path) -> bool:
    """Return whether a folder is what an interrupted removal left."""
    is_named = path.name.startswith(".") and path.name.endswith(REMOVED)
    if not is_named or not path.is_dir() or path.is_symlink():
        return False
    return any((path / name).is_file() for name in (_MARK, MANIFEST, RUN_FILE))


def remove(removal: Removal) -> None:
    """Remove a cache or a run.

    The folder first gets another name and loses the file that makes it a cache or a run, so that nothing
    takes what an interruption leaves for one. The next removal of that name removes it, too. A folder of a
    store keeps its name, and gets a file that says so.

    Raises:
        ShardBusyError: a process writes it.
        StorageError: the file system or the store refused.
    """
    if isinstance(removal.path, RemoteFolder):
        _remove_remote(removal.path)
        return
    path = removal.path.resolve()
    with storage_errors("remove", path), ExitStack() as held:
        if _is_leftover(path):
            _empty(path)
            return
        for file in _locks(path):
            lock = lock_if_free(file)
            if lock is None:
                raise ShardBusyError(f"a process writes {path}. Wait for it, or stop it.")
            held.callback(lock.release)
        removed = _removed_name(path)
        if removed.exists():
            shutil.rmtree(removed)
        path.rename(removed)
        _empty(removed)


def _remove_remote(folder: RemoteFolder) -> None:
    folder.write(_MARK, b"")
    folder.remove([MANIFEST, BEGUN])
    folder.remove([name for name in folder.sizes() if name != _MARK])
    folder.remove([_MARK])


def _empty(removed: Path) -> None:
    """Remove a folder; until it is gone, a file in it says that it is what a removal left."""
    (removed / _MARK).touch()
    for entry in removed.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _MARK:
            entry.unlink()
    shutil.rmtree(removed)


def _needing(path: Path, home: Path) -> Iterator[Path]:
    """Yield the runs of the home, here and next to a folder that began with it, or with a part of it.

    Beside the folder of a study's or a chain's caches lies that of its runs, which may have moved together.
    """
    path = path.resolve()
    beside = path.parent.parent / "runs"
    for run, places in _runs(home / "runs", path.parent, Path(), beside):
        found = [_resolved(place) for place in places]
        has_moved = run.parent == beside and path.parent.name == "caches"
        moved = [path.parent / each.name for each in found if has_moved and each and not each.exists()]
        named = [each for each in (*found, *moved) if each is not None]
        if run.resolve() != path and any(path in (each, *each.parents) for each in named):
            yield run


def _runs(*folders: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the runs in folders, each with the caches, runs and models that it was made from."""
    different = dict.fromkeys(folder.resolve() for folder in folders)
    for run in (run for folder in different for run in runs_in(folder)):
        with suppress(MiniLMCacheError):  # a damaged run needs nothing
            record = load_record(run)
            donor = record.init_teacher if Path(record.init_teacher or "").is_dir() else None
            places = (record.cache, record.init, donor, *record.also)
            yield run, [place.rstrip("/") for place in places if place]


def _locks(path: Path) -> Iterator[Path]:
    """Yield the lock files of a cache or a run; nobody writes through a linked folder of them."""
    folder = path / LOCKS
    files = [] if folder.is_symlink() or not folder.is_dir() else list(folder.iterdir())
    for file in [*files, RunFolder(path=path).lock]:
        if not file.is_symlink() and file.is_file():
            yield file


def _local(place: str) -> str:
    """Return the folder that a `file://` URL names, with its locks and its runs; other places as they are."""
    return place.removeprefix(_FILE)  # nothing is decoded, as in every other command


def _resolved(place: str) -> Path | None:
    """Return a path without links. None means that it is none, as a loop of links."""
    try:
        return Path(_local(place)).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
