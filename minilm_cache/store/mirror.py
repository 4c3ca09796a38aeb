"""Read a cache from its URL: shards are fetched when needed, checked, and kept up to a size limit.

All processes of a machine share what is kept: each shard has a lock file, which whoever fetches or removes
the shard holds, and whose time says when the shard was used last. Shards are read without it: a file that is
removed meanwhile can be read to its end, and one that is not there is fetched.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
from filelock import FileLock

from minilm_cache.errors import CacheCorruptError
from minilm_cache.session import ALONE
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.manifest import INDEX
from minilm_cache.store.catalogue import named_manifest
from minilm_cache.store.checked import file_state
from minilm_cache.store.durable import lock_if_free, storage_errors
from minilm_cache.store.layout import LOCKS, MANIFEST, below, lock_path, sequences_path, shard_files
from minilm_cache.store.pull import Fetcher
from minilm_cache.store.reader import CacheReader, Segment, refuse_other_metadata
from minilm_cache.store.remote import open_store

_WAIT_S: Final = 86_400.0
"""Longest wait, in seconds, for a shard that another reader is fetching."""
_REQUESTS: Final = 64
"""Most requests of a reader at the same time."""
_SHARERS: Final = 8
"""Processes that may fetch as many bytes as this one until it counts again."""
_IN_USE_NS: Final = 30 * 10**9
"""Nanoseconds since its last use for which a shard of several segments is kept whatever the limit."""
_EVICTION_LOCK: Final = f"{LOCKS}/eviction.lock"


class MirrorReader(CacheReader):
    """Reader of a cache at a URL. Threads and processes may share it.

    Its local folder holds the files outside the shards that were needed, and the shards that were used last.
    """

    reads_at_once = 16
    bytes_ahead = 2**29

    def __init__(self, url: str, home: Path, max_bytes: int) -> None:
        """Open a complete cache. The manifest and the tables of shards are all that is fetched.

        Args:
            url: URL of the cache.
            home: folder that holds all mirrors, each in `mirrors/`. Dumps with one fingerprint may differ in
                their bytes, so a mirror is named by the fingerprint and by the hash of the index.
            max_bytes: most bytes of shard files on this machine; shards in use may exceed it.

        Raises:
            CacheNotFoundError: there is no cache.
            CacheCorruptError: a fetched file differs from what was committed.
            StorageError: the store cannot be reached.
        """
        self._opened_by = (url, home.absolute(), max_bytes)
        source = open_store(url)
        manifest = named_manifest(source)
        index = [manifest.files[INDEX].sha256[:12]] if INDEX in manifest.files else []
        folder = home / "mirrors" / "-".join([manifest.fingerprint, *index])
        self._fetcher = Fetcher(source, folder, manifest, durable=False)
        self._fetcher.tables(ALONE)
        self._fetcher.write(MANIFEST, manifest.to_json())
        self._max_bytes = max_bytes
        self._room = 0
        """Bytes that may still be fetched before what is kept has to be counted."""
        super().__init__(folder)
        self._requests, self._process = ThreadPoolExecutor(_REQUESTS), os.getpid()

    def _opening(self) -> tuple[object, ...]:
        return self._opened_by

    def _check_metadata(self) -> None:
        """Compare the metadata that the manifest implies with its digests; no file is needed for that."""
        refuse_other_metadata(self.manifest, len(self.ranges), self._fetcher.url)

    def attachment(self, path: str) -> bytes:
        """Return the checked content of a file outside the shards, fetched first if it is not here yet."""
        if path in self.manifest.files:
            self._fetcher.attachment(path)
        return super().attachment(path)

    def segment(self, number: int, paths: Collection[str] | None = None) -> Segment:
        """Read one segment, after fetching those files of its shard that are not on this machine yet."""
        shard = self.segments.shard_of(number)
        self._note_use(shard)
        # Without the lock, so that segments of a shard are read at the same time. Files are whole or absent.
        with suppress(CacheCorruptError):
            return super().segment(number, paths)
        with self._in_use(shard):
            try:
                return super().segment(number, paths)
            except CacheCorruptError:  # not here yet, or damaged here
                wanted = {
                    file: digest
                    for file, digest in self._require(shard).files.items()
                    if paths is None
                    or file.split("/c/")[0] in {"tokens", *paths}
                    or file == sequences_path(shard)
                }
                self._fetch(wanted)
                segment = super().segment(number, paths)
        self._make_room(sum(digest.size for digest in wanted.values()))
        return segment

    def table(self, number: int) -> pa.Table:
        """Read the sequence table of a shard, which is fetched first if it is not on this machine yet."""
        path = sequences_path(number)
        self._note_use(number)
        with self._in_use(number):
            self._fetch({path: self._require(number).files[path]})
            return super().table(number)

    def _fetch(self, wanted: Mapping[str, FileDigest]) -> None:
        """Fetch those files of a shard that is in use which are not on this machine yet."""
        if self._process != os.getpid():  # threads are not in a forked process
            self._requests, self._process = ThreadPoolExecutor(_REQUESTS), os.getpid()
        self._fetcher.fetch_all(wanted, self._requests)
        for file in wanted:  # all of them have just been compared
            self._known_files[file] = file_state(below(self.root, file).stat())

    def _note_use(self, number: int) -> None:
        """Note that a shard is used now."""
        path = below(self.root, lock_path(number))
        with storage_errors("lock", path):
            path.parent.mkdir(exist_ok=True)
            path.touch()
            used_at = time.time_ns()
            os.utime(path, ns=(used_at, used_at))

    @contextmanager
    def _in_use(self, number: int) -> Iterator[None]:
        """Hold the lock on a shard, so that nobody else fetches or removes it."""
        path = below(self.root, lock_path(number))
        lock = FileLock(path, timeout=_WAIT_S, poll_interval=0.01)
        with storage_errors("lock", path):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _make_room(self, fetched: int) -> None:
        """Remove the shards that were used least recently, if those that are kept may exceed the limit.

        `fetched` is the number of bytes that were fetched since the last call.
        """
        self._room -= _SHARERS * fetched
        if self._room > 0:
            return
        lock = lock_if_free(below(self.root, _EVICTION_LOCK))
        if lock is None:  # another process is at it
            return
        try:
            kept = sorted(self._kept())
            total = sum(size for _, _, size in kept)
            # Segments of a shard are read one after the other: it stays until they have been.
            latest = time.time_ns() - (_IN_USE_NS if self.segments.per_shard > 1 else 0)
            for used_at, number, size in kept:
                if total > self._max_bytes and used_at <= latest and self._remove(number):
                    total -= size
            self._room = self._max_bytes - total
        finally:
            lock.release()

    def _kept(self) -> list[tuple[int, int, int]]:
        """Return time of last use (nanoseconds), number and bytes of every shard that is on this machine."""
        kept = []
        with storage_errors("list", self.root):
            locks = {int(lock.stem): lock for lock in below(self.root, LOCKS).glob("[0-9]*.lock")}
            tables = below(self.root, sequences_path(0)).parent.glob("part-*.parquet")
            # An earlier release kept shards without a lock each.
            for number in locks.keys() | {int(table.stem.removeprefix("part-")) for table in tables}:
                used_at = locks[number].stat().st_mtime_ns if number in locks else 0
                files = (below(self.root, path) for path in shard_files(self.manifest, number))
                size = sum(file.stat().st_size for file in files if file.is_file())
                if size:
                    kept.append((used_at, number, size))
        return kept

    def _remove(self, number: int) -> bool:
        """Remove a shard unless it is in use, and return whether it was removed."""
        path = below(self.root, lock_path(number))
        lock = lock_if_free(path)
        if lock is None:
            return False
        try:
            with storage_errors("remove", path):
                for file in shard_files(self.manifest, number):
                    below(self.root, file).unlink(missing_ok=True)
        finally:
            lock.release()
        return True
