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

from minilm_cache.errors import CacheCorruptError, CacheNotFoundError, MiniLMCacheError, StorageError
from minilm_cache.session import Session
from minilm_cache.settings import DEFAULT_LOCAL_BYTES
from minilm_cache.storage_schema.documents import MAX_RECORD_BYTES, FileDigest
from minilm_cache.storage_schema.manifest import INDEX, RANGES, CacheManifest
from minilm_cache.store.catalogue import named_manifest
from minilm_cache.store.checked import READ_REMEDY, Hasher, sha256_file, tokens_hash
from minilm_cache.store.durable import own_cores, storage_errors
from minilm_cache.store.index import open_shards, parse_record, read_ranges
from minilm_cache.store.layout import COMMITS, MANIFEST, below, commit_path
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.reader import CacheReader, Segment, read_manifest, refuse_other_metadata
from minilm_cache.store.remote import RemoteFolder, for_each, open_store

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
        manifest_damage = Damage(path=MANIFEST, shard=None, reason=_without_remedy(error))
        return Verdict(complete=None, num_files=0, num_bytes=0, damage=(manifest_damage,))
    files, damaged = _listed_files(root, manifest)
    num_bytes = sum(digest.size for _, _, digest in files)

    def local_damage(path: str, expected: FileDigest) -> str | None:
        return _local_damage(root, path, expected, full=full or path.endswith("zarr.json"))

    examine = _examiner(files, local_damage, session)
    with ThreadPoolExecutor(num_threads) as threads:
        damaged += filter(None, threads.map(examine, range(len(files))))
    if not (full or damaged):
        damaged += _metadata_damage(root, manifest)
    if full and not damaged:
        damaged += _content_damage(root, num_threads, check_rows=check_rows, session=session)
    return Verdict(
        complete=manifest.complete, num_files=len(files), num_bytes=num_bytes, damage=tuple(damaged)
    )


def _without_remedy(error: MiniLMCacheError) -> str:
    """Return what is wrong with a file, without the remedy, which `verify` says once for all files."""
    return str(error).removesuffix(f" {READ_REMEDY}")


def _examiner(
    files: Sequence[_ListedFile], damage_of: Callable[[str, FileDigest], str | None], session: Session
) -> Callable[[int], Damage | None]:
    """Return a function that examines the file of a number, and advances the progress, which begins now.

    Args:
        files: all files that are to be examined.
        damage_of: returns why the file at a path is not what was committed; None means that it is.
        session: its progress shows the bytes done.
    """
    session.progress.start("verify", sum(digest.size for _, _, digest in files), "bytes")

    def examine(number: int) -> Damage | None:
        path, shard, expected = files[number]
        reason = damage_of(path, expected)
        session.progress.advance(expected.size)
        return None if reason is None else Damage(path=path, shard=shard, reason=reason)

    return examine


def _metadata_damage(root: Path, manifest: CacheManifest) -> list[Damage]:
    """Return what is wrong with metadata that is as the manifest says; no file of a shard is read."""
    try:
        num_shards, again = len(read_ranges(root, manifest)), "Dump it again, or pull it again."
        refuse_other_metadata(manifest, num_shards, str(root / MANIFEST), remedy=again)
    except CacheCorruptError as error:
        return [Damage(path=MANIFEST, shard=None, reason=_without_remedy(error))]
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
    except (CacheCorruptError, CacheNotFoundError) as error:
        is_missing = isinstance(error, CacheNotFoundError)
        if is_missing and not {INDEX, commit_path(0)} & source.sizes().keys():
            raise
        lost = Damage(path=MANIFEST, shard=None, reason="missing" if is_missing else "damaged")
        return Verdict(complete=None, num_files=0, num_bytes=0, damage=(lost,))
    sizes = source.sizes()
    tables = {path: manifest.files[path] for path in (RANGES, INDEX) if path in manifest.files}

    def damage_of(path: str, expected: FileDigest) -> str | None:
        return remote_damage(source, path, expected, size=sizes.get(path), full=full or path in tables)

    files: list[_ListedFile] = [(path, None, digest) for path, digest in tables.items()]
    damaged = list(filter(None, map(_examiner(files, damage_of, session), range(len(files)))))
    if not damaged:  # without them nothing else can be listed
        try:
            reader = MirrorReader(url, home, DEFAULT_LOCAL_BYTES)
        except (CacheCorruptError, CacheNotFoundError) as error:
            # A record is damaged, or these files are of several caches.
            odd = Damage(path=MANIFEST, shard=None, reason=_without_remedy(error))
            damaged = _damaged_records(source, manifest, session) or [odd]
        else:
            listed, damaged = _listed_files(reader.root, reader.manifest)
            others = [file for file in listed if file[0] not in tables]
            examine = _examiner(others, damage_of, session)
            examined = for_each(examine, range(len(others)), should_stop=session.should_stop, place=url)
            files, damaged = files + others, [*damaged, *filter(None, examined)]
    num_bytes = sum(digest.size for _, _, digest in files)
    return Verdict(complete=True, num_files=len(files), num_bytes=num_bytes, damage=tuple(damaged))


def _damaged_records(source: RemoteFolder, manifest: CacheManifest, session: Session) -> list[Damage]:
    """Return which commit records of a store's cache are missing or damaged; only format 1 has records."""
    if not manifest.shards:
        return []
    ranges = read_ranges(Path(), manifest)

    def examine(shard: int) -> Damage | None:
        path = commit_path(shard)
        try:
            content = source.read(path, MAX_RECORD_BYTES)
            parse_record(content, manifest, ranges=ranges, shard=shard, where=f"{source.url}/{path}")
        except CacheNotFoundError:
            return Damage(path=path, shard=shard, reason="missing")
        except CacheCorruptError as error:
            return Damage(path=path, shard=shard, reason=_without_remedy(error))
        return None

    examined = for_each(examine, range(len(ranges)), should_stop=session.should_stop, place=source.url)
    return [damage for damage in examined if damage is not None]


def remote_damage(
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
        return files, [Damage(path=path, shard=None, reason=_without_remedy(error))]
    files += [(path, None, manifest.files[path]) for path in (RANGES, INDEX) if path in manifest.files]
    for number in range(len(ranges)):
        if number not in shards:
            if manifest.complete:
                damaged.append(Damage(path=commit_path(number), shard=number, reason="missing"))
            continue
        try:
            files += [(path, number, digest) for path, digest in shards[number].files.items()]
        except MiniLMCacheError as error:
            damaged.append(Damage(path=commit_path(number), shard=number, reason=_without_remedy(error)))
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
            return any(_local_damage(root, path, digest, full=False) for path, digest in files)
        except MiniLMCacheError:  # of the record
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


def _local_damage(root: Path, path: str, expected: FileDigest, *, full: bool) -> str | None:
    """Return why a file of a cache is not what was committed, or None if it is."""
    try:
        file = below(root, path)
        with storage_errors("read", file):
            if file.is_symlink() or not file.is_file():
                return "missing"
            size = file.stat().st_size
            if size != expected.size:
                return f"{size} bytes, committed {expected.size}"
            if full and sha256_file(file) != expected.sha256:
                return "its bytes are not those committed"
    except (CacheCorruptError, StorageError) as error:  # a symbolic link, or a disk that cannot read it
        return _without_remedy(error)
    return None


def _content_damage(
    root: Path, num_threads: int, *, session: Session, check_rows: CheckRows
) -> Iterator[Damage]:
    """Yield damage inside files that have the committed bytes, since a record itself may be false."""
    try:
        reader = CacheReader(root, partial=True)
        check_shard = check_rows(reader)
    except CacheCorruptError as error:
        yield Damage(path=MANIFEST, shard=None, reason=_without_remedy(error))
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
            return _without_remedy(error)
        same = tokens_hash(np.concatenate(tokens)) == committed
        return None if same else "the token ids are not those committed"
