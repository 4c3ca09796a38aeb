"""Write a cache: its identity first, then shard by shard, and an index of all shards at the end.

Order of writes for a shard: array files and sequence table, fsync of files and directories, then the record,
which is created only if it does not exist yet. All files of a shard come from one attempt; files that an
interrupted attempt left behind are written again, never reused.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, ShardBusyError, StorageError
from minilm_cache.session import Session
from minilm_cache.storage_schema.arrays import ArraySpec, array_specs
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.manifest import (
    INDEX,
    MAX_MANIFEST_BYTES,
    OUTSIDE,
    RANGES,
    CacheManifest,
    Measured,
)
from minilm_cache.storage_schema.metadata import zarr_documents
from minilm_cache.store.card import attach, has_damaged_preview, seal_with_preview
from minilm_cache.store.checked import checked_file, digest_bytes, is_damaged, read_checked, tokens_hash
from minilm_cache.store.creation import differing_fields, prepare_root
from minilm_cache.store.durable import (
    PARTIAL,
    ShardLock,
    create_file,
    link_file,
    lock_if_free,
    locked,
    new_file,
    read_bounded,
    storage_errors,
    sync_directories,
    sync_files,
    write_file,
)
from minilm_cache.store.index import (
    CommittedShard,
    RecordedShards,
    commit,
    committed_shards,
    encode_ranges,
    read_ranges,
    unseal,
    write_index,
)
from minilm_cache.store.layout import (
    MANIFEST,
    SEAL_LOCK,
    below,
    commit_path,
    lock_path,
    refuse_other_cache,
    sequences_path,
    shard_files,
)
from minilm_cache.store.leases import announce_rank, announced_ranks, forget_ranks
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.shards import ShardEncoder, ShardWriter, encode_table
from minilm_cache.store.verify import CheckRows, shards_of_other_sizes, unsound_shards

_OF_ONE_CACHE = {"zarr.json", RANGES, INDEX, *OUTSIDE}
"""Files that two caches of the same shards need not share."""


def refuse_incompatible(parts: CacheReader, manifest: CacheManifest, ranges: ShardRanges) -> None:
    """Raise IdentityMismatchError if a new cache cannot use files of `parts`: other codes or shards."""
    theirs, ours = parts.manifest.files, manifest.files
    differing = [path for path in theirs.keys() & ours.keys() - _OF_ONE_CACHE if theirs[path] != ours[path]]
    if parts.ranges != ranges or differing:
        what = min(differing) if differing else "its shards"
        raise IdentityMismatchError(
            f"{parts.root} cannot be added to here: {what} differs, so the two were begun separately. "
            "Choose another --out, or leave out --add."
        )


def has_layout_of(donor: CacheReader, manifest: CacheManifest, ranges: ShardRanges) -> bool:
    """Return whether another cache stores its tokens in the same layout as a new one."""
    metadata = "tokens/zarr.json"
    return donor.manifest.files.get(metadata) == manifest.files.get(metadata) and donor.ranges == ranges


def refuse_other_tokens(parts: CacheReader, shard: int, tokens: npt.NDArray[np.generic]) -> None:
    """Raise IdentityMismatchError if a shard of `parts` holds other token ids."""
    if parts.records[shard].tokens_xxh3 != tokens_hash(tokens):
        raise IdentityMismatchError(
            f"shard {shard} of {parts.root} holds other tokens than the corpus gives now. Dump without --add."
        )


def take_over(parts: CacheReader, root: Path, *, path: str, shard: int) -> FileDigest:
    """Link or copy a file of a shard of `parts` into the cache at `root`, and return what it is.

    Raises:
        CacheCorruptError: the file is damaged in `parts`.
    """
    expected = parts.records[shard].files[path]
    try:
        link_file(checked_file(parts.root, path, expected), below(root, path))
    except OSError:  # on another file system, or on one without hard links
        write_file(below(root, path), read_checked(parts.root, path, expected))
    return expected


def link_tokens(
    donor: CacheReader, root: Path, *, path: str, shard: int, tokens: npt.NDArray[np.generic]
) -> FileDigest | None:
    """Link the file of another cache if it holds the same tokens, and return what it is.

    Files of a cache are replaced, never changed in place, so neither cache can damage the other.

    Returns:
        Size and hashes of the file. None means that it was not linked.
    """
    if shard not in donor.records or donor.records[shard].tokens_xxh3 != tokens_hash(tokens):
        return None
    expected = donor.records[shard].files[path]
    try:
        link_file(checked_file(donor.root, path, expected), below(root, path))
    except (CacheCorruptError, OSError):  # damaged, on another file system, or no hard links
        return None
    return expected


class CacheWriter:
    """Writer of one cache. Several processes may write a cache together, each its own shards."""

    is_remote: ClassVar[bool] = False
    """Whether shards leave this machine when they are written."""

    def __init__(
        self,
        root: Path,
        manifest: CacheManifest,
        *,
        ranges: ShardRanges,
        attachments: Mapping[str, bytes],
        tokens_of: CacheReader | None = None,
        parts_of: CacheReader | None = None,
    ) -> None:
        """Create the cache, or resume an unfinished cache of the same identity.

        Args:
            root: folder of the cache.
            manifest: manifest of the new cache, with complete=False; its `files` are exactly the array
                metadata, the table of ranges and the attachments.
            ranges: sequences and tokens of each shard.
            attachments: content of files outside the arrays: path below the root to bytes.
            tokens_of: another cache, whose token files are linked instead of written where they are the same.
                None means that all token files are written.
            parts_of: a complete cache of the same teacher and sequences that this cache adds to: all that it
                holds is linked or copied, not written anew. None means that this cache adds to no other.

        Raises:
            IdentityMismatchError: the folder holds another cache, or something that is not a cache.
            StorageError: the file system refused.
        """
        self.root = root
        self.manifest = manifest
        self.ranges = ranges
        self._tokens_of = tokens_of
        self._parts_of = parts_of
        self._taken_paths = {spec.path for spec in parts_of.specs} if parts_of is not None else set()
        if parts_of is not None:
            refuse_incompatible(parts_of, manifest, ranges)
        with storage_errors("create the cache", root):
            self._create_or_resume()
            metadata = zarr_documents(
                manifest.identity,
                manifest.calibration,
                num_shards=len(ranges),
                shard_tokens=manifest.shard_tokens,
            )
            for path, content in (metadata | dict(attachments)).items():
                # What is outside the identity may be lacking, or be another one; `attach` adds it in the end.
                if path not in OUTSIDE or self.manifest.files.get(path) == digest_bytes(content):
                    self._put(path, content)
            if RANGES in self.manifest.files and is_damaged(root, self.manifest, RANGES):
                self._put(RANGES, encode_ranges(ranges))

    def _create_or_resume(self) -> None:
        path = self.root / MANIFEST
        if not path.exists():
            prepare_root(self.root)
            with suppress(FileExistsError):  # another rank of this dump was first
                create_file(path, self.manifest.to_json())
                return
        existing = self._read_manifest()
        differing = differing_fields(existing, self.manifest)
        names_ranges = bool(existing.shards) or not is_damaged(self.root, existing, RANGES)
        if not differing and names_ranges and read_ranges(self.root, existing) != self.ranges:
            differing = ["the sequences of its shards"]
        refuse_other_cache(self.root, differing)
        self.manifest = existing

    def _read_manifest(self) -> CacheManifest:
        path = self.root / MANIFEST
        return parse(CacheManifest, read_bounded(path, MAX_MANIFEST_BYTES), str(path))

    def _put(self, path: str, content: bytes) -> None:
        """Write a file that the manifest names, unless it exists with the named content."""
        target = below(self.root, path)
        expected = self.manifest.files.get(path)
        if digest_bytes(content) != expected:
            raise IdentityMismatchError(
                f"{path} of {self.root} would differ from the one that its manifest names, or is not named. "
                "Use the teacher's files and the releases of minilm-cache, transformers and pyarrow that "
                "began this dump, or another --out."
            )
        if not (target.is_file() and digest_bytes(target.read_bytes()) == expected):
            write_file(target, content)

    @property
    def is_complete(self) -> bool:
        """Whether the cache is sealed."""
        return self.manifest.complete

    def is_committed(self, shard: int) -> bool:
        """Return whether a shard is committed."""
        return INDEX in self.manifest.files or below(self.root, commit_path(shard)).is_file()

    def missing_shards(self) -> list[int]:
        """Return the shards that are not committed yet."""
        if INDEX in self.manifest.files:
            return []
        committed = set(committed_shards(self.root, len(self.ranges)))
        return [shard for shard in range(len(self.ranges)) if shard not in committed]

    def announce(self, rank: int) -> None:
        """Announce to other processes that a rank writes into this folder."""
        announce_rank(self.root, rank)

    def left_for(self, rank: int, world_size: int) -> list[int]:
        """Return the missing shards of a rank and of the ranks that have announced themselves here."""
        ranks = {rank, *announced_ranks(self.root)}
        return [shard for shard in self.missing_shards() if shard % world_size in ranks]

    def damaged(self, shards: Sequence[int], *, check_rows: CheckRows | None, session: Session) -> list[int]:
        """Return those of the given committed shards that are damaged.

        Args:
            shards: numbers of committed shards.
            check_rows: checks rows, so that all files are read and decoded. None means that only the sizes of
                files are compared.
            session: its progress shows tokens checked.

        """
        if check_rows is None:
            return shards_of_other_sizes(self.root, shards)
        return unsound_shards(self.root, shards=shards, check_rows=check_rows, session=session)

    def fetch(self, shards: Sequence[int]) -> None:
        """Have shards and their records below `root`; here they are there already."""

    def attach(self, path: str, content: bytes) -> None:
        """Add a file to the complete cache; see `store.card.attach`."""
        self.manifest = attach(self.root, self.manifest, path=path, content=content)

    def close(self) -> None:
        """End what runs in the background; here nothing does."""

    def claim(self, shard: int) -> ShardLock:
        """Acquire and return the lock on a shard, which ends with the process; any thread may release it.

        Raises:
            ShardBusyError: another process holds it.
        """
        path = below(self.root, lock_path(shard))
        lock = lock_if_free(path)
        if lock is None:
            raise ShardBusyError(
                f"shard {shard} of {self.root} is being written by another process. "
                "Wait for it. Where processes share a `dump`, each has its own --rank."
            )
        return lock

    def withdraw(self, shard: int) -> None:
        """Remove a damaged shard's commit record, so that it is written again; the caller holds its claim."""
        path = below(self.root, commit_path(shard))
        with self._unsealed(without=shard), storage_errors("remove", path):  # nobody seals with this record
            for name in shard_files(self.manifest, shard):
                self._clear(name)
            if path.parent.is_dir():
                path.unlink(missing_ok=True)
                sync_directories([path.parent])

    def _clear(self, path: str) -> None:
        """Remove a link or a folder from where a file of a shard belongs; what a link leads to stays."""
        folder, _, name = path.rpartition("/")
        file = below(self.root, folder) / name
        with storage_errors("remove", file):
            if file.is_symlink():
                file.unlink()
            elif file.is_dir():
                shutil.rmtree(file)

    def unseal(self) -> None:
        """Make a complete cache an unfinished one again, so that its index can be written anew."""
        with self._unsealed(without=None):
            pass

    @contextmanager
    def _unsealed(self, without: int | None) -> Iterator[None]:
        """Make a complete cache an unfinished one again, and hold the lock on sealing for a block.

        Args:
            without: number of a shard that then does not exist. None means that all shards exist that did.
        """
        with locked(below(self.root, SEAL_LOCK)):
            self.manifest = unseal(self.root, self._read_manifest(), self.ranges, without=without)
            yield

    @property
    def has_damaged_index(self) -> bool:
        """Whether the cache is complete, but its index is missing or damaged."""
        return INDEX in self.manifest.files and is_damaged(self.root, self.manifest, INDEX)

    @property
    def has_damaged_preview(self) -> bool:
        """Whether the cache is complete, but its preview is missing or damaged."""
        return self.is_complete and not self.is_remote and has_damaged_preview(self.root, self.manifest)

    @property
    def _specs(self) -> tuple[ArraySpec, ...]:
        """All arrays with a row per token or sequence."""
        return array_specs(self.manifest.identity, self.manifest.calibration)

    def begin_shard(self, shard: int) -> ShardWriter:
        """Begin to write a shard; the caller holds its claim, and then commits or abandons it.

        Raises:
            StorageError: the file system refused.
            ShardBusyError: the shard is committed already; its files are unchanged.
        """
        if self.is_committed(shard):
            raise ShardBusyError(f"shard {shard} of {self.root} is committed already. Use one writer for it.")
        return self._begin(shard)

    def _begin(self, shard: int) -> ShardWriter:
        specs = [spec for spec in self._specs if spec.path != "tokens" and not self.takes_over(spec)]
        return ShardWriter(self.root, shard, specs=specs, shard_tokens=self.manifest.shard_tokens)

    def commit_shard(self, written: ShardWriter, rank: int = 0) -> int:
        """Commit a shard whose segments have all been appended; the caller holds its claim.

        Args:
            written: the shard.
            rank: rank of this process, stored in the commit record.

        Returns:
            Bytes of the files that were written, without links to files of another cache.

        Raises:
            StorageError: the file system refused; the shard is not committed.
            ShardBusyError: the shard was committed meanwhile.
        """
        shard, tokens = written.shard, written.tokens
        if below(self.root, commit_path(shard)).is_file():
            raise self._lock_not_honoured(shard)
        if self._parts_of is not None:
            refuse_other_tokens(self._parts_of, shard, tokens)
        with storage_errors("write", self.root):
            own = written.finish()
            own |= self._write_tokens(shard, tokens) | self._write_table(shard, written.table)
            digests = {path: own[path] for path in shard_files(self.manifest, shard)}
            sync_files(self.root, digests)
            try:
                committed = CommittedShard(tokens_hash(tokens), digests)
                commit(self.root, self.manifest, committed, part=self.ranges[shard], number=shard, rank=rank)
            except FileExistsError:
                raise self._lock_not_honoured(shard) from None
        unlinked = [path for path in digests if below(self.root, path).stat().st_nlink == 1]
        return sum(digests[path].size for path in unlinked)

    def _lock_not_honoured(self, shard: int) -> ShardBusyError:
        return ShardBusyError(
            f"{self.root / commit_path(shard)} appeared while the shard was being written: the lock is not "
            "honoured by this file system. Run `minilm-cache verify --full`, with one writer."
        )

    def takes_over(self, spec: ArraySpec) -> bool:
        """Return whether an array's files are taken from the cache that this cache adds to."""
        return spec.path in self._taken_paths

    def copy_shard(self, shard: int, reader: CacheReader) -> None:
        """Copy a committed shard from another copy of this cache; the caller holds its claim.

        Raises:
            CacheCorruptError: the shard is damaged in that copy.
            ShardBusyError: the shard is committed already; its files are unchanged.
            StorageError: the file system refused; the shard is not committed.
        """
        if self.is_committed(shard):
            raise ShardBusyError(
                f"shard {shard} of {self.root} was committed meanwhile by another process. Run the same "
                "command again."
            )
        copied = reader.records[shard]
        with storage_errors("write", self.root):
            for path, expected in copied.files.items():
                write_file(below(self.root, path), read_checked(reader.root, path, expected))
            sync_files(self.root, copied.files)
            commit(self.root, self.manifest, copied, part=self.ranges[shard], number=shard)

    def _write_tokens(self, shard: int, tokens: npt.NDArray[np.generic]) -> dict[str, FileDigest]:
        """Write the token ids, or link them and what else is taken from another cache; return the digests."""
        if self._parts_of is not None:
            return {
                path: take_over(self._parts_of, self.root, path=path, shard=shard)
                for path in (spec.shard_path(shard) for spec in self._specs if self.takes_over(spec))
            }
        spec = next(spec for spec in self._specs if spec.path == "tokens")
        path, donor = spec.shard_path(shard), self._tokens_of
        if donor is not None and has_layout_of(donor, self.manifest, self.ranges):
            linked = link_tokens(donor, self.root, path=path, shard=shard, tokens=tokens)
            if linked is not None:
                return {path: linked}
        with new_file(below(self.root, path), durable=False) as file:
            encoder = ShardEncoder(file, spec, self.manifest.shard_tokens)
            encoder.append(tokens)
            return {path: encoder.finish()}

    def _write_table(self, shard: int, table: pa.Table) -> dict[str, FileDigest]:
        """Write or link the sequence table, and return what it is."""
        path = sequences_path(shard)
        if self._parts_of is not None:
            return {path: take_over(self._parts_of, self.root, path=path, shard=shard)}
        content = encode_table(table, self.manifest.identity.relations)
        write_file(below(self.root, path), content)
        return {path: digest_bytes(content)}

    @contextmanager
    def sealing(self) -> Iterator[bool]:
        """Hold the lock on sealing, and yield whether the cache can and must still be sealed."""
        with locked(below(self.root, SEAL_LOCK)):
            self.manifest = self._read_manifest()
            yield not self.manifest.complete and not self.missing_shards()

    def seal(self, measured: Measured, preview: pa.Table) -> None:
        """Write the index and mark the cache as complete; the manifest is written last.

        The commit records stay: from them an index that is damaged later can be written again.

        Raises:
            StorageError: a shard is missing, or the file system refused.
        """
        missing = self.missing_shards()
        if missing:
            raise StorageError(
                f"{self.root} cannot be sealed: shards {missing} are not committed. "
                "Run the dump again; it writes them."
            )
        complete = self.manifest.model_copy(update={"complete": True, "measured": measured})
        with storage_errors("seal the cache", self.root):
            if not complete.shards:
                shards = RecordedShards(self.root, self.manifest, self.ranges)
                index = {INDEX: write_index(self.root, self.manifest, shards)}
                complete = complete.model_copy(update={"files": complete.files | index})
            # Every shard is committed, so no process writes any more, and leftovers of kills can be removed:
            # before the manifest is written, since whoever finds a complete cache removes nothing.
            for leftover in (*(self.root / "locks").glob("[0-9]*.lock"), *self.root.rglob(f"*{PARTIAL}")):
                leftover.unlink(missing_ok=True)
            forget_ranks(self.root)
            self.manifest = seal_with_preview(self.root, complete, preview)
