"""What goes with a finished cache: a card for people and hubs, a preview, and files that are added later."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCardData

from minilm_cache.storage_schema.identity import codec_words
from minilm_cache.storage_schema.manifest import OUTSIDE, PREVIEW, TEACHER_WEIGHTS, CacheManifest
from minilm_cache.store.checked import digest_bytes, is_damaged
from minilm_cache.store.durable import remove_left_of, storage_errors, write_file
from minilm_cache.store.layout import CARD, MANIFEST, below
from minilm_cache.wording import printable, rendered


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
        if (between := manifest_between(manifest, named)) is not None:
            write_file(root / MANIFEST, between.to_json())
        remove_left_of(below(root, path))  # weights of a teacher that a kill has left are large
        write_file(below(root, path), content)
        write_file(root / CARD, cache_card(named).encode())
        write_file(root / MANIFEST, named.to_json())
    return named


def manifest_between(manifest: CacheManifest, later: CacheManifest) -> CacheManifest | None:
    """Return the manifest of a complete cache while files are replaced that no array needs.

    A manifest that still named the former files would call the cache damaged, if this process were killed.

    Args:
        manifest: manifest as it is.
        later: manifest as it will be.

    Returns:
        The manifest without the files that will be others. None means that there are none.
    """
    both = OUTSIDE & manifest.files.keys() & later.files.keys()
    others = {path for path in both if later.files[path] != manifest.files[path]}
    if not others:
        return None
    kept = {path: digest for path, digest in manifest.files.items() if path not in others}
    return manifest.model_copy(update={"files": kept})


_PREVIEW = {"config_name": "preview", "data_files": "preview/*.parquet", "default": True}


def cache_card(manifest: CacheManifest) -> str:
    """Return the dataset card of a complete cache, Markdown: metadata for hubs, content, how to read it."""
    measured = manifest.measured
    assert measured is not None
    data = DatasetCardData(
        pretty_name=f"{'Relations' if manifest.identity.has_relations else 'States'} of "
        f"{printable(manifest.labels.teacher)} on "
        f"{printable(manifest.labels.corpus)}",
        tags=["minilm-cache", "zarr", "knowledge-distillation"],
        configs=[
            *([_PREVIEW] if PREVIEW in manifest.files else []),
            {"config_name": "sequences", "data_files": "sequences/*.parquet"},
        ],
    )
    return rendered(
        "minilm_cache.store",
        "card.md.jinja",
        data=data.to_yaml(),
        title=str(data.pretty_name),
        manifest=manifest,
        identity=manifest.identity,
        measured=measured,
        codec=codec_words(manifest.identity.codec),
        keeps_weights=TEACHER_WEIGHTS in manifest.files,
    )


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
