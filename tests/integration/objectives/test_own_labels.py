"""Labels of a task of one's own, which are learned together with a teacher's answers."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from minilm_cache.cache import open_cache
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.labelled import OwnLabels, own_labels
from minilm_cache.objectives.several import documents_of
from minilm_cache.report.provenance import train_command
from minilm_cache.report.runs import TrainedRun
from minilm_cache.train.record import RunIdentity, load_record
from tests.fixtures import Command
from tests.support import WORDS, World, save_teacher

SAME: dict[str, Any] = {
    "arch": ("3x32:ff64",),
    "objective": "tinybert-prediction",
    "steps": 1,
    "lr": 1e-9,
    "warmup": 0.0,
}
"""A student that is the teacher, and stays it."""
WEIGHT = 0.25
ANSWERS = ("--objective", "tinybert-prediction")


def write(file: Path, labels: Sequence[object], *, second: str = "") -> Path:
    rows: list[dict[str, object]] = [
        {"text": " ".join(WORDS[number // base % 7] for base in (1, 7, 49)) + second, "label": label}
        for number, label in enumerate(labels)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def classifier(
    world: World, num_labels: int, *, dumped: dict[str, Any] | None = None, **settings: Any
) -> None:
    save_teacher(world.root / "classifier", head="sequences", num_labels=num_labels, **settings)
    text = {"corpus": str(world.root / "labels.jsonl"), "packing": "records", **(dumped or {})}
    world.dump(teacher=str(world.root / "classifier"), codec="none", logits=True, **text)


def answers(world: World) -> tuple[torch.Tensor, list[Any]]:
    """Return transformers' logits of the held-out texts, and their labels."""
    cache = open_cache(world.root / "cache")
    rows = [json.loads(line) for line in (world.root / "labels.jsonl").read_text().splitlines()]
    rows = [rows[number] for number in documents_of(cache)[cache.manifest.num_train :]]
    folder = world.root / "classifier"
    read = AutoTokenizer.from_pretrained(folder)(
        [row["text"] for row in rows], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**read).logits
    return logits, [row["label"] for row in rows]


@pytest.mark.parametrize("names", [None, ["no", "yes", "maybe"]])
def test_the_loss_is_that_of_answers_and_labels(world: World, names: list[str] | None) -> None:
    """By number or by name; a record without a label has the answer alone."""
    labels = [
        None if number % 3 == 0 else names[number % 3] if names else number % 3 for number in range(343)
    ]
    write(world.root / "labels.jsonl", labels)
    named: dict[str, Any] = {"id2label": dict(enumerate(names))} if names else {}
    classifier(world, 3, **named)
    run = world.train("run", **SAME, own_labels=str(world.root / "labels.jsonl"), label_weight=WEIGHT)
    logits, known = answers(world)
    losses = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    numbers = [each if each is None or names is None else names.index(each) for each in known]
    for row, number in enumerate(numbers):
        if number is not None:
            own = F.cross_entropy(logits[row], torch.tensor(number))
            losses[row] = (1 - WEIGHT) * losses[row] + WEIGHT * own
    (student,) = run.record.students
    assert {None} < {*numbers}
    assert student.held_out_before is not None
    assert student.held_out_before["prediction"] == pytest.approx(float(losses.mean()), abs=1e-4)


def test_a_table_without_a_header_may_begin_with_the_number_of_its_label(world: World) -> None:
    """Labels are 0 and 1 in many such tables, and the first column is called 0."""
    table = [(number % 2, WORDS[number % 7], WORDS[number % 11]) for number in range(77)]
    file = world.root / "labels.tsv"
    file.write_text("".join(f"{label}\t{first}\t{second}\n" for label, first, second in table))
    columns = {"corpus": str(file), "pair_columns": "1,2", "packing": "pairs"}
    classifier(world, 2, dumped=columns)
    settings = {"objective": "tinybert-prediction", "own_labels": str(file), "label_column": "0"}
    found = own_labels(open_cache(world.root / "cache"), ObjectiveConfig(**settings))
    assert found is not None
    texts = documents_of(open_cache(world.root / "cache"))
    assert found.values.tolist() == [table[number][0] for number in texts]


def test_labels_of_texts_that_are_joined_columns(world: World) -> None:
    rows = [{"title": WORDS[n % 7], "body": WORDS[n % 11], "label": n % 2} for n in range(77)]
    file = world.root / "labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    classifier(world, 2, dumped={"text_column": "title+body"})
    settings = {"objective": "tinybert-prediction", "own_labels": str(file)}
    found = own_labels(open_cache(world.root / "cache"), ObjectiveConfig(**settings))
    assert found is not None
    texts = documents_of(open_cache(world.root / "cache"))
    assert found.values.tolist() == [rows[number]["label"] for number in texts]


@pytest.mark.parametrize("objective", ["score", "tinybert-prediction"])
def test_of_a_teacher_that_gives_one_number_the_target_is_mixed(world: World, objective: str) -> None:
    write(world.root / "labels.jsonl", [number / 49 for number in range(343)])
    classifier(world, 1)
    settings = {**SAME, "objective": objective}
    run = world.train("run", **settings, own_labels=str(world.root / "labels.jsonl"))
    logits, known = answers(world)
    expected = (0.5 * (logits[:, 0] - torch.tensor(known))).square().mean()
    (before,) = (run.record.students[0].held_out_before or {}).values()
    assert before == pytest.approx(float(expected), rel=1e-3)


def test_students_learn_labels_that_the_teacher_does_not_know(world: World, command: Command) -> None:
    labels = [number % 7 % 2 for number in range(49)]
    file = write(world.root / "labels.jsonl", labels)
    classifier(world, 2)
    settings: dict[str, Any] = {
        "objective": "tinybert-prediction",
        "steps": 150,
        "batch_size": 16,
        "lr": 5e-3,
    }
    run = world.train("run", arch=("2x32",), **settings, own_labels=str(file), label_weight=1)
    folder = run.student_path("2x32")
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    read = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**read).logits.argmax(-1)
    assert (found == torch.tensor(labels)).float().mean() > 0.9

    words = shlex.split(train_command(TrainedRun.open(run.path)))
    again = ("--out", run.path, "--batch-size", 16, "--device", "cpu")
    code, _, err = command(*words[1:], *again)
    assert code == 0, err
    assert "own_labels" not in err
    write(file, [1 - label for label in labels])  # the same texts with other labels are another run
    command.fails(*words[1:], *again, code=1, says="holds another run, which differs in own_labels")


def test_a_label_is_none_where_it_is_nan() -> None:
    labels = OwnLabels(values=torch.tensor([torch.nan, 1.0]).numpy(), weight=1.0)
    own = torch.randn(2, 3)
    mixed = labels.joined(own, labels.of(torch.tensor([0, 1]).numpy()))
    torch.testing.assert_close(mixed[0], own[0])
    torch.testing.assert_close(mixed[1].softmax(-1), torch.tensor([0.0, 1.0, 0.0]))


def test_labels_of_other_texts_are_refused(world: World, command: Command) -> None:
    write(world.root / "labels.jsonl", [number % 2 for number in range(40)])
    classifier(world, 2)
    other = world.root / "other.jsonl"
    words = ("train", world.root / "cache", "--arch", "2x32", "--steps", 2, "--device", "cpu")
    answers = (*words, *ANSWERS, "--own-labels", other)
    command.fails(*answers, code=1, says=f"{other} does not exist")
    command.fails(*words, *ANSWERS, "--own-labels", world.root, code=1, says="is no file of records")
    command.fails(*words, *ANSWERS, "--own-labels", world.corpus, code=1, says="is no file of records")
    write(other, [0] * 40, second=" ba")
    command.fails(*answers, code=2, says=f"--own-labels {other} has other texts")
    write(other, [0] * 39 + ["often"])
    command.fails(*answers, code=2, says=("label 'often' is none of the teacher's classes", "--label-column"))
    command.fails(*answers, "--label-column", "grade", code=1, says=("no column 'grade'", "--label-column"))
    command.fails(*answers, "--label-weight", 0, code=2, says="give more than 0")
    command.fails(*answers, "--temperature", 2, code=2, says="not with labels")
    command.fails(*words, "--own-labels", other, code=2, says="goes with --objective")
    command.fails(*words, *ANSWERS, "--label-weight", 0.3, code=2, says="go with --own-labels")
    command.fails(
        *words, "--objective", "score", "--own-labels", world.root / "labels.jsonl", code=2, says="2 classes"
    )
    write(other, [0] * 40).write_text(other.read_text() + '{"text": " ", "label": 1}\n')
    command.fails(*answers, code=2, says="has 41 records")


def test_a_study_finds_labels_beside_its_document(world: World, command: Command) -> None:
    write(world.root / "labels.jsonl", [number % 2 for number in range(49)])
    save_teacher(world.root / "classifier", head="sequences", num_labels=2)
    (world.root / "study.yaml").write_text("""
dump: {teacher: classifier, corpus: labels.jsonl, packing: records, codec: none, logits: true, max_length: 32,
       device: cpu}
arch: [2x32]
objective:
  - tinybert-prediction
  - {objective: tinybert-prediction, own_labels: labels.jsonl}
train: {steps: 2, batch_size: 4, device: cpu}
""")
    code, out, err = command("study", world.root / "study.yaml", "--json")
    assert code == 0, err
    alone, labelled = sorted((row["objective"] for row in json.loads(out)["students"]), key=len)
    assert "labels" not in alone
    assert labelled.startswith(f"{alone} (labels ")
    moved = world.root / "elsewhere"
    moved.mkdir()
    for each in ("labels.jsonl", "classifier", "study.yaml", "study"):
        (world.root / each).rename(moved / each)
    code, again, err = command("study", moved / "study.yaml", "--dry-run", "--json")
    assert code == 0, err
    assert {each["state"] for each in json.loads(again)["passes"]} == {"complete"}


def test_labels_of_a_study_are_looked_for_first(world: World, command: Command) -> None:
    """Where they are not there, and where two files have one name."""
    write(world.root / "labels.jsonl", [0, 1])
    save_teacher(world.root / "classifier", head="sequences", num_labels=2)
    dump = "teacher: classifier, corpus: labels.jsonl, max_length: 32, packing: records, codec: none"
    begin = f"dump: {{{dump}, logits: true}}\n"
    study = world.root / "study.yaml"
    study.write_text(f"{begin}arch: [2x32]\nobjective:\n  - {{objective: score, own_labels: nosuch.csv}}\n")
    says = ("line 3, objective: --own-labels", "nosuch.csv does not exist")
    command.fails("study", study, "--dry-run", code=2, says=says)
    (world.root / "x").mkdir()
    write(world.root / "x" / "labels.jsonl", [1, 0])
    each = "{objective: tinybert-prediction, own_labels: %s}"
    listed = ", ".join(each % name for name in ("labels.jsonl", "x/labels.jsonl"))
    study.write_text(f"{begin}arch: [2x32]\nobjective: [{listed}]\n")
    code, out, err = command("study", study, "--dry-run", "--json")
    assert code == 0, err
    assert len({each["pass"] for each in json.loads(out)["passes"]}) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"text": "ba", "query": "ba"}, "no record has a label"),
        ({"text": "ba", "label": True}, None),
        ({"text": "ba", "label": 1.0}, None),
        ({"text": "ba", "label": "1.0"}, None),
        ({"text": "ba", "label": " yes "}, None),
        ({"text": "ba", "label": 0.5}, "none of the teacher's classes: no, yes, 0, 1"),
        ({"text": "ba", "label": "2"}, "none of the teacher's classes"),
        ({"text": "ba", "label": [1]}, "label '[1]' is none of the teacher's classes"),
    ],
)
def test_classes_are_written_in_many_ways(
    world: World, command: Command, line: dict[str, object], says: str | None
) -> None:
    file = world.root / "labels.jsonl"
    file.write_text("".join(json.dumps({"text": f"ba {WORDS[number]}"}) + "\n" for number in range(8)))
    classifier(world, 2, id2label={0: "no", 1: "yes "})
    rows = [{**line, "text": f"ba {WORDS[number]}"} for number in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if says is None:
        labels = own_labels(
            open_cache(world.root / "cache"), ObjectiveConfig(objective=ANSWERS[1], own_labels=str(file))
        )
        assert labels is not None
        assert set(labels.values) == {1.0}
        return
    words: tuple[object, ...] = ("train", world.root / "cache", "--arch", "2x32", "--steps", 2, *ANSWERS)
    if "label" not in line:
        words = (*words, "--label-column", "query")
        file.write_text("".join(json.dumps({**row, "query": None}) + "\n" for row in rows))
    command.fails(*words, "--own-labels", file, "--device", "cpu", code=2, says=says)


def test_a_class_that_is_called_by_a_number_is_found_by_its_name_alone(
    world: World, command: Command
) -> None:
    file = world.root / "labels.jsonl"
    rows = [{"text": f"ba {WORDS[number]}", "label": "-1" if number % 2 else "+1"} for number in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    classifier(world, 2, id2label={0: "+1", 1: "-1"})
    config = ObjectiveConfig(objective=ANSWERS[1], own_labels=str(file))
    labels = own_labels(open_cache(world.root / "cache"), config)
    assert labels is not None
    assert sorted(labels.values) == [0] * 4 + [1] * 4
    file.write_text(file.read_text().replace("+1", "1"))
    words = ("train", world.root / "cache", "--arch", "2x32", "--steps", 2, *ANSWERS, "--own-labels", file)
    says = "label '1' is none of the teacher's classes: +1, -1"
    command.fails(*words, "--device", "cpu", code=2, says=says)


def test_objectives_that_learn_answers_alone_do_not_get_labels(world: World, command: Command) -> None:
    write(world.root / "labels.jsonl", [number % 2 for number in range(40)])
    classifier(world, 2, dumped={"first_hidden": "all"})
    words = ("train", world.root / "cache", "--arch", "2x32", "--steps", 2, "--device", "cpu", *ANSWERS)
    joined = (*words, "--objective", "bert-pkd", "--own-labels", world.root / "labels.jsonl")
    command.fails(*joined, code=2, says="not all of them learn labels")


def test_labels_go_with_a_cache_at_a_url(world: World, command: Command) -> None:
    """Its tables are fetched before its shards are."""
    file = write(world.root / "labels.jsonl", [number % 2 for number in range(40)])
    classifier(world, 2)
    assert command("push", world.root / "cache", f"file://{world.root}/store")[0] == 0
    (pushed,) = (world.root / "store").iterdir()
    words = ("train", f"file://{pushed}", "--arch", "2x32", "--steps", 2, "--device", "cpu", *ANSWERS)
    code, _, err = command(*words, "--own-labels", file, "--out", world.root / "run")
    assert code == 0, err
    assert load_record(world.root / "run").complete


def test_a_run_without_labels_has_the_name_that_it_had() -> None:
    """The name is one that a release without labels gave: folders and recipes of its runs stay the same."""
    numbers: dict[str, Any] = {"steps": 5, "batch_size": 4, "seed": 0, "buffer_shards": 4, "shard_tokens": 10}
    shares = {"lr": 1e-3, "warmup": 0.1, "weight_decay": 0.01, "max_grad_norm": None, "eval_steps": None}
    objective = {"objective": "minilm", "relation_heads": None, "value_relation": True}
    layers = {"query_key_relations": False, "layer_map": "last", "teacher_layer": 2}
    whole = {"fingerprint": "f", "arch": ("1x32",), "num_streams": 1, "num_parts": 1, "compiled": False}
    values = numbers | shares | objective | layers | whole | {"precision": "float32"}
    identity = RunIdentity.model_validate(values)
    assert identity.name() == "1x32-2b66a374ec5c"
