"""Copy a cache into a store.

The index is sent first, and only if the store has none. It claims the place, so that two dumps with the same
fingerprint, whose bytes may differ, never mix. The manifest is sent last and makes the cache exist. A cache
of format 1 has no index; the commit record of a shard is sent before its files, and claims the shard.
"""

from collections.abc import Mapping
from pathlib import Path

from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    CacheNotFoundError,
    IdentityMismatchError,
    InvalidConfigError,
    MiniLMCacheError,
)
from minilm_cache.session import Session
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.documents import MAX_RECORD_BYTES, CommitRecord, FileDigest
from minilm_cache.storage_schema.manifest import INDEX, MAX_MANIFEST_BYTES, CacheManifest
from minilm_cache.store.card import cache_card, manifest_between
from minilm_cache.store.catalogue import remote_manifest
from minilm_cache.store.checked import checked_file, read_checked
from minilm_cache.store.durable import read_bounded
from minilm_cache.store.layout import BEGUN, CARD, MANIFEST, below, cache_name, commit_path
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.remote import RemoteFolder, TransferResult, for_each, num_bytes, open_store
from minilm_cache.store.verify import remote_damage


def push(root: Path, store_url: str, *, session: Session, full: bool = False) -> TransferResult:
    """Copy a complete cache into a folder of a store that is named by the cache; existing files stay.

    So do files that the store's cache has and this one lacks, such as the teacher's weights.

    Args:
        root: folder of the cache.
        store_url: URL or path of the store.
        session: its progress shows the bytes done. Its `should_stop` is called before each shard; True stops.
        full: read existing files and replace those that differ. False means that only sizes are compared, and
            of files beside the shards, which may be others than at an earlier push, the store's manifest.

    Raises:
        InvalidConfigError: the store is a cache itself.
        IdentityMismatchError: the store holds another dump with this fingerprint, and it is incomplete or
            `full` is set.
        CacheCorruptError: a file differs from what was committed; such a file is never sent.
        InterruptedRunError: a stop was requested; files that have arrived are kept.
        StorageError: the store refused, or cannot be reached.
    """
    reader = CacheReader(root)
    manifest = reader.manifest
    num_shards = len(reader.ranges)
    store = open_store(store_url)
    _refuse_inside_cache(store)
    target = store.below(cache_name(manifest.labels, manifest.identity))
    sender = _Sender(reader, target, session, full=full)
    existing = _complete_manifest(target)
    try:
        sender.claim(existing)
    except IdentityMismatchError:
        if full or existing is None or existing.fingerprint != manifest.fingerprint:
            raise
        session.progress.note(
            f"{target.url} holds this cache already, from another dump with an equal fingerprint"
        )
        return TransferResult(place=target.url, manifest=existing, shards_copied=0, shards_kept=num_shards)

    named = {} if existing is None else existing.files
    target.remove_leftovers()
    if existing is not None and (between := manifest_between(existing, manifest)) is not None:
        target.write(MANIFEST, between.to_json())
    session.progress.start("push", num_bytes(manifest, reader.records), "bytes")
    sent = [
        sender.send(path, digest, is_named=named.get(path) == digest)
        for path, digest in manifest.files.items()
    ]
    copied = sum(
        for_each(sender.send_shard, range(num_shards), should_stop=session.should_stop, place=target.url)
    )
    if kept := sorted(named.keys() - manifest.files.keys()):
        session.progress.note(f"{target.url} has {', '.join(kept)}, too, which {root} lacks: kept there")
    whole, is_new = _finish(target, root, manifest, named=named)
    if not (is_new or copied or any(sent)):
        session.progress.note(f"{target.url} holds this cache already: nothing to do")
    return TransferResult(
        place=target.url, manifest=whole, shards_copied=copied, shards_kept=num_shards - copied
    )


def _finish(
    target: RemoteFolder, root: Path, manifest: CacheManifest, *, named: Mapping[str, FileDigest]
) -> tuple[CacheManifest, bool]:
    """Write the manifest, with the files that only the store has, and return it and whether it is another.

    `named` are the files that the store's manifest names; they keep its order.
    """
    content, whole = read_bounded(root / MANIFEST, MAX_MANIFEST_BYTES), manifest
    if named.keys() - manifest.files.keys():
        whole = manifest.model_copy(update={"files": {**named, **manifest.files}})
        content = whole.to_json()
    is_new = target.read_if_there(MANIFEST, MAX_MANIFEST_BYTES) != content
    if is_new:
        target.write(CARD, cache_card(whole).encode())  # made anew: no hash covers the card in the folder
        target.write(MANIFEST, content)
    return whole, is_new


def _refuse_inside_cache(store: RemoteFolder) -> None:
    """Raise InvalidConfigError if a folder is, or lies in, a cache, be it damaged or unfinished."""
    folder: RemoteFolder | None = store
    while folder is not None:
        # Other programs have files called manifest.json, too.
        if _has(folder, BEGUN) or (_has(folder, MANIFEST) and _has(folder, "zarr.json")):
            raise InvalidConfigError(
                f"{store.url} is, or lies in, a cache, and is no store of caches. Name another folder."
            )
        folder = folder.above()


def _has(folder: RemoteFolder, name: str) -> bool:
    """Return whether a folder has a file that this process may read; folders above may be closed to it."""
    try:
        folder.read_range(name, 0, 1)
    except MiniLMCacheError:
        return False
    return True


def _complete_manifest(target: RemoteFolder) -> CacheManifest | None:
    try:
        return remote_manifest(target)
    except (CacheNotFoundError, CacheIncompleteError, CacheCorruptError):
        return None


class _Sender:
    """Sends files of a cache; each is checked against its record before it is sent."""

    def __init__(self, reader: CacheReader, target: RemoteFolder, session: Session, *, full: bool) -> None:
        self._reader = reader
        self._target = target
        self._progress = session.progress
        self._full = full
        self._sizes = target.sizes()

    def claim(self, existing: CacheManifest | None) -> None:
        """Claim the place of the cache in the store.

        Args:
            existing: manifest of the complete cache that the store has there. None means that it has none.

        Raises:
            IdentityMismatchError: the store holds another dump there.
        """
        others_claim = commit_path(0) if INDEX in self._reader.manifest.files else INDEX
        if BEGUN in self._sizes and MANIFEST not in self._sizes:
            raise self._begun_dump()
        if existing is None and others_claim in self._sizes:
            raise self._other_dump()
        if INDEX not in self._reader.manifest.files:
            if existing is not None and INDEX in existing.files:
                raise self._other_dump()
            self._claim_shard(0)
            return
        ours = self._reader.manifest.files[INDEX]
        if existing is not None:
            if existing.files.get(INDEX) != ours:
                raise self._other_dump()
            return  # a damaged index there is replaced like any other file
        content = read_checked(self._reader.root, INDEX, ours)
        if self._target.create(INDEX, content):
            if self._target.read_if_there(BEGUN, MAX_MANIFEST_BYTES) is not None:
                self._target.remove([INDEX])
                raise self._begun_dump()
        elif self._target.read_range(INDEX, 0, ours.size + 1) != content:
            raise self._other_dump()

    def _claim_shard(self, shard: int) -> bool:
        """Send a shard's record, in format 1, if the store has none, and return whether it was sent.

        Raises:
            IdentityMismatchError: the record in the store lists other files.
        """
        path = commit_path(shard)
        content = read_bounded(below(self._reader.root, path), MAX_RECORD_BYTES)
        if self._target.create(path, content):
            return True
        stored = self._target.read(path, MAX_RECORD_BYTES)
        try:
            record = parse(CommitRecord, stored, f"{self._target.url}/{path}")
        except CacheCorruptError:
            self._target.write(path, content)
            return True
        fingerprint = self._reader.manifest.fingerprint
        ours = (fingerprint, shard, self._reader.records[shard].files)
        if (record.fingerprint, record.shard, record.files) != ours:
            raise self._other_dump()
        return False

    def _begun_dump(self) -> IdentityMismatchError:
        return IdentityMismatchError(
            f"{self._target.url} holds an unfinished dump into this store. Finish it with the `minilm-cache "
            "dump` command that began it, delete it, or choose another store."
        )

    def _other_dump(self) -> IdentityMismatchError:
        return IdentityMismatchError(
            f"{self._target.url} holds shards of another dump of the same fingerprint, which only a "
            "push of that dump can finish or repair. Delete it, or choose another store."
        )

    def send(self, path: str, expected: FileDigest, *, is_named: bool = True) -> bool:
        """Send a file unless the store has it, and return whether it was sent.

        Args:
            path: path of the file below the cache's root.
            expected: digest of the file.
            is_named: whether a file of this size is the same one, as the store's manifest or the claim of
                its shard says. False means that it is read.
        """
        needed = not self._is_stored(path, expected, is_named=is_named)
        if needed:
            self._target.send(path, checked_file(self._reader.root, path, expected))
        self._progress.advance(expected.size)
        return needed

    def _is_stored(self, path: str, expected: FileDigest, *, is_named: bool) -> bool:
        size, full = self._sizes.get(path), self._full or not is_named
        return remote_damage(self._target, path, expected, size=size, full=full) is None

    def send_shard(self, shard: int) -> bool:
        """Send a shard's files, and its record in format 1, and return whether the store lacked any."""
        sent = self._reader.manifest.format_version == 1 and self._claim_shard(shard)
        for path, expected in self._reader.records[shard].files.items():
            sent = self.send(path, expected) or sent
        return sent
