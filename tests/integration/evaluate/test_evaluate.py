"""Fine-tuning and scoring from the command line, on tasks in their official layouts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from minilm_cache.errors import InterruptedRunError
from minilm_cache.evaluate.card import name_in_cards
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.evaluate.tasks import TASKS
from minilm_cache.session import Session
from tests.fixtures import Command
from tests.support import World, dump_arguments, save_teacher
from tests.tasks import SHORT, evaluated, write_glue, write_mlqa, write_squad, write_sst2, write_xnli

GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


def test_a_model_learns_and_its_score_is_that_of_plain_transformers(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    """The kept model, asked by transformers alone, gives the accuracy that was recorded."""
    data = write_sst2(tmp_path / "SST-2")
    asked = (teacher, "--task", "sst2", "--data", data, "--lr", "1e-3", "--epochs", "4", "--keep-models")
    (trial,) = evaluated(command, *asked, "--batch-size", "8", "--out", tmp_path / "out")["trials"]
    accuracy = trial["scores"]["dev"]["accuracy"]
    assert accuracy > 90

    folder = next((tmp_path / "out" / "sst2").iterdir())
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [line.split("\t") for line in (data / "dev.tsv").read_text().splitlines()[1:]]
    with torch.no_grad():
        told = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text, _ in rows]
    assert accuracy == pytest.approx(
        100 * np.mean([one == int(label) for one, (_, label) in zip(told, rows, strict=True)])
    )
    written = (folder / "predictions" / "dev.tsv").read_text().splitlines()
    assert written == ["index\tprediction", *(f"{number}\t{one}" for number, one in enumerate(told))]


def test_spans_are_those_of_plain_transformers(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Short contexts: one window, whose best span transformers' own model names."""
    data = write_squad(tmp_path / "squad", "2.0")
    asked = (teacher, "--task", "squad2", "--data", data, "--lr", "1e-3", "--epochs", "6", "--keep-models")
    (trial,) = evaluated(command, *asked, "--batch-size", "4", "--out", tmp_path / "out")["trials"]
    folder = next((tmp_path / "out" / "squad2").iterdir())
    told = json.loads((folder / "predictions" / "dev.json").read_text())
    model = AutoModelForQuestionAnswering.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    right = 0
    for paragraph in json.loads((data / "dev-v2.0.json").read_text())["data"][0]["paragraphs"]:
        question = paragraph["qas"][0]
        words = paragraph["context"].split()
        with torch.no_grad():
            said = model(**tokenizer(question["question"], paragraph["context"], return_tensors="pt"))
        starts, ends = said.start_logits[0], said.end_logits[0]
        spans = [(float(starts[4 + i] + ends[4 + j]), i, j) for i in range(12) for j in range(i, 12)]
        score, first, last = max(spans)
        expected = "" if float(starts[0] + ends[0]) > score else " ".join(words[first : last + 1])
        assert told[question["id"]] == expected
        right += expected == (question["answers"][0]["text"] if question["answers"] else "")
    assert trial["scores"]["dev"]["exact match"] == pytest.approx(100 * right / 9)
    assert set(json.loads((folder / "predictions" / "dev.na_prob.json").read_text())) == set(told)


def test_every_task_of_glue_with_submissions(teacher: Path, tmp_path: Path, command: Command) -> None:
    tasks = [word for name in GLUE for word in ("--task", name)]
    data = write_glue(tmp_path / "glue")
    short = ("--epochs", 1, "--max-train", 8, "--predict", "--out", tmp_path / "out")
    found = evaluated(command, teacher, *tasks, "--data", data, *short)
    metrics = {
        one["task"]: {name: set(scores) for name, scores in one["scores"].items()}
        for one in found["summaries"]
    }
    assert metrics["cola"] == {"dev": {"matthews"}}
    assert metrics["mrpc"] == metrics["qqp"] == {"dev": {"accuracy", "f1"}}
    assert metrics["stsb"] == {"dev": {"pearson", "spearman"}}
    assert metrics["mnli"] == {"dev-m": {"accuracy"}, "dev-mm": {"accuracy"}}
    written = {
        file.name: file
        for file in (tmp_path / "out").glob("*/*/predictions/*")
        if not file.name.startswith("dev")
    }
    names = {"CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI-m", "MNLI-mm", "AX", "QNLI", "RTE", "WNLI"}
    assert set(written) == {f"{name}.tsv" for name in names}
    lines = written["RTE.tsv"].read_text().splitlines()
    assert (lines[0], len(lines)) == ("index\tprediction", 13)
    assert {line.split("\t")[1] for line in lines[1:]} <= {"entailment", "not_entailment"}
    numbers = [float(line.split("\t")[1]) for line in written["STS-B.tsv"].read_text().splitlines()[1:]]
    assert all(0 <= number <= 5 for number in numbers)


def test_trials_are_kept_and_settings_chosen_on_dev(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_sst2(tmp_path / "SST-2")
    asked = [
        teacher,
        "--task",
        "sst2",
        "--data",
        data,
        "--epochs",
        1,
        "--seeds",
        2,
        "--out",
        tmp_path / "out",
    ]
    first = evaluated(command, *asked, "--lr", "1e-3")
    records = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("trial.json")}
    second = evaluated(command, *asked, "--lr", "1e-3", "--lr", "1e-6")
    assert second["trials"][:2] == first["trials"]
    assert all(file.stat().st_mtime_ns == at for file, at in records.items())
    means = {
        lr: np.mean([one["headline"] for one in second["trials"] if one["identity"]["lr"] == lr])
        for lr in (1e-3, 1e-6)
    }
    (summary,) = second["summaries"]
    assert (summary["settings"], summary["seeds"]) == (2, 2)
    assert summary["lr"] == max(means, key=means.__getitem__)
    renamed = teacher.rename(teacher.with_name("renamed"))
    third = evaluated(command, renamed, *asked[1:], "--lr", "1e-3")
    renamed.rename(teacher)
    assert [one["scores"] for one in third["trials"]] == [one["scores"] for one in first["trials"]]
    assert {one["model"] for one in third["trials"]} == {"renamed"}
    assert len(list((tmp_path / "out").rglob("trial.json"))) == 4
    values = [
        one["scores"]["dev"]["accuracy"] for one in second["trials"] if one["identity"]["lr"] == summary["lr"]
    ]
    score = summary["scores"]["dev"]["accuracy"]
    assert (score["mean"], score["stddev"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    code, out, _ = command("evaluate", *asked, *SHORT, "--lr", "1e-3", "--lr", "1e-6")
    assert code == 0
    assert "best of 2 settings on dev, so that scores on dev are optimistic" in out


def test_a_trial_again_is_the_same(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_sst2(tmp_path / "SST-2")
    asked = (teacher, "--task", "sst2", "--data", data, "--epochs", 1, "--lr", "1e-3", "--keep-models")
    weights = []
    for out in (tmp_path / "one", tmp_path / "two"):
        evaluated(command, *asked, "--out", out)
        weights.append(next(out.rglob("model.safetensors")).read_bytes())
    assert weights[0] == weights[1]


def test_students_of_a_run_and_untrained_shapes(world: World, command: Command) -> None:
    command(*dump_arguments(world))
    run = world.root / "run"
    code, _, err = command(
        "train", world.root / "cache", "--arch", "1x16", "--arch", "2x16", "--steps", 2, "--out", run
    )
    assert code == 0, err
    data = write_sst2(world.root / "SST-2")
    found = evaluated(
        command,
        world.teacher,
        run,
        "--task",
        "sst2",
        "--data",
        data,
        "--epochs",
        1,
        "--untrained",
        "--max-dev",
        6,
    )
    names = [one["model"] for one in found["summaries"]]
    whole = ["teacher", "run/1x16", "run/2x16"]
    assert names == [*whole, *(f"{name} (untrained)" for name in whole)]
    assert str(world.root / "home") in found["evaluations"]


def test_paper_grid(teacher: Path) -> None:
    config = EvaluateConfig(task=("mnli",), data="x", grid="paper")
    assert len(config.settings(TASKS["mnli"])) == 12
    assert config.settings(TASKS["squad2"]) == [(6e-5, 3)]
    assert EvaluateConfig(task=("rte",), data="x").settings(TASKS["rte"]) == [(3e-5, 3)]


def test_interrupted_trials_are_redone_and_ended_ones_kept(teacher: Path, tmp_path: Path) -> None:
    config = EvaluateConfig(
        task=("sst2",),
        data=str(write_sst2(tmp_path / "SST-2")),
        epochs=(1,),
        seeds=2,
        max_length=32,
        device="cpu",
    )
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return len(list(tmp_path.rglob("trial.json"))) == 1

    with pytest.raises(InterruptedRunError, match="trials that have ended are kept"):
        evaluate_models(config, [str(teacher)], out=tmp_path / "out", session=Session(should_stop=stop))
    assert [file.name for file in (tmp_path / "out" / "sst2").iterdir()]
    assert len(list(tmp_path.rglob("trial.json"))) == 1
    assert len(evaluate_models(config, [str(teacher)], out=tmp_path / "out").trials) == 2


def test_xnli_across_languages(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_xnli(tmp_path / "xnli")
    short = ("--epochs", 1, "--out", tmp_path / "out")
    found = evaluated(command, teacher, "--task", "xnli", "--data", data, "--predict", *short)
    (summary,) = found["summaries"]
    assert set(summary["scores"]) == {"dev-en", "dev-de"}
    lines = next((tmp_path / "out").rglob("test-de.tsv")).read_text().splitlines()
    assert len(lines) == 12
    assert set(lines) <= {"entailment", "neutral", "contradiction"}


def test_xnli_with_test_labels(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Settings are chosen on dev; labelled test sets are scored, too."""
    data = write_xnli(tmp_path / "xnli", test_labels=True)
    short = ("--epochs", 1, "--out", tmp_path / "out")
    found = evaluated(command, teacher, "--task", "xnli", "--data", data, *short)
    (trial,) = found["trials"]
    assert set(trial["scores"]) == {"dev-en", "dev-de", "test-en", "test-de"}
    assert trial["headline"] == pytest.approx(
        np.mean([trial["scores"][name]["accuracy"] for name in ("dev-en", "dev-de")])
    )
    found = evaluated(command, teacher, "--task", "xnli-translate-train", "--data", data, *short)
    assert {one["track"]: set(one["scores"]) for one in found["summaries"]} == {
        "de": {"dev-de", "test-de"},
        "en": {"dev-en", "test-en"},
    }


def test_mlqa(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_mlqa(tmp_path / "MLQA_V1")
    found = evaluated(
        command,
        teacher,
        "--task",
        "mlqa",
        "--data",
        tmp_path,
        "--epochs",
        1,
        "--max-length",
        64,
        "--out",
        tmp_path / "out",
    )
    (summary,) = found["summaries"]
    assert set(summary["scores"]) == {"dev-de", "dev-en", "test-de", "test-en"}
    assert data.is_dir()


def test_card_gets_rows_that_are_replaced(teacher: Path, tmp_path: Path, command: Command) -> None:
    own = save_teacher(tmp_path / "own")
    (own / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n\nWords.\n")
    data = write_glue(tmp_path / "glue")
    for tasks in (("sst2",), ("sst2", "stsb")):
        words = [word for name in tasks for word in ("--task", name)]
        evaluated(command, own, *words, "--data", data, "--epochs", 1, "--card", "--out", tmp_path / "out")
    card = ModelCard.load(own / "README.md")
    assert (card.data.license, "Words." in card.text) == ("mit", True)
    results = {(one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results}
    assert set(results) == {("SST-2", "accuracy"), ("STS-B", "pearson"), ("STS-B", "spearman")}
    assert (card.text.count("## Scores: SST-2"), card.text.count("## Scores: STS-B")) == (1, 1)
    assert "accuracy of 16 examples" in {one.metric_name for one in card.data.eval_results}
    assert f"| dev (16 examples) | accuracy | {results['SST-2', 'accuracy']:.1f} |" in card.text
    command.fails(
        *("evaluate", "mini", "--task", "sst2", "--data", data, "--card"),
        code=2,
        says="--card writes into folders",
    )


def test_names_of_tasks_in_cards_are_unique() -> None:
    names = {name_in_cards(name, "") for name in TASKS}
    assert len(names) == len(TASKS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--task", "sst3"),
            "--task sst3: there is no task sst3 (did you mean sst2?); the tasks are cola, sst2",
        ),
        (("--task", "sst2", "--grid", "paper", "--lr", "1e-5"), "leave out --lr and --epochs"),
        (("--task", "sst2", "--seeds", "0"), "--seeds 0"),
        (("--task", "sst2", "--lr", "-1"), "--lr"),
        (("--task", "sst2", "--device", "nosuch"), "--device nosuch"),
    ],
)
def test_misuse(
    arguments: tuple[str, ...], says: str, teacher: Path, tmp_path: Path, command: Command
) -> None:
    data = write_sst2(tmp_path / "SST-2")
    command.fails("evaluate", teacher, "--data", data, *arguments, code=2, says=says)


def test_a_model_with_too_few_positions(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_sst2(tmp_path / "SST-2")
    says = "--max-length 128 is more than teacher has positions for (its configuration says 66"
    command.fails("evaluate", teacher, "--task", "sst2", "--data", data, code=2, says=says)


def test_two_models_of_one_name_are_refused(teacher: Path, tmp_path: Path, command: Command) -> None:
    other = save_teacher(tmp_path / teacher.parent.name / "teacher", seed=1)  # of a folder of one name, too
    data = write_sst2(tmp_path / "SST-2")
    command.fails(
        *("evaluate", teacher, other, "--task", "sst2", "--data", data, "--max-length", 16),
        code=2,
        says=f"two models are called {teacher.parent.name}/teacher",
    )
    once = f"{teacher.parent}/./{teacher.name}/"  # one model that is named twice is one
    words = ("--task", "sst2", "--data", data, "--epochs", 1, "--out", tmp_path / "out")
    assert len(evaluated(command, teacher, once, *words)["trials"]) == 1


def test_a_damaged_trial_is_told(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_sst2(tmp_path / "SST-2")
    asked = (
        "evaluate",
        teacher,
        "--task",
        "sst2",
        "--data",
        data,
        "--epochs",
        1,
        "--out",
        tmp_path / "out",
        *SHORT,
    )
    assert command(*asked)[0] == 0
    file = next((tmp_path / "out").rglob("trial.json"))
    record = json.loads(file.read_text())
    (score,) = record["scores"].values()
    changes: list[dict[str, Any]] = [
        {"num_cut": {"other": 7}},
        {"num_cut": {"train": 10**9}},
        {"scores": {"dev": {"accuracy": 99.0}}},
        {"scores": {"dev": {"f1": 5.0}}, "headline": 5.0},
        {"scores": {"dev": {}}},
        {"scores": {"other": score}},
        {"scores": {"dev": {"accuracy": math.nan}}},
        {"scores": {}},
        {"headline": math.nan},
        {"headline": None},
        {"num_scored": {}},
        {"num_scored": {"dev": 10_000}},
    ]
    for changed in ("{}", *(json.dumps({**record, **change}) for change in changes)):
        file.write_text(changed)
        command.fails(*asked, code=1, says=("trial.json is damaged", "Remove its folder"))


def test_texts_of_test_sets_that_are_cut_are_counted(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Also when the trial is looked at again, with the test set and without it."""
    data = write_sst2(tmp_path / "SST-2")
    with (data / "test.tsv").open("a") as file:
        file.write(f"6\t{'ba ' * 40}\n")
    asked = ("evaluate", teacher, "--task", "sst2", "--data", data, "--epochs", 1, "--out", tmp_path / "out")
    says = "SST-2, test: 1 of 7 texts is cut"
    for predict in (("--predict",), ("--predict",), ()):
        code, out, err = command(*asked, *SHORT, *predict, "--json")
        assert code == 0, err
        assert any(line.startswith(says) for line in json.loads(out)["remarks"]) == bool(predict), out


def test_texts_that_are_cut_are_counted(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Exactly: a text that just fits is none of them."""
    for name, sizes in (("train", (1, 2, 3, 31)), ("dev", (1, 29, 30, 40))):
        rows = [f"{'ba ' * words}{name},{number % 2}" for number, words in enumerate(sizes)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    own = ("--task", tmp_path / "train.csv", "--dev", tmp_path / "dev.csv", "--epochs", 1)
    found = evaluated(command, teacher, *own, "--out", tmp_path / "out")
    assert [trial["num_cut"] for trial in found["trials"]] == [{"dev": 2, "train": 1}]
    cut, learned = (line for line in found["remarks"] if "cut" in line)
    assert "train.csv, dev: 2 of 4 texts are cut at 32 tokens. Give a greater --max-length" in cut
    assert "train.csv, train: 1 of 4 texts is cut at 32 tokens. Give a greater --max-length" in learned
    folder = Path(found["trials"][0]["folder"])
    shutil.rmtree(folder / "predictions")
    again = evaluated(command, teacher, *own, "--out", tmp_path / "out")
    assert f"predictions are gone from {folder}. Remove these folders to make them again" in again["remarks"]


def test_divergence_hides_nothing(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Scores of the other models are shown, the diverged model is named, and the exit code is 1."""
    data = write_sst2(tmp_path / "SST-2")
    model: Any = AutoModelForSequenceClassification.from_pretrained(teacher)
    with torch.no_grad():
        next(model.parameters()).fill_(1e38)  # a finite weight whose sum over a state is infinite
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(broken)
    asked = ("evaluate", teacher, broken, "--task", "sst2", "--data", data, "--epochs", 1, *SHORT)
    code, out, err = command(*asked, "--out", tmp_path / "out", "--json")
    assert (code, err.count("error: ")) == (1, 1)
    assert "broken on sst2: the loss was NaN or infinite in the end" in err
    scores = {one["model"]: one["scores"] for one in json.loads(out)["summaries"]}
    assert scores["broken"] == {}
    assert set(scores["teacher"]) == {"dev"}
    code, out, _ = command(*asked, "--out", tmp_path / "out")
    assert code == 1
    assert "diverged" in out
