"""Calibrations and figures of a manifest: what was measured of each thing that is stored."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from minilm_cache.storage_schema.identity import MAX_LAYERS
from minilm_cache.storage_schema.manifest import (
    CacheManifest,
    Calibration,
    Fidelity,
    LayerCalibration,
    LayerFidelity,
    StateFidelity,
    layer_folder,
)
from minilm_cache.storage_schema.states import StateFamily
from tests.unit.storage_schema.test_arrays import CALIBRATED_LAYERS, CALIBRATED_STATES, CALIBRATION
from tests.unit.storage_schema.test_base import Content, as_json, errors_of, named, with_value, without
from tests.unit.storage_schema.test_manifest import INVALID, STATES, V1, VECTORS, identified, manifest_of


@pytest.mark.parametrize("content", [STATES, VECTORS], ids=["states", "vectors"])
def test_what_is_coded_was_calibrated(content: Content) -> None:
    assert errors_of(CacheManifest, content | {"calibration": None}) == INVALID
    assert errors_of(CacheManifest, V1 | {"calibration": content["calibration"]}) == INVALID


@pytest.mark.parametrize(
    ("content", "path", "most", "too_much"),
    [
        (VECTORS, "num_fitted", 17, 18),
        (VECTORS, "num_checked", 4, 5),
        (VECTORS, "layers.0.head_size", 64, 65),
        (VECTORS, "layers.0.kl.attention", 0.1, math.nextafter(0.1, 1)),
        (VECTORS, "layers.0.kl.value", 0.1, 1),
        (STATES, "states.0.components", 32, 33),
        (STATES, "states.2.error", 0.2, math.nextafter(0.2, 1)),
    ],
    ids=named,
)
def test_a_calibration_keeps_to_its_bounds(content: Content, path: str, most: float, too_much: float) -> None:
    manifest_of(with_value(content, f"calibration.{path}", most))

    assert errors_of(CacheManifest, with_value(content, f"calibration.{path}", too_much)) == INVALID


@pytest.mark.parametrize("name", ["layers", "states"])
def test_a_calibration_is_of_each_layer_and_state_in_order(name: str) -> None:
    content = VECTORS if name == "layers" else STATES
    fitted = content["calibration"][name]
    other = {"layer": 1} if name == "layers" else {"number": 1}
    for wrong in ([], fitted[::-1] if len(fitted) > 1 else [], fitted * 2, [fitted[0] | other, *fitted[1:]]):
        assert errors_of(CacheManifest, with_value(content, f"calibration.{name}", wrong)) == INVALID


def test_figures_are_of_each_thing_stored_in_order() -> None:
    fidelity, states = STATES["measured"]["fidelity"], STATES["measured"]["states"]
    for wrong in (states[:-1], states[::-1], [], [*states, states[0]], V1["shards"]):
        with pytest.raises(ValidationError):
            manifest_of(with_value(STATES, "measured.states", wrong))
    assert errors_of(CacheManifest, with_value(STATES, "measured.fidelity", fidelity * 2)) == INVALID
    assert errors_of(CacheManifest, with_value(V1, "measured.states", states)) == INVALID


@pytest.mark.parametrize(
    "names", [[], ["attention"], ["value"], ["attention", "key"], ["attention", "value", "query"]]
)
def test_figures_are_of_both_relations(names: list[str]) -> None:
    fidelity = dict.fromkeys(names, V1["measured"]["fidelity"][0]["relations"]["value"])

    assert errors_of(LayerFidelity, {"layer": 0, "relations": fidelity}) == INVALID
    assert errors_of(LayerCalibration, CALIBRATED_LAYERS[0] | {"kl": dict.fromkeys(names, 0.1)}) == INVALID


@pytest.mark.parametrize("field", list(Fidelity.model_fields))
def test_only_a_divergence_that_is_infinite_has_no_figure(field: str) -> None:
    content: Content = V1["measured"]["fidelity"][0]["relations"]["value"]
    for value in (math.nan, math.inf, -math.inf):
        assert errors_of(Fidelity, content | {field: value}) == [(field, "finite_number")]
    if field == "kl_teacher_to_stored":
        assert Fidelity.model_validate_json(as_json(content)).kl_teacher_to_stored is None
    else:
        assert errors_of(Fidelity, content | {field: None}) == [(field, "float_type")]


@pytest.mark.parametrize("field", ["relative_error", "cross_entropy_bias"])
def test_figures_of_states_are_finite_or_there_are_none(field: str) -> None:
    content: Content = {"path": "labels", "bytes_per_token": 0, field: None}

    assert getattr(StateFidelity.model_validate_json(as_json(content)), field) is None
    for value in (math.nan, math.inf, "1"):
        assert [place for place, _ in errors_of(StateFidelity, content | {field: value})] == [field]


def test_lists_have_no_more_items_than_a_teacher_has_layers() -> None:
    layers = [CALIBRATED_LAYERS[0]] * MAX_LAYERS
    states = [CALIBRATED_STATES[0]] * (2 * MAX_LAYERS + 2)
    full = CALIBRATION | {"layers": layers, "states": states}

    assert len(Calibration.model_validate_json(as_json(full)).layers) == MAX_LAYERS
    assert errors_of(Calibration, full | {"layers": [*layers, layers[0]]}) == [("layers", "too_long")]
    assert errors_of(Calibration, full | {"states": [*states, states[0]]}) == [("states", "too_long")]


def test_a_window_is_required_though_it_may_be_none() -> None:
    assert LayerCalibration.model_validate_json(as_json(CALIBRATED_LAYERS[0])).window is None
    assert errors_of(LayerCalibration, without(CALIBRATED_LAYERS[0], "window")) == [("window", "missing")]


def test_a_calibration_is_found_by_its_layer_or_state() -> None:
    calibration = Calibration.model_validate_json(
        as_json(CALIBRATION | {"layers": CALIBRATED_LAYERS, "states": CALIBRATED_STATES})
    )

    assert [calibration.of_layer(layer).components for layer in (11, 0, 2)] == [16, 5, 7]
    assert [state.name for state in calibration.states] == [
        (StateFamily.HIDDEN, 0),
        (StateFamily.HIDDEN, 3),
        (StateFamily.MASKED, 2),
    ]
    assert layer_folder(11) == "vectors/11"


@given(st.lists(st.none() | st.floats(0, 1e6), min_size=4, max_size=4))
@settings(max_examples=30, deadline=None)
def test_the_worst_divergence_over_its_bound(divergences: list[float | None]) -> None:
    content = with_value(VECTORS, "measured.fidelity", VECTORS["measured"]["fidelity"] * 2)
    content = with_value(identified(content, "layers", [0, 2]), "measured.fidelity.0.layer", 0)
    fitted = content["calibration"]["layers"][0]
    content = with_value(content, "calibration.layers", [fitted | {"layer": 0}, fitted])
    places = [(layer, kind) for layer in (0, 1) for kind in ("attention", "value")]
    for (layer, kind), value in zip(places, divergences, strict=True):
        path = f"measured.fidelity.{layer}.relations.{kind}.kl_teacher_to_stored"
        content = with_value(content, path, value)

    worst = max(math.inf if kl is None else kl for kl in divergences)  # None is what JSON has for infinity
    assert manifest_of(content).kl_over_max == worst / 0.1


def test_only_finished_caches_of_vectors_have_a_bound_to_keep() -> None:
    assert manifest_of(V1).kl_over_max is None
    assert manifest_of(VECTORS | {"complete": False, "measured": None}).kl_over_max is None


def test_words_say_how_many_are_held_out_and_by_what() -> None:
    words = [
        manifest_of(V1 | {"held_out_by": by, "num_held_out": 21}).held_out_in_words
        for by in ("documents", "sequences", None)
    ]

    assert len(set(words)) == 3
    assert all("21 " in text for text in words)
    assert not any(letter.isdigit() for letter in manifest_of(V1 | {"num_held_out": 0}).held_out_in_words)
    many = manifest_of(V1).model_copy(update={"num_held_out": 1234567})
    assert "1,234,567" in many.held_out_in_words


def test_words_tell_figures_of_held_out_sequences_from_others() -> None:
    assert manifest_of(V1).measured_on != manifest_of(V1 | {"num_held_out": 0}).measured_on


def test_who_holds_out_what_is_left_out_where_it_is_not_said() -> None:
    assert "held_out_by" not in json.loads(manifest_of(V1).to_json())
    stored = json.loads(manifest_of(V1 | {"held_out_by": "sequences"}).to_json())
    assert stored["held_out_by"] == "sequences"
