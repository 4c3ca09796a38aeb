"""Write a cache: its identity first, then shard by shard. A shard exists once its commit record does.

Order of writes for a shard: array files and sequence table, fsync of files and directories, then the record,
which is created only if it does not exist yet. All files of a shard come from one attempt; files that an
interrupted attempt left behind are written again, never reused.
"""

import io
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from filelock import FileLock, Timeout

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, ShardBusyError, StorageError
from minilm_cache.storage_schema.arrays import ArraySpec, array_specs
from minilm_cache.storage_schema.manifest import MAX_MANIFEST_BYTES, CacheManifest, CommitRecord, FileDigest
from minilm_cache.storage_schema.measured import Measured
from minilm_cache.storage_schema.metadata import zarr_documents
from minilm_cache.storage_schema.problems import parse
from minilm_cache.storage_schema.sequences import sequence_columns
from minilm_cache.store.creation import differing_fields, prepare_root
from minilm_cache.store.durable import (
    PARTIAL,
    create_file,
    link_file,
    read_bounded,
    storage_errors,
    sync_directories,
    sync_file,
    write_file,
)
from minilm_cache.store.fingerprint import digest_bytes, xxh3
from minilm_cache.store.layout import (
    MANIFEST,
    SEAL_LOCK,
    below,
    commit_path,
    lock_path,
    sequences_path,
)
from minilm_cache.store.preview import seal_with_preview
from minilm_cache.store.reader import CacheReader, read_checked
from minilm_cache.store.shards import encode_pcodec_shard


class CacheWriter:
    """Writer of one cache. Several processes may write a cache together, each its own shards."""

    def __init__(
        self,
        root: Path,
        manifest: CacheManifest,
        *,
        attachments: Mapping[str, bytes],
        tokens_of: CacheReader | None = None,
        parts_of: CacheReader | None = None,
    ) -> None:
        """Create the cache, or resume an unfinished cache of the same identity.

        Args:
            root: folder of the cache.
            manifest: manifest of the new cache, with complete=False; its `files` are exactly the array
                metadata and the attachments.
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
        self._tokens_of = tokens_of
        self._parts_of = parts_of
        self._taken_paths = {spec.path for spec in parts_of.specs} if parts_of is not None else set()
        if parts_of is not None:
            _refuse_incompatible(parts_of, manifest)
        with storage_errors("create the cache", root):
            self._create_or_resume()
            metadata = zarr_documents(
                manifest.identity,
                manifest.calibration,
                num_shards=manifest.num_shards,
                shard_tokens=manifest.shard_tokens,
            )
            for path, content in (metadata | dict(attachments)).items():
                self._put(path, content)
            with zarr.config.set({"array.write_empty_chunks": True}):
                self._arrays = {
                    spec.path: zarr.open_array(str(root), path=spec.path, mode="r+", zarr_format=3)
                    for spec in array_specs(manifest.identity, manifest.calibration)
                    if spec.compressor == "zstd"
                }

    def _create_or_resume(self) -> None:
        path = self.root / MANIFEST
        if not path.exists():
            prepare_root(self.root)
            try:
                create_file(path, self.manifest.to_json())
            except FileExistsError:  # another rank of this dump was first
                pass
            else:
                return
        existing = self._read_manifest()
        differing = differing_fields(existing, self.manifest)
        if differing:
            raise IdentityMismatchError(
                f"{self.root} holds another cache, which differs in {', '.join(differing)}. "
                "Choose another --out, or repeat the settings of the first dump."
            )
        self.manifest = existing

    def _read_manifest(self) -> CacheManifest:
        path = self.root / MANIFEST
        return parse(CacheManifest, read_bounded(path, MAX_MANIFEST_BYTES), str(path))

    def _put(self, path: str, content: bytes) -> None:
        """Write a file that the manifest names, unless it exists with the named content."""
        target = below(self.root, path)
        expected = self.manifest.files[path]
        if digest_bytes(content) != expected:
            raise IdentityMismatchError(
                f"{path} of {self.root} would differ from the one that its manifest names. "
                "Use the release of minilm-cache and transformers that began this dump, or another --out."
            )
        if not (target.is_file() and digest_bytes(target.read_bytes()) == expected):
            write_file(target, content)

    @property
    def is_complete(self) -> bool:
        """Whether the cache is sealed."""
        return self.manifest.complete

    def is_committed(self, shard: int) -> bool:
        """Return whether a shard is committed."""
        return below(self.root, commit_path(shard)).is_file()

    def missing_shards(self) -> list[int]:
        """Return the shards that are not committed yet."""
        return [shard for shard in range(len(self.manifest.shards)) if not self.is_committed(shard)]

    def claim(self, shard: int) -> FileLock:
        """Acquire and return the lock on a shard; the caller releases it, in any thread.

        The lock ends with the process, so a kill leaves no lock behind.

        Raises:
            ShardBusyError: another process holds it.
        """
        path = below(self.root, lock_path(shard))
        with storage_errors("lock", path):
            path.parent.mkdir(exist_ok=True)
            lock = FileLock(path, timeout=0, thread_local=False)
            try:
                lock.acquire()
            except Timeout:
                raise ShardBusyError(
                    f"shard {shard} of {self.root} is being written by another process. "
                    "Wait for it, or give each process its own --rank."
                ) from None
        return lock

    def withdraw(self, shard: int) -> None:
        """Remove a damaged shard's commit record, so that it is written again; the caller holds its claim."""
        path = below(self.root, commit_path(shard))
        with storage_errors("remove", path):
            path.unlink()
            sync_directories([path.parent])

    def write_shard(
        self, shard: int, rows: Mapping[str, npt.NDArray[np.generic]], *, table: pa.Table, rank: int = 0
    ) -> int:
        """Write and commit one shard; the caller holds its claim.

        Args:
            shard: number of the shard.
            rows: array path to rows, `(tokens of the shard, ...)`, without slack.
            table: sequence table of the shard.
            rank: rank of this process, stored in the commit record.

        Returns:
            Bytes of the files that were written, without links to files of another cache.

        Raises:
            StorageError: the file system refused; the shard is not committed.
            ShardBusyError: the shard is committed already; its files are unchanged.
        """
        if self.is_committed(shard):
            raise ShardBusyError(f"shard {shard} of {self.root} is committed already. Use one writer for it.")
        if self._parts_of is not None:
            self._refuse_other_tokens(self._parts_of, shard, rows["tokens"])
        with storage_errors("write", self.root):
            files = [
                self._take_over(spec.shard_path(shard), shard)
                if self.takes_over(spec)
                else self._write_rows(spec, shard, rows[spec.path])
                for spec in array_specs(self.manifest.identity, self.manifest.calibration)
            ]
            takes_table = self._parts_of is not None
            table_path = sequences_path(shard)
            files.append(
                self._take_over(table_path, shard) if takes_table else self._write_table(shard, table)
            )
            self._make_durable(files)
            record = CommitRecord(
                fingerprint=self.manifest.fingerprint,
                shard=shard,
                attempt=uuid.uuid4().hex,
                rank=rank,
                range=self.manifest.shards[shard],
                tokens_xxh3=tokens_hash(rows["tokens"]),
                files={path: self._digest(path) for path in files},
            )
            path = below(self.root, commit_path(shard))
            try:
                create_file(path, record.to_json())
            except FileExistsError:
                raise ShardBusyError(
                    f"{path} appeared while the shard was being written: the lock is not honoured by "
                    "this file system. Run `minilm-cache verify --full` and use one writer."
                ) from None
        written = [path for path in files if below(self.root, path).stat().st_nlink == 1]
        return sum(record.files[path].size for path in written)

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
            raise ShardBusyError(f"shard {shard} of {self.root} was committed meanwhile by another process.")
        record = reader.records[shard]
        with storage_errors("write", self.root):
            for path, expected in record.files.items():
                write_file(below(self.root, path), read_checked(reader.root, path, expected))
            self._make_durable(list(record.files))
            create_file(below(self.root, commit_path(shard)), record.to_json())

    def _refuse_other_tokens(self, parts: CacheReader, shard: int, tokens: npt.NDArray[np.generic]) -> None:
        if parts.records[shard].tokens_xxh3 != tokens_hash(tokens):
            raise IdentityMismatchError(
                f"shard {shard} of {parts.root} holds other tokens than the corpus gives now. Dump "
                "without --add."
            )

    def _take_over(self, path: str, shard: int) -> str:
        """Link or copy a file of the cache that this cache adds to, and return its path.

        Raises:
            CacheCorruptError: the file is damaged in that cache.
        """
        parts = self._parts_of
        assert parts is not None
        content = read_checked(parts.root, path, parts.records[shard].files[path])
        try:
            link_file(below(parts.root, path), below(self.root, path))
        except OSError:  # on another file system, or on one without hard links
            write_file(below(self.root, path), content)
        return path

    def _write_rows(self, spec: ArraySpec, shard: int, rows: npt.NDArray[np.generic]) -> str:
        size = self.manifest.shard_tokens
        if spec.compressor == "pcodec":
            content = encode_pcodec_shard(rows, spec, size)
            write_file(below(self.root, spec.shard_path(shard)), content)
            return spec.shard_path(shard)
        if spec.path == "tokens" and self._link_tokens(spec, shard, rows):
            return spec.shard_path(shard)
        array = self._arrays[spec.path]
        whole = np.full((size, *spec.row_shape), array.fill_value, dtype=spec.dtype)
        whole[: len(rows)] = rows
        # zarr reads an existing shard before it replaces it, which fails if that shard is damaged.
        below(self.root, spec.shard_path(shard)).unlink(missing_ok=True)
        array[shard * size : (shard + 1) * size] = whole
        return spec.shard_path(shard)

    def _link_tokens(self, spec: ArraySpec, shard: int, rows: npt.NDArray[np.generic]) -> bool:
        """Link the file of another cache if it holds the same tokens, and return whether it was linked.

        Files of a cache are replaced, never changed in place, so neither cache can damage the other.
        """
        donor = self._tokens_of
        if donor is None or shard not in donor.records:
            return False
        if not _has_same_token_layout(donor.manifest, self.manifest):
            return False
        record, path = donor.records[shard], spec.shard_path(shard)
        if record.tokens_xxh3 != tokens_hash(rows):
            return False
        try:
            read_checked(donor.root, path, record.files[path])
            link_file(below(donor.root, path), below(self.root, path))
        except (CacheCorruptError, OSError):  # damaged, on another file system, or no hard links
            return False
        return True

    def _write_table(self, shard: int, table: pa.Table) -> str:
        fields = sequence_columns(self.manifest.identity.relations).items()
        schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in fields])
        buffer = io.BytesIO()
        pq.write_table(table.cast(schema), buffer, compression="zstd", write_page_checksum=True)
        path = sequences_path(shard)
        write_file(below(self.root, path), buffer.getvalue())
        return path

    def _make_durable(self, files: list[str]) -> None:
        directories = set()
        for path in files:
            file = below(self.root, path)
            sync_file(file)
            while file != self.root:
                file = file.parent
                directories.add(file)
        sync_directories(directories)

    def _digest(self, path: str) -> FileDigest:
        return digest_bytes(below(self.root, path).read_bytes())

    @contextmanager
    def sealing(self) -> Iterator[bool]:
        """Hold the lock on sealing, and yield whether the cache can and must still be sealed."""
        path = below(self.root, SEAL_LOCK)
        lock = FileLock(path)
        with storage_errors("lock", path):
            path.parent.mkdir(exist_ok=True)
            lock.acquire()
        try:
            self.manifest = self._read_manifest()
            yield not self.manifest.complete and not self.missing_shards()
        finally:
            lock.release()

    def seal(self, measured: Measured, preview: pa.Table) -> None:
        """Mark the cache as complete; the manifest is written last.

        Raises:
            StorageError: a shard is missing, or the file system refused.
        """
        missing = self.missing_shards()
        if missing:
            raise StorageError(f"{self.root} cannot be sealed: shards {missing} are not committed.")
        complete = self.manifest.model_copy(update={"complete": True, "measured": measured})
        with storage_errors("seal the cache", self.root):
            self.manifest = seal_with_preview(self.root, complete, preview)
            # Every shard is committed, so no process writes any more, and leftovers of kills can be removed.
            for leftover in (*(self.root / "locks").glob("[0-9]*.lock"), *self.root.rglob(f"*{PARTIAL}")):
                leftover.unlink(missing_ok=True)


def tokens_hash(tokens: npt.NDArray[np.generic]) -> str:
    """Return the hash of a shard's token ids, `(tokens,)`, as its commit record holds it."""
    return xxh3(np.ascontiguousarray(tokens).data.cast("B"))


def _has_same_token_layout(donor: CacheManifest, manifest: CacheManifest) -> bool:
    """Return whether two caches store their tokens in the same layout."""
    metadata = "tokens/zarr.json"
    return donor.shards == manifest.shards and donor.files.get(metadata) == manifest.files.get(metadata)


def _refuse_incompatible(parts: CacheReader, manifest: CacheManifest) -> None:
    """Raise IdentityMismatchError if files of `parts` cannot be used here: other codes, or other shards."""
    theirs, ours = parts.manifest.files, manifest.files
    differing = [
        path for path in theirs if path in ours and theirs[path] != ours[path] and path != "zarr.json"
    ]
    if parts.manifest.shards != manifest.shards or differing:
        what = differing[0] if differing else "its shards"
        raise IdentityMismatchError(
            f"{parts.root} cannot be added to here: {what} differs, so the two were begun separately. "
            "Choose another --out, or leave out --add."
        )
