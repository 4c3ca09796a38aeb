"""Verify a cache without a model: compare its files with what was committed.

`quick` checks the manifest, the metadata, the index (or every commit record), and sizes of all other files.
`full` also compares every file's SHA-256, decodes every array (which checks the crc32c of each chunk),
compares the token ids with the hash that was committed and checks the sequence tables.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minilm_cache.errors import CacheCorruptError, CacheNotFoundError, MiniLMCacheError
from minilm_cache.session import Session
from minilm_cache.settings import DEFAULT_LOCAL_BYTES
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.manifest import INDEX, RANGES, CacheManifest
from minilm_cache.store.catalogue import named_manifest
from minilm_cache.store.checked import Hasher, sha256_file, tokens_hash
from minilm_cache.store.durable import own_cores
from minilm_cache.store.index import open_shards, read_ranges
from minilm_cache.store.layout import COMMITS, MANIFEST, below, commit_path
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.reader import CacheReader, Segment, read_manifest, refuse_other_metadata
from minilm_cache.store.remote import RemoteFolder, for_each, open_store

_MAX_INDEX_BYTES = 2**31
_REMOTE_PART_BYTES = 2**23
"""Most bytes of a request that reads a file in a store."""
CheckRows = Callable[[CacheReader], Callable[[Segment], None]]
"""Returns, for a reader, a function that checks the rows of a segment and raises CacheCorruptError."""

_ListedFile = tuple[str, int | None, FileDigest]
"""Path below the root, shard, and committed digest. Shard None means a file outside the shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A file that differs from what was committed."""

    path: str
    """Path below the cache's root."""
    shard: int | None
    """Number of the shard that it belongs to. None means a file outside the shards."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of verifying a cache."""

    complete: bool | None
    """Whether the dump has finished. False means that only committed shards were checked; None means that the
    manifest is damaged and nothing else was checked."""
    num_files: int
    """Files that were checked."""
    num_bytes: int
    """Bytes of these files as they were committed."""
    damage: tuple[Damage, ...]


def verify(root: Path, *, full: bool, num_threads: int, session: Session, check_rows: CheckRows) -> Verdict:
    """Verify every committed shard of a cache, finished or not.

    Args:
        root: folder of the cache.
        full: read every byte. False means that only sizes are compared.
        num_threads: files that are checked at the same time.
        session: its progress shows the bytes done.
        check_rows: finds shards whose rows cannot be decoded; a parameter, since the store knows no codecs.

    Raises:
        CacheNotFoundError: there is no cache.
        UnsupportedFormatError: a newer release wrote the cache.
    """
    try:
        manifest = read_manifest(root)
    except (CacheCorruptError, CacheNotFoundError) as error:
        if not (below(root, COMMITS).is_dir() or below(root, INDEX).is_file()):
            raise
        manifest_damage = Damage(path=MANIFEST, shard=None, reason=str(error))
        return Verdict(complete=None, num_files=0, num_bytes=0, damage=(manifest_damage,))
    files, damaged = _listed_files(root, manifest)
    num_bytes = sum(digest.size for _, _, digest in files)
    session.progress.start("verify", num_bytes, "bytes")

    def examine(file: _ListedFile) -> Damage | None:
        path, shard, expected = file
        reason: str | None
        try:
            reason = _file_damage(below(root, path), expected, full=full or path.endswith("zarr.json"))
        except CacheCorruptError as error:  # a symbolic link, or a path that leads out of the cache
            reason = str(error)
        session.progress.advance(expected.size)
        return None if reason is None else Damage(path=path, shard=shard, reason=reason)

    with ThreadPoolExecutor(num_threads) as threads:
        damaged += [damage for damage in threads.map(examine, files) if damage is not None]
    if not (full or damaged):
        damaged += _metadata_damage(root, manifest)
    if full and not damaged:
        damaged += _content_damage(root, num_threads, check_rows=check_rows, session=session)
    return Verdict(
        complete=manifest.complete, num_files=len(files), num_bytes=num_bytes, damage=tuple(damaged)
    )


def _metadata_damage(root: Path, manifest: CacheManifest) -> list[Damage]:
    """Return what is wrong with metadata that is as the manifest says; no file of a shard is read."""
    try:
        num_shards, again = len(read_ranges(root, manifest)), "Dump it again, or pull it again."
        refuse_other_metadata(manifest, num_shards, str(root / MANIFEST), remedy=again)
    except CacheCorruptError as error:
        return [Damage(path=MANIFEST, shard=None, reason=str(error))]
    return []


def verify_url(url: str, home: Path, *, full: bool, session: Session) -> Verdict:
    """Verify a complete cache in a store, of which only the manifest and the tables are copied.

    Args:
        url: URL of the cache.
        home: folder below which what is kept of caches at URLs lies.
        full: read every byte. False means that only sizes are compared.
        session: its progress shows the bytes done. Its `should_stop` is called between files.

    Raises:
        CacheNotFoundError: there is no cache.
        InterruptedRunError: a stop was requested.
        StorageError: the store cannot be reached.
    """
    source = open_store(url)
    try:
        manifest = named_manifest(source)
        sizes = source.sizes()
        digests = {path: manifest.files[path] for path in (RANGES, INDEX) if path in manifest.files}
        tables = [
            Damage(path=path, shard=None, reason=reason)
            for path, digest in digests.items()
            if (reason := _remote_damage(source, path, digest, size=sizes.get(path), full=True)) is not None
        ]
        if tables:  # nothing else can be listed without them
            num_bytes = sum(digest.size for digest in digests.values())
            return Verdict(complete=True, num_files=len(digests), num_bytes=num_bytes, damage=tuple(tables))
        reader = MirrorReader(url, home, DEFAULT_LOCAL_BYTES)
    except (CacheCorruptError, CacheNotFoundError) as error:
        is_missing = isinstance(error, CacheNotFoundError)
        if is_missing and source.read_if_there(INDEX, _MAX_INDEX_BYTES) is None:
            raise
        lost = Damage(path=MANIFEST, shard=None, reason="missing" if is_missing else "damaged")
        return Verdict(complete=None, num_files=0, num_bytes=0, damage=(lost,))
    files, damaged = _listed_files(reader.root, reader.manifest)
    num_bytes = sum(digest.size for _, _, digest in files)
    session.progress.start("verify", num_bytes, "bytes")

    def examine(number: int) -> Damage | None:
        path, shard, expected = files[number]
        reason = _remote_damage(source, path, expected, size=sizes.get(path), full=full)
        session.progress.advance(expected.size)
        return None if reason is None else Damage(path=path, shard=shard, reason=reason)

    examined = for_each(examine, range(len(files)), should_stop=session.should_stop, place=url)
    damaged += [damage for damage in examined if damage is not None]
    return Verdict(complete=True, num_files=len(files), num_bytes=num_bytes, damage=tuple(damaged))


def _remote_damage(
    source: RemoteFolder, path: str, expected: FileDigest, *, size: int | None, full: bool
) -> str | None:
    """Return why a file of a store is not what was committed, or None if it is; size None means no file."""
    if size is None:
        return "missing"
    if size != expected.size:
        return f"{size} bytes, {expected.size} expected"
    if full:
        hasher = Hasher()
        for first in range(0, expected.size, _REMOTE_PART_BYTES):
            part = min(_REMOTE_PART_BYTES, expected.size - first)
            hasher.update(source.read_range(path, first, part))
        if hasher.digest() != expected:
            return "its bytes are not those that were committed"
    return None


def _listed_files(root: Path, manifest: CacheManifest) -> tuple[list[_ListedFile], list[Damage]]:
    """Return every file of a cache, without those that cannot be listed, and what keeps them from it."""
    files: list[_ListedFile] = [
        (path, None, digest) for path, digest in manifest.files.items() if path not in {RANGES, INDEX}
    ]
    damaged: list[Damage] = []
    path = RANGES
    try:
        ranges = read_ranges(root, manifest)
        path = INDEX
        shards = open_shards(root, manifest, ranges)
    except MiniLMCacheError as error:
        return files, [Damage(path=path, shard=None, reason=str(error))]
    files += [(path, None, manifest.files[path]) for path in (RANGES, INDEX) if path in manifest.files]
    for number in range(len(ranges)):
        if number not in shards:
            if manifest.complete:
                damaged.append(Damage(path=commit_path(number), shard=number, reason="missing"))
            continue
        try:
            files += [(path, number, digest) for path, digest in shards[number].files.items()]
        except MiniLMCacheError as error:
            damaged.append(Damage(path=commit_path(number), shard=number, reason=str(error)))
    return files, damaged


def default_threads() -> int:
    """Return twice the number of cores, since reading and decoding wait for each other.

    It is at most 8, since each thread holds a decoded segment in memory.
    """
    return min(2 * own_cores(), 8)


def shards_of_other_sizes(root: Path, shards: Sequence[int]) -> list[int]:
    """Return those of the given committed shards that have files of another size than was committed, or none.

    Raises:
        CacheCorruptError: a file outside the shards is damaged.
    """
    reader = CacheReader(root, partial=True)

    def differs(number: int) -> bool:
        try:
            files = reader.records[number].files.items()
            return any(_file_damage(below(root, path), digest, full=False) for path, digest in files)
        except MiniLMCacheError:  # of the record, or a symbolic link
            return True

    return [number for number in shards if differs(number)]


def unsound_shards(
    root: Path, *, shards: Sequence[int], session: Session, check_rows: CheckRows
) -> list[int]:
    """Return those of the given committed shards whose record, files (XXH3-128) or content are damaged.

    Raises:
        CacheCorruptError: a file outside the shards is damaged.
    """
    reader = CacheReader(root, partial=True)
    session.progress.start("check", int(reader.ranges.num_tokens[list(shards)].sum()), "tokens")
    check = _ShardCheck(reader, session, check_rows(reader))
    return [damage.shard for damage in check.damage(shards, default_threads()) if damage.shard is not None]


def _file_damage(file: Path, expected: FileDigest, *, full: bool) -> str | None:
    if file.is_symlink() or not file.is_file():
        return "missing"
    size = file.stat().st_size
    if size != expected.size:
        return f"{size} bytes, committed {expected.size}"
    if full and sha256_file(file) != expected.sha256:
        return "its bytes are not those committed"
    return None


def _content_damage(
    root: Path, num_threads: int, *, session: Session, check_rows: CheckRows
) -> Iterator[Damage]:
    """Yield damage inside files that have the committed bytes, since a record itself may be false."""
    try:
        reader = CacheReader(root, partial=True)
        check_shard = check_rows(reader)
    except CacheCorruptError as error:
        yield Damage(path=MANIFEST, shard=None, reason=str(error))
        return
    session.progress.start("decode", int(reader.ranges.num_tokens[list(reader.records)].sum()), "tokens")
    yield from _ShardCheck(reader, session, check_shard).damage(list(reader.records), num_threads)


@dataclass(frozen=True, slots=True)
class _ShardCheck:
    """Checks the content of shards."""

    reader: CacheReader
    session: Session
    check_rows: Callable[[Segment], None]

    def damage(self, shards: Sequence[int], num_threads: int) -> Iterator[Damage]:
        """Yield the damage of those of the given shards that are damaged, several being read at a time."""
        with ThreadPoolExecutor(num_threads) as threads:
            yield from filter(None, threads.map(self._examine, shards))

    def _examine(self, number: int) -> Damage | None:
        reason = self._reason(number)
        self.session.progress.advance(self.reader.ranges[number].num_tokens)
        path = INDEX if INDEX in self.reader.manifest.files else commit_path(number)
        return None if reason is None else Damage(path=path, shard=number, reason=reason)

    def _reason(self, number: int) -> str | None:
        """Return the reason why a shard is damaged, or None if it is not."""
        tokens = []
        try:
            for segment in self.reader.segments_of(number):
                self.check_rows(segment)
                tokens.append(segment.rows["tokens"])
            committed = self.reader.records[number].tokens_xxh3
        except MiniLMCacheError as error:
            return str(error)
        same = tokens_hash(np.concatenate(tokens)) == committed
        return None if same else "the token ids are not those committed"
