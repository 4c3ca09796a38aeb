"""The identity of a cache: what it refuses, and that its fingerprint is of all it says and nothing else."""

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from minilm_cache.storage_schema.base import Sha256
from minilm_cache.storage_schema.identity import (
    MAX_TOKENS,
    CacheIdentity,
    CorpusIdentity,
    Name,
    Packing,
    TeacherIdentity,
    TopKParameters,
    VectorsParameters,
    canonical_sha256,
)
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
from tests.unit.storage_schema.test_states import EVERYTHING, states_content

TEACHER: Content = {
    "model_type": "bert",
    "weights_sha256": "a" * 64,
    "config_sha256": "b" * 64,
    "num_layers": 12,
    "hidden_size": 32,
    "num_heads": 4,
    "vocab_size": 1000,
}
CORPUS: Content = {"sha256": "d" * 64, "num_documents": 12, "copies_sha256": "e" * 64}
PACKING: Content = {"mode": "packed", "max_length": 16, "max_tokens": 4096, "seed": 0, "split": "documents"}
LARGEST: Content = {
    "name": "topk",
    "k": 4,
    "select": "largest",
    "tail": "uniform",
    "weight_ratio": 1.06,
    "seed": 0,
}
PPS: Content = LARGEST | {"select": "pps", "tail": None}
DENSE: Content = {"name": "dense"}
VECTORS: Content = {"name": "vectors", "max_kl": 0.1, "calibration_tokens": 4096}
FULL: Content = {
    "format_version": 1,
    "teacher": TEACHER,
    "tokenizer_sha256": "c" * 64,
    "corpus": CORPUS,
    "packing": PACKING,
    "layers": [2],
    "relation_heads": 4,
    "relations": ["attention", "value"],
    "codec": LARGEST,
    "states": EVERYTHING,
}
"""Has every optional field."""
OF_VECTORS: Content = without(FULL, "states") | {"layers": [0, 2, 11], "relations": [], "codec": VECTORS}
LITTLE: Content = {
    **without(FULL, "states"),
    "corpus": without(CORPUS, "copies_sha256"),
    "packing": without(PACKING, "split") | {"max_tokens": None},
}
"""As caches of the first releases had it."""


def identity_of(content: Mapping[str, Any]) -> CacheIdentity:
    return CacheIdentity.model_validate_json(as_json(content))


def plain_fingerprint(content: object) -> str:
    """Return SPEC.md section 2 in plain Python."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def leaves(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Return path and value of every field that is not an object."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{name}.")
        else:
            yield above + name, value


def shuffled(content: Any, order: random.Random) -> Any:
    """Return the same content with the keys of every object in another order."""
    if isinstance(content, dict):
        items = list(content.items())
        order.shuffle(items)
        return {name: shuffled(value, order) for name, value in items}
    return [shuffled(value, order) for value in content] if isinstance(content, list) else content


PRINTABLE = st.characters().filter(str.isprintable)
DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
SEEDS = st.integers(0, 2**63 - 1)
ROW_CODECS = st.just(DENSE) | st.fixed_dictionaries(
    {
        "name": st.just("topk"),
        "k": st.integers(1, 4096),
        "weight_ratio": st.floats(1, 2, exclude_min=True),
        "seed": SEEDS,
    }
).flatmap(
    lambda codec: st.sampled_from([("pps", None), ("largest", "uniform"), ("largest", "renormalise")]).map(
        lambda pair: codec | {"select": pair[0], "tail": pair[1]}
    )
)


@st.composite
def identity_content(draw: st.DrawFn) -> Content:
    """Draw what CacheIdentity accepts, of every codec, with and without states."""
    num_layers, vocab_size = draw(st.integers(1, 24)), draw(st.integers(1, 2**24))
    layers = draw(st.lists(st.integers(0, num_layers - 1), min_size=1, max_size=4, unique=True).map(sorted))
    of_vectors = len(layers) > 1 or draw(st.booleans())
    content: Content = {
        "teacher": {
            "model_type": draw(st.text(PRINTABLE, min_size=1, max_size=20)),
            "weights_sha256": draw(DIGESTS),
            "config_sha256": draw(DIGESTS),
            "num_layers": num_layers,
            "hidden_size": draw(st.integers(1, 2**16)),
            "num_heads": draw(st.integers(1, 1024)),
            "vocab_size": vocab_size,
        },
        "tokenizer_sha256": draw(DIGESTS),
        "corpus": {"sha256": draw(DIGESTS), "num_documents": draw(st.integers(1, 2**40))},
        "packing": {
            "mode": draw(st.sampled_from(["packed", "records"])),
            "max_length": draw(st.integers(4, 2**16)),
            "max_tokens": draw(st.none() | st.integers(1, MAX_TOKENS)),
            "seed": draw(SEEDS),
        },
        "layers": layers,
        "relation_heads": draw(st.integers(1, 1024)),
        "relations": [] if of_vectors else draw(st.sampled_from([["value"], ["attention", "value"]])),
        "codec": VECTORS if of_vectors else draw(ROW_CODECS),
    }
    if draw(st.booleans()):
        content["states"] = draw(states_content(num_layers=num_layers, vocab_size=vocab_size))
    return content


@given(identity_content())
@settings(max_examples=60, deadline=None)
def test_an_identity_comes_back_from_json_as_it_was(content: Content) -> None:
    identity = identity_of(content)
    stored = identity.model_dump_json().encode()
    again = CacheIdentity.model_validate_json(stored)

    assert again == identity
    assert hash(again) == hash(identity)
    assert again.fingerprint() == identity.fingerprint() == plain_fingerprint(json.loads(stored))


@given(identity_content(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_fingerprint_does_not_depend_on_the_order_of_keys(content: Content, order: random.Random) -> None:
    assert identity_of(shuffled(content, order)).fingerprint() == identity_of(content).fingerprint()


@pytest.mark.parametrize("name", ["v1", "v1-states", "v1-vectors"])
def test_fingerprints_on_disk_are_those_of_plain_python(name: str) -> None:
    manifest = json.loads((ROOT / "tests/golden" / name / "manifest.json").read_bytes())

    assert manifest["fingerprint"] == plain_fingerprint(manifest["identity"])
    assert identity_of(manifest["identity"]).fingerprint() == manifest["fingerprint"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({}, b"{}"),
        ([], b"[]"),
        (None, b"null"),
        ({"b": [1, 2], "a": {"d": None, "c": True}}, b'{"a":{"c":true,"d":null},"b":[1,2]}'),
        ({"a": 1.0, "b": 1}, b'{"a":1.0,"b":1}'),
        ({"a": 1e-7, "b": 0.1}, b'{"a":1e-07,"b":0.1}'),
        ({"\u00e9": '\U0001f600 "\\/\n'}, b'{"\\u00e9":"\\ud83d\\ude00 \\"\\\\/\\n"}'),
    ],
    ids=str,
)
def test_canonical_json_byte_by_byte(content: object, text: bytes) -> None:
    assert canonical_sha256(content) == hashlib.sha256(text).hexdigest()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_two_contents_have_one_hash_if_and_only_if_they_are_the_same(
    first: object, second: object, order: random.Random
) -> None:
    assert canonical_sha256(shuffled(first, order)) == canonical_sha256(first)
    assert (canonical_sha256(first) == canonical_sha256(second)) == (
        json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    )


OTHER: dict[str, object] = {
    "teacher.model_type": "roberta",
    "teacher.weights_sha256": "0" * 64,
    "teacher.config_sha256": "0" * 64,
    "teacher.num_layers": 13,
    "teacher.hidden_size": 33,
    "teacher.num_heads": 5,
    "teacher.vocab_size": 1001,
    "tokenizer_sha256": "0" * 64,
    "corpus.sha256": "0" * 64,
    "corpus.num_documents": 13,
    "corpus.copies_sha256": None,
    "packing.mode": "records",
    "packing.max_length": 17,
    "packing.max_tokens": None,
    "packing.seed": 1,
    "packing.split": None,
    "layers": [3],
    "relation_heads": 3,
    "relations": ["value"],
    "codec.k": 5,
    "codec.tail": "renormalise",
    "codec.weight_ratio": 1.07,
    "codec.seed": 1,
    "states.hidden": [0, 4],
    "states.masked_hidden": [3],
    "states.first": [1],
    "states.max_error": 0.3,
    "states.calibration_tokens": 8193,
    "states.masking.share": 0.16,
    "states.masking.mask_token": 5,
    "states.masking.seed": 1,
    "states.masking.readings": None,
    "states.labels.k": 9,
    "states.labels.temperature": 1.0,
    "states.labels.weight_ratio": 1.04,
    "states.labels.tokens": None,
    "states.num_classes": 6,
}
"""Another value of every field that can change alone."""


def test_the_fingerprint_is_of_every_field() -> None:
    changes = [with_value(FULL, path, value) for path, value in OTHER.items()]
    changes += [FULL | {"codec": codec} for codec in (PPS, DENSE)]
    changes += [OF_VECTORS, with_value(OF_VECTORS, "codec.max_kl", 0.2)]
    changes += [with_value(OF_VECTORS, "codec.calibration_tokens", 1), OF_VECTORS | {"layers": [0, 2]}]
    changes += [FULL, without(FULL, "states"), FULL | {"relations": ["value", "attention"]}]

    assert {path for path, _ in leaves(FULL)} - set(OTHER) == {"format_version", "codec.name", "codec.select"}
    assert len({identity_of(content).fingerprint() for content in changes}) == len(changes)


@pytest.mark.parametrize("path", ["corpus.copies_sha256", "packing.split", "states"])
def test_a_field_that_says_nothing_leaves_the_fingerprint_as_it_was(path: str) -> None:
    """Caches made before the format knew the field keep their fingerprint."""
    identity = identity_of(with_value(LITTLE, path, None))

    assert identity.fingerprint() == plain_fingerprint(LITTLE)
    assert path.rsplit(".", 1)[-1] not in identity.model_dump_json()


def test_the_version_is_part_of_the_fingerprint_even_where_it_is_left_out() -> None:
    assert identity_of(without(LITTLE, "format_version")).fingerprint() == plain_fingerprint(LITTLE)


@pytest.mark.parametrize(("path", "value"), list(leaves(without(FULL, "format_version"))), ids=named)
def test_no_field_takes_a_value_of_another_sort(path: str, value: object) -> None:
    is_number = isinstance(value, int | float)
    for other in (*of_other_types(value), *((math.nan, math.inf, -1, 10**30) if is_number else ())):
        with pytest.raises(ValidationError):
            identity_of(with_value(FULL, path, other))


@pytest.mark.parametrize("path", ["", "teacher.", "corpus.", "packing.", "codec.", "states."])
def test_unknown_fields_are_refused(path: str) -> None:
    (place,) = errors_of(CacheIdentity, with_value(FULL, f"{path}more", None))

    assert place[1] == "extra_forbidden"
    assert place[0].endswith("more")


OPTIONAL = {"format_version", "corpus.copies_sha256", "packing.max_tokens", "packing.split", "states"}


@pytest.mark.parametrize("path", [path for path, _ in leaves(LITTLE)])
def test_fields_are_required_unless_there_is_one_value_for_old_caches(path: str) -> None:
    if path in OPTIONAL:
        identity_of(without(LITTLE, path))
    elif path == "codec.name":
        assert errors_of(CacheIdentity, without(LITTLE, path)) == [("codec", "union_tag_not_found")]
    else:
        (place,) = errors_of(CacheIdentity, without(LITTLE, path))
        assert place == (path.replace("codec.", "codec.topk."), "missing")


ABOVE_ONE = math.nextafter(1, 2)


@pytest.mark.parametrize(
    ("model", "content", "field", "values"),
    [
        (TeacherIdentity, TEACHER, "num_layers", (0, 1, 1024, 1025)),
        (TeacherIdentity, TEACHER, "hidden_size", (0, 1, 2**16, 2**16 + 1)),
        (TeacherIdentity, TEACHER, "num_heads", (0, 1, 1024, 1025)),
        (TeacherIdentity, TEACHER, "vocab_size", (0, 1, 2**24, 2**24 + 1)),
        (CorpusIdentity, CORPUS, "num_documents", (0, 1, 2**40, 2**40 + 1)),
        (Packing, PACKING, "max_length", (3, 4, 2**16, 2**16 + 1)),
        (Packing, PACKING, "max_tokens", (0, 1, MAX_TOKENS, MAX_TOKENS + 1)),
        (Packing, PACKING, "seed", (-1, 0, 2**63 - 1, 2**63)),
        (TopKParameters, LARGEST, "k", (0, 1, 4096, 4097)),
        (TopKParameters, LARGEST, "weight_ratio", (1, ABOVE_ONE, 2, math.nextafter(2, 3))),
        (TopKParameters, LARGEST, "seed", (-1, 0, 2**63 - 1, 2**63)),
        (VectorsParameters, VECTORS, "max_kl", (0, 5e-324, 1, ABOVE_ONE)),
        (VectorsParameters, VECTORS, "calibration_tokens", (0, 1, 2**24, 2**24 + 1)),
        (CacheIdentity, FULL, "relation_heads", (0, 1, 1024, 1025)),
    ],
    ids=named,
)
def test_bounds(model: type, content: Content, field: str, values: tuple[Any, Any, Any, Any]) -> None:
    check_range(model, content, field, values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 63,
        "a" * 65,
        "A" * 64,
        "g" * 64,
        "a" * 63 + "\n",
        "a" * 64 + "\n",
        "\uff11" * 64,
        " " + "a" * 63,
    ],
    ids=repr,
)
def test_digests_are_64_lower_case_hexadecimal_digits(text: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Sha256).validate_python(text)


@given(st.binary())
@settings(deadline=None)
def test_every_sha256_is_a_digest(content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()

    assert TypeAdapter(Sha256).validate_python(digest) == digest


@given(st.text(st.characters(max_codepoint=0x7F), min_size=1, max_size=8))
@settings(deadline=None)
def test_names_hold_every_ascii_character_but_controls(text: str) -> None:
    if text.isprintable():
        assert TypeAdapter(Name).validate_python(text) == text
    else:
        with pytest.raises(ValidationError):
            TypeAdapter(Name).validate_python(text)


def test_names_have_1_to_512_characters() -> None:
    for text in ("a", "\u00e9" * 512, "\U0001f600"):
        assert TypeAdapter(Name).validate_python(text) == text
    for text in ("", "a" * 513):
        with pytest.raises(ValidationError):
            TypeAdapter(Name).validate_python(text)


@pytest.mark.parametrize("version", [0, 2, -1, 10**9, "1", None, [1]])
def test_an_identity_of_another_version_is_refused(version: object) -> None:
    assert [place for place, _ in errors_of(CacheIdentity, FULL | {"format_version": version})] == [
        "format_version"
    ]
