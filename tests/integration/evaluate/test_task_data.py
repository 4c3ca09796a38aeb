"""Data of downstream tasks: what is read, and how bad data end."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset

from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.files import Source
from minilm_cache.evaluate.glue import read_text_task
from minilm_cache.evaluate.squad import read_span_task
from minilm_cache.evaluate.tasks import TASKS, SpanTask, TextTask
from minilm_cache.session import Silent
from tests.fixtures import Command
from tests.support import save_teacher, write_hub
from tests.tasks import evaluated, write_glue, write_squad, write_sst2

KINDS = ("evaluate.kind", "evaluate.texts", "evaluate.spans", "evaluate.generation", "evaluate.metrics")
"""Modules that need the libraries of scores."""
SST2 = next(task for task in TASKS.values() if isinstance(task, TextTask) and task.name == "sst2")


def source(folder: Path | None, hub: str | None = None, *, tests: bool = False) -> Source:
    return Source(folder=folder, hub=hub, tests=tests, note=Silent().note)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


def rows_of(labels: list[int], names: list[str] | None, *columns: str) -> Dataset:
    """Return rows of texts with classes, as the hub's data sets have them."""
    texts = {column: [f"ba {number}" for number in range(len(labels))] for column in columns}
    rows = Dataset.from_dict({**texts, "label": labels, "idx": list(range(len(labels)))})
    return rows if names is None else rows.cast_column("label", ClassLabel(names=names))


NLI = ["entailment", "neutral", "contradiction"]


@pytest.mark.parametrize(
    ("name", "names", "columns", "labels", "expected"),
    [
        ("sst2", ["negative", "positive"], ("sentence",), [1, 0], [1, 0]),
        ("sst2", None, ("sentence",), [1, 0], [1, 0]),
        ("rte", ["entailment", "not_entailment"], ("sentence1", "sentence2"), [1, 0], [1, 0]),
        ("rte", ["not_entailment", "entailment"], ("sentence1", "sentence2"), [1, 0], [0, 1]),
        ("mrpc", ["not_equivalent", "equivalent"], ("sentence1", "sentence2"), [1, 0], [1, 0]),
        ("qnli", ["entailment", "not_entailment"], ("question", "sentence"), [0, 1], [0, 1]),
    ],
)
def test_labels_of_the_hub_go_by_their_names(
    tmp_path: Path,
    name: str,
    names: list[str] | None,
    columns: tuple[str, ...],
    labels: list[int],
    expected: list[int],
) -> None:
    rows = rows_of(labels, names, *columns)
    hidden = rows_of([-1, -1], names, *columns)
    splits = {"train": rows, "validation": rows, "test": hidden}
    hub = write_hub(tmp_path / "hub", {name: splits, "other": splits})
    task = TASKS[name]
    assert isinstance(task, TextTask)
    (track,) = read_text_task(task, source(None, str(hub), tests=True))
    assert [one.label for one in track.dev["dev"]] == expected
    assert [one.label for one in track.test["test"]] == [None, None]
    assert track.unlabelled() == ["test"]
    (track,) = read_text_task(task, source(None, str(hub)))
    assert track.test == {}


def test_labels_of_the_hub_that_are_others_are_refused(tmp_path: Path) -> None:
    rows = rows_of([1, 0], ["bad", "good"], "sentence")
    hub = write_hub(tmp_path / "hub", {"sst2": {"train": rows, "validation": rows}})
    with pytest.raises(CorpusError, match="label 'good' is not one of 0, 1"):
        read_text_task(SST2, source(None, str(hub)))


def test_mnli_and_xnli_of_the_hub(tmp_path: Path) -> None:
    pairs = rows_of([0, 1, 2], NLI, "premise", "hypothesis")
    splits = dict.fromkeys(("train", "validation_matched", "validation_mismatched"), pairs)
    mnli = TASKS["mnli"]
    assert isinstance(mnli, TextTask)
    (track,) = read_text_task(mnli, source(None, str(write_hub(tmp_path / "mnli", {"mnli": splits}))))
    assert [one.label for one in track.dev["dev-mm"]] == [0, 1, 2]
    assert mnli.labels == tuple(NLI)

    languages = ["ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"]
    of_language = {"train": pairs, "validation": pairs, "test": pairs}
    hub = write_hub(tmp_path / "xnli", dict.fromkeys(languages, of_language))
    xnli = TASKS["xnli"]
    assert isinstance(xnli, TextTask)
    (track,) = read_text_task(xnli, source(None, str(hub)))
    assert set(track.dev) == {f"dev-{language}" for language in languages}
    assert [one.label for one in track.test["test-de"]] == [0, 1, 2]


def test_squad_and_mlqa_of_the_hub(tmp_path: Path) -> None:
    answers = [{"text": ["be"], "answer_start": [3]}, {"text": [], "answer_start": []}]
    rows = Dataset.from_dict(
        {
            "id": ["a", "b"],
            "title": ["t", "t"],
            "context": ["ba be"] * 2,
            "question": ["bi"] * 2,
            "answers": answers,
        }
    )
    hub = write_hub(tmp_path / "squad", {"squad_v2": {"train": rows, "validation": rows}})
    task = TASKS["squad2"]
    assert isinstance(task, SpanTask)
    (track,) = read_span_task(task, source(None, str(hub)))
    assert [one.answers for one in track.dev["dev"]] == [((3, "be"),), ()]
    with pytest.raises(CorpusError, match="no answer"):
        read_span_task(replace(task, has_unanswerable=False), source(None, str(hub)))


def test_a_repository_of_scripts_is_told(teacher: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text("raise SystemExit\n")
    command.fails(
        *("evaluate", teacher, "--task", "sst2", "--data", f"hf:{folder}"),
        code=1,
        says=("cannot load", "--data DIR"),
    )


def _squad_file(context: str, answer: str | None, start: str = "0") -> str:
    answers = [] if answer is None else [{"text": answer, "answer_start": float(start)}]
    question = {"id": "q", "question": "?", "answers": answers}
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [question]}]}]})


def _twice(document: str) -> str:
    found = json.loads(document)
    return json.dumps({"data": found["data"] * 2})


@pytest.mark.parametrize(
    ("task", "file", "content", "says"),
    [
        ("sst2", "SST-2/train.tsv", None, "has no training set of SST-2"),
        ("rte", "RTE/dev.tsv", None, "has no dev set of RTE"),
        ("sst2", "SST-2/dev.tsv", "", "dev.tsv is empty"),
        ("sst2", "SST-2/dev.tsv", "sentence\tlabel\n", "dev.tsv holds no example"),
        ("sst2", "SST-2/train.tsv", "text\tlabel\nba\t1\n", "has no column 'sentence'; it has text, label"),
        (
            "sst2",
            "SST-2/train.tsv",
            "sentence\tlabel\nba\t1\nbe\t7\n",
            "train.tsv, example 2: label '7' is not one of",
        ),
        (
            "sst2",
            "SST-2/train.tsv",
            "sentence\tlabel\nba\t1\t2\n",
            "1 of 1 rows do not have 2 columns; the first, row 1, has 3",
        ),
        ("sst2", "SST-2/train.tsv", "sentence\tlabel\nb\xff", "cannot read"),
        (
            "stsb",
            "STS-B/dev.tsv",
            "sentence1\tsentence2\tscore\nba\tbe\tmuch\n",
            "score 'much' is not a finite number",
        ),
        (
            "stsb",
            "STS-B/dev.tsv",
            "sentence1\tsentence2\tscore\nba\tbe\tnan\n",
            "score 'nan' is not a finite number",
        ),
        ("squad", "SQuAD/dev-v1.1.json", None, "has no dev-v1.1.json"),
        ("squad", "SQuAD/dev-v1.1.json", "{", "as JSON"),
        ("squad", "SQuAD/dev-v1.1.json", "[" * 100_000, "as JSON"),
        ("squad", "SQuAD/dev-v1.1.json", _squad_file("ba be", "ba", "Infinity"), "as SQuAD's JSON"),
        ("squad", "SQuAD/dev-v1.1.json", _squad_file("ba \ud800", "ba"), "is not a text"),
        ("squad", "SQuAD/dev-v1.1.json", _twice(_squad_file("ba be", "ba")), "two questions have the id 'q'"),
        ("rte", "RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tba\n", "row 1, has 2"),
        ("sst2", "SST-2/dev.tsv", "\xef\xbb\xbf", "is empty"),
        (
            "sst2",
            "SST-2/train.jsonl",
            '{"sentence": "ba", "label": "1"}\n{"sentence": "be"}\n',
            "label 'None' is not one of",
        ),
        ("sst2", "SST-2/train.jsonl", '{"sentence": "ba", "label": "1"}\n{"sen', "train.jsonl, line 2,"),
        ("sst2", "SST-2/train.jsonl", '{"sentence": "\\ud800", "label": "1"}\n', "is not a text"),
        ("xnli", "XNLI/train-en.tsv", "b\xff\tbe\tneutral\n", "cannot read"),
        ("squad", "SQuAD/dev-v1.1.json", "[]", "as SQuAD's JSON"),
        ("squad", "SQuAD/dev-v1.1.json", '{"version": 1}', "no 'data'"),
        ("squad", "SQuAD/dev-v1.1.json", '{"data": []}', "holds no question"),
        (
            "squad",
            "SQuAD/dev-v1.1.json",
            _squad_file("ba be", "be"),
            "question q: answer 'be' is not at character 0",
        ),
        (
            "squad",
            "SQuAD/dev-v1.1.json",
            _squad_file("ba be", None),
            "no answer. SQuAD has one for each question",
        ),
        ("mlqa", "MLQA_V1/dev/x.json", "", "has no train-v1.1.json"),
        ("xnli", "XNLI/dev-en.tsv", "ba\tbe\tneutral\n", "train-LANGUAGE.tsv is not there"),
        ("xnli", "XNLI/train-en.tsv", "ba\tbe\tneutral\n", "dev-LANGUAGE.tsv is not there"),
    ],
)
def test_bad_data_ends_in_one_line(
    task: str, file: str, content: str | None, says: str, teacher: Path, tmp_path: Path, command: Command
) -> None:
    write_glue(tmp_path)
    write_squad(tmp_path / "SQuAD", "1.1")
    bad = tmp_path / file
    if bad.suffix == ".jsonl":
        bad.with_suffix(".tsv").unlink()
    bad.unlink() if content is None else bad.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        bad.write_text(content, encoding="latin-1")
    command.fails("evaluate", teacher, "--task", task, "--data", tmp_path, code=1, says=says)


def test_rows_that_lack_columns_are_few(tmp_path: Path) -> None:
    """QQP's training set is known for a few, which the benchmark's own code leaves out."""
    data = write_sst2(tmp_path / "SST-2", num_train=2000)
    with (data / "train.tsv").open("a") as file:
        file.write("ba ba\n")
    (track,) = read_text_task(SST2, source(data))
    assert len(track.train) == 2000


def test_jsonl_has_the_same_columns(tmp_path: Path) -> None:
    data = write_sst2(tmp_path / "SST-2")
    rows = [line.split("\t") for line in (data / "dev.tsv").read_text().splitlines()[1:]]
    (expected,) = read_text_task(SST2, source(data))
    (data / "dev.tsv").unlink()
    lines = [json.dumps({"sentence": text, "label": label}) for text, label in rows]
    (data / "dev.jsonl").write_text("\n".join(lines))
    (found,) = read_text_task(SST2, source(data))
    assert found == expected


@pytest.mark.parametrize(
    ("lacking", "command_line", "says"),
    [
        ("sklearn", ("evaluate", "mini", "--task", "sst2", "--data", "."), "'minilm-cache[eval]'"),
        ("onnxscript", ("speed", "TEACHER", "--length", "8", "--onnx", "OUT"), "'minilm-cache[onnx]'"),
        (
            "sentence_transformers",
            ("embeddings", "mini", "--data", "x"),
            "'minilm-cache[sentence-transformers,eval]'",
        ),
    ],
)
def test_an_extra_that_is_not_installed_is_named(
    lacking: str,
    command_line: tuple[str, ...],
    says: str,
    teacher: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, lacking, None)
    for name in ("evaluate.run", *KINDS, "evaluate.embeddings", "deploy.onnx"):
        monkeypatch.delitem(sys.modules, f"minilm_cache.{name}", raising=False)  # imported anew
    words = {"TEACHER": str(teacher), "OUT": str(tmp_path / "onnx")}
    arguments = [words.get(word, word) for word in command_line]
    command.fails(*arguments, code=2, says=f"{lacking}, which is not installed: pip install {says}")


def test_predictions_keep_the_files_own_index(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_sst2(tmp_path / "SST-2")
    (data / "test.tsv").write_text("index\tsentence\n7\tba ba\n3\tbe be\n\n")
    evaluated(
        command,
        teacher,
        "--task",
        "sst2",
        "--data",
        data,
        "--epochs",
        1,
        "--predict",
        "--out",
        tmp_path / "out",
    )
    lines = next((tmp_path / "out").rglob("SST-2.tsv")).read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "7", "3"]


def test_lines_end_where_files_say(tmp_path: Path) -> None:
    """Not at every character that Unicode calls a line's end, and an empty line at the end is none."""
    data = write_sst2(tmp_path / "SST-2")
    (data / "dev.tsv").unlink()
    (data / "dev.jsonl").write_text('{"sentence": "ba\u2028be\u0085", "label": 1}\n\n', encoding="utf-8")
    (track,) = read_text_task(SST2, source(data))
    assert [one.texts for one in track.dev["dev"]] == [("ba\u2028be\u0085",)]
