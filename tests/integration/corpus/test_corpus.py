"""Every form of corpus gives the texts that were written, as they are now."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from minilm_cache.corpus.formats import num_skipped
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.records import COPIES_OF, Roles
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.errors import CorpusError, InvalidConfigError
from minilm_cache.session import Session
from tests.fixtures import Command
from tests.support import World, tiny_tokenizer, write_hub

TEXTS = ["ba be", 'bi "bo", bu', " \t", "ban\nben", "é — 北", "None", "NA"]
WITH_TEXT = [text for text in TEXTS if text.strip()]


def write(path: Path, texts: list[str]) -> None:
    """Write texts as records in the format that the file's ending names."""
    table = pa.table({"number": list(range(len(texts))), "text": texts, "body": [text * 2 for text in texts]})
    if path.suffix in (".txt", ".md"):
        path.write_text("\n\n".join(texts))
    elif path.suffix == ".jsonl":
        Dataset(table).to_json(path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path)


def read(name: str | Path, column: str | None = None) -> list[str]:
    return list(load_corpus(str(name), column).texts())


@pytest.mark.parametrize("ending", [".txt", ".md", ".jsonl", ".csv", ".parquet"])
def test_every_format_gives_what_was_written(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"c{ending}"
    write(file, TEXTS)
    assert read(file) == WITH_TEXT
    if ending not in (".txt", ".md"):
        assert read(file, "body") == [text * 2 for text in WITH_TEXT]


def test_a_cache_and_a_run_are_no_texts(world: World, command: Command) -> None:
    """Nor are folders around them; a name alone says nothing."""
    cache, run, around = world.dump().path, world.train("run").path, world.root
    (run / "notes.txt").write_text("ba be")
    for folder, found, what in ((cache, cache, "a cache"), (run, run, "a run"), (around, cache, "a cache")):
        says = (f"corpus {folder}: {found} holds no texts", f"It is {what}")
        words = ("dump", "--teacher", world.teacher, "--corpus", folder, "--out", world.root / "out")
        command.fails(*words, code=1, says=says)
    for name in ("run.json", "search.json", "manifest.json"):
        (world.root / "texts").mkdir(exist_ok=True)
        (world.root / "texts" / name).write_text("{}")
    (world.root / "texts/a.txt").write_text("ba be")
    assert load_corpus(str(world.root / "texts")).identity.num_documents == 1


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    for name, text in (("b.[x]/*.txt", "third"), ("a.csv", "first"), ("b/one.jsonl", "second")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [text])
    (tmp_path / "README.md").write_text("not a corpus")
    (tmp_path / ".hidden.txt").write_text("neither")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/c.txt").write_text("nor this")
    (tmp_path / "picture.png").write_bytes(b"nor bytes")
    (tmp_path / "z.md").write_text("fourth")
    assert read(tmp_path) == ["first", "second", "third", "fourth"]
    assert num_skipped(str(tmp_path)) == 2


def test_texts_of_csv_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_bytes('\ufefftext\r\n007\r\n\r\n1.50\r\nnull\r\n""\r\n'.encode())
    assert read(tmp_path / "c.csv") == ["007", "1.50", "null"]
    (tmp_path / "c.csv").write_text("\ntext,label\nba,1\n  \n\nbe,2\n")
    assert read(tmp_path / "c.csv") == ["ba", "be"]


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".csv", ".parquet"])
def test_a_file_written_anew_at_the_same_time_is_read_anew(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"c{ending}"
    for text in ("one", "two"):
        write(file, [text])
        os.utime(file, (1e9, 1e9))  # as an archive does that is made to be reproducible
        assert read(file) == [text]


def test_a_data_set_of_the_hub_by_configuration_and_split(tmp_path: Path) -> None:
    def rows(text: str) -> Dataset:
        return Dataset.from_dict({"text": [text, "", "ba"]})

    hub = write_hub(
        tmp_path / "hub", {"first": {"train": rows("a")}, "second": {"train": rows("b"), "test": rows("c")}}
    )
    assert read(f"hf:{hub}:first") == ["a", "ba"]
    assert read(f"hf:{hub}:second:test") == ["c", "ba"]
    for name, says in (
        (f"hf:{hub}:third", "third"),
        (f"hf:{hub}:first:test", "test"),
        (f"hf:{hub}", "first"),
    ):
        with pytest.raises(CorpusError, match=says):
            load_corpus(name)


def test_a_folder_like_the_hub_that_has_the_name_of_another(tmp_path: Path) -> None:
    for place, text in (("a", "one"), ("b", "two"), ("b", "three")):
        rows = Dataset.from_dict({"text": [text]})
        assert read(f"hf:{write_hub(tmp_path / place / 'hub', {'of': {'train': rows}})}") == [text]


def test_a_data_set_is_no_old_one_where_datasets_would_keep_it_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.IN_MEMORY_MAX_SIZE", 10**9)
    for text in ("one", "two"):
        hub = write_hub(tmp_path / "hub", {"of": {"train": Dataset.from_dict({"text": [text]})}})
        assert read(f"hf:{hub}") == [text]


def test_lines_of_a_text_file_are_documents_where_that_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "c.txt"
    file.write_text("one line\nanother line\n\nthe last")

    assert list(load_corpus(str(file)).texts()) == ["one line\nanother line", "the last"]
    assert list(load_corpus(str(file), documents="lines").texts()) == ["one line", "another line", "the last"]


def test_lines_are_those_of_text_files_only(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"text": "a b"}\n')
    for name in (str(file), str(tmp_path), "python-docs", "hf:some/text"):
        with pytest.raises(InvalidConfigError, match=r"--documents lines is about text files"):
            load_corpus(name, documents="lines")
    (tmp_path / "d.txt").write_text("x y\nz\n")

    assert list(load_corpus(str(tmp_path), documents="lines").texts()) == ["a b", "x y", "z"]


def test_both_sides_of_pairs_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"a": "one", "b": "two"}\n{"a": "three", "b": "one"}\n')
    corpus = load_corpus(str(file), "a, b")

    assert list(corpus.texts()) == ["one", "three", "two", "one"]
    keys = tokenise(corpus, tiny_tokenizer(), session=Session(tmp_path)).keys[0]
    assert keys[0] == keys[3], "equal texts are held out together"
    with pytest.raises(CorpusError, match="no column 'c'"):
        load_corpus(str(file), "a,c")


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet", "hub"])
def test_several_columns_are_one_text(tmp_path: Path, ending: str) -> None:
    table = pa.table({"title": ["ba", "", "bu"], "body": ["be bi", "bo", " "], "a+b": ["1", "2", "3"]})
    place: str | Path = tmp_path / f"c{ending}"
    if ending == "hub":
        place = f"hf:{write_hub(tmp_path / 'hub', {'default': {'train': Dataset(table)}})}"
    elif ending == ".jsonl":
        Dataset(table).to_json(place)
    elif ending == ".csv":
        pyarrow.csv.write_csv(table, place)
    else:
        pyarrow.parquet.write_table(table, place)
    assert read(place, "title+body") == ["ba be bi", "bo", "bu"]
    assert read(place, "title + body,title") == ["ba be bi", "bo", "bu", "ba", "bu"]
    assert read(place, "a+b") == ["1", "2", "3"]  # a column of that name
    with pytest.raises(CorpusError, match="no column 'text'"):
        read(place, "title+text")


def test_a_record_may_lack_one_of_its_columns_and_not_all(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"title": "ba", "body": null}\n{"body": "be"}\n')
    assert read(file, "title+body") == ["ba", "be"]
    file.write_text('{"title": "ba", "body": "bi"}\n{"title": null}\n')
    with pytest.raises(CorpusError, match=r"line 2 has no text in title or body"):
        read(file, "title+body")
    file.write_text('{"title": 7, "body": "bi"}\n')
    with pytest.raises(CorpusError, match="column 'title' holds a number, not text"):
        read(file, "title+body")


def test_numbers_name_no_columns_of_single_texts(tmp_path: Path) -> None:
    """A header would be read as a text: numbers are for pairs."""
    file = tmp_path / "c.csv"
    file.write_text("text,label\nba,1\nbe,2\n")
    for column in ("0", "1", "0,1"):
        with pytest.raises(CorpusError, match=r"no column '\d'; it has text, label"):
            read(file, column)


def test_data_sets_of_the_hub_are_checked_as_files_are(tmp_path: Path) -> None:
    features = Features(
        text=Value("string"), kind=ClassLabel(names=["query", "plain"]), document=ClassLabel(names=["a", "b"])
    )
    rows = {"text": ["ba", "be", "\ufeffbi"], "kind": [0, 1, -1], "document": [0, 0, -1]}
    hub = f"hf:{write_hub(tmp_path / 'hub', {'of': {'train': Dataset.from_dict(rows, features=features)}})}"
    corpus = load_corpus(hub)
    assert list(corpus.texts()) == ["ba", "be", "bi"]
    assert COPIES_OF not in corpus.documents.column_names  # numbers of classes name no document
    roles = Roles("kind", {"query": "Q: ", "plain": ""})
    assert list(load_corpus(hub, roles=roles).texts()) == ["Q: ba", "be", "bi"]
    with pytest.raises(CorpusError, match=r"column 'kind' of record 0 .* holds a number, not text"):
        load_corpus(hub, "kind")
    with pytest.raises(CorpusError, match=r"holds a number in column 'kind', not text"):
        load_corpus(hub, pair_columns="text,kind")
    full = Dataset.from_dict({"text": ["ba", "\0" * 40]})
    with pytest.raises(CorpusError, match="full of NUL characters"):
        load_corpus(f"hf:{write_hub(tmp_path / 'other', {'of': {'train': full}})}")


def test_a_role_may_be_the_last_of_many_columns(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    many = {"text": "ba", **{f"c{number}": "" for number in range(25)}}
    file.write_text(f'{json.dumps(many)}\n{{"text": "be", "role": "query"}}\n')
    assert list(load_corpus(str(file), roles=Roles("role", {"query": "Q: "})).texts()) == ["ba", "Q: be"]
