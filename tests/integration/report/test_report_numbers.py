"""The report's numbers, recomputed from what it was made of, and its commands, run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from minilm_cache.dump.fidelity import max_kl_in_words
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.report.plots import Picture, curves_figure, storage_figure, tradeoff_figure
from minilm_cache.report.provenance import dump_command, train_command
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.similarity import ComparedStudent, relation_agreement
from minilm_cache.report.tables import STUDENTS, students_table
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.support import World, save_teacher, write_corpus

WEIGHTS = {"soft_labels": 5 * 2.0**2, "masked_lm": 2.0, "cosine": 1.0}
"""Weights of the parts of `distilbert`, at the temperature of its labels."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with a cache of everything that a pre-trained teacher says."""
    root = tmp_path_factory.mktemp("numbers")
    world = World(root, save_teacher(root / "teacher", head="tokens"), write_corpus(root / "corpus.txt"))
    world.dump(
        **{"for": "minilm,tinybert,distilbert,bert-pkd"},
        codec="vectors",
        max_kl=0.1,
        max_error=0.3,
        maskings=2,
        label_k=5,
        seed=3,
        max_tokens=900,
        corpus=str(world.corpus),
    )
    return world


def rows_of(picture: Picture) -> list[dict[str, Any]]:
    """Return the rows of the data of a picture, the first ones that it has."""
    found: list[list[dict[str, Any]]] = list(picture.spec["datasets"].values())
    return max(found, key=len)


def test_crosses_are_on_the_scale_of_the_curve(words: World, tmp_path: Path) -> None:
    """Held-out parts were added without the weights that the training loss has."""
    recipe = TrainConfig(
        arch=("2x32",), objective="distilbert", steps=4, batch_size=4, eval_steps=2, device="cpu"
    )
    train_students(recipe, words.root / "cache", out=tmp_path / "run", session=Session(words.home))
    drawn = rows_of(curves_figure([TrainedRun.open(tmp_path / "run")]))
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    looks = {line["step"]: line["held_out"]["2x32"] for line in lines if "held_out" in line}

    assert list(looks) == [2, 4]
    heights = {row["step"]: row["held out"] for row in drawn if "held out" in row}
    (student,) = TrainedRun.open(tmp_path / "run").record.students
    assert heights.pop(0) == pytest.approx(student.loss_before)
    for step, height in heights.items():
        expected = sum(WEIGHTS[name] * looks[step][name] for name in WEIGHTS)
        assert height == pytest.approx(expected, rel=1e-6)
        assert height > 3 * sum(looks[step][name] for name in WEIGHTS)


@pytest.mark.parametrize("objectives", [("minilm=1", "hidden-mse=1"), ("distilbert",)])
def test_joint_objectives_are_reported(words: World, tmp_path: Path, objectives: tuple[str, ...]) -> None:
    """What a run derived from its objective is not asked of it a second time."""
    recipe = TrainConfig(arch=("2x32",), objective=objectives, steps=2, batch_size=4, device="cpu")
    train_students(recipe, words.root / "cache", out=tmp_path / "run", session=Session(words.home))
    (row,) = students_table([TrainedRun.open(tmp_path / "run")]).to_pylist()
    measured = read_manifest(words.root / "cache").measured
    assert measured is not None
    sizes = {state.path: state.bytes_per_token for state in measured.states or ()}
    relations = measured.bytes_per_token - sum(sizes.values())
    assert relations < row["needed_bytes_per_token"] < measured.bytes_per_token


def test_losses_that_have_no_place_on_the_axis_are_left_out(words: World, tmp_path: Path) -> None:
    recipe = TrainConfig(arch=("1x16",), steps=4, batch_size=4, device="cpu")
    train_students(recipe, words.root / "cache", out=tmp_path / "run", session=Session(words.home))
    log = tmp_path / "run/log.jsonl"
    for step, loss in ((5, "NaN"), (6, "Infinity"), (7, "0.0"), (8, "-1e-6"), (9, "0.5")):
        line = f'{{"step": {step}, "students": {{"1x16": {{"loss": {loss}}}}}}}\n'
        log.write_text(log.read_text() + line)
    drawn = rows_of(curves_figure([TrainedRun.open(tmp_path / "run")]))
    steps = [row["step"] for row in drawn if "training" in row]
    assert not {5, 6, 7, 8} & {*steps}
    assert 9 in steps


def student(cache: str, arch: str, **kls: float | None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(STUDENTS.names)
    found = {f"kl_{kind}": value for kind, value in kls.items()}
    total = sum(value for value in kls.values() if value is not None)
    named = {"cache": cache, "arch": arch, "objective": "minilm", "kl_to": "teacher", "kl_sum": total}
    sizes = {"num_parameters": 10, "speedup": 2.0, "needed_bytes_per_token": 50.0}
    return {**row, **named, **sizes, **found}


def test_pictures_keep_sums_of_other_relations_apart() -> None:
    """A sum of two relations and one of four are not closer and farther."""
    rows = [
        student("a", "3x96", attention=0.3, value=0.1),
        student("a", "3x96", attention=0.2, value=0.1, query=0.3, key=0.4),
        student("a", "6x96", attention=0.25, value=0.1),
    ]
    table = pa.Table.from_pylist(rows, schema=STUDENTS)
    both = "KL of attention + value + query + key"
    seen = [(row["shape"], row["measure"], row["closeness"]) for row in rows_of(tradeoff_figure(table))]
    expected = [("3x96", "KL of attention + value", 0.4), ("3x96", both, 1.0)]
    assert [(*names, pytest.approx(total)) for *names, total in seen] == [
        *expected,
        ("6x96", "KL of attention + value", 0.35),
    ]
    chosen = [param for param in tradeoff_figure(table).spec["params"] if param["name"] == "measure_shown"]
    assert chosen[0]["value"] == [{"measure": "KL of attention + value"}]
    assert chosen[0]["bind"]["options"] == ["KL of attention + value", both]  # never both of them at once
    lines = [(row["student"], row["measure"], row["KL"]) for row in rows_of(storage_figure(table, 100))]
    assert lines[1] == ("3x96, minilm", both, pytest.approx(1.0))


def test_the_dump_command_makes_the_same_fingerprint(
    words: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(words.root)  # names are the ends of paths
    expected = read_manifest(words.root / "cache")
    line = dump_command(expected)
    code, out, err = command(
        *shlex.split(line)[1:], "--out", words.root / "again", "--json", "--device", "cpu"
    )

    assert code == 0, err
    assert json.loads(out)["fingerprint"] == expected.fingerprint


RUNS: dict[str, dict[str, Any]] = {
    "minilm": {"arch": ("2x16",), "value_relation": False, "eval_steps": 2},
    "tinybert of the last layer": {"arch": ("2x16",), "objective": "tinybert", "layer_map": "last"},
    "distilbert": {"arch": ("2x32:ff64",), "objective": "distilbert", "init": "teacher-layers"},
    "bert-pkd by the paper": {"arch": ("2x32",), "objective": "bert-pkd", "form": "paper", "patience": 10.0},
    "from a run": {"arch": ("2x16",), "init": "first"},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_train_command_makes_the_same_run(
    words: World, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(words.root)
    monkeypatch.setenv("MINILM_CACHE_HOME", str(words.home))  # where the teacher is known
    changes = dict(RUNS[name])
    if changes.get("init") == "teacher-layers":
        changes["init_teacher"] = "teacher"
    if changes.get("init") == "first":
        first = TrainConfig(arch=("2x16",), steps=1, batch_size=2, seed=7, device="cpu")
        changes["init"] = str(tmp_path / "first")
        train_students(first, words.root / "cache", out=tmp_path / "first", session=Session(words.home))
    recipe = TrainConfig(steps=2, batch_size=2, device="cpu", **changes)
    before = train_students(
        recipe, words.root / "cache", out=tmp_path / "run", session=Session(words.home)
    ).record
    line = train_command(TrainedRun.open(tmp_path / "run"))
    code, _, err = command(*shlex.split(line)[1:], "--out", tmp_path / "again", "--device", "cpu")

    assert code == 0, err
    after = TrainedRun.open(tmp_path / "again").record
    assert after.identity == before.identity
    assert after.students == before.students


def test_a_cache_says_whether_its_bound_holds_on_held_out_text(words: World, command: Command) -> None:
    manifest = read_manifest(words.root / "cache")
    assert manifest.measured is not None
    worst = max(
        one.kl_teacher_to_stored or 0
        for layer in manifest.measured.fidelity
        for one in layer.relations.values()
    )
    said = max_kl_in_words(manifest)
    assert said is not None
    assert manifest.kl_over_max == pytest.approx(worst / 0.1)
    assert ("above --max-kl 0.1" in said) == (worst > 0.1)
    assert f"worst KL {worst:.4f} nats on {manifest.measured_on}" in said
    _, out, _ = command("info", words.root / "cache")
    assert "worst KL" in out
    _, out, _ = command("info", words.root / "cache", "--json")
    assert json.loads(out)["kl_over_max"] == pytest.approx(worst / 0.1)


def test_split_heads_have_no_attention(words: World, tmp_path: Path) -> None:
    """For vectors split into other heads the page shows query, key and value relations, not "attention"."""
    recipe = TrainConfig(
        arch=("2x16",), objective="minilmv2", relation_heads=8, steps=1, batch_size=2, device="cpu"
    )
    train_students(recipe, words.root / "cache", out=tmp_path / "run", session=Session(words.home))
    run = TrainedRun.open(tmp_path / "run")
    compared = ComparedStudent(name="one", folder=run.folder(run.students[0]), relation_heads=8, layer=None)
    found = relation_agreement(
        run.reference, Teacher(locate_teacher(str(words.teacher)), torch.device("cpu")), [compared]
    )

    assert [one.kind for one in found] == [RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE]
    assert all(len(one.heads) == 8 for one in found)


def test_kls_to_rows_of_several_codecs_and_of_several_layers_are_no_figures_to_compare(
    world: World, command: Command
) -> None:
    """A caution names the objective; without the teacher, a run of all layers has no KL of the last one."""
    caches = {
        "one": world.dump("one", codec="vectors", layers="all").path,
        "two": world.dump("two", codec="vectors", max_kl=0.15).path,
    }
    runs = []
    for name, cache, layers in (("one", "one", "last"), ("two", "two", "last"), ("all", "one", "all")):
        words = ("train", caches[cache], "--arch", "2x16", "--init", "random", "--steps", 2)
        runs.append(world.root / name / "run")
        code, _, err = command(*words, "--layer-map", layers, "--out", runs[-1])
        assert code == 0, err
    found = {}
    for given in ((), ("--teacher", world.teacher)):
        page = ("report", *runs, "--out", world.root / "page.html", "--json")
        code, out, err = command(*page, *given)
        assert code == 0, err
        found[bool(given)] = json.loads(out)
    says = "KLs of minilm are to rows that several codecs have stored"
    assert [any(says in line for line in found[live]["cautions"]) for live in (False, True)] == [True, False]
    kls = {live: [row["kl_sum"] is None for row in found[live]["students"]] for live in found}
    assert kls == {False: [False, False, True], True: [False, False, False]}
