"""Read a cache from its URL: shards are fetched when needed, checked, and kept up to a size limit."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from filelock import FileLock

from minilm_cache.progress import Silent, never_stop
from minilm_cache.storage_schema.manifest import TEACHER_WEIGHTS
from minilm_cache.store.catalogue import named_manifest
from minilm_cache.store.durable import storage_errors
from minilm_cache.store.layout import MANIFEST, below, sequences_path
from minilm_cache.store.pull import Fetcher
from minilm_cache.store.reader import CacheReader, Shard
from minilm_cache.store.remote import open_store

_WAIT_S = 86_400.0
"""Longest wait, in seconds, for a shard that another reader is fetching."""


class MirrorReader(CacheReader):
    """Reader of a cache at a URL. Threads may share it.

    Its local folder holds all files outside the shards, and the shards that were used last.
    """

    def __init__(self, url: str, home: Path, max_bytes: int) -> None:
        """Open a complete cache.

        Args:
            url: URL of the cache.
            home: folder that holds all mirrors, each in `mirrors/` and the cache's fingerprint.
            max_bytes: most bytes of shard files on this machine; shards in use may exceed it.

        Raises:
            CacheNotFoundError: there is no cache.
            CacheCorruptError: a fetched file differs from what was committed.
            StorageError: the store cannot be reached.
        """
        source = open_store(url)
        manifest = named_manifest(source)
        folder = home / "mirrors" / manifest.fingerprint
        self._fetcher = Fetcher(source, folder, manifest)
        self._fetcher.records(never_stop)
        self._fetcher.attachments(Silent(), later=[TEACHER_WEIGHTS])
        self._fetcher.write(MANIFEST, manifest.to_json())
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._used: OrderedDict[int, None] = OrderedDict()
        self._busy: dict[int, int] = {}
        super().__init__(folder)
        for number in self.records:  # shards that an earlier run has fetched
            if self._num_bytes(number):
                self._used[number] = None

    def attachment(self, path: str) -> bytes:
        """Return the checked content of a file outside the shards, fetched first if it is not here yet."""
        if path in self.manifest.files:
            with self._fetch_lock():
                self._fetcher.attachment(path)
        return super().attachment(path)

    def shard(self, number: int, paths: Collection[str] | None = None) -> Shard:
        """Read one shard, after fetching those of its files that are not on this machine yet."""
        with self._fetch_lock(), self._using(number):
            for path, expected in self._require(number).files.items():
                array = path.split("/c/")[0]
                is_read = paths is None or array in paths or array == "tokens"
                if is_read or path == sequences_path(number):
                    self._fetcher.fetch(path, expected)
            return super().shard(number, paths)

    def _fetch_lock(self) -> FileLock:
        """Return the lock that keeps other readers, in any process, from removing what this one fetches."""
        return FileLock(self.root / "mirror.lock", timeout=_WAIT_S, poll_interval=0.01)

    @contextmanager
    def _using(self, number: int) -> Iterator[None]:
        """Keep a shard from being removed while the block runs, and remove the oldest shards afterwards."""
        with self._lock:
            self._busy[number] = self._busy.get(number, 0) + 1
            self._used[number] = None
            self._used.move_to_end(number)
        try:
            yield
        finally:
            with self._lock:
                self._busy[number] -= 1
                self._remove_oldest()

    def _remove_oldest(self) -> None:
        sizes = {number: self._num_bytes(number) for number in self._used}
        total = sum(sizes.values())
        for number in list(self._used):
            if total <= self._max_bytes:
                return
            if not self._busy.get(number):
                self._remove(number)
                total -= sizes[number]

    def _remove(self, number: int) -> None:
        for path in self.records[number].files:
            file = below(self.root, path)
            with storage_errors("remove", file):
                file.unlink(missing_ok=True)
        del self._used[number]

    def _num_bytes(self, number: int) -> int:
        files = (below(self.root, path) for path in self.records[number].files)
        return sum(file.stat().st_size for file in files if file.is_file())
