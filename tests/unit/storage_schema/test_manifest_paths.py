"""The files that a manifest names: their paths stay below the root, and are those of the format."""

import os
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from minilm_cache.storage_schema.documents import CommitRecord, FileDigest, RelativePath
from minilm_cache.storage_schema.manifest import TOKENIZER_FILES, CacheManifest
from tests.unit.storage_schema.test_base import Content, as_json, errors_of, named, without
from tests.unit.storage_schema.test_manifest import DIGEST, INVALID, RECORD, STATES, V1, VECTORS, manifest_of


@pytest.mark.parametrize(
    "path",
    [
        "tokens/c/0",
        "zarr.json",
        "a",
        "_a/-b",
        "A.b/c_d-e.f",
        "a..b",
        "sequences/part-00000.parquet",
        "x" * 128,
    ],
)
def test_paths_below_the_root_are_accepted(path: str) -> None:
    record = CommitRecord.model_validate_json(as_json(RECORD | {"files": {path: DIGEST}}))

    assert list(record.files) == [path]


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "./a", "a/./b", ".a", "a/.b"),
        *(
            "a\\b",
            "C:/a",
            "a b",
            "a\n",
            "a\nb",
            "a\0",
            "~/a",
            "a/~b",
            "$HOME",
            "a%2e",
            "\u00e9",
            "a\u2215b",
            "x" * 129,
        ),
    ],
    ids=repr,
)
def test_paths_that_could_lead_elsewhere_are_refused(path: str) -> None:
    (place,) = errors_of(CommitRecord, RECORD | {"files": {path: DIGEST}})

    assert place[0].startswith("files")


@given(st.text("./\\ ~a-\n", max_size=12))
@settings(deadline=None)
def test_an_accepted_path_stays_below_the_root(path: str) -> None:
    try:
        TypeAdapter(RelativePath).validate_python(path)
    except ValidationError:
        return
    assert os.path.normpath(path) == path
    assert not any(part.startswith(".") for part in PurePosixPath(path).parts)
    assert not path.startswith("/")


@pytest.mark.parametrize("field", ["size", "sha256", "xxh3_128"])
def test_a_file_has_its_size_and_both_hashes(field: str) -> None:
    assert errors_of(FileDigest, without(DIGEST, field)) == [(field, "missing")]
    assert errors_of(FileDigest, DIGEST | {field: None})[0][0] == field


@pytest.mark.parametrize(
    ("content", "path"),
    [
        *((V1, f"teacher/{name}") for name in ("config.json", *TOKENIZER_FILES)),
        (V1, "preview/sequences.parquet"),
        (V1, "tokens/zarr.json"),
        *(
            (content, f"{folder}/{name}")
            for content, folder in ((VECTORS, "vectors/2"), (STATES, "states/masked/3"))
            for name in ("basis/c/0/0", "step/c/0", "analysis/c/0/0", "gain/c/0", "mean/c/0")
        ),
    ],
    ids=named,
)
def test_a_manifest_names_the_files_of_the_format(content: Content, path: str) -> None:
    assert list(manifest_of(content | {"files": {path: DIGEST}}).files) == [path]


@pytest.mark.parametrize(
    ("content", "path"),
    [
        *(
            (V1, path)
            for path in ("README.md", "manifest.json", "commits/00000.json", "tokens/c/0", "zarr.jsonx")
        ),
        *(
            (V1, f"teacher/{name}")
            for name in ("weights.safetensors", "pytorch_model.bin", "modeling_bert.py")
        ),
        *((V1, path) for path in ("teacher/sub/vocab.txt", "vocab.txt", "preview/other.parquet")),
        (V1, "vectors/2/basis/c/0/0"),
        *(
            (VECTORS, f"vectors/{path}")
            for path in ("1/basis/c/0/0", "2/basis/c/0/1", "2/codes/c/0/0", "2/basis")
        ),
        (VECTORS, "states/hidden/0/step/c/0"),
        (STATES, "states/hidden/1/step/c/0"),
    ],
    ids=named,
)
def test_a_manifest_names_no_other_file(content: Content, path: str) -> None:
    assert errors_of(CacheManifest, content | {"files": content["files"] | {path: DIGEST}}) == INVALID
