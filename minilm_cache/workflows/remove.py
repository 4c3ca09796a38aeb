"""Remove caches and runs: only folders that are one, that no process writes, and that nothing else needs."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from minilm_cache.errors import CacheNotFoundError, InvalidConfigError, MiniLMCacheError, ShardBusyError
from minilm_cache.store.durable import storage_errors
from minilm_cache.store.layout import LOCKS, MANIFEST
from minilm_cache.train.folder import REMOVED, RUN_FILE, RunFolder, is_run, runs_in
from minilm_cache.train.record import load_record

_MARK: Final = ".being-removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A cache or a run that is to be removed."""

    path: Path
    num_bytes: int
    """Bytes of its files. Caches made with `--add` share some of them with others, which keep theirs."""
    needed_by: tuple[Path, ...]
    """Runs of the home or of the same folder that were trained from this cache, or that began with this run's
    students."""


def find_removal(name: str, home: Path) -> Removal:
    """Return what would be removed.

    Args:
        name: a folder, or the name of a cache or a run of the home.
        home: folder of caches and runs.

    Raises:
        CacheNotFoundError: there is no such cache or run.
        InvalidConfigError: the folder is neither.
    """
    places = [Path(name), home / "caches" / name, home / "runs" / name]
    path = next((place for place in places if place.is_dir()), None)
    leftover = next(filter(_is_leftover, map(_removed_name, places)), None)
    if path is None and leftover is not None:
        return Removal(path=leftover, num_bytes=_num_bytes(leftover), needed_by=())
    if path is None:
        raise CacheNotFoundError(
            f"there is no cache or run {name}, neither here nor in {home}. `minilm-cache ls` lists them."
        )
    if path.is_symlink() or not (is_run(path) or (path / MANIFEST).is_file()):
        raise InvalidConfigError(f"{path} is neither a cache nor a run. Remove it by other means.")
    return Removal(path=path, num_bytes=_num_bytes(path), needed_by=tuple(_needing(path, home)))


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
    takes what an interruption leaves for one. The next removal of that name removes it, too.

    Raises:
        ShardBusyError: a process writes it.
        StorageError: the file system refused.
    """
    path = removal.path.resolve()
    with storage_errors("remove", path), ExitStack() as held:
        if _is_leftover(path):
            _empty(path)
            return
        for file in _locks(path):
            lock = FileLock(file)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise ShardBusyError(f"a process writes {path}. Wait for it, or stop it.") from None
            held.callback(lock.release)
        removed = _removed_name(path)
        if removed.exists():
            shutil.rmtree(removed)
        path.rename(removed)
        _empty(removed)


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
    """Yield the runs of the home, and those next to a folder, that name it as their cache or beginning."""
    places = dict.fromkeys(folder.resolve() for folder in (home / "runs", path.parent))
    for run in (run for place in places for run in runs_in(place)):
        if run.resolve() == path.resolve():
            continue
        try:
            record = load_record(run)
        except MiniLMCacheError:  # a damaged run needs nothing
            continue
        places_needed = (record.cache, record.init, *record.also)
        if path.resolve() in [_resolved(place) for place in places_needed if place]:
            yield run


def _locks(path: Path) -> Iterator[Path]:
    """Yield the lock files of a cache or a run; nobody writes through a linked folder of them."""
    folder = path / LOCKS
    files = [] if folder.is_symlink() or not folder.is_dir() else list(folder.iterdir())
    for file in [*files, RunFolder(path=path).lock]:
        if not file.is_symlink() and file.is_file():
            yield file


def _resolved(place: str) -> Path | None:
    """Return a path without links. None means that it is none, as a loop of links."""
    try:
        return Path(place).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
