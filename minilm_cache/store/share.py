"""Push a cache to a store, list what is there, and pull one from it.

Everything is bound by hashes: a pull checks each file against the commit records, and those against the
manifest, as a reader does. The manifest goes last in both directions, so that nothing half-copied is ever
taken for a cache; shards that have arrived are not copied again.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    CacheNotFoundError,
    IdentityMismatchError,
    InterruptedRunError,
    MiniLMCacheError,
)
from minilm_cache.fingerprint import digest_bytes
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.storage_schema.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    CacheManifest,
    CommitRecord,
    FileDigest,
)
from minilm_cache.storage_schema.problems import parse
from minilm_cache.store.durable import is_vacant, storage_errors, sync_directories, write_file
from minilm_cache.store.layout import CARD, MANIFEST, PREVIEW, below, cache_name, commit_path, shard_bytes
from minilm_cache.store.reader import CacheReader, check_record, check_size, read_checked, read_manifest
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.store.verify import is_sound

Result = TypeVar("Result")

TRANSFERS: Final = 8
"""Files on their way at once."""
_MAX_ATTACHMENT_BYTES: Final = 2**27
"""Of a tokenizer, the largest file outside the shards."""
_MAX_PAGE_BYTES: Final = 2**24
"""Of the card and of the preview, which no hash covers and no reader needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a push or a pull did."""

    place: str
    """URL or folder of the cache that is complete now."""
    manifest: CacheManifest
    shards_copied: int
    shards_kept: int
    """Shards that had arrived before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One cache of a store."""

    url: str
    manifest: CacheManifest | None
    problem: str | None
    """Why it cannot be read; none: it can."""


def catalogue(url: str) -> list[CatalogueEntry]:
    """Return the caches in a store, or the one at its URL.

    Raises:
        StorageError: the store cannot be reached.
    """
    store = open_store(url)
    if store.read_if_there(MANIFEST, MAX_MANIFEST_BYTES) is not None:
        return [_entry(store)]
    with ThreadPoolExecutor(TRANSFERS) as threads:
        found = list(threads.map(_entry, [store.below(name) for name in store.folders()]))
    return [entry for entry in found if entry.manifest is not None or entry.problem is not None]


def find_cache(store_url: str, fingerprint: str) -> str | None:
    """Return the URL of the complete cache of a fingerprint in a store; none: it is not there.

    Raises:
        StorageError: the store cannot be reached.
    """
    store = open_store(store_url)
    for name in store.folders():
        if name.endswith(fingerprint[:12]):
            entry = _entry(store.below(name))
            if entry.manifest is not None and entry.manifest.fingerprint == fingerprint:
                return entry.url
    return None


def _entry(folder: RemoteFolder) -> CatalogueEntry:
    try:
        manifest = remote_manifest(folder)
    except CacheNotFoundError:
        return CatalogueEntry(url=folder.url, manifest=None, problem=None)
    except MiniLMCacheError as error:
        return CatalogueEntry(url=folder.url, manifest=None, problem=str(error))
    return CatalogueEntry(url=folder.url, manifest=manifest, problem=None)


def remote_manifest(folder: RemoteFolder) -> CacheManifest:
    """Return the manifest of a complete cache.

    Raises:
        CacheNotFoundError: there is no cache.
        CacheIncompleteError: it is not complete.
        CacheCorruptError: it is damaged.
        UnsupportedFormatError: a newer release wrote it.
    """
    try:
        content = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    except CacheNotFoundError:
        raise CacheNotFoundError(
            f"no cache at {folder.url}: {MANIFEST} is not there. "
            "Give the URL of a cache, as `minilm-cache ls` shows it."
        ) from None
    manifest = parse(CacheManifest, content, f"{folder.url}/{MANIFEST}")
    check_size(manifest, f"{folder.url}/{MANIFEST}")
    if not manifest.complete:
        raise CacheIncompleteError(f"{folder.url} is incomplete. Push it again where its dump has finished.")
    return manifest


def push(root: Path, store_url: str, progress: Progress, should_stop: ShouldStop) -> Shared:
    """Copy a complete cache into a store, below its name there.

    Raises:
        IdentityMismatchError: a cache of this fingerprint that another dump wrote is partly there.
        CacheCorruptError: a file differs from what was committed; what differs is never sent.
        InterruptedRunError: it was asked to stop; shards that have arrived are kept.
        StorageError: the store refused, or cannot be reached.
    """
    reader = CacheReader(root)
    manifest = reader.manifest
    target = open_store(store_url).below(cache_name(manifest.labels, manifest.identity))
    if target.read_if_there(MANIFEST, MAX_MANIFEST_BYTES) is not None:
        there = remote_manifest(target)
        if there.fingerprint != manifest.fingerprint:
            raise IdentityMismatchError(f"{target.url} holds another cache. Choose another store.")
        progress.note(f"{target.url} is there already: equal fingerprints never need a second push")
        kept = len(manifest.shards)
        return Shared(place=target.url, manifest=there, shards_copied=0, shards_kept=kept)

    sender = _Sender(reader, target, progress)
    progress.start("push", _num_bytes(manifest, list(reader.records.values())), "bytes")
    for path, digest in manifest.files.items():
        sender.send(path, digest)
    for page in (CARD, PREVIEW):
        if below(root, page).is_file():
            target.write(page, below(root, page).read_bytes())
    copied = sum(_each(sender.send_shard, range(len(manifest.shards)), should_stop, target.url))
    target.write(MANIFEST, (root / MANIFEST).read_bytes())
    kept = len(manifest.shards) - copied
    return Shared(place=target.url, manifest=manifest, shards_copied=copied, shards_kept=kept)


class _Sender:
    """Sends files of one cache, each checked against its record before it goes."""

    def __init__(self, reader: CacheReader, target: RemoteFolder, progress: Progress) -> None:
        self._reader = reader
        self._target = target
        self._progress = progress

    def send(self, path: str, expected: FileDigest) -> None:
        """Send a file."""
        self._target.write(path, read_checked(self._reader.root, path, expected))
        self._progress.advance(expected.size)

    def send_shard(self, shard: int) -> bool:
        """Send a shard's files and then its record; returns whether that was necessary."""
        files = self._reader.records[shard].files
        record = below(self._reader.root, commit_path(shard)).read_bytes()
        there = self._target.read_if_there(commit_path(shard), MAX_RECORD_BYTES)
        if there is None:
            for path, expected in files.items():
                self.send(path, expected)
            self._target.write(commit_path(shard), record)
        elif there == record:
            self._progress.advance(sum(expected.size for expected in files.values()))
        else:
            raise IdentityMismatchError(
                f"{self._target.url} holds shards of another dump of the same fingerprint. Delete it, or "
                "choose another store."
            )
        return there is None


def pull(url: str, out: Path, progress: Progress, should_stop: ShouldStop) -> Shared:
    """Copy a cache from a store into a folder; each file is checked as it arrives.

    Raises:
        CacheNotFoundError: there is none.
        CacheCorruptError: what arrives is not what was committed.
        IdentityMismatchError: the folder holds something else.
        InterruptedRunError: it was asked to stop; files that have arrived are kept.
        StorageError: the store refused, or cannot be reached.
    """
    out = out.resolve()
    source = open_store(url)
    manifest = remote_manifest(source)
    num_shards = len(manifest.shards)
    if (out / MANIFEST).is_file():
        there = read_manifest(out)
        if there.fingerprint != manifest.fingerprint:
            raise IdentityMismatchError(f"{out} holds another cache. Choose another --out.")
        if not (there.complete and all(is_sound(out, there, shard) for shard in range(num_shards))):
            raise IdentityMismatchError(
                f"{out} holds this cache, but unfinished or damaged. Repeat its `minilm-cache dump` command, "
                "or choose another --out."
            )
        progress.note(f"{out} holds this cache already: nothing to do")
        return Shared(place=str(out), manifest=manifest, shards_copied=0, shards_kept=num_shards)
    if out.exists() and not (out.is_dir() and is_vacant(out)):
        raise IdentityMismatchError(f"{out} is not empty and is no cache. Choose another --out.")
    arriving = out.with_name(f".{out.name}.{manifest.fingerprint[:12]}.arriving")
    fetcher = Fetcher(source, arriving, manifest)
    records = fetcher.records(should_stop)
    progress.start("pull", _num_bytes(manifest, records), "bytes")

    def fetch_shard(shard: int) -> bool:
        copied = False
        for path, expected in records[shard].files.items():
            copied = fetcher.fetch(path, expected) or copied
            progress.advance(expected.size)
        return copied

    fetcher.attachments(progress)
    copied = sum(_each(fetch_shard, range(num_shards), should_stop, url))
    for page in (CARD, PREVIEW):
        content = source.read_if_there(page, _MAX_PAGE_BYTES)
        if content is not None:
            fetcher.write(page, content)
    fetcher.write(MANIFEST, manifest.to_json())
    with storage_errors("create the cache", out):
        if out.is_dir():
            out.rmdir()
        arriving.rename(out)
        sync_directories([out.parent])
    return Shared(place=str(out), manifest=manifest, shards_copied=copied, shards_kept=num_shards - copied)


class Fetcher:
    """Fetches files of one cache into a folder, each checked against its record before it is written."""

    def __init__(self, source: RemoteFolder, folder: Path, manifest: CacheManifest) -> None:
        """Fetch from `source` into `folder`."""
        self._source = source
        self._folder = folder
        self._manifest = manifest
        # No file of a shard is longer than what it decodes to, but for headers.
        whole = shard_bytes(manifest.identity, manifest.calibration, manifest.shard_tokens)
        self._max_file_bytes = whole + whole // 8 + 2**20

    def records(self, should_stop: ShouldStop) -> list[CommitRecord]:
        """Fetch every shard's commit record.

        Raises:
            CacheCorruptError: one belongs to another cache or shard.
        """

        def fetch(shard: int) -> CommitRecord:
            path = commit_path(shard)
            content = self._source.read(path, MAX_RECORD_BYTES)
            place = f"{self._source.url}/{path}"
            record = parse(CommitRecord, content, place)
            check_record(record, self._manifest, shard, place)
            self.write(path, content)
            return record

        return _each(fetch, range(len(self._manifest.shards)), should_stop, self._source.url)

    def attachments(self, progress: Progress) -> None:
        """Fetch what lies outside the shards."""
        for path, expected in self._manifest.files.items():
            self.fetch(path, expected, _MAX_ATTACHMENT_BYTES)
            progress.advance(expected.size)

    def fetch(self, path: str, expected: FileDigest, max_bytes: int | None = None) -> bool:
        """Fetch a file of at most so many bytes, of a shard where no bound is given.

        Returns whether that was necessary.

        Raises:
            CacheCorruptError: what arrives is not what was committed.
        """
        if expected.size > (max_bytes or self._max_file_bytes):
            raise CacheCorruptError(
                f"{self._source.url}/{path} claims {expected.size} bytes, more than it can need. "
                "It was not written by `minilm-cache dump`."
            )
        if below(self._folder, path).is_file():
            try:
                read_checked(self._folder, path, expected)
            except CacheCorruptError:
                pass  # cut short by a kill of an older release, or damaged since: fetched again
            else:
                return False
        content = self._source.read(path, expected.size)
        if digest_bytes(content) != expected:
            raise CacheCorruptError(
                f"{self._source.url}/{path} is not what was committed. Run the same command again; if it "
                "says so again, the cache was damaged there: ask who published it to push it again."
            )
        self.write(path, content)
        return True

    def write(self, path: str, content: bytes) -> None:
        """Write a file into the folder, durably."""
        file = below(self._folder, path)
        with storage_errors("write", file):
            write_file(file, content)


def _num_bytes(manifest: CacheManifest, records: Sequence[CommitRecord]) -> int:
    shards = sum(digest.size for record in records for digest in record.files.values())
    return shards + sum(digest.size for digest in manifest.files.values())


def _each(work: Callable[[int], Result], numbers: range, should_stop: ShouldStop, place: str) -> list[Result]:
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
