"""Write a cache straight into a store: no common file system, no merge, no push.

What must be decided once is decided by creating a file only if there is none: how the dump begins
(`unfinished.json`), each shard (its commit record) and the finished cache (`manifest.json`). A process writes
a shard on its own disk, sends it below `staging/` under a name made of its record, creates the record, and
then has the store copy the files to their places. Whoever finds a record without its files copies them again.
So files of two attempts at a shard are never mixed, even if their bytes differ.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, ShardBusyError, StorageError
from minilm_cache.progress import Progress, Silent
from minilm_cache.storage_schema.documents import MAX_RECORD_BYTES, CommitRecord, FileDigest
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import MAX_MANIFEST_BYTES, CacheManifest
from minilm_cache.storage_schema.measured import Measured
from minilm_cache.storage_schema.problems import parse
from minilm_cache.store.attach import attach
from minilm_cache.store.checked import read_checked
from minilm_cache.store.creation import differing_values
from minilm_cache.store.durable import write_file
from minilm_cache.store.fingerprint import digest_bytes
from minilm_cache.store.layout import CARD, COMMITS, MANIFEST, below, commit_path, shard_files
from minilm_cache.store.leases import Lease, Leases
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.remote import RemoteFolder
from minilm_cache.store.transfer import TRANSFERS
from minilm_cache.store.verify import CheckRows
from minilm_cache.store.writer import CacheWriter

BEGUN: Final = "unfinished.json"
"""Manifest of a dump that has begun, in a store."""
STAGING: Final = "staging"
CLAIMS: Final = "claims"
_LEAST_LISTING_S: Final = 2.0
"""Least seconds between two listings of the records; large caches are listed less often."""
_LISTING_SHARE: Final = 20
"""A listing is repeated after so many times the seconds that it took."""
_POLL_S: Final = 0.5
"""Seconds between two looks at a cache that another process seals."""


class OtherBeginningError(Exception):
    """Another process has begun this dump first, perhaps with other codes."""


def finished_manifest(target: RemoteFolder, identity: CacheIdentity) -> CacheManifest | None:
    """Return the manifest of a complete cache in a store. None means that it is not complete.

    Raises:
        IdentityMismatchError: it is another cache.
    """
    content = target.read_if_there(MANIFEST, MAX_MANIFEST_BYTES)
    return None if content is None else _same(content, MANIFEST, target=target, identity=identity)


def join(target: RemoteFolder, root: Path, identity: CacheIdentity) -> bool:
    """Make a folder the beginning of the dump that a store holds, and return whether it holds one.

    Args:
        target: folder of the cache in the store.
        root: folder on this machine, which may not exist.
        identity: what is dumped.

    Raises:
        IdentityMismatchError: the store holds another dump there.
        CacheCorruptError: a file of the store is damaged.
        StorageError: the store or the file system refused.
    """
    content = target.read_if_there(BEGUN, MAX_MANIFEST_BYTES)
    if content is None:
        return False
    manifest = _same(content, BEGUN, target=target, identity=identity)
    staging = target.below(_staging(content))
    for path, digest in manifest.files.items():
        write_file(below(root, path), _read_checked(staging, path, digest), durable=False)
    write_file(root / MANIFEST, content, durable=False)
    return True


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
        **others: Any,  # noqa: ANN401 - None, since nothing is linked or reused in a store
    ) -> None:
        """Begin the dump, or join the one that has begun; arguments as for `CacheWriter`.

        Raises:
            OtherBeginningError: another process was first.
        """
        assert not any(others.values()), others
        super().__init__(root, manifest, ranges=ranges, attachments=attachments)
        self._target = target
        self._leases = Leases(target.below(CLAIMS))
        self._missing: list[int] = []
        self._next_listing = 0.0
        content = self.manifest.to_json()
        if target.read_if_there(BEGUN, MAX_MANIFEST_BYTES) is None:
            staging = target.below(_staging(content))
            for path, digest in self.manifest.files.items():
                staging.write(path, read_checked(root, path, digest))
            target.create(BEGUN, content)
        if finished_manifest(target, self.manifest.identity) is not None:
            target.remove([BEGUN])
            raise OtherBeginningError
        if target.read_if_there(BEGUN, MAX_MANIFEST_BYTES) != content:
            raise OtherBeginningError

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
            raise ShardBusyError(f"shard {shard} of {self._target.url} is being written by another process.")
        return lease

    def announce(self, rank: int) -> None:
        """Do nothing: whoever is free writes what is missing."""

    def left_for(self, rank: int, world_size: int) -> list[int]:
        """Return all shards that are missing, whichever rank they belong to."""
        del rank, world_size
        return self.missing_shards()

    def write_shard(
        self, shard: int, rows: Mapping[str, npt.NDArray[np.generic]], *, table: pa.Table, rank: int = 0
    ) -> int:
        """Write a shard, send it, and commit it unless another process has; see `CacheWriter`.

        Returns:
            0, since nothing of it stays on this machine.
        """
        super().write_shard(shard, rows, table=table, rank=rank)
        path = below(self.root, commit_path(shard))
        content = path.read_bytes()
        files = parse(CommitRecord, content, str(path)).files
        staging = self._target.below(_staging(content))
        with ThreadPoolExecutor(TRANSFERS) as threads:
            sent = [(path, read_checked(self.root, path, digest)) for path, digest in files.items()]
            list(threads.map(lambda item: staging.write(*item), sent))
        self._target.create(commit_path(shard), content)
        if self._target.read(commit_path(shard), MAX_RECORD_BYTES) == content:
            self._place(content, list(files))
        else:  # another process was first; its bytes are as good
            self._target.remove([f"{_staging(content)}/{path}" for path in files])
        self._forget(shard)
        self._next_listing = 0.0
        return 0

    def damaged(
        self, shards: Sequence[int], *, check_rows: CheckRows | None, progress: Progress
    ) -> list[int]:
        """Return those of the given committed shards that are damaged; see `CacheWriter`."""
        stored = self._target.sizes()
        with ThreadPoolExecutor(TRANSFERS) as threads:
            whole = dict(zip(shards, threads.map(lambda n: self._is_whole(n, stored), shards), strict=True))
        lost = [shard for shard in shards if not whole[shard]]
        for shard in shards if check_rows is not None else ():
            if whole[shard]:
                try:
                    self.fetch([shard])
                    lost += super().damaged([shard], check_rows=check_rows, progress=progress)
                except CacheCorruptError:
                    lost.append(shard)
                self._forget(shard)
        return sorted(lost)

    def withdraw(self, shard: int) -> None:
        """Remove a damaged shard's commit record; the caller holds its claim."""
        self._target.remove([commit_path(shard)])
        self._next_listing = 0.0

    def fetch(self, shards: Sequence[int]) -> None:
        """Fetch shards and their records.

        Raises:
            CacheCorruptError: a file is not what was committed.
        """
        for shard in shards:
            content = self._fetch_record(shard)
            files = parse(CommitRecord, content, self._target.url).files
            for path, digest in files.items():
                write_file(below(self.root, path), _read_checked(self._target, path, digest), durable=False)

    @contextmanager
    def sealing(self) -> Iterator[bool]:
        """Hold the lease on sealing, and yield whether the cache can and must still be sealed."""
        self._next_listing = 0.0
        if self.missing_shards():
            yield False
            return
        lease = None
        while (finished := finished_manifest(self._target, self.manifest.identity)) is None:
            lease = self._leases.acquire("seal")
            if lease is not None:
                break
            time.sleep(_POLL_S)
        if finished is not None:
            self.manifest = finished
        try:
            if lease is not None:
                self._gather()
            yield lease is not None
        finally:
            if lease is not None and not self.manifest.complete:
                lease.release()

    def _gather(self) -> None:
        """Fetch all records, and see that every shard's files are in their places.

        Raises:
            StorageError: files have gone from the store; their shards are to be written again.
        """
        shards = range(len(self.ranges))
        with ThreadPoolExecutor(TRANSFERS) as threads:
            list(threads.map(self._fetch_record, shards))
        for shard in (lost := self.damaged(shards, check_rows=None, progress=Silent())):
            self.withdraw(shard)
        if lost:
            raise StorageError(
                f"files of {len(lost)} shards have gone from {self._target.url}. Run the same command "
                "again: it writes these shards again."
            )

    def seal(self, measured: Measured, preview: pa.Table) -> None:
        """Finish the cache on this machine, then in the store; the manifest goes last."""
        super().seal(measured, preview)
        for path, digest in self.manifest.files.items():
            self._target.write(path, read_checked(self.root, path, digest))
        self._target.write(CARD, (self.root / CARD).read_bytes())
        self._target.create(MANIFEST, self.manifest.to_json())
        finished = finished_manifest(self._target, self.manifest.identity)
        assert finished is not None
        self.manifest = finished
        done = (f"{STAGING}/", f"{CLAIMS}/", f"{COMMITS}/", BEGUN)
        self._target.remove([name for name in self._target.sizes() if name.startswith(done)])

    def attach(self, path: str, content: bytes) -> None:
        """Add a file to the finished cache in the store."""
        self.manifest = attach_in_store(self._target, self.root, self.manifest, path=path, content=content)

    def close(self) -> None:
        """End the renewal of leases."""
        self._leases.close()

    def _fetch_record(self, shard: int) -> bytes:
        content = self._target.read(commit_path(shard), MAX_RECORD_BYTES)
        below(self.root, COMMITS).mkdir(exist_ok=True)
        write_file(below(self.root, commit_path(shard)), content, durable=False)
        return content

    def _is_whole(self, shard: int, stored: Mapping[str, int]) -> bool:
        """Return whether a shard's files have their sizes; those that are only staged are put in place.

        Args:
            shard: number of a committed shard.
            stored: sizes of all files of the cache in the store, in bytes.
        """
        content = self._target.read(commit_path(shard), MAX_RECORD_BYTES)
        try:
            files = parse(CommitRecord, content, self._target.url).files
        except CacheCorruptError:
            return False
        absent = [path for path, digest in files.items() if stored.get(path) != digest.size]
        staging = _staging(content)
        if any(stored.get(f"{staging}/{path}") != files[path].size for path in absent):
            return False
        self._place(content, absent)
        return True

    def _place(self, record: bytes, paths: Sequence[str]) -> None:
        """Have the store copy files of a committed shard to their places."""
        with ThreadPoolExecutor(TRANSFERS) as threads:
            list(threads.map(lambda path: self._target.copy(f"{_staging(record)}/{path}", path), paths))

    def _forget(self, shard: int) -> None:
        """Remove a shard from this machine."""
        for path in (commit_path(shard), *shard_files(self.manifest, shard)):
            below(self.root, path).unlink(missing_ok=True)


def attach_in_store(
    target: RemoteFolder, root: Path, manifest: CacheManifest, *, path: str, content: bytes
) -> CacheManifest:
    """Add a file to a finished cache in a store, and return its manifest; see `store.attach`.

    Args:
        target: folder of the cache in the store.
        root: folder on this machine for what is sent.
        manifest: manifest of the cache.
        path: path of the file below the cache.
        content: content of the file.
    """
    named = attach(root, manifest, path=path, content=content)
    if named != manifest or target.sizes().get(path) != len(content):
        target.write(path, content)
        target.write(CARD, (root / CARD).read_bytes())
        target.write(MANIFEST, named.to_json())
    return named


def _staging(content: bytes) -> str:
    """Return the folder of the files that a record or a beginning names."""
    return f"{STAGING}/{hashlib.sha256(content).hexdigest()[:32]}"


def _read_checked(folder: RemoteFolder, path: str, expected: FileDigest) -> bytes:
    """Return a file of a store.

    Raises:
        CacheCorruptError: it is not what was committed.
    """
    content = folder.read(path, expected.size)
    if digest_bytes(content) != expected:
        raise CacheCorruptError(
            f"{folder.url}/{path} is damaged. Run the same command again with `--check full`: it "
            "writes damaged shards again."
        )
    return content


def _same(content: bytes, name: str, *, target: RemoteFolder, identity: CacheIdentity) -> CacheManifest:
    """Return a manifest of a store.

    Raises:
        IdentityMismatchError: it is of another cache.
    """
    manifest = parse(CacheManifest, content, f"{target.url}/{name}")
    differing = differing_values(manifest.identity.model_dump(mode="json"), identity.model_dump(mode="json"))
    if words := ", ".join(differing):
        raise IdentityMismatchError(
            f"{target.url} holds another cache, which differs in {words}. Choose another --out, or repeat "
            "the settings of the first dump."
        )
    return manifest
