"""Problems of documents from disk: each message says where, and none costs more than the document."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError, UnsupportedFormatError
from minilm_cache.storage_schema.base import Problem, parse, refuse_costly
from minilm_cache.storage_schema.documents import CommitRecord, ShardRange
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.storage_schema.versions import FORMAT_VERSION, READABLE_VERSIONS
from tests.support import find_problems
from tests.unit.storage_schema.test_base import as_json
from tests.unit.storage_schema.test_documents import MANIFEST, RECORD, changed

SHARD = b'{"first_sequence":0,"num_sequences":1,"num_tokens":1}'
FILE = b'"a":{"size":1,"sha256":"%s","xxh3_128":"%s"}' % (b"a" * 64, b"b" * 32)
FREE_OBJECTS, FREE_VALUES = 4096, 16384


def is_refused(document: bytes) -> bool:
    try:
        refuse_costly(document, "x")
    except CacheCorruptError:
        return True
    return False


def test_a_problem_is_shown_with_its_place_first() -> None:
    problem = Problem("a.b", "missing", "is not there")

    assert str(problem) == "a.b: is not there"
    assert problem == Problem("a.b", "missing", "is not there") != Problem("a.c", "missing", "is not there")


def test_documents_that_are_right_have_no_problems() -> None:
    assert not find_problems(CacheManifest, MANIFEST)
    assert not find_problems(CommitRecord, RECORD)


@pytest.mark.parametrize(
    ("path", "value", "loc", "kind"),
    [
        ("shard_tokens", 3, "shard_tokens", "greater_than_equal"),
        ("identity.layers", ["2"], "identity.layers.0", "int_type"),
        ("identity.codec.k", 0, "identity.codec.topk.k", "greater_than_equal"),
        ("identity.layers", [2, 1], "identity", "value_error"),
        ("labels.more", 1, "labels.more", "extra_forbidden"),
        ("num_sequences", 23, "document", "value_error"),
        ("files", {"../a": {}}, "files.../a.[key]", "string_pattern_mismatch"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_problem_is_told_by_its_place_and_sort(path: str, value: object, loc: str, kind: str) -> None:
    document = changed(MANIFEST, path, value)
    problems = {(problem.loc, problem.kind) for problem in find_problems(CacheManifest, document)}

    assert (loc, kind) in problems


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"null", b"1", b"\xff\xfe", b'{"a": NaN'])
def test_what_is_no_object_is_one_problem_of_the_document(document: bytes) -> None:
    (problem,) = find_problems(CacheManifest, document)

    assert problem.loc == "document"
    assert problem.message


def test_parsing_returns_what_plain_json_has() -> None:
    manifest, record = parse(CacheManifest, MANIFEST, "x"), parse(CommitRecord, RECORD, "x")

    assert json.loads(manifest.to_json()) | {"checksum": None} == json.loads(MANIFEST) | {"checksum": None}
    assert record.files.keys() == json.loads(RECORD)["files"].keys()


def test_a_document_of_another_sort_is_damaged() -> None:
    with pytest.raises(CacheCorruptError):
        parse(CommitRecord, MANIFEST, "x")
    with pytest.raises(CacheCorruptError):
        parse(CacheManifest, RECORD, "x")


def test_an_error_is_one_line_that_names_the_file_and_the_first_problems() -> None:
    document = as_json(
        dict.fromkeys("abcdefghi", 1) | {"first_sequence": 0, "num_sequences": 1, "num_tokens": 1}
    )
    with pytest.raises(CacheCorruptError) as caught:
        parse(ShardRange, document, "some/manifest.json")
    message = str(caught.value)

    assert message.startswith("some/manifest.json ")
    assert len(message.splitlines()) == 1
    assert [name for name in "abcdefghi" if f" {name}: " in message] == ["a", "b", "c"]
    assert "6 more" in message


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_problems_are_all_quoted(count: int) -> None:
    document = {"first_sequence": 0, "num_sequences": 1, "num_tokens": 1} | dict.fromkeys("abc"[:count], 1)
    with pytest.raises(CacheCorruptError) as caught:
        parse(ShardRange, as_json(document), "x")

    assert all(f" {name}: " in str(caught.value) for name in "abc"[:count])
    assert "more)" not in str(caught.value)


def test_an_error_does_not_quote_values_of_a_stranger() -> None:
    with pytest.raises(CacheCorruptError) as caught:
        parse(CacheManifest, changed(MANIFEST, "fingerprint", "\x1b]0;secret\x07"), "x")

    assert "secret" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_this_release_reads_what_it_writes() -> None:
    assert FORMAT_VERSION in READABLE_VERSIONS
    assert sorted(READABLE_VERSIONS) == list(range(1, FORMAT_VERSION + 1))


@pytest.mark.parametrize(
    "document",
    [
        b'{"format_version": 3}',
        b'{"format_version":0}',
        b'{"format_version" :\n\t999999999 , "x": 1}',
        b'{"x": {"format_version": 7}}',
        MANIFEST.replace(b'"format_version": 1', b'"format_version": 3', 1),
    ],
    ids=lambda document: repr(document[:24]),
)
def test_another_version_is_told_apart_from_damage(document: bytes) -> None:
    for model in (CacheManifest, CommitRecord):
        with pytest.raises(UnsupportedFormatError):
            parse(model, document, "x")


@pytest.mark.parametrize(
    "version", ["-1", "1.5", '"2"', "null", "[2]", "1e9", "12345678901", "9" * 5000, "true1", ""], ids=repr
)
def test_what_is_no_version_is_damage(version: str) -> None:
    document = MANIFEST.replace(b'"format_version": 1', b'"format_version": ' + version[:5000].encode(), 1)

    with pytest.raises(CacheCorruptError):
        parse(CacheManifest, document, "x")


def test_a_name_that_looks_like_a_version_is_none() -> None:
    document = changed(MANIFEST, "labels.teacher", '"format_version": 2,')

    assert parse(CacheManifest, document, "x").labels.teacher == '"format_version": 2,'


def test_a_second_version_does_not_pass_for_the_first() -> None:
    """The last key counts, as with plain JSON."""
    document = MANIFEST.rstrip()[:-1] + b', "format_version": 3}'

    assert json.loads(document)["format_version"] == 3
    with pytest.raises((CacheCorruptError, UnsupportedFormatError)):
        parse(CacheManifest, document, "x")


@pytest.mark.parametrize("field", ["fingerprint", "num_tokens", "shard_tokens"])
def test_a_key_written_twice_does_not_hide_a_wrong_value(field: str) -> None:
    value = json.dumps(json.loads(MANIFEST)[field]).encode()
    again = MANIFEST.rstrip()[:-1] + b', "%s": ' % field.encode()

    assert parse(CacheManifest, again + value + b"}", "x") == parse(CacheManifest, MANIFEST, "x")
    with pytest.raises(CacheCorruptError):
        parse(CacheManifest, again + b"null}", "x")


@pytest.mark.parametrize("opening", [b"[", b"{", b'{"a":', b"[{"])
def test_objects_and_lists_are_counted(opening: bytes) -> None:
    count = FREE_OBJECTS // sum(opening.count(sign) for sign in (b"[", b"{"))

    assert not is_refused(opening * count)
    assert is_refused(opening * (count + 1))


def test_values_are_counted() -> None:
    assert not is_refused(b"," * FREE_VALUES)
    assert is_refused(b"," * (FREE_VALUES + 1))


@pytest.mark.parametrize(("item", "values"), [(SHARD, 3), (FILE, 3)], ids=["shards", "files"])
def test_each_shard_and_file_may_have_an_object_and_its_values(item: bytes, values: int) -> None:
    text = b",".join([item] * 10_000)

    assert text.count(b",") == values * 10_000 - 1
    assert not is_refused(text + b"[" * FREE_OBJECTS)
    assert is_refused(text + b"[" * (FREE_OBJECTS + 1))
    assert not is_refused(text + b"," * (FREE_VALUES + 1))
    assert is_refused(text + b"," * (FREE_VALUES + 2))


@pytest.mark.parametrize("name", [b'{"first_sequence"', b'{"xxh3_128"'])
def test_names_that_are_shorter_than_what_they_stand_for_buy_nothing(name: bytes) -> None:
    assert is_refused(name * 20_000)


def test_a_manifest_of_80_000_shards_is_not_refused() -> None:
    shards = b",".join(
        b'{"first_sequence":%d,"num_sequences":8,"num_tokens":128}' % (8 * n) for n in range(80_000)
    )

    assert not is_refused(MANIFEST[:-1] + b',"shards":[' + shards + b"]}")


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 4096,
        b'{"identity":' * 3000,
        b" " + b"[" * 2**20,
        b'{"shards":[' + b"{}," * 2**18 + b"{}]}",
        b'{"files":{' + b'"a":1,' * 2**18 + b'"a":1}}',
        b'{"num_tokens":' + b"9" * 2**20 + b"}",
        b'{"fingerprint":"' + b"a" * 2**20 + b'"}',
        b'{"fingerprint":"' + b"\xc0\x80" * 10 + b'"}',
        b'{"labels":{"teacher":"\\ud800"}}',
    ],
    ids=lambda document: repr(document[:24]),
)
def test_hostile_documents_are_damaged_and_take_little_memory(document: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CacheCorruptError) as caught:
            parse(CacheManifest, document, "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**24
    assert len(str(caught.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from([*json.loads(MANIFEST), "identity.codec", "labels.corpus", "measured.fidelity", "x"])


@given(FIELDS, JSON)
@settings(max_examples=80, deadline=None)
def test_a_field_with_any_value_is_accepted_or_told(path: str, value: object) -> None:
    """Whatever is accepted can be written and read again."""
    document = changed(MANIFEST, path, value)
    problems = find_problems(CacheManifest, document)
    if problems:
        with pytest.raises((CacheCorruptError, UnsupportedFormatError)):
            parse(CacheManifest, document, "x")
    else:
        manifest = parse(CacheManifest, document, "x")
        assert parse(CacheManifest, manifest.to_json(), "x").to_json() == manifest.to_json()
