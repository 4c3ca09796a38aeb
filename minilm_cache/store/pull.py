"""Copy a cache from a store, and check every file as it arrives."""

import math
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import numpy as np

from minilm_cache.errors import (
    CacheCorruptError,
    CacheNotFoundError,
    IdentityMismatchError,
    InvalidConfigError,
    MiniLMCacheError,
)
from minilm_cache.session import Session
from minilm_cache.storage_schema.arrays import all_small_arrays, array_specs
from minilm_cache.storage_schema.documents import MAX_RECORD_BYTES, FileDigest
from minilm_cache.storage_schema.manifest import INDEX, RANGES, TEACHER_WEIGHTS, CacheManifest
from minilm_cache.store.card import cache_card
from minilm_cache.store.catalogue import named_manifest
from minilm_cache.store.checked import MAX_WEIGHTS_BYTES, Hasher, checked_file, is_sound
from minilm_cache.store.durable import (
    PARTIAL,
    is_vacant,
    locked,
    new_file,
    refuse_full_disk,
    remove_partials,
    storage_errors,
    sync_directories,
    write_file,
)
from minilm_cache.store.index import open_shards, parse_record, read_ranges, refuse_large_index
from minilm_cache.store.layout import CARD, MANIFEST, below, commit_path, refuse_inside_cache
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import CacheReader, read_manifest, refuse_other_metadata
from minilm_cache.store.remote import RemoteFolder, TransferResult, for_each, num_bytes, open_store

_TABLE_ROW_BYTES: Final = 64
"""Most bytes that a row of a sequence table takes."""
_MAX_ATTACHMENT_BYTES: Final = 2**27
"""Most bytes of a file outside the shards; the largest one is that of a tokenizer."""
_PART_BYTES: Final = 2**23
"""Most bytes of a request of `Fetcher.fetch_all`."""
_PARTS_AHEAD: Final = 64
"""Parts that `Fetcher.fetch_all` requests before they are written."""
_LARGE_PART_BYTES: Final = 2**26
"""Most bytes of a request of `Fetcher.fetch`."""


def pull(url: str, out: Path, *, session: Session) -> TransferResult:
    """Copy a cache from a store into a folder, and check each file as it arrives.

    Raises:
        InvalidConfigError: the folder lies in another cache.
        CacheNotFoundError: there is no cache.
        CacheCorruptError: a fetched file differs from what was committed.
        IdentityMismatchError: the folder holds something else.
        InterruptedRunError: a stop was requested; files that have arrived are kept.
        StorageError: the store refused, or cannot be reached.
    """
    try:
        out = out.resolve()
    except (OSError, RuntimeError) as error:
        raise InvalidConfigError(f"--out {out}: it is a loop of links. Choose another folder.") from error
    refuse_inside_cache(out, "--out")
    source = open_store(url)
    manifest = named_manifest(source)
    lock = out.with_name(f".{out.name}.pull.lock")
    interrupted = f"interrupted while another process pulls into {out}. Run the same command again."
    with locked(lock, should_stop=session.should_stop, interrupted=interrupted):
        result = _pull(source, manifest, out=out, session=session)
        # A process that then gets the lock on the removed file finds the cache complete.
        lock.unlink(missing_ok=True)
        return result


def _pull(source: RemoteFolder, manifest: CacheManifest, *, out: Path, session: Session) -> TransferResult:
    existing = _manifest_there(out, manifest)
    if existing is not None:
        if existing.fingerprint != manifest.fingerprint:
            raise IdentityMismatchError(f"{out} holds another cache. Choose another --out.")
        return _renewed(source, manifest, existing, out=out, session=session)
    if out.exists() and not (out.is_dir() and is_vacant(out)):
        raise IdentityMismatchError(f"{out} is not empty and is not a cache. Choose another --out.")
    arriving = _arriving_folder(out, manifest)
    copied, kept = _fetch(Fetcher(source, arriving, manifest), source, arriving, out=out, session=session)
    with storage_errors("create the cache", out):
        if out.is_dir():
            shutil.rmtree(out)  # holds only leftovers of interrupted writes, see above
        arriving.rename(out)
        sync_directories([out.parent])
    return TransferResult(place=str(out), manifest=manifest, shards_copied=copied, shards_kept=kept)


def _renewed(
    source: RemoteFolder, manifest: CacheManifest, existing: CacheManifest, *, out: Path, session: Session
) -> TransferResult:
    """Fetch what a copy lacks or has damaged, and what is another in the store, such as new prompts.

    Files that the copy has got since it was pulled, such as weights, stay.

    Raises:
        CacheCorruptError: one of these files is damaged, which the store does not have.
        IdentityMismatchError: the folder holds another dump of the same fingerprint, which is not whole.
    """
    further = {path: digest for path, digest in existing.files.items() if path not in manifest.files}
    whole = manifest.model_copy(update={"files": manifest.files | further})
    is_same = existing.complete and _is_same_dump(existing, manifest)
    others = {path for path, digest in manifest.files.items() if existing.files.get(path) != digest}
    if is_same and others:
        lacking = sorted(others - existing.files.keys())
        words = [f"without {', '.join(lacking)}"] if lacking else []
        if changed := sorted(others & existing.files.keys()):
            words.append(f"with another {', '.join(changed)} than the store, which is fetched")
        session.progress.note(f"{out} holds this cache already, {' and '.join(words)}")
    elif existing.complete and _is_sound(out):
        another = "" if is_same else ", from another dump with an equal fingerprint"
        session.progress.note(f"{out} holds this cache already{another}: nothing to do")
        num_shards = len(read_ranges(out, existing))
        return TransferResult(place=str(out), manifest=existing, shards_copied=0, shards_kept=num_shards)
    elif not is_same:
        raise IdentityMismatchError(
            f"{out} holds this cache, but unfinished, or damaged and of another dump. Repeat its "
            "`minilm-cache dump` command, or remove the folder and pull again."
        )
    else:
        session.progress.note(
            f"{out} holds this cache, but damaged: fetching what is not as it was committed"
        )
    copied, kept = _fetch(Fetcher(source, out, manifest), source, out, out=out, session=session, whole=whole)
    for path, expected in further.items():
        if not is_sound(out, path, expected):
            raise CacheCorruptError(
                f"{out / path} is damaged, and {source.url} does not have it. Remove the folder, pull again, "
                "and repeat what has added it."
            )
    return TransferResult(place=str(out), manifest=whole, shards_copied=copied, shards_kept=kept)


def _is_same_dump(one: CacheManifest, other: CacheManifest) -> bool:
    """Return whether two manifests name the same shards, or say the same in format 1, without an index."""
    if INDEX in other.files:
        return one.files.get(INDEX) == other.files[INDEX]
    # Manifests of the first releases have no checksum.
    alike = [each.model_copy(update={"checksum": None, "files": {}}) for each in (one, other)]
    return alike[0] == alike[1]


def _manifest_there(out: Path, manifest: CacheManifest) -> CacheManifest | None:
    """Return the manifest of the cache in a folder, or the store's where that is damaged or lost.

    None means that the folder holds no cache.

    Raises:
        CacheCorruptError: it is damaged, and the files beside it do not show that the cache is the store's.
    """
    try:
        return read_manifest(out)
    except (CacheCorruptError, CacheNotFoundError) as error:
        # The index has hashes of every shard, so no other cache has the same one. Format 1 has no index.
        is_this = INDEX in manifest.files and not (out / MANIFEST).is_dir()
        if is_this and all(is_sound(out, path, expected) for path, expected in manifest.files.items()):
            return manifest
        if isinstance(error, CacheNotFoundError):
            return None
        raise CacheCorruptError(
            f"{out / MANIFEST} is damaged, and nothing beside it shows that the cache is that of the store. "
            "Choose another --out, or remove the folder if you do not need it."
        ) from error


def _fetch(
    fetcher: "Fetcher",
    source: RemoteFolder,
    folder: Path,
    *,
    out: Path,
    session: Session,
    whole: CacheManifest | None = None,
) -> tuple[int, int]:
    """Fetch all files of a cache that a folder lacks, or that differ; the manifest comes last.

    Args:
        fetcher: fetches into the folder.
        source: folder of the cache in a store.
        folder: folder that the files are written into.
        out: folder of the cache when all is done, for messages.
        session: its progress shows bytes. Its `should_stop` is called between files.
        whole: manifest of the folder when all is done. None means that it is the store's.

    Returns:
        The numbers of shards that were copied, and that were there.
    """
    manifest = fetcher.manifest
    ranges = fetcher.tables(session)
    num_shards, records = len(ranges), open_shards(folder, manifest, ranges)
    refuse_other_metadata(manifest, num_shards, source.url)
    size = num_bytes(manifest, records)
    arrived = fetcher.bytes_arrived(manifest.files)
    for record in records.values():
        for path, expected in record.files.items():
            fetcher.refuse_claim(path, expected)
        arrived += fetcher.bytes_arrived(record.files)
    refuse_full_disk(out, size - arrived, "pull a cache into")
    session.progress.start("pull", size, "bytes")

    def fetch_shard(shard: int) -> bool:
        copied = False
        for path, expected in records[shard].files.items():
            copied = fetcher.fetch(path, expected) or copied
            session.progress.advance(expected.size)
        return copied

    fetcher.attachments(session)
    copied = sum(for_each(fetch_shard, range(num_shards), should_stop=session.should_stop, place=source.url))
    whole = whole or manifest
    fetcher.write(CARD, cache_card(whole).encode())  # made anew: no hash covers the one of the store
    fetcher.write(MANIFEST, whole.to_json())
    return copied, num_shards - copied


def _arriving_folder(out: Path, manifest: CacheManifest) -> Path:
    """Return the folder that a cache is fetched into, without what killed pulls have left in it."""
    arriving = out.with_name(f".{out.name}.{manifest.fingerprint[:12]}.arriving")
    for left in arriving.rglob(f".*{PARTIAL}"):
        left.unlink(missing_ok=True)
    return arriving


def _is_sound(root: Path) -> bool:
    """Return whether every file of a complete cache matches what was committed (XXH3-128)."""
    try:
        reader = CacheReader(root)
        for files in (reader.manifest.files, *(shard.files for shard in reader.records.values())):
            for path, expected in files.items():
                checked_file(root, path, expected)
    except MiniLMCacheError:
        return False
    return True


class Fetcher:
    """Fetches files of a cache into a folder; each is checked against its record before it is written."""

    def __init__(
        self, source: RemoteFolder, folder: Path, manifest: CacheManifest, *, durable: bool = True
    ) -> None:
        """Prepare to fetch from `source` into `folder`.

        Args:
            source: folder of the cache in a store.
            folder: folder that the files are written into.
            manifest: manifest of the cache.
            durable: flush every file to disk. False where a file that is lost can be fetched again.
        """
        self.url = source.url
        self._durable = durable
        self._source = source
        self._folder = folder
        self.manifest = manifest
        specs = array_specs(manifest.identity, manifest.calibration)
        self._row_bytes = {spec.path: spec.row_bytes for spec in specs}

    def tables(self, session: Session) -> ShardRanges:
        """Fetch what says what the shards hold and consist of, and return the former.

        Raises:
            CacheCorruptError: the index or a commit record is damaged, or belongs to another cache.
            InterruptedRunError: a stop was requested.
        """
        manifest = self.manifest
        if not manifest.shards:
            self.attachment(RANGES)
        ranges = read_ranges(self._folder, manifest)
        if not manifest.shards:
            refuse_large_index(manifest, len(ranges), f"{self._source.url}/{INDEX}")
            self.fetch(INDEX, manifest.files[INDEX], manifest.files[INDEX].size)
        else:
            self._records(ranges, session)
        return ranges

    def _records(self, ranges: ShardRanges, session: Session) -> None:
        """Fetch every shard's commit record, in format 1."""

        def fetch(shard: int) -> None:
            path = commit_path(shard)
            content = self._source.read(path, MAX_RECORD_BYTES)
            where = f"{self._source.url}/{path}"
            parse_record(content, self.manifest, ranges=ranges, shard=shard, where=where)
            self.write(path, content)

        for_each(fetch, range(len(ranges)), should_stop=session.should_stop, place=self._source.url)

    def attachments(self, session: Session) -> None:
        """Fetch the files outside the shards, but for the index, which `tables` fetches."""
        for path, expected in self.manifest.files.items():
            if path != INDEX:
                self.attachment(path)
            session.progress.advance(expected.size)

    def attachment(self, path: str) -> None:
        """Fetch one file outside the shards."""
        most = MAX_WEIGHTS_BYTES if path == TEACHER_WEIGHTS else _MAX_ATTACHMENT_BYTES
        self.fetch(path, self.manifest.files[path], self._small_bytes.get(path, most))

    @cached_property
    def _small_bytes(self) -> dict[str, int]:
        """Bytes of the arrays that apply to all tokens, by path; those of large teachers have many."""
        return {
            small.chunk_path: math.prod(small.shape) * np.dtype(small.dtype).itemsize
            for small in all_small_arrays(self.manifest.identity, self.manifest.calibration)
        }

    def fetch(self, path: str, expected: FileDigest, max_bytes: int | None = None) -> bool:
        """Fetch a file, unless it is in the folder already.

        Args:
            path: path below the cache's root.
            expected: size and hashes of the file.
            max_bytes: most bytes of the file. None means what a file of a shard can need.

        Returns:
            Whether the file was fetched.

        Raises:
            CacheCorruptError: a fetched file differs from what was committed.
        """
        self.refuse_claim(path, expected, max_bytes)
        if self._has(path, expected):
            return False
        with self._arriving(path, expected) as keep:
            num_bytes = expected.size + 1  # so that a file that is longer is noticed
            for first in range(0, num_bytes, _LARGE_PART_BYTES):
                keep(self._source.read_range(path, first, min(_LARGE_PART_BYTES, num_bytes - first)))
        return True

    def fetch_all(self, files: Mapping[str, FileDigest], requests: ThreadPoolExecutor) -> None:
        """Fetch files of a shard, unless they are in the folder already: all at the same time, in parts.

        Args:
            files: what is expected of each file, by its path below the cache's root.
            requests: makes the requests, of at most 8 MiB each.

        Raises:
            CacheCorruptError: a fetched file differs from what was committed.
        """
        for path, expected in files.items():
            self.refuse_claim(path, expected)
        missing = {path: expected for path, expected in files.items() if not self._has(path, expected)}
        parts = _ahead(
            requests,
            (
                partial(self._source.read_range, path, first, min(_PART_BYTES, expected.size - first))
                for path, expected in missing.items()
                for first in range(0, expected.size, _PART_BYTES)
            ),
        )
        for path, expected in missing.items():
            remove_partials(below(self._folder, path))  # of processes that were killed
            with self._arriving(path, expected) as keep:
                for _ in range(0, expected.size, _PART_BYTES):
                    keep(next(parts))

    def bytes_arrived(self, paths: Iterable[str]) -> int:
        """Return the bytes of those files that are in the folder already."""
        files = (below(self._folder, path) for path in paths)
        return sum(file.stat().st_size for file in files if file.is_file())

    def _has(self, path: str, expected: FileDigest) -> bool:
        """Return whether a file is in the folder, as it was committed."""
        return below(self._folder, path).is_file() and is_sound(self._folder, path, expected)

    @contextmanager
    def _arriving(self, path: str, expected: FileDigest) -> Iterator[Callable[[bytes], None]]:
        """Yield a function that keeps the parts of a file as they arrive; the file counts when all have.

        Raises:
            CacheCorruptError: the file is not what was committed; it is not kept.
        """
        file, hasher = below(self._folder, path), Hasher()
        with storage_errors("write", file), new_file(file, durable=self._durable) as arriving:

            def keep(part: bytes) -> None:
                hasher.update(part)
                arriving.write(part)

            yield keep
            if hasher.digest() != expected:
                raise CacheCorruptError(
                    f"{self._source.url}/{path} is not what was committed. Run the same command again; if "
                    "that fails too, the store's copy is damaged: ask its publisher to run `minilm-cache "
                    "push --full`."
                )

    def refuse_claim(self, path: str, expected: FileDigest, max_bytes: int | None = None) -> None:
        """Raise CacheCorruptError for a file that is said to be larger than it can be.

        Args:
            path: path below the cache's root.
            expected: what is said of the file.
            max_bytes: most bytes of the file. None means what a file of a shard can need.
        """
        if expected.size > (max_bytes or self._most_bytes(path)):
            raise CacheCorruptError(
                f"{self._source.url}/{path} claims {expected.size} bytes, more than it can need. "
                "It was not written by `minilm-cache dump`."
            )

    def _most_bytes(self, path: str) -> int:
        """Return the most bytes that a file of a shard can need: its decoded size and its headers."""
        row_bytes = self._row_bytes.get(path.split("/c/", maxsplit=1)[0], _TABLE_ROW_BYTES)
        decoded = self.manifest.shard_tokens * row_bytes
        return decoded + decoded // 8 + 2**20

    def write(self, path: str, content: bytes) -> None:
        """Write a file into the folder, completely or not at all."""
        file = below(self._folder, path)
        with storage_errors("write", file):
            write_file(file, content, durable=self._durable)


def _ahead(requests: ThreadPoolExecutor, calls: Iterable[Callable[[], bytes]]) -> Iterator[bytes]:
    """Yield the results of calls in their order, while those after them are made."""
    pending: deque[Future[bytes]] = deque()
    try:
        for call in calls:
            pending.append(requests.submit(call))
            if len(pending) == _PARTS_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:  # after an error nobody wants them
            future.cancel()
