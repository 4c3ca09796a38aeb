"""Functions that push and pull share.

Every file is bound by hashes: a pull checks each file against the index (in format 1, the commit records),
and that against the manifest, as a reader does. In both directions the manifest is copied last, so that an
unfinished copy is never mistaken for a cache. Files that have arrived are not copied again.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from minilm_cache.errors import InterruptedRunError
from minilm_cache.session import ShouldStop
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.index import CommittedShards

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
