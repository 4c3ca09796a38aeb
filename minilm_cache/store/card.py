"""What goes with a finished cache: a card for people and hubs, a preview, and files that are added later."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCardData

from minilm_cache.storage_schema.identity import CacheIdentity, codec_words
from minilm_cache.storage_schema.manifest import PREVIEW, TEACHER_WEIGHTS, CacheManifest, Measured
from minilm_cache.store.checked import digest_bytes, is_damaged
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.store.layout import CARD, MANIFEST, below
from minilm_cache.wording import markdown, printable


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


_PYTHON = {True: 'relation("attention")', False: "states()"}
"""What reads a sequence's content, for caches with relations and for those without."""
_PREVIEW = {"config_name": "preview", "data_files": "preview/*.parquet", "default": True}


def _contents(identity: CacheIdentity) -> str:
    """Return what a cache holds, as the beginning of a sentence."""
    if not identity.has_relations:
        return "States"
    return f"Attention distributions and value relations of {_layers(identity.layers)}"


def _layers(layers: tuple[int, ...]) -> str:
    if len(layers) == 1:
        return f"a teacher's layer {layers[0]} (counted from 0)"
    return f"a teacher's layers {', '.join(map(str, layers))} (counted from 0)"


def _states_table(measured: Measured) -> list[str]:
    if not measured.states:
        return []
    rows = [
        f"| `{state.path}` | {state.bytes_per_token:.1f} | "
        f"{'' if state.relative_error is None else f'{state.relative_error:.4f}'} | "
        f"{'' if state.cross_entropy_bias is None else f'{state.cross_entropy_bias:+.4f}'} | "
        f"{'' if state.cosine is None else f'{state.cosine:.5f}'} |"
        for state in measured.states
    ]
    return [
        "| state | bytes per token | relative error | cross-entropy bias, nats | cosine |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def _relations_table(measured: Measured) -> list[str]:
    if not measured.fidelity:
        return []
    rows = [
        f"| {layer.layer} | {kind} | {fidelity.kl_stored_to_teacher:.4f} | {fidelity.mass_kept:.3f} "
        f"| {fidelity.cross_entropy_bias:+.4f} |"
        for layer in measured.fidelity
        for kind, fidelity in layer.relations.items()
    ]
    return [
        "| layer | relation | KL(stored, teacher), nats | mass kept | cross-entropy bias, nats |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def _kept_weights(manifest: CacheManifest) -> list[str]:
    """Return the line about the weights of the teacher, if they are in the cache."""
    is_kept = TEACHER_WEIGHTS in manifest.files
    return ["- the weights of the teacher are among the files, in float16"] * is_kept


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
    identity = manifest.identity
    return "\n".join(
        [
            "---",
            data.to_yaml(),
            "---",
            f"# {markdown(str(data.pretty_name))}",
            "",
            f"{_contents(identity)}, for distilling",
            "students offline with minilm-cache. Format version "
            f"{manifest.format_version}; every array opens with plain `zarr.open_group`.",
            "",
            f"- teacher: {markdown(manifest.labels.teacher)} ({markdown(identity.teacher.model_type)}, "
            f"weights SHA-256 `{identity.teacher.weights_sha256}`)",
            *_kept_weights(manifest),
            f"- corpus: {markdown(manifest.labels.corpus)} ({identity.corpus.num_documents:,} documents, "
            f"SHA-256 `{identity.corpus.sha256}`)",
            f"- {manifest.num_sequences:,} sequences of at most {identity.packing.max_length} tokens "
            f"({identity.packing.mode}), {manifest.num_tokens:,} tokens; the last {manifest.num_held_out:,} "
            "sequences are held out",
            f"- codec of relations: {codec_words(identity.codec)}",
            f"- bytes per token: {measured.bytes_per_token:.1f}",
            *([f"- states: {identity.states.in_words}"] if identity.states is not None else []),
            f"- fingerprint: `{manifest.fingerprint}`",
            "",
            f"Measured on {manifest.measured_on}, from the bytes on disk:",
            "",
            *_relations_table(measured),
            *_states_table(measured),
            "```python",
            "from minilm_cache import open_cache",
            'cache = open_cache("FOLDER")  # the folder of this card, or its URL',
            f"cache[0].input_ids, cache[0].{_PYTHON[identity.has_relations]}",
            "```",
            "",
        ]
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
