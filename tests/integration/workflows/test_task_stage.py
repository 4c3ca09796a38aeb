"""The task stage as one command: from a fine-tuned teacher and a task's texts to students that are scored."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from minilm_cache.cache import open_cache
from minilm_cache.models.files import weights_sha256
from minilm_cache.objectives.several import documents_of
from minilm_cache.storage_schema.states import LOGITS
from minilm_cache.train.record import load_record
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import save_teacher, write_revisions
from tests.tasks import evaluated, write_glue

TUNED = ("--lr", "1e-3", "--epochs", "6", "--batch-size", "8", "--keep-models")
SHORT = (
    "--max-length",
    32,
    "--steps",
    80,
    "--batch-size",
    8,
    "--lr",
    "2e-3",
    "--arch",
    "2x32",
    "--device",
    "cpu",
)


def tuned(command: Command, folder: Path, task: str) -> Path:
    """Return the folder of a classifier that was fine-tuned on a task."""
    plain = save_teacher(folder / "plain")
    out = folder / "tuned"
    evaluated(command, plain, "--task", task, "--data", folder / "glue", *TUNED, "--out", out)
    (trial,) = (out / task).iterdir()
    return trial / "model"


def stage(command: Command, folder: Path, *words: object) -> dict[str, Any]:
    code, out, err = command("chain", *words, "--out", folder / "stage", *SHORT, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("task", "metric"), [("sst2", "accuracy"), ("mrpc", "accuracy"), ("stsb", "pearson")]
)
def test_students_learn_a_task_from_its_texts(
    tmp_path: Path, command: Command, task: str, metric: str
) -> None:
    """Single texts, pairs and values; the cache has the texts and their copies, and no label."""
    write_glue(tmp_path / "glue")
    teacher = tuned(command, tmp_path, task)
    words = ("--task", task, "--data", tmp_path / "glue", "--teacher", teacher)
    masker = save_teacher(tmp_path / "masker", head="tokens")
    found = stage(command, tmp_path, *words, "--augment", masker, "--copies", 3)
    scores = {summary["model"]: summary["scores"]["dev"][metric]["mean"] for summary in found["summaries"]}
    of_teacher, of_student = scores.values()
    if task != "stsb":  # whose few values here say nothing of their texts
        assert of_teacher > 80
        assert of_student > of_teacher - 15
    cache = open_cache(tmp_path / "stage" / "cache")
    rows = [json.loads(line) for line in (tmp_path / "stage" / "augmented.jsonl").read_text().splitlines()]
    assert len(cache) == len(rows)
    assert rows[0].keys() == {"text", "document"} if task == "sst2" else {"first", "second", "document"}
    assert LOGITS in cache[0].states()
    before = (tmp_path / "stage" / "run" / "run.json").read_bytes()
    assert stage(command, tmp_path, *words, "--augment", masker, "--copies", 3) == found
    assert (tmp_path / "stage" / "run" / "run.json").read_bytes() == before
    other = ("chain", *words, "--out", tmp_path / "stage", *SHORT)
    command.fails(*other, code=1, says=("was begun with other settings", "--augment, --copies"))
    save_teacher(masker, head="tokens", seed=7)
    copies = ("--augment", masker, "--copies", 3)
    command.fails(*other, *copies, code=1, says="with other settings: the weights of --augment")
    file = tmp_path / "stage" / "stage.json"
    stated = json.loads(file.read_text())
    del stated["augment_weights"]  # as earlier releases wrote it
    file.write_text(json.dumps(stated))
    assert stage(command, tmp_path, *words, *copies) == found


@pytest.mark.parametrize("task", ["mrpc", "stsb"])
def test_texts_are_paired_anew_with_near_ones(tmp_path: Path, command: Command, task: str) -> None:
    """The pairs come first, with their labels; further ones have none, are new, and are near."""
    write_glue(tmp_path / "glue")
    teacher, encoder = tuned(command, tmp_path, task), save_teacher(tmp_path / "encoder", seed=3)
    save_encoder(encoder, "mean")
    words = ("--task", task, "--data", tmp_path / "glue", "--teacher", teacher)
    mined = ("--mine", encoder, "--mined", 2)
    found = stage(command, tmp_path, *words, *mined, "--label-weight", 0.5)

    rows = [json.loads(line) for line in (tmp_path / "stage" / "mined.jsonl").read_text().splitlines()]
    own = [json.loads(line) for line in (tmp_path / "stage" / "texts.jsonl").read_text().splitlines()]
    assert rows[: len(own)] == own
    further = [(row["first"], row["second"]) for row in rows[len(own) :]]
    firsts, seconds = {row["first"] for row in own}, {row["second"] for row in own}
    assert len(further) == len(set(further)) > len(firsts)
    assert not set(further) & {(row["first"], row["second"]) for row in own}
    assert {first for first, _ in further} <= firsts
    assert {second for _, second in further} <= seconds
    assert all(first != second for first, second in further)
    assert len(open_cache(tmp_path / "stage" / "cache")) == len(rows)
    vectors = SentenceTransformer(str(encoder), device="cpu")
    for first in sorted({first for first, _ in further})[:3]:
        others = sorted(seconds - {first} - {row["second"] for row in own if row["first"] == first})
        cosines = (vectors.encode(others) @ vectors.encode(first)).tolist()
        near = {other for _, other in sorted(zip(cosines, others, strict=True), reverse=True)[:30]}
        assert {second for one, second in further if one == first} <= near
    code, _, err = command(
        "chain", *words, *mined, "--label-weight", 0.5, "--out", tmp_path / "stage", *SHORT
    )
    assert code == 0
    answers = open_cache(tmp_path / "stage" / "cache")
    shares: tuple[list[int], list[int]] = ([], [])
    for number, row in enumerate(documents_of(answers)):
        shares[int(row >= len(own))].append(int(answers[number].states()[LOGITS][0].argmax()))
    differ = task == "mrpc" and abs(np.mean(shares[0]) - np.mean(shares[1])) >= 0.2
    assert ("of the further ones, which students learn" in err) == differ
    assert stage(command, tmp_path, *words, *mined, "--label-weight", 0.5) == found
    other = ("chain", *words, "--label-weight", 0.5, "--out", tmp_path / "stage", *SHORT)
    command.fails(*other, code=1, says=("was begun with other settings", "--mine, --mined"))
    save_encoder(save_teacher(encoder, seed=4), "mean")
    command.fails(*other, *mined, code=1, says="with other settings: the weights of --mine")


def test_the_layers_of_the_teacher_are_learned_first(tmp_path: Path, command: Command) -> None:
    write_glue(tmp_path / "glue")
    teacher = tuned(command, tmp_path, "sst2")
    student = stage(
        command,
        tmp_path,
        "--task",
        "sst2",
        "--data",
        tmp_path / "glue",
        "--teacher",
        teacher,
        "--max-train",
        40,
    )
    words = ("--task", "sst2", "--data", tmp_path / "glue", "--teacher", teacher)
    code, out, err = command(
        *("chain", *words, "--student", student["run"], "--intermediate", "--out", tmp_path / "second"),
        *(*SHORT, "--json"),
    )
    assert code == 0, err
    second = json.loads(out)
    first = json.loads((Path(second["run"]).parent / "run-first" / "run.json").read_text())
    assert first["identity"]["objective"] == "tinybert"
    scores = [summary["scores"]["dev"]["accuracy"]["mean"] for summary in second["summaries"]]
    assert scores[1] > scores[0] - 15
    assert len((tmp_path / "stage" / "texts.jsonl").read_text().splitlines()) == 40


@pytest.mark.parametrize("task", ["sst2", "stsb", "rte"])
def test_labels_of_the_task_are_learned_with_the_answers(tmp_path: Path, command: Command, task: str) -> None:
    """Also where classes have no names of their own, as here those of the teacher of RTE."""
    write_glue(tmp_path / "glue")
    if task == "rte":
        teacher = save_teacher(tmp_path / "plain", head="sequences", num_labels=2)
    else:
        teacher = tuned(command, tmp_path, task)
    words = ("--task", task, "--data", tmp_path / "glue", "--teacher", teacher)
    train = tmp_path / "glue" / {"sst2": "SST-2", "stsb": "STS-B", "rte": "RTE"}[task] / "train.tsv"
    *before, last = train.read_text().splitlines()
    *others, _, label = last.split("\t")
    train.write_text("\n".join([*before, "\t".join([*others, "", label]), last, ""]))
    code, _, err = command("chain", *words, "--label-weight", 0.3, "--out", tmp_path / "stage", *SHORT)
    assert code == 0, err
    assert "1 of " in err
    assert "examples have an empty text and are left out" in err
    found = stage(command, tmp_path, *words, "--label-weight", 0.3)
    record = load_record(Path(found["run"]))
    assert record.identity.label_weight == 0.3
    assert record.own_labels == str(tmp_path / "stage" / "texts.jsonl")
    assert stage(command, tmp_path, *words, "--label-weight", 0.3) == found
    other = ("chain", *words, "--out", tmp_path / "stage", *SHORT)
    command.fails(*other, code=1, says="was begun with other settings: --label-weight")
    elsewhere = ("chain", *words, "--out", tmp_path / "elsewhere", *SHORT, "--label-weight", 2)
    command.fails(*elsewhere, code=2, says="--label-weight 2.0: ")
    assert not (tmp_path / "elsewhere").exists()


def test_the_teacher_that_is_scored_is_the_one_that_was_dumped(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are of the revision that was asked for, here in the hub's folder of downloads."""
    write_glue(tmp_path / "glue")
    snapshots = write_revisions(tmp_path / "hub", head="sequences", num_labels=2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    words = ("--task", "sst2", "--data", tmp_path / "glue")
    masker = save_teacher(tmp_path / "masker", head="tokens")  # which has no revisions
    copies = ("--augment", masker, "--copies", 1, "--steps", 2)
    found = stage(command, tmp_path, *words, "--teacher", "org/teacher", "--revision", "v1", *copies)
    assert found["summaries"][0]["model"] == "org/teacher"
    trials = map(json.loads, (file.read_text() for file in (tmp_path / "stage").rglob("trial.json")))
    (of_teacher,) = (trial for trial in trials if trial["model"] == "org/teacher")
    cached = open_cache(tmp_path / "stage/cache").manifest.identity.teacher.weights_sha256
    assert cached == weights_sha256(snapshots / ("1" * 40))
    as_is = ("--max-length", 32, "--as-is", "--out", tmp_path / "alone")
    for seed in range(2):
        (alone,) = evaluated(command, snapshots / (str(seed) * 40), *words, *as_is)["trials"]
        same = alone["identity"]["model_sha256"] == of_teacher["identity"]["model_sha256"]
        assert same is (seed == 1)


def test_what_a_task_stage_refuses_leaves_its_folder_alone(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_glue(tmp_path / "glue")
    answers, out = save_teacher(tmp_path / "answers", head="sequences", num_labels=2), tmp_path / "stage"
    task = ("--task", "sst2", "--data", tmp_path / "glue", "--teacher", answers)
    words = ("chain", "--out", out, *SHORT, *task)
    for more, says in (
        (("--tracker", "wandb"), "wandb is not installed"),
        (("--accumulate", 3), "does not divide into 3 parts"),
        (("--batches", "by-query"), "for pairs of texts"),
        (("--init", "slice", "--init-layers", "0,9"), "--init-layers"),
        (("--dump-batch-size", 0), "--dump-batch-size 0: give at least 1"),
    ):
        command.fails(*words, *more, code=2, says=says)
    command.fails("chain", "--out", out, *task, code=2, says="--arch is missing")
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        command.fails(*words, code=2, says="a task stage runs in one process")
    assert not out.exists()
    out.mkdir()
    (out / "texts.jsonl").write_text("mine")
    command.fails(*words, code=1, says="holds other texts (texts.jsonl)")
    assert (out / "texts.jsonl").read_text() == "mine"
    (out / "texts.jsonl").rename(out / "notes.txt")
    command.fails(*words, code=1, says=("is not empty", "holds no task stage (notes.txt)"))


def test_what_a_task_stage_does_not_take_is_one_line(tmp_path: Path, command: Command) -> None:
    write_glue(tmp_path / "glue")
    plain = save_teacher(tmp_path / "plain")
    base: tuple[object, ...] = ("chain", "--out", tmp_path / "stage", *SHORT)
    task = ("--task", "sst2", "--data", tmp_path / "glue")
    command.fails(*base, *task, code=2, says="--teacher is missing")
    base = (*base, "--teacher", plain)
    command.fails(*base, *task, code=2, says="is no classifier")
    command.fails(*base, *task, "--assistant", "2x32", code=2, says="--assistant: it goes with a chain")
    command.fails(*base, *task, "--corpus", plain, code=2, says="--corpus: --task takes the task's own texts")
    command.fails(*base, *task, "--dry-run", code=2, says="--dry-run: it goes with a chain")
    command.fails(*base, *task, "--preset", "minilm", code=2, says="--preset: it goes with a chain")
    command.fails(*base, *task, "--copies", 3, code=2, says="--copies goes with --augment")
    command.fails(*base, *task, "--mined", 8, code=2, says="--mined goes with --mine")
    command.fails(*base, "--data", tmp_path, code=2, says="--data goes with --task")
    command.fails(*base, "--task", "sst2", code=2, says="--data is missing")
    command.fails(*base, "--task", "squad", "--data", tmp_path, code=2, says="squad is about spans")
    command.fails(*base, "--task", "xnli", "--data", tmp_path, code=2, says="in one language")
    command.fails(*base, *task, "--prompt", "ba ", code=2, says="--prompt: --task takes the task's own texts")
    both = ("--student", plain, "--init", "random")
    command.fails(*base, *task, *both, code=2, says="--init: --task and --student say")
    scorer = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1)
    command.fails(
        "chain", "--out", tmp_path / "stage", *SHORT, "--teacher", scorer, *task, code=2, says="is about"
    )
    answers = save_teacher(tmp_path / "answers", head="sequences", num_labels=2)
    shape = ("chain", "--out", tmp_path / "stage", *SHORT, "--teacher", answers, *task)
    command.fails(*shape, "--arch", "1x31", code=2, says="hidden size 31")
    command.fails(*shape, "--max-length", 512, code=2, says="--max-length 512 is more than")
    mined = ("chain", "--out", tmp_path / "stage", *SHORT, "--teacher", answers, *task, "--mine", plain)
    command.fails(*mined, code=2, says="the texts of this task are no pairs")
    of_pairs = (*mined, "--task", "mrpc")
    command.fails(*of_pairs, code=2, says=f"--mine {plain} gives no vectors of texts")
    labelled = (*task, "--label-weight", 0.5, "--augment", plain)
    command.fails(*base, *labelled, code=2, says="--label-weight: copies of texts have no labels")
    own = tmp_path / "own.csv"
    own.write_text("text,label\nba,1\nbe,0\n")
    command.fails(*base, "--task", own, code=2, says="give --dev")


def test_scored_texts_that_are_also_learned_from_are_counted(tmp_path: Path, command: Command) -> None:
    teacher = save_teacher(tmp_path / "teacher", head="sequences")
    rows = [f"{'ba ' * (n % 7 + 1)}be{' be' * (n // 7)},{n % 2}" for n in range(40)]
    for name, some in (("train", rows), ("dev", [*rows[:3], "ka ko,1", "ko ka,0"])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *some]) + "\n")
    words = ("chain", "--task", tmp_path / "train.csv", "--dev", tmp_path / "dev.csv", "--teacher", teacher)
    code, _, err = command(*words, "--out", tmp_path / "stage", *SHORT, "--steps", 1)
    assert code == 0, err
    assert "train.csv: 3 of the 5 texts that are scored are also trained on" in err
    (tmp_path / "dev.csv").write_text("\n".join(["text,label", *rows[:39]]) + "\n")
    code, _, err = command(*words, "--max-train", 9, "--out", tmp_path / "few", *SHORT, "--steps", 1)
    assert code == 0, err
    assert re.search(r"train.csv: [89] of the 39 texts that are scored are also trained on", err)
