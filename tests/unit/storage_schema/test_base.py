"""The base of stored documents: frozen, strict, and silent about sections that say nothing."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from minilm_cache.storage_schema.base import StoredModel

Content = dict[str, Any]


def as_json(content: object) -> bytes:
    return json.dumps(content).encode()


def with_value(content: Mapping[str, Any], path: str, value: object) -> Content:
    """Return a deep copy with one field set; `path` has dots, and numbers for places in lists."""
    copy: Content = json.loads(json.dumps(content))
    *parents, last = path.split(".")
    place: Any = copy
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[int(last) if isinstance(place, list) else last] = value
    return copy


def without(content: Mapping[str, Any], path: str) -> Content:
    """Return a deep copy that lacks one field."""
    copy: Content = json.loads(json.dumps(content))
    *parents, last = path.split(".")
    place = copy
    for name in parents:
        place = place[name]
    del place[last]
    return copy


def errors_of(model: type[BaseModel], content: object) -> list[tuple[str, str]]:
    """Return place and type of everything that pydantic says against `content`; there must be something."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(as_json(content))
    return [(".".join(map(str, item["loc"])), item["type"]) for item in caught.value.errors()]


def check_range(
    model: type[BaseModel], content: Content, field: str, values: tuple[Any, Any, Any, Any]
) -> None:
    """Check a field's bounds: of four ascending values the outer two are refused, the inner two accepted."""
    too_small, least, greatest, too_great = values
    for value in (least, greatest):
        document = model.model_validate_json(as_json(content | {field: value}))
        assert getattr(document, field) == value
    for value in (too_small, too_great):
        assert [place for place, _ in errors_of(model, content | {field: value})] == [field]


def named(value: object) -> str:
    """Return what a case of a parametrized test is called by: models and fields, no values."""
    return value.__name__ if isinstance(value, type) else value if isinstance(value, str) else ""


def of_other_types(value: object) -> tuple[object, ...]:
    """Return values that no field takes which holds this one."""
    if isinstance(value, bool):
        return (0, 1, "true", None, [value], {})
    if isinstance(value, str):
        return (1, 0.5, True, [value], {}, "", value + "\n", " " + value + "\x00")
    if isinstance(value, list):
        return ("0", 0, True, {"0": 0}, [None], [[0]], [{}], [True])
    return ("", True, [1], {}) if value is None else ("1", True, [value], {})


class Inner(StoredModel):
    width: int = 0
    tags: tuple[str, ...] = ()

    sections: ClassVar[frozenset[str]] = frozenset({"tags"})


class Example(StoredModel):
    name: str
    kept: tuple[int, ...] = ()
    note: str | None = None
    count: int = 0
    share: float = 0.0
    is_new: bool = False
    numbers: tuple[int, ...] = ()
    table: dict[str, int] = Field(default_factory=dict)
    inner: Inner | None = None
    text: str = ""

    sections: ClassVar[frozenset[str]] = frozenset(
        {"count", "share", "is_new", "numbers", "table", "inner", "text"}
    )


class Plain(StoredModel):
    numbers: tuple[int, ...] = ()
    inner: Inner | None = None


EXAMPLES = st.builds(
    Example,
    name=st.text(),
    kept=st.lists(st.integers(), max_size=3).map(tuple),
    note=st.none() | st.text(),
    count=st.integers(-(2**63), 2**63),
    share=st.floats(allow_nan=False, allow_infinity=False),
    is_new=st.booleans(),
    numbers=st.lists(st.integers(), max_size=3).map(tuple),
    table=st.dictionaries(st.text(), st.integers(), max_size=3),
    inner=st.none() | st.builds(Inner, width=st.integers(), tags=st.lists(st.text(), max_size=2).map(tuple)),
    text=st.text(),
)


@given(EXAMPLES)
@settings(deadline=None)
def test_a_document_comes_back_from_json_as_it_was(document: Example) -> None:
    stored = document.model_dump_json().encode()
    again = Example.model_validate_json(stored)

    assert again == document
    assert again.model_dump_json().encode() == stored
    assert json.loads(stored) == document.model_dump(mode="json")


@given(EXAMPLES)
@settings(deadline=None)
def test_a_section_is_left_out_if_and_only_if_it_says_nothing(document: Example) -> None:
    stored = json.loads(document.model_dump_json())
    optional = {"numbers": document.numbers, "table": document.table, "inner": document.inner}

    assert {name for name in optional if name in stored} == {
        name for name, value in optional.items() if value is not None and value not in ((), {})
    }
    assert set(stored) >= {"name", "kept", "note", "count", "share", "is_new", "text"}


def test_zero_false_and_no_text_say_something() -> None:
    assert Example(name="a").model_dump(mode="json") == {
        "name": "a",
        "kept": [],
        "note": None,
        "count": 0,
        "share": 0.0,
        "is_new": False,
        "text": "",
    }


def test_sections_are_left_out_of_python_values_too() -> None:
    assert "numbers" not in Example(name="a").model_dump()
    assert Example(name="a", numbers=(1,)).model_dump()["numbers"] == (1,)


def test_without_sections_everything_is_written() -> None:
    assert Plain().model_dump(mode="json") == {"numbers": [], "inner": None}


def test_each_model_has_sections_of_its_own() -> None:
    """`numbers` may be left out of the outer model, `tags` of the inner one."""
    assert Plain(inner=Inner()).model_dump(mode="json") == {"numbers": [], "inner": {"width": 0}}
    assert Example(name="a", inner=Inner(tags=("b",))).model_dump(mode="json")["inner"] == {
        "width": 0,
        "tags": ["b"],
    }


def test_a_section_written_as_empty_is_read_as_if_it_were_left_out() -> None:
    written: Content = {"name": "a", "numbers": [], "table": {}, "inner": None}

    assert Example.model_validate_json(as_json(written)) == Example.model_validate_json(b'{"name": "a"}')


def test_fields_are_written_in_the_order_of_the_model() -> None:
    stored = json.loads(b'{"text": "b", "numbers": [1], "name": "a"}')
    document = Example.model_validate_json(as_json(stored))

    assert list(json.loads(document.model_dump_json())) == [
        name for name in Example.model_fields if name not in {"table", "inner"}
    ]


def test_a_field_can_be_excluded_beside_the_sections() -> None:
    assert set(Example(name="a").model_dump(exclude={"name", "text"})) == {
        "kept",
        "note",
        "count",
        "share",
        "is_new",
    }


@pytest.mark.parametrize("name", ["name", "numbers", "unknown"])
def test_documents_cannot_be_changed(name: str) -> None:
    document = Example(name="a")

    with pytest.raises(ValidationError):
        setattr(document, name, "b")
    assert document == Example(name="a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 1),
        ("name", None),
        ("name", ["a"]),
        ("count", "1"),
        ("count", 1.5),
        ("count", True),
        ("count", None),
        ("count", 1e300),
        ("share", "0.5"),
        ("share", True),
        ("is_new", 1),
        ("is_new", "true"),
        ("numbers", 1),
        ("numbers", "12"),
        ("numbers", {"0": 1}),
        ("table", []),
        ("inner", []),
    ],
    ids=str,
)
def test_values_of_another_type_are_not_converted(field: str, value: object) -> None:
    assert [place for place, _ in errors_of(Example, {"name": "a", field: value})] == [field]


def test_a_wrong_item_is_named_by_its_place() -> None:
    assert errors_of(Example, {"name": "a", "numbers": [1, "2", 3, None], "table": {"x": "1"}}) == [
        ("numbers.1", "int_type"),
        ("numbers.3", "int_type"),
        ("table.x", "int_type"),
    ]


def test_a_whole_number_may_stand_for_a_float() -> None:
    share = Example.model_validate_json(b'{"name": "a", "share": 1}').share

    assert (type(share), share) == (float, 1.0)


def test_unknown_fields_are_refused_at_every_depth() -> None:
    assert errors_of(Example, {"name": "a", "more": 1}) == [("more", "extra_forbidden")]
    assert errors_of(Example, {"name": "a", "inner": {"more": None}}) == [("inner.more", "extra_forbidden")]
    assert errors_of(Example, {"name": "a", "__class__": "b"}) == [("__class__", "extra_forbidden")]
    assert errors_of(Example, {"name": "a", "sections": []}) == [("sections", "extra_forbidden")]


def test_a_missing_field_is_named() -> None:
    assert errors_of(Example, {}) == [("name", "missing")]


def test_of_a_key_written_twice_the_last_counts_as_with_plain_json() -> None:
    text = b'{"name": "a", "count": 1, "count": 2}'

    assert Example.model_validate_json(text).count == json.loads(text)["count"] == 2
    with pytest.raises(ValidationError):
        Example.model_validate_json(b'{"name": "a", "count": 1, "count": "2"}')


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'"name"',
        b'{"name": "a"',
        b'{"name": "a"}}',
        b"{'name': 'a'}",
        b'{"name": "\xff"}',
        b'{"name": "\\ud800"}',
        '{"name": "a"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"name": "a"}',
        b'{"name": "a", "inner": ' + b'{"inner": ' * 1000,
        b'{"name": "a", "numbers": ' + b"[" * 1000,
        b'{"name": "a", "count": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_text_that_is_no_such_document_is_refused(text: bytes) -> None:
    with pytest.raises(ValidationError):
        Example.model_validate_json(text)
