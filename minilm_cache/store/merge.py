"""Merge parts of a cache that machines without a common file system have dumped, some of its shards each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minilm_cache.errors import IdentityMismatchError
from minilm_cache.session import Session
from minilm_cache.storage_schema.manifest import OUTSIDE, TEACHER_WEIGHTS
from minilm_cache.store.creation import differing_fields
from minilm_cache.store.durable import refuse_file
from minilm_cache.store.index import unsealed
from minilm_cache.store.layout import refuse_inside_cache
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.writer import CacheWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What a merge did."""

    path: Path
    """Folder of the merged cache."""
    num_shards: int
    """Shards of the whole cache."""
    shards_copied: int
    """Shards that this merge copied."""
    shards_missing: int
    """Shards that none of the parts holds."""
    is_complete: bool
    """Whether the cache was finished before, so that nothing is left to do."""


def merge(parts: Sequence[Path], out: Path, *, session: Session) -> Merged:
    """Copy the committed shards of every part into one cache, which is new or was begun before.

    Even with every shard the cache is not complete afterwards: the dump command that made the parts measures
    its fidelity and seals it.

    Raises:
        IdentityMismatchError: the parts belong to different caches, or two of them hold the same shard.
        CacheCorruptError: a part is damaged.
        InterruptedRunError: a stop was requested; shards that have been copied are kept.
        StorageError: the file system refused.
    """
    refuse_file(out, "OUT")
    refuse_inside_cache(out.resolve(), "OUT")
    readers = [CacheReader(part, partial=True) for part in parts]
    for reader in readers[1:]:
        _check_same(readers[0], reader)
    owners = _owners(readers)
    # A part that keeps the teacher's weights gives them to the whole; the others may have been without.
    first = max(readers, key=lambda reader: TEACHER_WEIGHTS in reader.manifest.files)
    manifest = unsealed(first.manifest)
    attachments = {path: first.attachment(path) for path in manifest.files if not path.endswith("zarr.json")}
    writer = CacheWriter(out, manifest, ranges=first.ranges, attachments=attachments)
    if TEACHER_WEIGHTS in attachments.keys() - writer.manifest.files.keys():
        session.progress.note(
            f"{out} was begun without the teacher's weights. `dump --keep-weights` adds them."
        )
    todo = [shard for shard in sorted(owners) if not writer.is_committed(shard)]
    sizes = {shard: owners[shard].records[shard].num_bytes for shard in todo}
    session.progress.start("merge", sum(sizes.values()), "bytes")
    for shard in todo:
        session.stop_if_asked(
            f"interrupted: the shards that are in {out} are kept. Run the same command again."
        )
        with writer.claim(shard):
            writer.copy_shard(shard, owners[shard])
        session.progress.advance(sizes[shard])
    missing = len(writer.missing_shards())
    num_shards = len(first.ranges)
    return Merged(
        path=out,
        num_shards=num_shards,
        shards_copied=len(todo),
        shards_missing=missing,
        is_complete=writer.is_complete,
    )


def _check_same(first: CacheReader, second: CacheReader) -> None:
    differing = differing_fields(second.manifest, first.manifest)
    if not differing and second.ranges != first.ranges:
        differing = ["the sequences of their shards"]
    if differing:
        raise IdentityMismatchError(
            f"{second.root} and {first.root} are not parts of one cache: they differ in "
            f"{', '.join(differing)}. Merge parts of one dump."
        )
    if second.manifest.format_version != first.manifest.format_version:
        raise IdentityMismatchError(
            f"{second.root} and {first.root} are of different formats. Dump all parts with one release."
        )
    fitted, others = (
        {path: digest for path, digest in unsealed(part.manifest).files.items() if path not in OUTSIDE}
        for part in (second, first)
    )
    if fitted != others:
        raise IdentityMismatchError(
            f"{second.root} and {first.root} were begun separately: their codecs were fitted on each "
            "machine. Copy the folder that one dump has created to the other machines before they dump."
        )


def _owners(readers: Sequence[CacheReader]) -> dict[int, CacheReader]:
    """Return the part that each shard is copied from."""
    owners: dict[int, CacheReader] = {}
    for reader in readers:
        for shard, record in reader.records.items():
            owner = owners.setdefault(shard, reader)
            if owner.records[shard] != record:
                raise IdentityMismatchError(
                    f"shard {shard} is in {owner.root} and in {reader.root}, from two dumps. "
                    "Give each machine a --rank of its own, or leave one of them out."
                )
    return owners
