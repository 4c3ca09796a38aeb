"""Lock the creation of a cache, and compare a cache that exists already with the requested one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from minilm_cache.errors import IdentityMismatchError
from minilm_cache.session import Session
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.durable import is_vacant, storage_errors, wait_for
from minilm_cache.store.layout import CREATE_LOCK, MANIFEST, below

_LONGEST: Final = 16
"""Most characters of a value in a message."""


def prepare_root(root: Path) -> None:
    """Make the folder of a new cache. It may hold files left by interrupted or waiting processes.

    Raises:
        IdentityMismatchError: the folder holds something that is not a cache.
    """
    locks = below(root, CREATE_LOCK).parent
    occupied = root.is_dir() and not is_vacant(root, apart_from=locks)
    # Another rank may have started in the meantime; the manifest is the first file that it writes.
    if occupied and not (root / MANIFEST).exists():
        raise IdentityMismatchError(f"{root} is not empty and is not a cache. Choose another --out.")
    root.mkdir(parents=True, exist_ok=True)


@contextmanager
def creating(root: Path, session: Session) -> Iterator[None]:
    """Hold the lock on creating a cache, so that all processes use what the first of them decides.

    Raises:
        IdentityMismatchError: the folder holds something that is not a cache.
        InterruptedRunError: a stop was requested while this process waited.
        StorageError: the file system refused.
    """
    path = below(root, CREATE_LOCK)
    lock = FileLock(path)
    with storage_errors("lock", path):
        if not (root / MANIFEST).exists():
            prepare_root(root)
        path.parent.mkdir(exist_ok=True)
        with suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            session.progress.note(f"waiting for the process that creates {root}")
        interrupted = (
            f"interrupted while another process creates {root}: this one wrote nothing. "
            "Run the same command again."
        )
        wait_for(lock, session.should_stop, interrupted)
    try:
        yield
    finally:
        lock.release()


def differing_fields(existing: CacheManifest, expected: CacheManifest) -> list[str]:
    """Return where two manifests differ that would have to describe the same cache.

    The texts are those of `differing_values`. Empty means that only the sequences of its shards can differ.
    """
    pairs = [
        (existing.identity.model_dump(mode="json"), expected.identity.model_dump(mode="json")),
        ({"shard_tokens": existing.shard_tokens}, {"shard_tokens": expected.shard_tokens}),
    ]
    return [text for left, right in pairs for text in differing_values(left, right)]


def differing_values(
    existing: Mapping[str, object], expected: Mapping[str, object], prefix: str = ""
) -> Iterator[str]:
    """Yield each difference of two documents as `name (existing value there, expected value asked)`."""
    for name in sorted(existing.keys() | expected.keys()):
        left, right = existing.get(name), expected.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from differing_values(left, right, f"{prefix}{name}.")
        elif left != right:
            yield f"{prefix}{name} ({_shown(left)} there, {_shown(right)} asked)"


def _shown(value: object) -> str:
    """Return a value for a message: a group of values as `some`, a long text by its beginning."""
    if isinstance(value, dict):
        return "some"
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
