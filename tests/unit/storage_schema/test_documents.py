"""The format: strict documents, metadata as a function of the manifest, nothing that drifts."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError, UnsupportedFormatError
from minilm_cache.storage_schema.arrays import INNER_CHUNK_BYTES, array_specs, sequence_columns
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.documents import CommitRecord
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.storage_schema.metadata import zarr_documents
from tests.support import find_problems

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/v1"
MANIFEST = (GOLDEN / "manifest.json").read_bytes()
RECORD = (GOLDEN / "commits/00000.json").read_bytes()


def golden() -> CacheManifest:
    return CacheManifest.model_validate_json(MANIFEST)


def changed(document: bytes, path: str, value: object) -> bytes:
    """Return a document with one field set."""
    content = json.loads(document)
    *parents, last = path.split(".")
    place = content
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    return json.dumps(content).encode()


def test_the_json_schema_is_that_of_the_manifest() -> None:
    """Regenerate with `python -m tests.golden.regenerate` when a format version is added."""
    published = json.loads((ROOT / "storage_schema/manifest.schema.json").read_text())

    assert published == CacheManifest.model_json_schema()


def test_the_golden_fingerprint_is_that_of_its_identity() -> None:
    assert golden().fingerprint == golden().identity.fingerprint()


def test_metadata_on_disk_is_what_the_manifest_implies() -> None:
    manifest = golden()
    documents = zarr_documents(
        manifest.identity, None, num_shards=len(manifest.shards), shard_tokens=manifest.shard_tokens
    )
    for path, content in documents.items():
        assert (GOLDEN / path).read_bytes() == content


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("unknown", 1),
        ("fingerprint", "0" * 64),
        ("complete", False),
        ("complete", 1),
        ("num_tokens", 1),
        ("num_sequences", 10**9),
        ("num_held_out", 10**6),
        ("shard_tokens", 100),
        ("shard_tokens", 2**40),
        ("shards", []),
        ("identity.relation_heads", 0),
        ("identity.relation_heads", "4"),
        ("identity.codec.k", 10**9),
        ("identity.codec.name", "pickle"),
        ("identity.packing.max_length", 2**20),
        ("identity.teacher.vocab_size", 2**30),
        ("labels.teacher", "a\nb"),
        ("files", {"../../etc/passwd": {"size": 1, "sha256": "0" * 64, "xxh3_128": "0" * 32}}),
        ("files", {"/etc/passwd": {"size": 1, "sha256": "0" * 64, "xxh3_128": "0" * 32}}),
        ("files", {"teacher/.hidden": {"size": 1, "sha256": "0" * 64, "xxh3_128": "0" * 32}}),
        ("measured.bytes_per_token", float("nan")),
    ],
    ids=str,
)
def test_manifests_that_cannot_be_are_refused(path: str, value: object) -> None:
    with pytest.raises(CacheCorruptError, match="x is damaged"):
        parse(CacheManifest, changed(MANIFEST, path, value), "x")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("shard", -1),
        ("attempt", "../x"),
        ("files", {"a/../../b": {"size": 1, "sha256": "0" * 64, "xxh3_128": "0" * 32}}),
        ("range.num_sequences", 0),
        ("more", None),
    ],
    ids=str,
)
def test_records_that_cannot_be_are_refused(path: str, value: object) -> None:
    assert find_problems(CommitRecord, changed(RECORD, path, value))


def test_every_problem_is_found_at_once() -> None:
    document = changed(changed(MANIFEST, "labels.teacher", ""), "shard_tokens", 3)

    assert {problem.loc for problem in find_problems(CacheManifest, document)} == {
        "labels.teacher",
        "shard_tokens",
    }


def test_a_newer_version_is_told_before_anything_else() -> None:
    with pytest.raises(UnsupportedFormatError, match="format version 3"):
        parse(CacheManifest, b'{"format_version": 3, "anything": "else"}', "x")


@given(st.binary(max_size=200))
def test_any_bytes_end_in_an_error_of_ours(document: bytes) -> None:
    with pytest.raises((CacheCorruptError, UnsupportedFormatError)):
        parse(CacheManifest, document, "x")


def test_inner_chunks_are_as_large_as_decoding_likes() -> None:
    for spec in array_specs(golden().identity):
        rows = spec.chunk_tokens(2**18)

        assert INNER_CHUNK_BYTES <= rows * spec.row_bytes < 2 * INNER_CHUNK_BYTES


def test_the_spec_names_every_array_and_column() -> None:
    text = (ROOT / "storage_schema/SPEC.md").read_text()
    for spec in array_specs(golden().identity):
        assert f"`{spec.path.replace('attention', 'R').replace('value', 'R')}`" in text
    for column in sequence_columns((RelationKind.ATTENTION, RelationKind.VALUE)):
        assert f"`{column}`" in text
