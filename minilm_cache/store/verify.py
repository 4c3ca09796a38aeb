"""Verify a cache without a model: compare its files with what was committed.

`quick` checks the manifest, the metadata, every commit record and the size of every file. `full` also
compares every file's SHA-256, decodes every array (which checks the crc32c of each chunk), compares the
token ids with the hash in the record and checks the sequence tables.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minilm_cache.errors import CacheCorruptError, CacheNotFoundError, MiniLMCacheError
from minilm_cache.progress import Progress
from minilm_cache.storage_schema.manifest import CacheManifest, FileDigest
from minilm_cache.store.fingerprint import sha256_file, xxh3
from minilm_cache.store.layout import COMMITS, MANIFEST, below, commit_path
from minilm_cache.store.reader import CacheReader, Shard, read_manifest, read_record

CheckRows = Callable[[CacheReader], Callable[[Shard], None]]
"""Returns, for a reader, a function that checks the rows of a shard and raises CacheCorruptError."""

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


def verify(root: Path, *, full: bool, num_threads: int, progress: Progress, check_rows: CheckRows) -> Verdict:
    """Verify every committed shard of a cache, finished or not.

    Args:
        root: folder of the cache.
        full: read every byte. False means that only sizes are compared.
        num_threads: files that are checked at the same time.
        progress: shows the bytes done.
        check_rows: finds shards whose rows cannot be decoded; a parameter, since the store knows no codecs.

    Raises:
        CacheNotFoundError: there is no cache.
        UnsupportedFormatError: a newer release wrote the cache.
    """
    try:
        manifest = read_manifest(root)
    except (CacheCorruptError, CacheNotFoundError) as error:
        if not below(root, COMMITS).is_dir():
            raise
        manifest_damage = Damage(path=MANIFEST, shard=None, reason=str(error))
        return Verdict(complete=None, num_files=0, num_bytes=0, damage=(manifest_damage,))
    files: list[_ListedFile] = [(path, None, digest) for path, digest in manifest.files.items()]
    damaged: list[Damage] = []
    for shard in range(len(manifest.shards)):
        path = commit_path(shard)
        try:
            if not below(root, path).is_file():
                if manifest.complete:
                    damaged.append(Damage(path=path, shard=shard, reason="missing"))
                continue
            record = read_record(root, manifest, shard)
        except MiniLMCacheError as error:
            damaged.append(Damage(path=path, shard=shard, reason=str(error)))
            continue
        files += [(path, shard, digest) for path, digest in record.files.items()]
    num_bytes = sum(digest.size for _, _, digest in files)
    progress.start("verify", num_bytes, "bytes")

    def examine(file: _ListedFile) -> Damage | None:
        path, shard, expected = file
        reason: str | None
        try:
            reason = _file_damage(below(root, path), expected, full=full)
        except CacheCorruptError as error:  # a symbolic link, or a path that leads out of the cache
            reason = str(error)
        progress.advance(expected.size)
        return None if reason is None else Damage(path=path, shard=shard, reason=reason)

    with ThreadPoolExecutor(num_threads) as threads:
        damaged += [damage for damage in threads.map(examine, files) if damage is not None]
    if full and not damaged:
        damaged += _content_damage(root, num_threads, progress=progress, check_rows=check_rows)
    return Verdict(
        complete=manifest.complete, num_files=len(files), num_bytes=num_bytes, damage=tuple(damaged)
    )


def default_threads() -> int:
    """Return twice the number of cores, since reading and decoding wait for each other.

    It is at most 8, since each thread holds a decoded shard in memory.
    """
    return min(2 * (os.cpu_count() or 1), 8)


def unsound_shards(
    root: Path, manifest: CacheManifest, *, shards: Sequence[int], progress: Progress, check_rows: CheckRows
) -> list[int]:
    """Return those of the given committed shards whose record, files (XXH3-128) or content are damaged.

    Raises:
        CacheCorruptError: a file outside the shards is damaged.
    """
    readable = [shard for shard in shards if _has_record(root, manifest, shard)]
    reader = CacheReader(root, partial=True, shards=readable)
    progress.start("check", sum(manifest.shards[shard].num_tokens for shard in readable), "tokens")
    damaged = {
        damage.shard
        for damage in _damaged_contents(
            reader, default_threads(), progress=progress, check_shard=check_rows(reader)
        )
    }
    return [shard for shard in shards if shard not in readable or shard in damaged]


def _has_record(root: Path, manifest: CacheManifest, shard: int) -> bool:
    try:
        read_record(root, manifest, shard)
    except MiniLMCacheError:
        return False
    return True


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
    root: Path, num_threads: int, *, progress: Progress, check_rows: CheckRows
) -> Iterator[Damage]:
    """Yield damage inside files that have the committed bytes, since a record itself may be false."""
    try:
        reader = CacheReader(root, partial=True)
        check_shard = check_rows(reader)
    except CacheCorruptError as error:
        yield Damage(path=MANIFEST, shard=None, reason=str(error))
        return
    progress.start("decode", sum(reader.manifest.shards[n].num_tokens for n in reader.records), "tokens")
    yield from _damaged_contents(reader, num_threads, progress=progress, check_shard=check_shard)


def _damaged_contents(
    reader: CacheReader, num_threads: int, *, progress: Progress, check_shard: Callable[[Shard], None]
) -> Iterator[Damage]:
    def examine(number: int) -> Damage | None:
        reason = _shard_damage(reader, number, check_shard)
        progress.advance(reader.manifest.shards[number].num_tokens)
        return None if reason is None else Damage(path=commit_path(number), shard=number, reason=reason)

    with ThreadPoolExecutor(num_threads) as threads:
        yield from filter(None, threads.map(examine, reader.records))


def _shard_damage(reader: CacheReader, number: int, check_shard: Callable[[Shard], None]) -> str | None:
    """Return the reason why a shard whose files have the committed bytes is damaged, or None if it is not."""
    try:
        shard = reader.shard(number)
        check_shard(shard)
    except MiniLMCacheError as error:
        return str(error)
    tokens = np.ascontiguousarray(shard.rows["tokens"])
    if xxh3(tokens.data.cast("B")) != reader.records[number].tokens_xxh3:
        return "the token ids are not those committed"
    return None
