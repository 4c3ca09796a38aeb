"""Files that are added to a complete cache: its manifest names them from then on."""

from pathlib import Path

from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.card import cache_card
from minilm_cache.store.checked import is_sound
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.store.fingerprint import digest_bytes
from minilm_cache.store.layout import CARD, MANIFEST, below


def attach(root: Path, manifest: CacheManifest, *, path: str, content: bytes) -> CacheManifest:
    """Add a file to a complete cache, or write it again where it is damaged; the manifest goes last.

    Args:
        root: folder of the cache.
        manifest: manifest of the cache.
        path: path of the file below `root`, one that the format knows.
        content: content of the file.

    Returns:
        The manifest as it is now.

    Raises:
        StorageError: the file system refused.
    """
    digest = digest_bytes(content)
    if manifest.files.get(path) == digest and not is_damaged(root, manifest, path):
        return manifest
    named = manifest.model_copy(update={"files": manifest.files | {path: digest}})
    with storage_errors("write", root):
        write_file(below(root, path), content)
        write_file(root / CARD, cache_card(named).encode())
        write_file(root / MANIFEST, named.to_json())
    return named


def is_damaged(root: Path, manifest: CacheManifest, path: str) -> bool:
    """Return whether a file that a manifest names is missing or damaged."""
    return not is_sound(root, path, manifest.files[path])
