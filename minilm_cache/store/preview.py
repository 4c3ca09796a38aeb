"""The preview of a finished cache: a table of some of its sequences, whose hash is in the manifest."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from minilm_cache.storage_schema.manifest import PREVIEW, CacheManifest
from minilm_cache.store.attach import is_damaged
from minilm_cache.store.card import cache_card
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.store.fingerprint import digest_bytes
from minilm_cache.store.layout import CARD, MANIFEST, below


def seal_with_preview(root: Path, manifest: CacheManifest, preview: pa.Table) -> CacheManifest:
    """Write the preview, the card and the manifest of a complete cache; the manifest goes last.

    Args:
        root: folder of the cache.
        manifest: manifest of the complete cache.
        preview: table of the preview.

    Returns:
        The manifest as it was written, with the preview among its files.

    Raises:
        StorageError: the file system refused.
    """
    buffer = io.BytesIO()
    pq.write_table(preview, buffer, compression="zstd")
    files = manifest.files | {PREVIEW: digest_bytes(buffer.getvalue())}
    named = manifest.model_copy(update={"files": files})
    with storage_errors("seal the cache", root):
        write_file(below(root, PREVIEW), buffer.getvalue())
        write_file(root / CARD, cache_card(named).encode())
        write_file(root / MANIFEST, named.to_json())
    return named


def has_damaged_preview(root: Path, manifest: CacheManifest) -> bool:
    """Return whether the preview that a manifest names is missing or damaged."""
    return PREVIEW in manifest.files and is_damaged(root, manifest, PREVIEW)
