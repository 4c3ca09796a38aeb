"""Write a cache straight into a store: no common file system, no merge, no push.

Three files must be written by one process only: the beginning of the dump (`unfinished.json`), the commit
record of each shard, and the `manifest.json` of the finished cache. Processes create them only if they do not
exist, and the first one wins. A process writes a shard on its own disk, sends the files to a folder below
`staging/` that is named by a hash of the record, creates the record, and has the store copy the files to
their places. A process that finds a record without its files copies them again. So files of two attempts at a
shard are never mixed, even if their bytes differ.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa

from minilm_cache.errors import CacheCorruptError, ShardBusyError, StorageError
from minilm_cache.session import Session
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.documents import MAX_RECORD_BYTES, CommitRecord
from minilm_cache.storage_schema.manifest import MAX_MANIFEST_BYTES, CacheManifest, Measured
from minilm_cache.store.card import attach, manifest_between
from minilm_cache.store.checked import checked_file
from minilm_cache.store.creation import (
    CLAIMS,
    begin,
    finished_manifest,
    read_remote,
    remove_leftovers,
    staging_of,
)
from minilm_cache.store.durable import write_file
from minilm_cache.store.layout import CARD, COMMITS, MANIFEST, below, commit_path, shard_files
from minilm_cache.store.leases import Lease, Leases
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.remote import TRANSFERS, RemoteFolder
from minilm_cache.store.shards import ShardWriter
from minilm_cache.store.verify import CheckRows
from minilm_cache.store.writer import CacheWriter

_LEAST_LISTING_S: Final = 2.0
"""Least seconds between two listings of the records; large caches are listed less often."""
_LISTING_SHARE: Final = 20
"""A listing is repeated after so many times the seconds that it took."""
_POLL_S: Final = 0.5
"""Seconds between two looks at a cache that another process seals."""


class StoreWriter(CacheWriter):
    """Writer of a cache in a store. Its folder on this machine holds shards only until they are sent."""

    is_remote = True

    def __init__(
        self,
        root: Path,
        manifest: CacheManifest,
        *,
        target: RemoteFolder,
        ranges: ShardRanges,
        attachments: Mapping[str, bytes],
        tokens_of: None = None,
        parts_of: None = None,
    ) -> None:
        """Begin the dump, or join the one that has begun.

        Args:
            root: folder on this machine, which `join` may have made.
            manifest: manifest of the new cache.
            target: folder of the cache in the store.
            ranges: sequences and tokens of each shard.
            attachments: content of files outside the arrays: path below the root to bytes.
            tokens_of: None, since no files of other caches are linked in a store.
            parts_of: None for the same reason.

        Raises:
            OtherBeginningError: another process was first.
        """
        del tokens_of, parts_of
        super().__init__(root, manifest, ranges=ranges, attachments=attachments)
        self._target = target
        self._leases = Leases(target.below(CLAIMS))
        self._missing: list[int] = []
        self._next_listing = 0.0
        begin(target, root, self.manifest)

    def is_committed(self, shard: int) -> bool:
        """Return whether a shard is committed in the store; a finished cache has all, and no records."""
        return self._is_there(commit_path(shard)) or self._is_there(MANIFEST)

    def _is_there(self, name: str) -> bool:
        return self._target.read_if_there(name, MAX_MANIFEST_BYTES) is not None

    def missing_shards(self) -> list[int]:
        """Return the shards that are not committed yet, as a listing of some seconds ago says."""
        started = time.monotonic()
        if started >= self._next_listing:
            names = self._target.below(COMMITS).sizes()
            self._missing = [n for n in range(len(self.ranges)) if Path(commit_path(n)).name not in names]
            if self._missing and self._is_there(MANIFEST):  # finished meanwhile, which removes the records
                self._missing = []
            took = time.monotonic() - started
            self._next_listing = started + max(_LEAST_LISTING_S, _LISTING_SHARE * took)
        return self._missing

    def claim(self, shard: int) -> Lease:
        """Acquire and return the lease on a shard.

        Raises:
            ShardBusyError: another process holds it.
        """
        lease = self._leases.acquire(f"{shard:05d}")
        if lease is None:
            raise ShardBusyError(
                f"shard {shard} of {self._target.url} is being written by another "
                "process. Wait for it, and run the same command again."
            )
        return lease

    def announce(self, rank: int) -> None:
        """Do nothing: whoever is free writes what is missing."""

    def left_for(self, rank: int, world_size: int) -> list[int]:
        """Return all shards that are missing, whichever rank they belong to."""
        del rank, world_size
        return self.missing_shards()

    def begin_shard(self, shard: int) -> ShardWriter:
        """Begin to write a shard on this machine; if another process commits it first, its end shows that."""
        return self._begin(shard)

    def commit_shard(self, written: ShardWriter, rank: int = 0) -> int:
        """Send a shard, and commit it unless another process has; see `CacheWriter`.

        Returns:
            0, since nothing of it stays on this machine.
        """
        super().commit_shard(written, rank)
        shard = written.shard
        path = below(self.root, commit_path(shard))
        content = path.read_bytes()
        files = parse(CommitRecord, content, str(path)).files
        staging = self._target.below(staging_of(content))
        with ThreadPoolExecutor(TRANSFERS) as threads:
            sent = [(path, checked_file(self.root, path, digest)) for path, digest in files.items()]
            list(threads.map(lambda item: staging.send(*item), sent))
        self._commit(shard, content, list(files))
        self._forget(shard)
        self._next_listing = 0.0
        return 0

    def _commit(self, shard: int, record: bytes, paths: list[str]) -> None:
        """Create a shard's record and place its files, unless another process has committed the shard."""
        name, staged = commit_path(shard), [f"{staging_of(record)}/{path}" for path in paths]
        self._target.create(name, record)
        if self._is_there(MANIFEST):  # another process has finished the cache, which removes all records
            self._target.remove([name, *staged])
        elif self._target.read_if_there(name, MAX_RECORD_BYTES) == record:
            self._place(record, paths)
        else:  # another process was first; its bytes are as good
            self._target.remove(staged)

    def damaged(self, shards: Sequence[int], *, check_rows: CheckRows | None, session: Session) -> list[int]:
        """Return those of the given committed shards that are damaged; see `CacheWriter`."""
        records = self._records(shards)
        lost = self._lost(records)
        for shard in sorted(records.keys() - lost) if check_rows is not None else ():
            try:
                self.fetch([shard])
                lost |= set(super().damaged([shard], check_rows=check_rows, session=session))
            except CacheCorruptError:
                lost.add(shard)
            self._forget(shard)
        return sorted(lost)

    def withdraw(self, shard: int) -> None:
        """Remove a damaged shard's files, then its commit record; the caller holds its claim.

        Files that stayed would be taken for those of the next record: only their sizes are compared there.
        """
        self._target.remove(shard_files(self.manifest, shard))
        self._target.remove([commit_path(shard)])
        self._next_listing = 0.0

    def fetch(self, shards: Sequence[int]) -> None:
        """Fetch shards and their records.

        Raises:
            CacheCorruptError: a file is not what was committed.
        """
        for shard, content in self._records(shards).items():
            write_file(below(self.root, commit_path(shard)), content, durable=False)
            files = parse(CommitRecord, content, self._target.url).files
            for path, digest in files.items():
                write_file(below(self.root, path), read_remote(self._target, path, digest), durable=False)

    @contextmanager
    def sealing(self) -> Iterator[bool]:
        """Hold the lease on sealing, and yield whether the cache can and must still be sealed."""
        self._next_listing = 0.0
        if self.missing_shards():
            yield False
            return
        while (finished := finished_manifest(self._target, self.manifest.identity)) is None:
            lease = self._leases.acquire("seal")
            if lease is not None:
                with lease:
                    self._gather()
                    yield True
                return
            time.sleep(_POLL_S)
        self.manifest = finished
        yield False

    def _gather(self) -> None:
        """Fetch all records, and make sure that every shard's files are in their places.

        Raises:
            StorageError: files have gone from the store; their shards are to be written again.
        """
        records = self._records(range(len(self.ranges)))
        for shard, content in records.items():
            write_file(below(self.root, commit_path(shard)), content, durable=False)
        for shard in (lost := self._lost(records)):
            self.withdraw(shard)
        if lost or len(records) < len(self.ranges):
            raise StorageError(
                f"files of {len(self.ranges) - len(records) + len(lost)} shards have gone from "
                f"{self._target.url}. Run the same command again: it writes these shards again."
            )

    def seal(self, measured: Measured, preview: pa.Table) -> None:
        """Finish the cache on this machine, then in the store; the manifest goes last.

        Where measuring took longer than the lease on it, another process may have finished the cache. Nothing
        is sent then: its manifest has the hashes of its own files.
        """
        super().seal(measured, preview)
        finished = finished_manifest(self._target, self.manifest.identity)
        if finished is None:
            for path, digest in self.manifest.files.items():
                self._target.send(path, checked_file(self.root, path, digest))
            self._target.write(CARD, (self.root / CARD).read_bytes())
            self._target.create(MANIFEST, self.manifest.to_json())
            finished = finished_manifest(self._target, self.manifest.identity)
        assert finished is not None
        self.manifest = finished
        remove_leftovers(self._target)

    def attach(self, path: str, content: bytes) -> None:
        """Add a file to the finished cache in the store."""
        self.manifest = attach_in_store(self._target, self.root, self.manifest, path=path, content=content)

    def close(self) -> None:
        """End the renewal of leases."""
        self._leases.close()

    def _records(self, shards: Sequence[int]) -> dict[int, bytes]:
        """Return the records of those of some shards that have one, by their numbers."""
        with ThreadPoolExecutor(TRANSFERS) as threads:
            contents = threads.map(
                lambda shard: self._target.read_if_there(commit_path(shard), MAX_RECORD_BYTES), shards
            )
            return {n: content for n, content in zip(shards, contents, strict=True) if content is not None}

    def _lost(self, records: Mapping[int, bytes]) -> set[int]:
        """Return the committed shards whose files have gone; files that are only staged are put in place.

        Args:
            records: number of each shard to its record.
        """
        stored = self._target.sizes()
        return {shard for shard, record in records.items() if not self._is_whole(record, stored)}

    def _is_whole(self, record: bytes, stored: Mapping[str, int]) -> bool:
        """Return whether a shard's files have their sizes, after putting in place what is only staged.

        Args:
            record: commit record of the shard.
            stored: sizes of all files of the cache in the store, in bytes.
        """
        try:
            files = parse(CommitRecord, record, self._target.url).files
        except CacheCorruptError:
            return False
        absent = [path for path, digest in files.items() if stored.get(path) != digest.size]
        staging = staging_of(record)
        if any(stored.get(f"{staging}/{path}") != files[path].size for path in absent):
            return False
        self._place(record, absent)
        return True

    def _place(self, record: bytes, paths: Sequence[str]) -> None:
        """Have the store copy files of a committed shard to their places."""
        try:
            with ThreadPoolExecutor(TRANSFERS) as threads:
                list(threads.map(lambda path: self._target.copy(f"{staging_of(record)}/{path}", path), paths))
        except StorageError:
            # Whoever finishes the cache puts all files in their places, and then removes the staged ones.
            if not self._is_there(MANIFEST):
                raise

    def _forget(self, shard: int) -> None:
        """Remove a shard from this machine."""
        for path in (commit_path(shard), *shard_files(self.manifest, shard)):
            below(self.root, path).unlink(missing_ok=True)


def attach_in_store(
    target: RemoteFolder, root: Path, manifest: CacheManifest, *, path: str, content: bytes
) -> CacheManifest:
    """Add a file to a finished cache in a store, and return its manifest; see `store.card.attach`.

    Args:
        target: folder of the cache in the store.
        root: folder on this machine for what is sent.
        manifest: manifest of the cache.
        path: path of the file below the cache.
        content: content of the file.
    """
    named = attach(root, manifest, path=path, content=content)
    if named != manifest or target.sizes().get(path) != len(content):
        if (between := manifest_between(manifest, named)) is not None:
            target.write(MANIFEST, between.to_json())
        target.write(path, content)
        target.write(CARD, (root / CARD).read_bytes())
        target.write(MANIFEST, named.to_json())
    return named
