"""Who may create a cache, and whether what is there already is the same one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from minilm_cache.errors import IdentityMismatchError
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.durable import is_vacant, storage_errors, wait_for
from minilm_cache.store.layout import CREATE_LOCK, MANIFEST, below


def prepare_root(root: Path) -> None:
    """Make the folder of a new cache; what interrupted and waiting processes leave in it is no hindrance."""
    locks = below(root, CREATE_LOCK).parent
    occupied = root.is_dir() and not is_vacant(root, beside=locks)
    # Another rank may have begun meanwhile; the manifest is the first file it writes.
    if occupied and not (root / MANIFEST).exists():
        raise IdentityMismatchError(f"{root} is not empty and is no cache. Choose another --out.")
    root.mkdir(parents=True, exist_ok=True)


@contextmanager
def creating(root: Path, progress: Progress, should_stop: ShouldStop) -> Iterator[None]:
    """Hold the right to create a cache, so that what one process decides is what the others find.

    Raises:
        IdentityMismatchError: the folder holds something that is no cache.
        InterruptedRunError: it was asked to stop while it waited.
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
            progress.note(f"waiting for the process that creates {root}")
        interrupted = (
            f"interrupted while another process creates {root}: this one wrote nothing. "
            "Run the same command again."
        )
        wait_for(lock, should_stop, interrupted)
    try:
        yield
    finally:
        lock.release()


def differing_fields(found: CacheManifest, expected: CacheManifest) -> list[str]:
    """Return, as `name (found instead of expected)`, what keeps two manifests from being one cache's."""
    pairs = [
        (found.identity.model_dump(mode="json"), expected.identity.model_dump(mode="json")),
        ({"shard_tokens": found.shard_tokens}, {"shard_tokens": expected.shard_tokens}),
    ]
    differing = [text for left, right in pairs for text in differing_values(left, right)]
    if not differing and found.shards != expected.shards:
        differing.append("the sequences of its shards")
    return differing


def differing_values(
    found: Mapping[str, object], expected: Mapping[str, object], prefix: str = ""
) -> Iterator[str]:
    """Yield, as `name (found there, expected asked)`, what keeps two documents from being the same."""
    for name in sorted(found.keys() | expected.keys()):
        left, right = found.get(name), expected.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from differing_values(left, right, f"{prefix}{name}.")
        elif left != right:
            yield f"{prefix}{name} ({left!s:.16} there, {right!s:.16} asked)"
