"""List the caches of a store or of a home."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from minilm_cache.errors import CacheIncompleteError, CacheNotFoundError, MiniLMCacheError, StorageError
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.manifest import MAX_MANIFEST_BYTES, CacheManifest
from minilm_cache.store.layout import BEGUN, MANIFEST
from minilm_cache.store.reader import check_size, read_manifest
from minilm_cache.store.remote import TRANSFERS, RemoteFolder, open_store

_URLS_SHOWN: Final = 5
"""Most URLs of caches that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One cache of a store."""

    url: str
    manifest: CacheManifest | None
    """Manifest of the cache. None means that it cannot be read."""
    problem: str | None
    """Reason why it cannot be read. None means that it can be read."""


def catalogue(url: str) -> list[CatalogueEntry]:
    """Return the caches of a store, or the single cache if `url` is the URL of a cache.

    Raises:
        StorageError: the store cannot be reached.
    """
    return _caches_of(open_store(url))


def _caches_of(store: RemoteFolder) -> list[CatalogueEntry]:
    if store.read_if_there(MANIFEST, MAX_MANIFEST_BYTES) is not None:
        return [_entry(store)]
    # Manifests arrive concurrently, but only one is parsed at a time: a large one takes much memory.
    parse_lock = Lock()
    folders = [store.below(name) for name in store.folders()]
    with ThreadPoolExecutor(TRANSFERS) as threads:
        entries = list(threads.map(lambda folder: _entry(folder, parse_lock), folders))
    return [entry for entry in entries if entry.manifest is not None or entry.problem is not None]


def find_cache(store_url: str, fingerprint: str) -> str | None:
    """Return the URL of the complete cache with a fingerprint in a store, or None if it is not there.

    Raises:
        StorageError: the store cannot be reached.
    """
    for entry in _likely_first(open_store(store_url), fingerprint[:12]):
        if entry.manifest is not None and entry.manifest.fingerprint == fingerprint:
            return entry.url
    return None


def _likely_first(store: RemoteFolder, ending: str) -> Iterator[CatalogueEntry]:
    """Yield a store's caches whose names end so, then all: whoever dumps into a store may choose a name."""
    for name in store.folders():
        if name.endswith(ending):
            yield _entry(store.below(name))
    yield from _caches_of(store)


def _entry(folder: RemoteFolder, parse_lock: AbstractContextManager[object] | None = None) -> CatalogueEntry:
    try:
        manifest = remote_manifest(folder, parse_lock)
    except CacheNotFoundError:
        return CatalogueEntry(url=folder.url, manifest=None, problem=None)
    except MiniLMCacheError as error:
        return CatalogueEntry(url=folder.url, manifest=None, problem=str(error))
    return CatalogueEntry(url=folder.url, manifest=manifest, problem=None)


def named_manifest(folder: RemoteFolder) -> CacheManifest:
    """Return the manifest of a cache that a user has named, like `remote_manifest`.

    If it is not there, the error lists the caches in that folder or in the folder above.
    """
    try:
        return remote_manifest(folder)
    except CacheNotFoundError as error:
        above = folder.above()
        urls = _urls(folder) or (_urls(above) if above else [])
        if not urls:
            raise
        more = f" and {len(urls) - _URLS_SHOWN} more" if len(urls) > _URLS_SHOWN else ""
        raise CacheNotFoundError(f"{error} There: {', '.join(urls[:_URLS_SHOWN])}{more}.") from None


def _urls(store: RemoteFolder) -> list[str]:
    """Return the URLs of a store's complete caches; an empty list if the store cannot be listed."""
    try:
        return [entry.url for entry in _caches_of(store) if entry.manifest is not None]
    except StorageError:
        return []


def remote_manifest(
    folder: RemoteFolder, parse_lock: AbstractContextManager[object] | None = None
) -> CacheManifest:
    """Return the manifest of a complete cache.

    Args:
        folder: folder of the cache.
        parse_lock: held while the manifest is parsed. None means that no lock is held.

    Raises:
        CacheNotFoundError: there is no cache.
        CacheIncompleteError: the cache is not complete.
        CacheCorruptError: the manifest is damaged.
        UnsupportedFormatError: a newer release wrote the cache.
    """
    try:
        content = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    except CacheNotFoundError:
        if folder.read_if_there(BEGUN, MAX_MANIFEST_BYTES) is not None:
            raise CacheIncompleteError(
                f"{folder.url} is an unfinished dump. The `minilm-cache dump` command that began it finishes "
                "it."
            ) from None
        raise CacheNotFoundError(
            f"no cache at {folder.url}: {MANIFEST} is not there. "
            "Give the URL of a cache, as `minilm-cache ls` shows it."
        ) from None
    with parse_lock or nullcontext():
        manifest = parse(CacheManifest, content, f"{folder.url}/{MANIFEST}")
    check_size(manifest, f"{folder.url}/{MANIFEST}")
    if not manifest.complete:
        raise CacheIncompleteError(
            f"{folder.url} is unfinished. Finish its dump; push it again if this is a copy."
        )
    return manifest


def newest_cache(home: Path) -> Path:
    """Return the complete cache below `home` that was finished last.

    Raises:
        CacheIncompleteError: there is no complete cache.
    """
    finished = []
    for manifest in home.glob("caches/*/manifest.json"):
        try:
            if read_manifest(manifest.parent).complete:
                finished.append((manifest.stat().st_mtime, manifest.parent))
        except MiniLMCacheError:  # damaged, or newer than this release: not a cache to choose by default
            continue
    if not finished:
        raise CacheIncompleteError(
            f"no complete cache in {home / 'caches'}. Make one with `minilm-cache dump`, or name one by "
            "its folder or URL."
        )
    return max(finished)[1]
