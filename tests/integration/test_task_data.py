"""Data of downstream tasks: what is read, and how bad data end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from minilm_cache.evaluate.tasks import TASKS, TextTask
from minilm_cache.evaluate.texts import read_text_task
from tests.conftest import Command
from tests.support import save_teacher
from tests.tasks import evaluated, write_glue, write_squad, write_sst2

SST2 = next(task for task in TASKS.values() if isinstance(task, TextTask) and task.name == "sst2")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


def test_hub_layout(teacher: Path, tmp_path: Path, command: Command) -> None:
    """The hub's own columns, from a folder laid out as a repository is."""
    rows = {"sentence": ["ba ba", "be be"] * 6, "label": [1, 0] * 6, "idx": list(range(12))}
    hidden = {**rows, "label": [-1] * 12}
    splits = DatasetDict(
        {
            "train": Dataset.from_dict(rows),
            "validation": Dataset.from_dict(rows),
            "test": Dataset.from_dict(hidden),
        }
    )
    repository = tmp_path / "repository"
    files = []
    for split, one in splits.items():
        (repository / "sst2").mkdir(parents=True, exist_ok=True)
        one.to_parquet(repository / "sst2" / f"{split}.parquet")
        files.append(f"  - split: {split}\n    path: sst2/{split}.parquet")
    card = "---\nconfigs:\n- config_name: sst2\n  data_files:\n" + "\n".join(files) + "\n---\n"
    (repository / "README.md").write_text(card)
    found = evaluated(
        command,
        teacher,
        "--task",
        "sst2",
        "--data",
        f"hf:{repository}",
        "--epochs",
        1,
        "--out",
        tmp_path / "out",
    )
    assert found["trials"][0]["num_train"] == 12
    (track,) = read_text_task(SST2, None, str(repository))
    assert [one.label for one in track.dev["dev"]] == [1, 0] * 6


def _squad_file(context: str, answer: str | None) -> str:
    answers = [] if answer is None else [{"text": answer, "answer_start": 0}]
    question = {"id": "q", "question": "?", "answers": answers}
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [question]}]}]})


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
            "train.tsv, example 2: label '7' is none",
        ),
        (
            "sst2",
            "SST-2/train.tsv",
            "sentence\tlabel\nba\t1\t2\n",
            "1 of 1 rows have not 2 columns, the first has 3",
        ),
        ("sst2", "SST-2/train.tsv", "sentence\tlabel\nb\xff", "cannot read"),
        ("stsb", "STS-B/dev.tsv", "sentence1\tsentence2\tscore\nba\tbe\tmuch\n", "score 'much' is no number"),
        ("stsb", "STS-B/dev.tsv", "sentence1\tsentence2\tscore\nba\tbe\tnan\n", "score 'nan' is no number"),
        ("squad", "SQuAD/dev-v1.1.json", None, "has no dev-v1.1.json"),
        ("squad", "SQuAD/dev-v1.1.json", "{", "as SQuAD's JSON"),
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
        (
            "xnli",
            "XNLI/dev-en.tsv",
            "ba\tbe\tneutral\n",
            "train-LANGUAGE.tsv or multinli.train.*.tsv is not there",
        ),
        ("xnli", "XNLI/train-en.tsv", "ba\tbe\tneutral\n", "dev-LANGUAGE.tsv or xnli.dev.tsv is not there"),
    ],
)
def test_bad_data_ends_in_one_line(  # noqa: PLR0913 - a table of cases
    task: str, file: str, content: str | None, says: str, teacher: Path, tmp_path: Path, command: Command
) -> None:
    write_glue(tmp_path)
    write_squad(tmp_path / "SQuAD", "1.1")
    bad = tmp_path / file
    bad.unlink() if content is None else bad.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        bad.write_text(content, encoding="latin-1")
    command.fails("evaluate", teacher, "--task", task, "--data", tmp_path, code=1, says=says)


def test_rows_that_lack_columns_are_few(tmp_path: Path) -> None:
    """QQP's training set is known for a few, which the benchmark's own code leaves out."""
    data = write_sst2(tmp_path / "SST-2", num_train=2000)
    with (data / "train.tsv").open("a") as file:
        file.write("ba ba\n")
    (track,) = read_text_task(SST2, data, None)
    assert len(track.train) == 2000


def test_jsonl_has_the_same_columns(tmp_path: Path) -> None:
    data = write_sst2(tmp_path / "SST-2")
    rows = [line.split("\t") for line in (data / "dev.tsv").read_text().splitlines()[1:]]
    (expected,) = read_text_task(SST2, data, None)
    (data / "dev.tsv").unlink()
    lines = [json.dumps({"sentence": text, "label": label}) for text, label in rows]
    (data / "dev.jsonl").write_text("\n".join(lines))
    (found,) = read_text_task(SST2, data, None)
    assert found == expected


@pytest.mark.parametrize(
    ("lacking", "command_line", "says"),
    [
        ("sklearn.metrics", ("evaluate", "mini", "--task", "sst2", "--data", "x"), "'minilm-cache[eval]'"),
        ("onnxscript", ("speed", "TEACHER", "--length", "8", "--onnx", "OUT"), "'minilm-cache[onnx]'"),
        (
            "sentence_transformers",
            ("embeddings", "mini", "--data", "x"),
            "'minilm-cache[sentence-transformers,eval]'",
        ),
    ],
)
def test_an_extra_that_is_not_installed_is_named(
    lacking: str, command_line: tuple[str, ...], says: str, teacher: Path, tmp_path: Path
) -> None:
    words = {"TEACHER": str(teacher), "OUT": str(tmp_path / "onnx")}
    arguments = [words.get(word, word) for word in command_line]
    program = (
        f"import sys; sys.modules[{lacking!r}] = None; from minilm_cache.cli.main import run; "
        f"sys.exit(run({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"{lacking}, which is not installed: pip install {says}" in done.stderr
    assert "Traceback" not in done.stderr
