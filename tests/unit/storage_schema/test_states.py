"""What is stored beside relations: which combinations there are, where each lies, what it is called."""

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.storage_schema.states import (
    INDEX_PATH,
    LABELS_FOLDER,
    LOGITS_PATH,
    MAX_READINGS,
    MAX_STATES,
    POOLED,
    READ_PATH,
    STATES_FOLDER,
    WEIGHT_PATH,
    Masking,
    SignalName,
    SoftLabels,
    StateFamily,
    StatesIdentity,
    plain_path,
    reading_path,
)
from tests.unit.storage_schema.test_base import (
    Content,
    as_json,
    check_range,
    errors_of,
    named,
    with_value,
    without,
)

MASKING: Content = {"share": 0.15, "mask_token": 4, "seed": 0, "readings": 3}
LABELS: Content = {"k": 8, "temperature": 2.0, "weight_ratio": 1.03, "tokens": "all"}
POOLING: Content = {
    "mode": "mean",
    "dense_sha256": "0" * 64,
    "normalize": True,
    "width": 24,
    "min_cosine": 0.9995,
    "calibration_sequences": 4096,
}
EVERYTHING: Content = {
    "hidden": [0, 3],
    "masked_hidden": [2],
    "first": [1, 4],
    "max_error": 0.2,
    "calibration_tokens": 8192,
    "masking": MASKING,
    "labels": LABELS,
    "num_classes": 5,
}


def states_of(content: Content) -> StatesIdentity:
    return StatesIdentity.model_validate_json(as_json(content))


@st.composite
def states_content(draw: st.DrawFn, num_layers: int = 12, vocab_size: int = 1000) -> Content:
    """Draw what StatesIdentity accepts, of a teacher with so many layers and tokens."""
    numbers = st.lists(st.integers(0, num_layers), max_size=3, unique=True).map(sorted)
    hidden, masked, first = draw(numbers), draw(numbers), draw(numbers)
    content: Content = {"hidden": hidden, "masked_hidden": masked, "first": first}
    if hidden or masked:
        content["max_error"] = draw(st.floats(0, 1, exclude_min=True, exclude_max=True))
        content["calibration_tokens"] = draw(st.integers(1, 2**24))
    has_labels = draw(st.booleans())
    if has_labels:
        content["labels"] = {
            "k": draw(st.integers(1, 4096)),
            "temperature": draw(st.floats(0, 100, exclude_min=True)),
            "weight_ratio": draw(st.floats(1, 2, exclude_min=True)),
            "tokens": draw(st.sampled_from(["all", None])),
        }
    if has_labels or masked:
        content["masking"] = {
            "share": draw(st.floats(0, 1, exclude_min=True)),
            "mask_token": draw(st.integers(0, vocab_size - 1)),
            "seed": draw(st.integers(0, 2**63 - 1)),
            "readings": draw(st.none() | st.integers(2, MAX_READINGS)),
        }
    if not (hidden or masked or first or has_labels) or draw(st.booleans()):
        content["num_classes"] = draw(st.integers(1, 2**16))
    return content


@given(states_content())
@settings(max_examples=60, deadline=None)
def test_states_come_back_from_json_as_they_were(content: Content) -> None:
    states = states_of(content)
    stored = states.model_dump_json().encode()

    assert StatesIdentity.model_validate_json(stored) == states
    assert set(json.loads(stored)) == {name for name, value in content.items() if value not in ([], None)}


def test_the_names_of_families_are_part_of_the_format() -> None:
    assert [family.value for family in StateFamily] == ["hidden", "masked", "first", "pooled"]
    assert (STATES_FOLDER, LABELS_FOLDER, LOGITS_PATH) == ("states", "labels", "states/logits")
    assert (READ_PATH, INDEX_PATH, WEIGHT_PATH) == ("labels/read", "labels/index", "labels/weight")


@pytest.mark.parametrize("family", [StateFamily.HIDDEN, StateFamily.MASKED, StateFamily.FIRST])
@pytest.mark.parametrize("number", [0, 7, 1024])
def test_a_state_lies_below_its_family_and_number(family: StateFamily, number: int) -> None:
    assert SignalName(family, number).folder == f"states/{family.value}/{number}"


def test_pooled_vectors_are_a_state_of_their_own() -> None:
    states = states_of({"pooled": POOLING})
    plain = without(POOLING, "dense_sha256")

    assert states.coded == (POOLED,)
    assert states.paths == ("states/pooled",)
    assert (states.head, states.num_readings, states.highest) == (None, 1, 0)
    assert states.in_words == (
        "pooled vectors of width 24 (mean of the last hidden states, linear maps, length 1)"
    )
    assert "dense_sha256" not in states_of({"pooled": plain}).model_dump_json()
    assert states_of(EVERYTHING | {"pooled": POOLING}).coded[-1] == POOLED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "sum"),
        ("mode", None),
        ("dense_sha256", "0"),
        ("normalize", 1),
        ("width", 0),
        ("width", 2**16 + 1),
        ("min_cosine", 0.0),
        ("min_cosine", 1.0),
        ("min_cosine", math.nan),
        ("calibration_sequences", 0),
        ("calibration_sequences", 2**24 + 1),
    ],
)
def test_a_pooling_out_of_bounds_is_refused(field: str, value: object) -> None:
    ((place, _),) = errors_of(StatesIdentity, {"pooled": POOLING | {field: value}})

    assert place == f"pooled.{field}"


@given(st.sampled_from([READ_PATH, WEIGHT_PATH, "states/masked/3/codes"]), st.integers(0, MAX_READINGS - 1))
@settings(deadline=None)
def test_the_path_of_a_reading_leads_back_to_the_plain_one(path: str, reading: int) -> None:
    stored = reading_path(path, reading)

    assert plain_path(stored) == path
    assert (stored == path) == (reading == 0)
    assert stored.endswith(path)


def test_readings_lie_below_their_number() -> None:
    assert reading_path("labels/read", 0) == "labels/read"
    assert reading_path("labels/read", 12) == "readings/12/labels/read"
    paths = {reading_path(path, n) for path in (READ_PATH, INDEX_PATH) for n in range(MAX_READINGS)}
    assert len(paths) == 2 * MAX_READINGS


@pytest.mark.parametrize(
    "path", ["tokens", "states/hidden/0/codes", "reading/1/labels/read", "readingsX/1/a"]
)
def test_other_paths_are_plain_already(path: str) -> None:
    assert plain_path(path) == path


ABOVE_ONE = math.nextafter(1, 2)


@pytest.mark.parametrize(
    ("model", "content", "field", "values"),
    [
        (Masking, MASKING, "share", (0, 5e-324, 1, ABOVE_ONE)),
        (Masking, MASKING, "mask_token", (-1, 0, 2**24 - 1, 2**24)),
        (Masking, MASKING, "seed", (-1, 0, 2**63 - 1, 2**63)),
        (Masking, MASKING, "readings", (1, 2, 64, 65)),
        (SoftLabels, LABELS, "k", (0, 1, 4096, 4097)),
        (SoftLabels, LABELS, "temperature", (0, 5e-324, 100, math.nextafter(100, 101))),
        (SoftLabels, LABELS, "weight_ratio", (1, ABOVE_ONE, 2, math.nextafter(2, 3))),
        (StatesIdentity, EVERYTHING, "max_error", (0, 5e-324, math.nextafter(1, 0), 1)),
        (StatesIdentity, EVERYTHING, "calibration_tokens", (0, 1, 2**24, 2**24 + 1)),
        (StatesIdentity, EVERYTHING, "num_classes", (0, 1, 2**16, 2**16 + 1)),
    ],
    ids=named,
)
def test_bounds(model: type, content: Content, field: str, values: tuple[Any, Any, Any, Any]) -> None:
    check_range(model, content, field, values)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", ["max_error", "masking.share", "labels.temperature", "labels.weight_ratio"])
def test_numbers_that_are_not_finite_are_refused(path: str, value: float) -> None:
    assert [place for place, _ in errors_of(StatesIdentity, with_value(EVERYTHING, path, value))] == [path]


@pytest.mark.parametrize("family", ["hidden", "masked_hidden", "first"])
def test_numbers_of_states_ascend_within_their_bounds(family: str) -> None:
    assert getattr(states_of(EVERYTHING | {family: [0, 1024]}), family) == (0, 1024)
    assert errors_of(StatesIdentity, EVERYTHING | {family: [2, 1]}) == [("", "value_error")]
    assert errors_of(StatesIdentity, EVERYTHING | {family: [1, 1]}) == [("", "value_error")]
    assert errors_of(StatesIdentity, EVERYTHING | {family: [-1, 1025]}) == [
        (f"{family}.0", "greater_than_equal"),
        (f"{family}.1", "less_than_equal"),
    ]


@pytest.mark.parametrize("family", ["hidden", "masked_hidden", "first"])
def test_a_family_has_a_state_for_each_layer_and_the_embeddings_at_most(family: str) -> None:
    assert states_of(EVERYTHING | {family: list(range(MAX_STATES))}).highest == MAX_STATES - 1 == 128
    assert errors_of(StatesIdentity, EVERYTHING | {family: list(range(MAX_STATES + 1))}) == [
        (family, "too_long")
    ]


def test_sections_go_together_or_are_refused() -> None:
    """Every subset of the sections, against the rules as SPEC.md section 9 implies them."""
    for present in itertools.product([False, True], repeat=len(EVERYTHING)):
        has = dict(zip(EVERYTHING, present, strict=True))
        content = {name: value for name, value in EVERYTHING.items() if has[name]}
        is_coded = has["hidden"] or has["masked_hidden"]
        is_allowed = (
            has["max_error"] == has["calibration_tokens"] == is_coded
            and has["masking"] == (has["labels"] or has["masked_hidden"])
            and (is_coded or has["first"] or has["labels"] or has["num_classes"])
        )
        if is_allowed:
            assert set(states_of(content).model_dump(mode="json")) == set(content)
        else:
            assert errors_of(StatesIdentity, content) == [("", "value_error")]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("more", 1),
        ("masking.more", 1),
        ("labels.more", 1),
        ("hidden", "0"),
        ("hidden", [True]),
        ("hidden", [0.5]),
        ("masking", []),
        ("masking.seed", "0"),
        ("labels.k", 2.5),
        ("labels.tokens", "masked"),
        ("labels.tokens", ""),
        ("num_classes", False),
    ],
    ids=str,
)
def test_values_of_another_sort_are_refused(path: str, value: object) -> None:
    places = [place for place, _ in errors_of(StatesIdentity, with_value(EVERYTHING, path, value))]

    assert len(places) == 1
    assert places[0].startswith(path)


@pytest.mark.parametrize("path", [f"masking.{name}" for name in ("share", "mask_token", "seed")])
def test_masking_needs_all_that_determines_it(path: str) -> None:
    assert errors_of(StatesIdentity, without(EVERYTHING, path)) == [(path, "missing")]


@pytest.mark.parametrize("path", [f"labels.{name}" for name in ("k", "temperature", "weight_ratio")])
def test_labels_need_all_that_determines_them(path: str) -> None:
    assert errors_of(StatesIdentity, without(EVERYTHING, path)) == [(path, "missing")]


def test_coded_states_are_those_of_every_token_in_order() -> None:
    assert states_of(EVERYTHING).coded == (
        (StateFamily.HIDDEN, 0),
        (StateFamily.HIDDEN, 3),
        (StateFamily.MASKED, 2),
    )
    assert states_of({"first": [1]}).coded == ()


def test_paths_are_those_of_everything_stored_in_order() -> None:
    assert states_of(EVERYTHING).paths == (
        "states/hidden/0",
        "states/hidden/3",
        "states/masked/2",
        "states/first/1",
        "states/first/4",
        "labels",
        "states/logits",
    )
    assert states_of({"num_classes": 2}).paths == ("states/logits",)
    assert states_of({"first": [0]}).paths == ("states/first/0",)


def test_masked_states_have_labels_that_say_what_was_read() -> None:
    states = states_of(without(without(EVERYTHING, "labels"), "num_classes") | {"hidden": [], "first": []})

    assert states.paths == ("states/masked/2", "labels")


@given(states_content())
@settings(max_examples=60, deadline=None)
def test_every_state_has_one_path_and_the_highest_is_none_above(content: Content) -> None:
    states = states_of(content)
    numbers = [*content["hidden"], *content["masked_hidden"], *content["first"]]

    assert len(set(states.paths)) == len(states.paths)
    assert {int(path.rsplit("/", 1)[1]) for path in states.paths if path[-1].isdigit()} == set(numbers)
    assert states.highest == max(numbers, default=0)
    assert [name.folder for name in states.coded] == list(states.paths[: len(states.coded)])


@pytest.mark.parametrize(
    ("content", "head"),
    [
        ({"first": [0]}, None),
        ({"first": [0], "num_classes": 2}, "sequences"),
        ({"labels": LABELS, "masking": MASKING}, "tokens"),
        (without(without(EVERYTHING, "labels"), "num_classes"), None),
    ],
    ids=["first", "classes", "labels", "masked"],
)
def test_only_labels_and_logits_need_a_head(content: Content, head: str | None) -> None:
    assert states_of(content).head == head


def test_readings_are_counted_from_one_on() -> None:
    assert states_of({"first": [0]}).num_readings == 1
    assert states_of(EVERYTHING).num_readings == 3
    assert states_of(without(EVERYTHING, "masking.readings")).num_readings == 1
    assert Masking.model_validate_json(as_json(MASKING | {"readings": None})).num_readings == 1


def test_a_single_reading_is_left_out_of_the_document() -> None:
    masking = Masking.model_validate_json(as_json(MASKING | {"readings": None}))

    assert masking.model_dump(mode="json") == {"share": 0.15, "mask_token": 4, "seed": 0}


def test_labels_of_chosen_tokens_leave_out_that_they_are() -> None:
    labels = SoftLabels.model_validate_json(as_json(LABELS | {"tokens": None}))

    assert labels.model_dump(mode="json") == {"k": 8, "temperature": 2.0, "weight_ratio": 1.03}


def test_words_name_everything_that_is_stored() -> None:
    parts = states_of(EVERYTHING).in_words.split("; ")

    assert len(parts) == 6
    for part, numbers in zip(parts, ("0, 3", "2", "1, 4", "8", "3", "5"), strict=True):
        assert numbers in part
    assert "2" in parts[3].rsplit(" ", 1)[1]  # the temperature, without a fraction


def test_words_name_nothing_else() -> None:
    assert len(states_of({"first": [7]}).in_words.split("; ")) == 1
    assert "7" in states_of({"first": [7]}).in_words
    assert "1000" in states_of({"num_classes": 1000}).in_words


def test_words_tell_apart_which_tokens_have_labels() -> None:
    of_all = states_of({"labels": LABELS, "masking": MASKING})
    of_chosen = states_of({"labels": LABELS | {"tokens": None}, "masking": MASKING})

    assert of_all.in_words != of_chosen.in_words
