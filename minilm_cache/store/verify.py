"""Audit a cache without a model: what is there against what was committed.

`quick` looks at the manifest, the metadata, every commit record and the size of every file. `full` also
compares every file's SHA-256, decodes every array (which checks the crc32c of each chunk), compares the
token ids with the hash in the record and checks the sequence tables.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minilm_cache.errors import CacheCorruptError
from minilm_cache.fingerprint import sha256_file, xxh3
from minilm_cache.progress import Progress
from minilm_cache.storage_schema.manifest import CacheManifest, FileDigest
from minilm_cache.store.layout import below, commit_path
from minilm_cache.store.reader import CacheReader, read_checked, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One file that is not what was committed."""

    path: str
    """Below the cache's root."""
    shard: int | None
    """The shard it belongs to; none: a file outside the shards."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an audit found."""

    num_files: int
    num_bytes: int
    damage: tuple[Damage, ...]


def verify(root: Path, *, full: bool, num_threads: int, progress: Progress) -> Verdict:
    """Audit a cache, finished or not: every committed shard.

    Args:
        root: the cache's folder.
        full: read every byte; else sizes only.
        num_threads: files looked at together.
        progress: told of bytes done.

    Raises:
        CacheNotFoundError: there is no cache.
        CacheCorruptError: the manifest, metadata or a record is so damaged that nothing else can be judged.
        UnsupportedFormatError: a newer release wrote it.
    """
    reader = CacheReader(root, partial=True)
    files: list[tuple[str, int | None, FileDigest]] = [
        (path, None, digest) for path, digest in reader.manifest.files.items()
    ]
    for shard, record in reader.records.items():
        files += [(path, shard, digest) for path, digest in record.files.items()]
    num_bytes = sum(digest.size for _, _, digest in files)
    progress.start("verify", num_bytes, "bytes")

    def examine(file: tuple[str, int | None, FileDigest]) -> Damage | None:
        path, shard, expected = file
        reason = _file_damage(below(root, path), expected, full=full)
        progress.advance(expected.size)
        return None if reason is None else Damage(path=path, shard=shard, reason=reason)

    with ThreadPoolExecutor(num_threads) as threads:
        found = [damage for damage in threads.map(examine, files) if damage is not None]
    if full:
        known = {damage.shard for damage in found}
        sound = [shard for shard in reader.records if shard not in known]
        progress.start("decode", sum(reader.manifest.shards[n].num_tokens for n in sound), "tokens")
        for shard in sound:
            found += _content_damage(reader, shard)
            progress.advance(reader.manifest.shards[shard].num_tokens)
    return Verdict(num_files=len(files), num_bytes=num_bytes, damage=tuple(found))


def is_sound(root: Path, manifest: CacheManifest, shard: int) -> bool:
    """Return whether a committed shard's record and all its files are what was committed (XXH3-128)."""
    try:
        record = read_record(root, manifest, shard)
        for path, expected in record.files.items():
            read_checked(root, path, expected)
    except CacheCorruptError:
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


def _content_damage(reader: CacheReader, number: int) -> Iterator[Damage]:
    """Yield what is wrong inside files that have the committed bytes: a record may lie."""
    try:
        shard = reader.shard(number)
    except CacheCorruptError as error:
        yield Damage(path=commit_path(number), shard=number, reason=str(error))
        return
    tokens = np.ascontiguousarray(shard.rows["tokens"])
    if xxh3(tokens.data.cast("B")) != reader.records[number].tokens_xxh3:
        yield Damage(path=commit_path(number), shard=number, reason="its token ids are not those committed")
