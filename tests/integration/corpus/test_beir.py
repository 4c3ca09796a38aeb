"""Retrieval data in BEIR's layout as a corpus: what is judged becomes pairs, without a file in between."""

import json
import re
from pathlib import Path

import pytest

from minilm_cache.cache import open_cache
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.pairs import BETWEEN
from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.own_data import OwnData, read_own_data
from minilm_cache.evaluate.settings import RetrievalData
from tests.fixtures import Command
from tests.support import VOCABULARY, save_teacher

WORDS = VOCABULARY[5:29]
COLUMNS = "query,positive+negative"
GRADES = {"train": ("q0\td1\t1", "q0\td0\t2", "q0\td2\t0", "q1\td3\t1"), "test": ("q2\td0\t1", "q1\td2\t-1")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with six documents, four queries, and judgements to train and to test on."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    documents = [
        {"_id": f"d{at}", "title": WORDS[at] if at % 2 else "", "text": " ".join(WORDS[at : at + 4])}
        for at in range(6)
    ]
    queries = [{"_id": f"q{at}", "text": " ".join(WORDS[at + 8 : at + 11])} for at in range(4)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, lines in GRADES.items():
        (folder / f"qrels/{name}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return folder


def read(corpus: Path, columns: str | None = COLUMNS, home: Path | None = None) -> list[tuple[str, ...]]:
    loaded = load_corpus(str(corpus), pair_columns=columns, home=home)
    assert loaded.identity.groups is (None if columns is None else True)
    return [tuple(text.split(BETWEEN)) for text in loaded.texts()]


def text(at: int) -> str:
    """Return a document, after its title."""
    return " ".join([*([WORDS[at]] if at % 2 else []), *WORDS[at : at + 4]])


def asked(at: int) -> str:
    return " ".join(WORDS[at + 8 : at + 11])


def test_what_is_judged_becomes_pairs_the_best_documents_first(folder: Path) -> None:
    of_train = [(asked(0), text(0)), (asked(0), text(1)), (asked(0), text(2)), (asked(1), text(3))]
    assert read(folder) == read(folder / "qrels/train.tsv") == of_train
    assert read(folder, "query,positive") == [of_train[0], of_train[1], of_train[3]]
    assert read(folder / "qrels/test.tsv") == [(asked(2), text(0))]  # q1 has no relevant document there


def test_without_pairs_the_texts_are_documents_and_queries(folder: Path) -> None:
    content = "".join((folder / f"{name}.jsonl").read_text() for name in ("corpus", "queries"))
    assert read(folder, None) == [(json.loads(line)["text"],) for line in content.splitlines()]


def test_other_texts_of_the_folder_are_read_as_before(folder: Path) -> None:
    (folder / "more.txt").write_text("one more")
    assert ("one more",) in read(folder, None)


def test_names_may_be_relative_to_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "qrels")
    assert read(Path("test.tsv")) == [(asked(2), text(0))]


def test_a_document_may_have_a_title_alone_and_a_pair_two_grades(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    rows[3]["text"] = ""
    rows.append({"_id": "unused", "text": ""})
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "qrels/train.tsv").open("a") as train:
        train.write("q0\td0\t0\nq0\td0\t1\nnowhere\td0\t0\n")
    assert read(folder)[0] == (asked(0), text(0))
    assert read(folder)[-1] == (asked(1), WORDS[3])


def test_names_may_be_numbers(folder: Path) -> None:
    expected = read(folder)
    for file in (folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels/train.tsv"):
        file.write_text(
            re.sub(r'"[dq](\d)"', r"\1", re.sub(r"\b[dq](\d)\t(?=\S)", r"\1\t", file.read_text()))
        )
    assert '"_id": 3,' in (folder / "corpus.jsonl").read_text()
    assert "0\t1\t1" in (folder / "qrels/train.tsv").read_text()
    assert read(folder) == expected
    with (folder / "corpus.jsonl").open("a") as documents:
        documents.write('{"_id": [1], "text": "ba"}\n')
    with pytest.raises(CorpusError, match=r"corpus\.jsonl, line 7 has no text '_id'"):
        read(folder)


def test_a_change_of_any_of_the_three_files_is_seen(folder: Path, tmp_path: Path) -> None:
    known = read(folder, home=tmp_path)
    for file, old, new in (
        ("corpus.jsonl", WORDS[0], WORDS[20]),
        ("queries.jsonl", asked(1), WORDS[21]),
        ("qrels/train.tsv", "q1\td3", "q1\td4"),
    ):
        content = (folder / file).read_text()
        (folder / file).write_text(content.replace(old, new))
        before, known = known, read(folder, home=tmp_path)
        assert known != before, file


def own(place: Path) -> OwnData:
    return read_own_data(RetrievalData(retrieval=place))


def test_retrieval_reads_the_judgements_that_are_named(folder: Path) -> None:
    assert own(folder).right == {"q2": {"d0": 1}}
    named = own(folder / "qrels/train.tsv")
    assert named.right == {"q0": {"d1": 1, "d0": 2}, "q1": {"d3": 1}}
    assert set(named.queries) == {"q0", "q1"}
    assert len(named.documents) == 6


def test_judgements_go_from_a_folder_to_a_student(folder: Path, tmp_path: Path, command: Command) -> None:
    for at in range(4, 64):  # so many that some are held out
        query = {"_id": f"q{at}", "text": f"{WORDS[at % 20]} {WORDS[at // 20]}"}
        with (folder / "queries.jsonl").open("a") as queries, (folder / "qrels/train.tsv").open("a") as train:
            queries.write(json.dumps(query) + "\n")
            train.write(f"q{at}\td{at % 6}\t1\n")
    with (folder / "qrels/train.tsv").open("a") as train:
        train.write("q3\td0\t0\n")
    save_teacher(tmp_path / "judge", head="sequences", num_labels=1)
    code, _, err = command(
        *("dump", "--teacher", tmp_path / "judge", "--corpus", folder, "--pair-columns", COLUMNS),
        *("--for", "score", "--max-length", "32", "--out", tmp_path / "cache"),
    )
    assert code == 0, err
    assert "1 of 63 judged queries have no relevant document" in err
    assert open_cache(str(tmp_path / "cache")).manifest.num_sequences == 64
    verify = ("verify", tmp_path / "cache", "--teacher", tmp_path / "judge", "--corpus", folder)
    code, _, err = command(*verify)
    assert code == 0, err
    code, _, err = command(
        *("train", tmp_path / "cache", "--objective", "score", "--arch", "1x16", "--steps", "2"),
        *("--batch-size", "2", "--out", tmp_path / "run"),
    )
    assert code == 0, err
    assert (tmp_path / "run/students/1x16/model.safetensors").is_file()


def test_mine_says_that_there_are_judgements_to_train_on(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    save_teacher(tmp_path / "encoder")
    words = ("mine", tmp_path / "encoder", "--max-length", "16", "--negatives", "2", "--among", "5")
    code, _, err = command(*words, "--retrieval", folder, "--out", tmp_path / "tested.jsonl")
    assert (code, "For a training, mine" in err) == (0, True), err
    train = folder / "qrels/train.tsv"
    code, _, err = command(*words, "--retrieval", train, "--out", tmp_path / "mined.jsonl")
    assert (code, "For a training, mine" in err) == (0, False), err
    groups = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    assert [group["positive"] for group in groups] == [[text(0), text(1)], [text(3)]]  # the best one first
    assert not {text(0), text(1)} & set(groups[0]["negative"])


def test_what_is_missing_or_wrong_is_named(folder: Path, command: Command) -> None:
    words = ("dump", "--teacher", "mini", "--corpus", folder, "--for", "score", "--pair-columns")
    command.fails(*words, "question,answer", code=1, says=("no column 'question'", COLUMNS))
    train = folder / "qrels/train.tsv"
    whole = train.read_text()
    for line, says in (("q0\td99\t1", "no document 'd99'"), ("q0 d1 1", "a whole grade, with tabs")):
        train.write_text(f"{whole}{line}\n")
        with pytest.raises(CorpusError, match=f"line 6.*{says}"):
            read(folder)
    train.write_text("q0 d1 1\n")
    command.fails(*words, COLUMNS, code=1, says=("line 1", "a whole grade, with tabs"))
    train.write_text(whole)
    texts = (folder / "corpus.jsonl").read_text()
    (folder / "corpus.jsonl").write_text(texts.replace('"text"', '"body"'))
    command.fails(*words, COLUMNS, code=1, says=("corpus.jsonl, line 1", "no text 'text'"))
    (folder / "corpus.jsonl").write_text(texts)
    train.write_text("query-id\tcorpus-id\tscore\n")
    with pytest.raises(CorpusError, match="no query has a relevant document"):
        read(folder)
    train.unlink()
    command.fails(*words, COLUMNS, code=1, says=("no qrels/train.tsv", "it has test.tsv", "qrels/test.tsv"))


def test_queries_with_one_document_teach_no_order(folder: Path, tmp_path: Path, command: Command) -> None:
    save_teacher(tmp_path / "judge", head="sequences", num_labels=1)
    for at in range(4, 64):
        query = {"_id": f"q{at}", "text": f"{WORDS[at % 20]} {WORDS[at // 20]}"}
        with (folder / "queries.jsonl").open("a") as queries:
            queries.write(json.dumps(query) + "\n")
    lines = "".join(f"q{at}\td{at % 6}\t1\n" for at in range(64))
    (folder / "qrels/train.tsv").write_text(lines)  # without a header
    words = ("dump", "--teacher", tmp_path / "judge", "--corpus", folder, "--pair-columns", COLUMNS)
    cache, short = tmp_path / "cache", ("--max-length", "32")
    for objective in ("listwise", "ranknet", "margin-mse"):
        command.fails(
            *words, *short, "--for", objective, code=1, says=("every query has one document", objective)
        )
    code, _, err = command(*words, *short, "--for", "score", "--out", cache)
    assert code == 0, err
    for objective in ("listwise", "ranknet", "margin-mse", "listwise=1,score=1"):
        trained = ("train", cache, "--arch", "1x16", "--steps", "2", "--batch-size", "4", "--objective")
        command.fails(
            *trained, objective, "--out", tmp_path / f"run-{objective}", code=2, says="as many queries"
        )
