"""The manifest and the commit record: what they must say of themselves, and which files they may name."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from minilm_cache.errors import CacheCorruptError, UnsupportedFormatError
from minilm_cache.storage_schema.base import parse
from minilm_cache.storage_schema.documents import (
    MAX_RECORD_BYTES,
    CommitRecord,
    FileDigest,
    ShardRange,
    StoredDocument,
    Xxh3,
)
from minilm_cache.storage_schema.identity import MAX_TOKENS
from minilm_cache.storage_schema.manifest import (
    MAX_MANIFEST_BYTES,
    CacheManifest,
    Calibration,
    Labels,
    LayerCalibration,
    LayerFidelity,
    Measured,
    StateCalibration,
    StateFidelity,
)
from tests.unit.storage_schema.test_arrays import CALIBRATED_LAYERS, CALIBRATED_STATES, CALIBRATION
from tests.unit.storage_schema.test_base import (
    Content,
    as_json,
    check_range,
    errors_of,
    named,
    of_other_types,
    with_value,
    without,
)
from tests.unit.storage_schema.test_documents import ROOT
from tests.unit.storage_schema.test_identity import leaves, plain_fingerprint

STORED = {
    name: (ROOT / "tests/golden" / name / "manifest.json").read_bytes()
    for name in ("v1", "v1-states", "v1-vectors")
}
V1, STATES, VECTORS = ({**json.loads(text), "checksum": None} for text in STORED.values())
"""Released manifests, without a checksum so that the tests may change them."""
RECORD: Content = json.loads((ROOT / "tests/golden/v1/commits/00000.json").read_bytes())
DIGEST: Content = {"size": 1, "sha256": "a" * 64, "xxh3_128": "b" * 32}
INCOMPLETE = V1 | {"complete": False, "measured": None}
INVALID = [("", "value_error")]
"""What a validator of the whole document raises, in contrast to one of a field."""


def manifest_of(content: Content) -> CacheManifest:
    return CacheManifest.model_validate_json(as_json(content))


def identified(content: Content, path: str, value: object) -> Content:
    """Return a manifest with another identity and the fingerprint of it."""
    changed = with_value(content, f"identity.{path}", value)
    return changed | {"fingerprint": plain_fingerprint(changed["identity"])}


@pytest.mark.parametrize("name", STORED)
def test_released_manifests_are_written_as_they_were(name: str) -> None:
    """Apart from the checksum, which the first releases did not write."""
    written = json.loads(CacheManifest.model_validate_json(STORED[name]).to_json())

    assert without(written, "checksum") == {
        field: value for field, value in json.loads(STORED[name]).items() if field != "checksum"
    }
    if name == "v1-states":
        assert CacheManifest.model_validate_json(STORED[name]).to_json() == STORED[name].rstrip(b"\n")


@pytest.mark.parametrize(
    ("model", "content"), [(CacheManifest, STATES), (CommitRecord, RECORD)], ids=["manifest", "record"]
)
def test_the_checksum_is_that_of_plain_python(model: type[StoredDocument], content: Content) -> None:
    document = model.model_validate_json(as_json(content))
    stored = document.to_json()
    again = model.model_validate_json(stored)

    assert json.loads(stored)["checksum"] == plain_fingerprint(without(json.loads(stored), "checksum"))
    assert again.to_json() == stored
    assert again.model_copy(update={"checksum": None}) == document
    assert document.checksum is None


SEALED = CacheManifest.model_validate_json(as_json(VECTORS)).to_json()


@given(st.integers(0, len(SEALED) - 1), st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_no_changed_byte_of_a_manifest_goes_unnoticed(place: int, byte: int) -> None:
    """What is accepted nevertheless, such as another space, says the same."""
    text = SEALED[:place] + bytes([byte]) + SEALED[place + 1 :]
    try:
        manifest = parse(CacheManifest, text, "x")
    except (CacheCorruptError, UnsupportedFormatError):
        return
    assert manifest.to_json() == SEALED


@given(st.integers(0, len(SEALED) - 1))
@settings(max_examples=50, deadline=None)
def test_a_manifest_that_breaks_off_is_damaged(length: int) -> None:
    with pytest.raises(CacheCorruptError):
        parse(CacheManifest, SEALED[:length], "x")


def test_a_wrong_checksum_is_refused_and_none_is_not() -> None:
    assert errors_of(CacheManifest, V1 | {"checksum": "0" * 64}) == INVALID
    assert errors_of(CacheManifest, V1 | {"checksum": ""}) == [("checksum", "string_pattern_mismatch")]
    assert manifest_of(V1).checksum is manifest_of(without(V1, "checksum")).checksum is None


CHANGEABLE = [
    (path, value)
    for path, value in leaves(without(without(V1, "files"), "format_version"))
    if path not in {"checksum", "identity.format_version"}
]


@pytest.mark.parametrize(("path", "value"), CHANGEABLE, ids=named)
def test_no_field_takes_a_value_of_another_type(path: str, value: object) -> None:
    for other in of_other_types(value):
        with pytest.raises(ValidationError):
            manifest_of(with_value(V1, path, other))


@pytest.mark.parametrize(
    "path", ["", "labels.", "identity.", "shards.0.", "measured.", "measured.fidelity.0."]
)
def test_unknown_fields_are_refused(path: str) -> None:
    assert (f"{path}more", "extra_forbidden") in errors_of(CacheManifest, with_value(V1, f"{path}more", 0))


@pytest.mark.parametrize("path", list(V1))
def test_fields_are_required_unless_old_caches_lack_them(path: str) -> None:
    if path in {"checksum", "calibration"}:
        assert manifest_of(without(V1, path)).to_json() == manifest_of(V1).to_json()
    elif path in {"measured", "shards", "format_version"}:  # what it says then contradicts the rest
        assert errors_of(CacheManifest, without(V1, path)) == INVALID
    else:
        assert errors_of(CacheManifest, without(V1, path)) == [(path, "missing")]


@pytest.mark.parametrize(
    ("model", "content", "field", "values"),
    [
        (FileDigest, DIGEST, "size", (-1, 0, 2**40, 2**40 + 1)),
        (ShardRange, V1["shards"][0], "first_sequence", (-1, 0, MAX_TOKENS, MAX_TOKENS + 1)),
        (ShardRange, V1["shards"][0], "num_sequences", (0, 1, MAX_TOKENS, MAX_TOKENS + 1)),
        (ShardRange, V1["shards"][0], "num_tokens", (0, 1, MAX_TOKENS, MAX_TOKENS + 1)),
        (LayerFidelity, V1["measured"]["fidelity"][0], "layer", (-1, 0, 1023, 1024)),
        (LayerCalibration, CALIBRATED_LAYERS[0], "layer", (-1, 0, 1023, 1024)),
        (LayerCalibration, CALIBRATED_LAYERS[0], "components", (0, 1, 2**18, 2**18 + 1)),
        (LayerCalibration, CALIBRATED_LAYERS[0], "head_size", (0, 1, 2**16, 2**16 + 1)),
        (LayerCalibration, CALIBRATED_LAYERS[0], "scaling", (0, 5e-324, 2**20, 2**20 + 1)),
        (LayerCalibration, CALIBRATED_LAYERS[0], "window", (-1, 0, 2**16, 2**16 + 1)),
        (StateCalibration, CALIBRATED_STATES[0], "number", (-1, 0, 1024, 1025)),
        (StateCalibration, CALIBRATED_STATES[0], "components", (0, 1, 2**16, 2**16 + 1)),
        (StateCalibration, CALIBRATED_STATES[0], "error", (-5e-324, 0, 1, math.nextafter(1, 2))),
        (Calibration, CALIBRATION, "num_fitted", (0, 1, MAX_TOKENS, MAX_TOKENS + 1)),
        (Calibration, CALIBRATION, "num_checked", (0, 1, MAX_TOKENS, MAX_TOKENS + 1)),
        (CommitRecord, RECORD, "shard", (-1, 0, 2**24 - 1, 2**24)),
        (CommitRecord, RECORD, "rank", (-1, 0, 2**20 - 1, 2**20)),
    ],
    ids=named,
)
def test_bounds(model: type, content: Content, field: str, values: tuple[Any, Any, Any, Any]) -> None:
    check_range(model, content, field, values)


@pytest.mark.parametrize(
    ("model", "content", "field", "value"),
    [
        (Measured, V1["measured"], "bytes_per_token", 0),
        (Measured, V1["measured"], "bytes_per_token", math.inf),
        (Measured, V1["measured"], "bytes_per_token", 2.0**41),
        (Measured, V1["measured"], "total_bytes", -1),
        (Measured, V1["measured"], "total_bytes", 2**60 + 1),
        (Measured, V1["measured"], "fidelity_sequences", 0),
        (Measured, V1["measured"], "fidelity_sequences", MAX_TOKENS + 1),
        (StateFidelity, {"path": "labels"}, "bytes_per_token", -5e-324),
        (StateFidelity, {"path": "labels"}, "bytes_per_token", math.nan),
        (CacheManifest, V1, "num_tokens", 0),
        (CacheManifest, V1, "num_tokens", MAX_TOKENS + 1),
        (CacheManifest, V1, "num_sequences", 0),
        (CacheManifest, V1, "num_sequences", MAX_TOKENS + 1),
        (CacheManifest, V1, "num_held_out", -1),
        (CacheManifest, V1, "shard_tokens", 32),
        (CacheManifest, V1, "shard_tokens", 2**27),
        (CacheManifest, V1, "held_out_by", "tokens"),
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(model: type, content: Content, field: str, value: object) -> None:
    assert [place for place, _ in errors_of(model, content | {field: value})] == [field]


@pytest.mark.parametrize(
    "text", ["", "b" * 31, "b" * 33, "B" * 32, "b" * 31 + "g", "b" * 32 + "\n"], ids=repr
)
def test_a_hash_or_an_attempt_is_32_lower_case_hexadecimal_digits(text: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Xxh3).validate_python(text)
    for field in ("attempt", "tokens_xxh3"):
        assert [place for place, _ in errors_of(CommitRecord, RECORD | {field: text})] == [field]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fingerprint", "0" * 64),
        ("shard_tokens", 192),
        ("shard_tokens", 64),
        ("shards.0.first_sequence", 1),
        ("shards.1.first_sequence", 7),
        ("shards.1.first_sequence", 9),
        ("shards.0.num_sequences", 7),
        ("shards.2.num_sequences", 7),
        ("shards.2.num_tokens", 92),
        ("num_sequences", 23),
        ("num_tokens", 346),
        ("num_held_out", 22),
        ("complete", False),
        ("measured", None),
        ("measured.fidelity.0.layer", 1),
        ("calibration", CALIBRATION),
    ],
    ids=str,
)
def test_what_a_manifest_says_must_agree(path: str, value: object) -> None:
    assert errors_of(CacheManifest, with_value(V1, path, value)) == INVALID


@pytest.mark.parametrize(
    ("path", "value"),
    [("shard_tokens", 256), ("shard_tokens", 2**26), ("num_held_out", 0), ("num_held_out", 21)],
    ids=str,
)
def test_what_does_agree_is_accepted(path: str, value: object) -> None:
    assert getattr(manifest_of(V1 | {path: value}), path) == value


def test_the_longest_sequence_fits_a_shard() -> None:
    manifest_of(identified(V1, "packing.max_length", 128))

    assert errors_of(CacheManifest, identified(V1, "packing.max_length", 129)) == INVALID


def test_sequences_have_a_token_each_and_shards_hold_them() -> None:
    content = with_value(V1, "shards.2.num_tokens", 6) | {"num_tokens": 262}
    manifest_of(content)

    assert (
        errors_of(CacheManifest, with_value(content, "shards.2.num_tokens", 5) | {"num_tokens": 261})
        == INVALID
    )
    assert (
        errors_of(CacheManifest, with_value(V1, "shards.2.num_tokens", 129) | {"num_tokens": 385}) == INVALID
    )


@st.composite
def partitions(draw: st.DrawFn) -> Content:
    """Draw an unfinished manifest whose shards follow each other."""
    shards, following = [], 0
    for num_sequences in draw(st.lists(st.integers(1, 128), min_size=1, max_size=5)):
        num_tokens = draw(st.integers(num_sequences, 128))
        shards.append({"first_sequence": following, "num_sequences": num_sequences, "num_tokens": num_tokens})
        following += num_sequences
    return INCOMPLETE | {
        "shards": shards,
        "num_sequences": following,
        "num_tokens": sum(shard["num_tokens"] for shard in shards),
        "num_held_out": draw(st.integers(0, following - 1)),
    }


@given(partitions(), st.data())
@settings(max_examples=50, deadline=None)
def test_shards_partition_the_sequences(content: Content, data: st.DataObject) -> None:
    manifest = manifest_of(content)
    shard = data.draw(st.integers(0, len(manifest.shards) - 1))
    field = data.draw(st.sampled_from(["first_sequence", "num_sequences", "num_tokens"]))
    value = content["shards"][shard][field] + data.draw(st.sampled_from([-1, 1]))

    assert manifest.num_train + manifest.num_held_out == manifest.num_sequences
    assert json.loads(manifest.to_json())["shards"] == content["shards"]
    with pytest.raises(ValidationError):
        manifest_of(with_value(content, f"shards.{shard}.{field}", value))


def test_of_many_wrong_shards_only_the_first_is_told() -> None:
    """A problem takes more memory than the text that has it."""
    places = [
        place for place, _ in errors_of(CacheManifest, V1 | {"shards": [{"first_sequence": -1}] * 2000})
    ]

    assert "shards.0.first_sequence" in places
    assert not any(place.startswith(("shards.1", "shards.2")) for place in places)


def test_a_manifest_of_many_shards_is_as_small_as_its_bound_says() -> None:
    shards = [{"first_sequence": 8 * n, "num_sequences": 8, "num_tokens": 128} for n in range(10_000)]
    content = INCOMPLETE | {"shards": shards, "num_sequences": 80_000, "num_tokens": 1_280_000}

    assert 7 * len(manifest_of(content).to_json()) < MAX_MANIFEST_BYTES
    assert len(CommitRecord.model_validate_json(as_json(RECORD)).to_json()) < MAX_RECORD_BYTES


def test_a_manifest_without_states_says_nothing_of_them() -> None:
    vectors = json.loads(manifest_of(VECTORS).to_json())

    assert "states" not in vectors["calibration"]
    assert "states" not in vectors["measured"]
    assert set(json.loads(manifest_of(V1).to_json())) == set(V1)


def test_names_for_people_do_not_enter_the_fingerprint() -> None:
    labels: Content = {
        "teacher": "a",
        "corpus": "b",
        "created_by": "c",
        "text_column": "d",
        "revision": "e",
        "documents": "lines",
    }

    assert manifest_of(V1 | {"labels": labels}).labels.model_dump() == labels
    for name in ("text_column", "revision", "documents"):
        assert name not in Labels.model_validate_json(as_json(without(labels, name))).model_dump()


@pytest.mark.parametrize("name", ["teacher", "corpus", "created_by", "text_column", "revision"])
@pytest.mark.parametrize("value", ["", "a\x1b[31m", "a\tb", "x" * 513], ids=repr)
def test_names_for_people_have_no_control_characters(name: str, value: str) -> None:
    assert [place for place, _ in errors_of(Labels, V1["labels"] | {name: value})] == [name]


@pytest.mark.parametrize("field", list(RECORD))
def test_a_record_says_everything(field: str) -> None:
    if field != "format_version":
        assert errors_of(CommitRecord, without(RECORD, field)) == [(field, "missing")]


@pytest.mark.parametrize("model", [CacheManifest, CommitRecord])
@pytest.mark.parametrize("version", [0, 3, "1", None, [1]])
def test_no_other_version_is_read(model: type[StoredDocument], version: object) -> None:
    content = V1 if model is CacheManifest else RECORD

    assert errors_of(model, content | {"format_version": version}) == [("format_version", "literal_error")]
