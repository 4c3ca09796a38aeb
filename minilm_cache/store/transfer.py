"""What a push and a pull have in common.

Everything is bound by hashes: a pull checks each file against the commit records, and those against the
manifest, as a reader does. The manifest goes last in both directions, so that nothing half-copied is ever
taken for a cache; files that have arrived are not copied again.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from minilm_cache.errors import InterruptedRunError
from minilm_cache.progress import ShouldStop
from minilm_cache.storage_schema.manifest import CacheManifest, CommitRecord

Result = TypeVar("Result")

TRANSFERS: Final = 8
"""Files on their way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a push or a pull did."""

    place: str
    """URL or folder of the cache that is complete now."""
    manifest: CacheManifest
    shards_copied: int
    shards_kept: int
    """Shards that had arrived before."""


def num_bytes(manifest: CacheManifest, records: Sequence[CommitRecord]) -> int:
    """Return the bytes of a cache's files, those of no hash left out."""
    shards = sum(digest.size for record in records for digest in record.files.values())
    return shards + sum(digest.size for digest in manifest.files.values())


def each(
    work: Callable[[int], Result], numbers: range, *, should_stop: ShouldStop, place: str
) -> list[Result]:
    """Do work for each number, several at once; the first failure ends it."""

    def guarded(number: int) -> Result:
        if should_stop():
            raise InterruptedRunError(
                f"interrupted: what has been copied from or to {place} is kept. Run the same command again."
            )
        return work(number)

    with ThreadPoolExecutor(TRANSFERS) as threads:
        results: Iterator[Result] = threads.map(guarded, numbers)
        try:
            return list(results)
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
