"""Begin a cache, in a folder or in a store, and compare one that exists with the requested one."""

import hashlib
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError
from minilm_cache.session import Session
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import INDEX, MAX_MANIFEST_BYTES, CacheManifest
from minilm_cache.store.checked import digest_bytes, read_checked
from minilm_cache.store.durable import locked, storage_errors, write_file
from minilm_cache.store.layout import (
    BEGUN,
    COMMITS,
    CREATE_LOCK,
    MANIFEST,
    below,
    commit_path,
    refuse_occupied,
    refuse_other_cache,
)
from minilm_cache.store.remote import AccessDeniedError, RemoteFolder
from minilm_cache.wording import differing_values


def prepare_root(root: Path) -> None:
    """Make the folder of a new cache. It may hold files left by interrupted or waiting processes.

    Raises:
        IdentityMismatchError: the folder holds something that is not a cache.
    """
    refuse_occupied(root)
    root.mkdir(parents=True, exist_ok=True)


@contextmanager
def creating(root: Path, session: Session) -> Iterator[None]:
    """Hold the lock on creating a cache, so that all processes use what the first of them decides.

    Raises:
        IdentityMismatchError: the folder holds something that is not a cache.
        InterruptedRunError: a stop was requested while this process waited.
        StorageError: the file system refused.
    """
    path = below(root, CREATE_LOCK)
    with storage_errors("lock", path):
        if not (root / MANIFEST).exists():
            prepare_root(root)
    interrupted = (
        f"interrupted while another process creates {root}: this one wrote nothing. "
        "Run the same command again."
    )
    note = partial(session.progress.note, f"waiting for the process that creates {root}")
    with locked(path, should_stop=session.should_stop, interrupted=interrupted, waits=note):
        yield


def differing_fields(existing: CacheManifest, expected: CacheManifest) -> list[str]:
    """Return where two manifests differ that would have to describe the same cache.

    The texts are those of `wording.differing_values`. Empty means that only the sequences of its shards can
    differ.
    """
    pairs = [
        (existing.identity.model_dump(mode="json"), expected.identity.model_dump(mode="json")),
        ({"shard_tokens": existing.shard_tokens}, {"shard_tokens": expected.shard_tokens}),
    ]
    return [text for left, right in pairs for text in differing_values(left, right)]


STAGING: Final = "staging"
CLAIMS: Final = "claims"


class OtherBeginningError(Exception):
    """Another process has begun this dump first, perhaps with other codes, or has finished it."""


def begun_manifest(target: RemoteFolder) -> CacheManifest | None:
    """Return the manifest of what a store holds, complete or begun, whatever it is. None means nothing."""
    for path in (MANIFEST, BEGUN):
        content = target.read_if_there(path, MAX_MANIFEST_BYTES)
        if content is not None:
            return parse(CacheManifest, content, f"{target.url}/{path}")
    return None


def finished_manifest(target: RemoteFolder, identity: CacheIdentity) -> CacheManifest | None:
    """Return the manifest of a complete cache in a store. None means that it is not complete.

    Raises:
        IdentityMismatchError: it is another cache.
    """
    content = target.read_if_there(MANIFEST, MAX_MANIFEST_BYTES)
    if content is None:
        return None
    manifest = _same(content, MANIFEST, target=target, identity=identity)
    if not manifest.complete:
        raise IdentityMismatchError(
            f"{target.url} holds an unfinished dump into a folder. Finish it there by `--out FOLDER`, or "
            "choose another --out."
        )
    return manifest


def join(target: RemoteFolder, root: Path, identity: CacheIdentity) -> None:
    """Make a folder the beginning of the dump that a store holds, if it holds one.

    Args:
        target: folder of the cache in the store.
        root: folder on this machine, which may not exist.
        identity: what is dumped.

    Raises:
        IdentityMismatchError: the store holds another dump there.
        CacheCorruptError: a file of the store is damaged.
        StorageError: the store or the file system refused.
    """
    content = target.read_if_there(BEGUN, MAX_MANIFEST_BYTES)
    if content is None:
        return
    manifest = _same(content, BEGUN, target=target, identity=identity)
    staging = target.below(staging_of(content))
    for path, digest in manifest.files.items():
        write_file(below(root, path), read_remote(staging, path, digest), durable=False)
    write_file(root / MANIFEST, content, durable=False)


def begin(target: RemoteFolder, root: Path, manifest: CacheManifest) -> None:
    """Begin a dump in a store, or find that this very dump has begun.

    Args:
        target: folder of the cache in the store.
        root: folder on this machine with the files that the manifest names.
        manifest: manifest of the unfinished cache.

    Raises:
        OtherBeginningError: another process was first, with other codes, or has finished the cache.
        IdentityMismatchError: a push has begun there.
    """
    content = manifest.to_json()
    if target.read_if_there(BEGUN, MAX_MANIFEST_BYTES) is None:
        _refuse_pushed(target, target.sizes().keys())
        staging = target.below(staging_of(content))
        for path, digest in manifest.files.items():
            staging.write(path, read_checked(root, path, digest))
        if target.create(BEGUN, content):
            try:  # a push that claims the place from now on finds that a dump has begun
                _refuse_pushed(target, target.sizes().keys() - {BEGUN})
            except IdentityMismatchError:
                target.remove([BEGUN])
                raise
    if finished_manifest(target, manifest.identity) is not None:
        remove_leftovers(target)
        raise OtherBeginningError
    if target.read_if_there(BEGUN, MAX_MANIFEST_BYTES) != content:
        raise OtherBeginningError


def _refuse_pushed(target: RemoteFolder, names: Set[str]) -> None:
    """Raise IdentityMismatchError for a place that a push has claimed, and has not finished."""
    claims = {INDEX, commit_path(0)}  # formats 2 and 1
    if claims & names and not {BEGUN, MANIFEST} & names:
        raise IdentityMismatchError(
            f"{target.url} holds a part of a cache that is being pushed there. Repeat that push, or choose "
            "another --out."
        )


def refuse_store(target: RemoteFolder) -> None:
    """Raise IdentityMismatchError for a place in a store that is no cache, and has caches below it."""
    if begun_manifest(target) is None:
        for name in target.folders():
            manifest = None
            with suppress(CacheCorruptError):  # other programs have files of this name, too
                manifest = begun_manifest(target.below(name))
            if manifest is not None:
                raise IdentityMismatchError(
                    f"{target.url} holds other caches, such as {name}. Give --out a name below it: "
                    f"{target.url}/NAME."
                )


def remove_leftovers(target: RemoteFolder) -> None:
    """Remove what only a dump needs from the folder of a finished cache, if this process may write there."""
    if target.read_if_there(BEGUN, MAX_MANIFEST_BYTES) is None:  # no dump into the store has begun here
        return
    with suppress(AccessDeniedError):  # whoever reads the cache needs none of this gone
        for folder in (STAGING, CLAIMS, COMMITS):
            target.remove([f"{folder}/{name}" for name in target.below(folder).sizes()])
        target.remove([BEGUN])


def staging_of(content: bytes) -> str:
    """Return the folder of the files that a record or a beginning names."""
    return f"{STAGING}/{hashlib.sha256(content).hexdigest()[:32]}"


def read_remote(folder: RemoteFolder, path: str, expected: FileDigest) -> bytes:
    """Return a file of a store.

    Raises:
        CacheCorruptError: it is not what was committed.
    """
    content = folder.read(path, expected.size)
    if digest_bytes(content) != expected:
        raise CacheCorruptError(
            f"{folder.url}/{path} is damaged. Run the same command again with `--check full`: it "
            "writes damaged shards again."
        )
    return content


def _same(content: bytes, name: str, *, target: RemoteFolder, identity: CacheIdentity) -> CacheManifest:
    """Return a manifest of a store.

    Raises:
        IdentityMismatchError: it is of another cache.
    """
    manifest = parse(CacheManifest, content, f"{target.url}/{name}")
    differing = differing_values(manifest.identity.model_dump(mode="json"), identity.model_dump(mode="json"))
    refuse_other_cache(target.url, differing)
    return manifest
