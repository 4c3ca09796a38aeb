"""One door for text: what is there is read as it is, or one line says which record is not text."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.records import COPIES_OF
from minilm_cache.errors import CorpusError, MiniLMCacheError
from minilm_cache.store.checked import sha256_texts
from tests.fixtures import Command
from tests.mutations import mutations
from tests.support import World, dump_arguments

CHARACTERS = st.characters(codec="utf-8", exclude_characters="\r\0")
TEXTS = st.lists(st.text(CHARACTERS, max_size=30), min_size=1, max_size=12)


def read(file: Path, column: str | None = None) -> list[str]:
    return list(load_corpus(str(file), column).texts())


def has_text(texts: list[str]) -> list[str]:
    return [text for text in texts if text and not text.isspace()]


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=TEXTS, others=st.lists(st.recursive(st.none() | st.integers() | st.text(CHARACTERS), st.lists)))
def test_columns_of_any_kind_do_not_change_the_texts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], others: list[Any]
) -> None:
    """Next to `text`, every record may hold anything of any type."""
    file = tmp_path_factory.mktemp("text") / "c.jsonl"
    rows = [{"text": text, "n": others[at % len(others)] if others else at} for at, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row, ensure_ascii=at % 2 == 0) + "\n" for at, row in enumerate(rows)))
    if has_text(texts):
        assert read(file) == has_text(texts)
    else:
        with pytest.raises(CorpusError, match="is empty"):
            read(file)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(st.sampled_from("ab \n\t"), min_size=1, max_size=60))
def test_paragraphs_are_those_of_earlier_releases_but_for_lines_of_spaces(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    """The oracle is `datasets`, which earlier releases read with: identities of such texts stay."""
    assume(not text.isspace())
    folder = tmp_path_factory.mktemp("text")
    ours = read(written(folder / "c.txt", text))
    plain = written(
        folder / "plain.txt", "\n".join("" if line.isspace() else line for line in text.split("\n"))
    )
    expected = datasets.load_dataset(
        "text", data_files=str(plain), split="train", sample_by="paragraph", cache_dir=str(folder)
    )["text"]
    assert [part.split() for part in ours] == [part.split() for part in has_text(list(expected))]
    if not any(line.isspace() for line in text.split("\n")):
        assert ours == has_text(list(expected))


@pytest.mark.parametrize(
    ("name", "content", "column", "expected"),
    [
        ("index.csv", ",text\n0,first text\n1,second\n", None, ["first text", "second"]),
        ("space.csv", 'id, text\n1,"a"\n', "text", ["a"]),
        ("comma.csv", '"title, short",x\nba,1\n', "title, short", ["ba"]),
        ("mark.txt", b"\xef\xbb\xbfba be\n\nbi", None, ["ba be", "bi"]),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "ba"}\n', None, ["ba"]),
        ("dates.jsonl", '{"q": "1990-05-17", "a": "12:30:00"}\n', "q,a", ["1990-05-17", "12:30:00"]),
        (
            "late.jsonl",
            '{"text": "a", "n": 1}\n{"text": "b", "n": 1.5}\n{"text": "c", "n": {}}\n',
            None,
            list("abc"),
        ),
        ("deep.jsonl", '{"text": "a", "x": ' + "[" * 50 + "]" * 50 + "}\n", None, ["a"]),
        ("array.jsonl", '[{"text": "a"},\n {"text": "b"}]', None, ["a", "b"]),
        ("spaces.txt", "ba\n \nbe\n\t\nbi\n", None, ["ba", "be", "bi\n"]),
        ("a::b.txt", "ba", None, ["ba"]),
        ("$HOME [x]*.txt", "ba", None, ["ba"]),
        ("old.csv", b"text\rba\rbe\r", None, ["ba", "be"]),
        ("bzip.txt", "BZhang says ba", None, ["BZhang says ba"]),
        ("nul.txt", "a long text with one \0 in it", None, ["a long text with one \0 in it"]),
    ],
)
def test_texts_are_read_as_they_are(
    tmp_path: Path, name: str, content: bytes | str, column: str | None, expected: list[str]
) -> None:
    assert read(written(tmp_path / name, content), column) == expected


def archived(kind: str) -> bytes:
    content, out = b"ba be\n" * 20, io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("a.txt", content)
    elif kind == "tar":
        with tarfile.open(fileobj=out, mode="w") as archive:
            info = tarfile.TarInfo("a.txt")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    elif kind == "gzip":
        return gzip.compress(content)
    else:
        return bz2.compress(content) if kind == "bzip2" else lzma.compress(content)
    return out.getvalue()


REFUSED: list[tuple[str, bytes | str, str]] = [
    ("a.jsonl", b'{"text": "ok"}\n{"text": "na\xefve"}\n', "line 2 is not text in UTF-8 .byte 0xef"),
    ("a.csv", b"text\nok\nna\xefve\n", "line 3 is not text in UTF-8"),
    ("a.txt", b"ok\nna\xefve\n", "line 2 is not text in UTF-8"),
    ("a.txt", "ba be".encode("utf-16"), "UTF-16"),
    ("a.csv", "text\nba".encode("utf-16-be"), "UTF-16"),
    ("a.jsonl", '{"text": "ba"}'.encode("utf-32"), "UTF-32"),
    ("a.jsonl", '{"text": "a", "x": ' + "[" * 20_000 + "]" * 20_000 + "}\n", "line 1 is nested too deep"),
    ("a.jsonl", "[\n" * 30_000, "nested too deep"),
    ("a.jsonl", '{"a":' * 2_000 + "1" + "}" * 2_000, "line 1"),
    ("a.jsonl", '["a"]\n["b"]\n', "the array is not JSON"),
    ("a.jsonl", '["a", "b"]\n', "element 0 of its array .* holds a text"),
    ("a.jsonl", '{"text": "a"}\n"b"\n', "line 2 holds a text, where a record"),
    ("a.jsonl", '{"text": "a", "text": "b"}\n', "line 1 has column 'text' twice"),
    ("a.jsonl", '[{"text": "z"}, {"text": "a", "\\u0074ext": "b"}]\n', "element 1 has column 'text' twice"),
    ("a.jsonl", '[{"text": "a", "x": {"text": 1}, "text": "b"}]\n', "element 0 has column 'text' twice"),
    ("a.jsonl", '{"text": "a"}\n{"body": "b"}\n', "record 1 .* has no text"),
    ("a.jsonl", '{"text": true}\n', "holds true or false, not text"),
    ("a.csv", "text,text \na,b\n", "two columns of one name"),
    *(
        (f"a{ending}", archived(kind), kind)
        for kind in ("gzip", "bzip2", "xz", "zip", "tar")
        for ending in (".txt", ".jsonl")
    ),
    ("a.md", b"(\xb5/\xfd" + b"zstd", "zstd"),
]


@pytest.mark.parametrize(("name", "content", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_text_is_named_with_its_record(
    world: World, command: Command, name: str, content: bytes | str, says: str
) -> None:
    file = written(world.root / name, content)
    with pytest.raises(CorpusError, match=says):
        load_corpus(str(file))
    if name == "a.jsonl" and "0xef" in says:  # one object on stdout, whatever happens
        code, out, err = command(*dump_arguments(world, "--corpus", file, "--json"))
        assert (code, "Traceback" in err, len(json.loads(out or "{}"))) == (
            1,
            False,
            len(json.loads(out or "{}")),
        )


def test_words_of_a_column_may_stand_elsewhere_in_a_record(tmp_path: Path) -> None:
    rows = [{"text": "a", "kind": "text"}, {"text": "b", "meta": {"text": "z"}, "tags": ["text", "text"]}]
    for name, content in (
        ("array", json.dumps(rows)),
        ("lines", "\n".join(json.dumps(row) for row in rows)),
        ("nested", '[{"text": "a"}, {"text": "b", "meta": {"text": "x", "text": "y"}}]'),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(content)
        assert list(load_corpus(str(file)).texts()) == ["a", "b"]


@pytest.mark.parametrize("first", [0, 1])
def test_two_names_of_a_file_are_read_as_each_of_them_says(tmp_path: Path, first: int) -> None:
    rows = tmp_path / "notes.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    link = tmp_path / "notes.txt"
    link.symlink_to(rows)
    files = [rows, link][:: 1 - 2 * first]
    found = {file: list(load_corpus(str(file), home=tmp_path).texts()) for file in files}
    assert found == {rows: ["one", "two"], link: [rows.read_text()]}


def test_parquet_is_read_by_column(tmp_path: Path) -> None:
    maps = pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64()))
    for name, table in (
        ("a", pa.table({"text": ["one", "two"], "m": maps})),
        ("b", pa.table({"text": pa.array([], pa.string()), "m": maps[:0]})),
        ("c", pa.table({"text": pa.array(["three"]).dictionary_encode(), "m": [1.5]})),
        ("d", pa.table({"text": pa.array(["four"], pa.large_string())})),
    ):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    assert read(tmp_path) == ["one", "two", "three", "four"]
    bad = pa.array([b"ok", b"na\xefve"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "e.parquet")
    with pytest.raises(CorpusError, match=r"e\.parquet: record 1 .* is not text in UTF-8"):
        read(tmp_path)
    pq.write_table(pa.table({"text": pa.array(["x" * 2**20] * 600)}), tmp_path / "e.parquet")
    assert (tmp_path / "e.parquet").stat().st_size < 2**21
    bomb = pa.table({"text": pa.array(["x" * 2**26] * 2)})
    pq.write_table(bomb, tmp_path / "e.parquet", compression="zstd")
    with pytest.raises(CorpusError, match="would unpack to"):
        read(tmp_path / "e.parquet")


def test_values_of_document_are_copies_whatever_their_type(tmp_path: Path) -> None:
    values: list[Any] = [1, 1, 1.5, True, "1990-05-17", ["a"], {"b": 1}, None]
    rows = [{"text": f"t{at}", "document": value} for at, value in enumerate(values)]
    file = written(tmp_path / "c.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    corpus = load_corpus(str(file))
    expected = ["1", "1", "1.5", "true", "1990-05-17", '["a"]', '{"b": 1}', None]
    assert list(corpus.documents[COPIES_OF]) == expected
    assert corpus.identity.copies_sha256 == sha256_texts(value or "" for value in expected)
    written(tmp_path / "d.jsonl", '{"text": "plain"}\n')
    assert list(load_corpus(str(tmp_path)).documents[COPIES_OF]) == [*expected, None]


def test_a_thousand_small_files_take_seconds(tmp_path: Path) -> None:
    for number in range(1_300):
        (tmp_path / f"{number:04d}.txt").write_text(f"text number {number}")
    began = time.process_time()
    assert len(read(tmp_path)) == 1_300
    assert time.process_time() - began < 20  # two minutes where each file was a data set


@pytest.mark.timeout(60)
def test_a_record_of_many_columns_takes_no_time(tmp_path: Path) -> None:
    row = {"text": "ba", **{f"c{number}": 1 for number in range(200_000)}}
    rows = "".join(json.dumps({"text": "b", f"d{number}": 1}) + "\n" for number in range(4_000))
    assert len(read(written(tmp_path / "c.jsonl", json.dumps(row) + "\n" + rows))) == 4_001


def test_file_names_that_are_not_utf_8(world: World, command: Command) -> None:
    folder = world.root / "texts"
    folder.mkdir()
    (folder / "na\udcefve.txt").write_text("ba be bi bo bu\n" * 20)
    assert command(*dump_arguments(world, "--corpus", folder))[0] == 0


SEEDS: dict[str, bytes] = {
    "c.jsonl": b'{"text": "ba be", "n": 1, "x": [1, {"y": null}]}\n{"text": "bi", "document": 3}\n' * 3,
    "c.csv": b'text,n\nba be,1\n"bi, bo",2\n',
    "c.txt": "ba be\n\nbi é\n \nbo".encode(),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*SEEDS, "c.parquet"])
def test_mutated_files_give_texts_or_one_line(tmp_path: Path, name: str) -> None:
    """No other error, and no signal."""
    if name not in SEEDS:
        pq.write_table(pa.table({"text": ["ba be", "bi"] * 20, "n": list(range(40))}), tmp_path / name)
    seed = SEEDS.get(name) or (tmp_path / name).read_bytes()
    errors = []
    for content in mutations(seed, 150, near_end=0.7 if name == "c.parquet" else 0):
        try:
            load_corpus(str(written(tmp_path / name, content)))
        except MiniLMCacheError as error:
            errors.append(str(error))
    assert errors
    assert not [error for error in errors if "\n" in error]
