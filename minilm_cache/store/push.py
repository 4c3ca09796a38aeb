"""Copy a cache into a store.

A shard's commit record goes first there, and only where none is: it claims the shard, so that two dumps of
one fingerprint, whose bytes may differ, never mix. The manifest goes last and makes the cache exist.
"""

from pathlib import Path

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, MiniLMCacheError
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.storage_schema.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    CacheManifest,
    CommitRecord,
    FileDigest,
)
from minilm_cache.storage_schema.problems import parse
from minilm_cache.store.card import cache_card
from minilm_cache.store.catalogue import remote_manifest
from minilm_cache.store.durable import read_bounded
from minilm_cache.store.fingerprint import digest_bytes
from minilm_cache.store.layout import CARD, MANIFEST, below, cache_name, commit_path
from minilm_cache.store.reader import CacheReader, read_checked
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.store.transfer import Shared, each, num_bytes


def push(
    root: Path, store_url: str, *, progress: Progress, should_stop: ShouldStop, full: bool = False
) -> Shared:
    """Copy a complete cache into a store, below its name there; files that are there stay.

    Args:
        root: the cache's folder.
        store_url: what to copy it into.
        progress: told of bytes done.
        should_stop: asked before each shard.
        full: read files that are there and replace those that differ; else their sizes are compared.

    Raises:
        IdentityMismatchError: another dump of this fingerprint is partly there, or has other bytes to mend.
        CacheCorruptError: a file differs from what was committed; what differs is never sent.
        InterruptedRunError: it was asked to stop; files that have arrived are kept.
        StorageError: the store refused, or cannot be reached.
    """
    reader = CacheReader(root)
    manifest = reader.manifest
    num_shards = len(manifest.shards)
    target = open_store(store_url).below(cache_name(manifest.labels, manifest.identity))
    sender = _Sender(reader, target, progress, full=full)
    try:
        sender.claim(0)
    except IdentityMismatchError:
        there = _complete_manifest(target)
        if full or there is None or there.fingerprint != manifest.fingerprint:
            raise
        progress.note(f"{target.url} is there already, of another dump: equal fingerprints serve alike")
        return Shared(place=target.url, manifest=there, shards_copied=0, shards_kept=num_shards)

    progress.start("push", num_bytes(manifest, list(reader.records.values())), "bytes")
    sent = [sender.send(path, digest) for path, digest in manifest.files.items()]
    copied = sum(each(sender.send_shard, range(num_shards), should_stop=should_stop, place=target.url))
    content = read_bounded(root / MANIFEST, MAX_MANIFEST_BYTES)
    if target.read_if_there(MANIFEST, MAX_MANIFEST_BYTES) != content:
        target.write(CARD, cache_card(manifest).encode())  # written anew: no hash covers the one here
        target.write(MANIFEST, content)
    elif not (copied or any(sent)):
        progress.note(f"{target.url} is there already: nothing to do")
    return Shared(place=target.url, manifest=manifest, shards_copied=copied, shards_kept=num_shards - copied)


def _complete_manifest(target: RemoteFolder) -> CacheManifest | None:
    try:
        return remote_manifest(target)
    except MiniLMCacheError:
        return None


class _Sender:
    """Sends files of one cache, each checked against its record before it goes."""

    def __init__(self, reader: CacheReader, target: RemoteFolder, progress: Progress, *, full: bool) -> None:
        self._reader = reader
        self._target = target
        self._progress = progress
        self._full = full
        self._there = target.sizes()

    def claim(self, shard: int) -> bool:
        """Put a shard's record where none is; returns whether it was sent.

        Raises:
            IdentityMismatchError: the record there is of other files.
        """
        path = commit_path(shard)
        content = read_bounded(below(self._reader.root, path), MAX_RECORD_BYTES)
        if self._target.create(path, content):
            return True
        try:
            found = parse(
                CommitRecord, self._target.read(path, MAX_RECORD_BYTES), f"{self._target.url}/{path}"
            )
        except CacheCorruptError:
            self._target.write(path, content)
            return True
        ours = self._reader.records[shard]
        if (found.fingerprint, found.shard, found.files) != (ours.fingerprint, ours.shard, ours.files):
            raise IdentityMismatchError(
                f"{self._target.url} holds shards of another dump of the same fingerprint, which its own "
                "push finishes or mends. Delete it, or choose another store."
            )
        return False

    def send(self, path: str, expected: FileDigest) -> bool:
        """Send a file unless it is there; returns whether that was necessary."""
        necessary = not self._is_there(path, expected)
        if necessary:
            self._target.write(path, read_checked(self._reader.root, path, expected))
        self._progress.advance(expected.size)
        return necessary

    def _is_there(self, path: str, expected: FileDigest) -> bool:
        if self._there.get(path) != expected.size:
            return False
        return not self._full or digest_bytes(self._target.read(path, expected.size)) == expected

    def send_shard(self, shard: int) -> bool:
        """Send a shard's record and files unless they are there; returns whether any was sent."""
        sent = self.claim(shard)
        for path, expected in self._reader.records[shard].files.items():
            sent = self.send(path, expected) or sent
        return sent
