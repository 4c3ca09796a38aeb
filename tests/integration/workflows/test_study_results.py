"""What the results of studies say: scores, seeds, layers and paths, each of the study that it belongs to."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from minilm_cache.report.runs import open_runs
from minilm_cache.report.tables import results, students_table, summary_table
from minilm_cache.session import Session
from minilm_cache.workflows.study import run_study
from minilm_cache.workflows.study_spec import read_study
from tests.fixtures import Command
from tests.integration.workflows.test_study import document
from tests.support import VOCABULARY, World, save_teacher


def test_studies_keep_their_own_scores(world: World, command: Command) -> None:
    """Runs of two studies may have one name: the scores of the last one stood for both."""
    own = {}
    for name, period in (("first", 3), ("second", 2)):  # every second text has another beginning
        labelled = world.root / f"texts of {name}" / "task.csv"
        labelled.parent.mkdir()
        words = [f"{VOCABULARY[5 + at % 24]} {VOCABULARY[5 + at // 24]}" for at in range(60)]
        rows = [f"{'ba be' if at % 2 else 'ri ro'} {words[at]},{'ny'[at % period > 0]}" for at in range(60)]
        labelled.write_text("text,label\n" + "\n".join(rows) + "\n")
        changes = {
            "caches": "\n  one: {codec: vectors, max_kl: 0.05}",
            "seed": " [0]",
            "arch": " [1x32]",
            "evaluate": f" {{task: {labelled}, lr: [0.003], epochs: [20], max_length: 16, device: cpu}}",
        }
        run_study(read_study(document(world, **changes)), world.root / name, session=Session(world.home))
        frame = results(world.root / name)
        (column,) = (each for each in frame.columns if each.startswith("score: "))
        own[name] = frame[column].tolist()
    assert own["first"] != own["second"]
    for order in (["first", "second"], ["second", "first"]):
        both = results(*(world.root / name for name in order))
        assert both[column].tolist() == [*own[order[0]], *own[order[1]]]


def test_seeds_of_a_grown_study_are_averaged(world: World) -> None:
    """Passes with other shapes beside a student's are seeds of one student all the same."""
    changes = {"caches": "\n  one: {codec: vectors, max_kl: 0.05}"}
    train = "\n  steps: 6\n  batch_size: 4\n  init: slice\n  device: cpu"
    path = document(world, arch=" [1x16]", seed=" [0]", train=train, **changes)
    run_study(read_study(path), world.root / "study", session=Session(world.home))
    path = document(world, arch=" [1x16, 1x32]", seed=" [0, 1]", train=train, **changes)
    result = run_study(read_study(path), world.root / "study", session=Session(world.home))
    assert {row["arch"]: row["seeds"] for row in result.summary.to_pylist()} == {"1x16": 2, "1x32": 2}
    assert len(result.summary) == 2
    other = train.replace("init: slice", f"init: slice\n  init_teacher: {world.teacher}")
    run_study(
        read_study(document(world, arch=" [1x16]", seed=" [2]", train=other, **changes)),
        world.root / "study",
        session=Session(world.home),
    )
    table = students_table(open_runs(world.root / "study"))
    assert sorted(summary_table(table)["seeds"].to_pylist()) == [1, 2, 2]


def test_a_cache_of_another_place_may_have_the_name_of_one_here(world: World, command: Command) -> None:
    elsewhere = world.root / "elsewhere/one"
    world.dump("elsewhere/one", max_tokens=512)
    caches = f"\n  one: {{codec: topk, k: 6}}\n  other: {{cache: {elsewhere}}}"
    study = document(world, caches=caches, arch=" [1x16]", seed=" [0]")
    code, _, err = command("study", study)
    assert code == 0, err
    code, out, err = command("report", world.root / "shapes", "--out", world.root / "page.html", "--json")
    assert code == 0, err
    assert len(json.loads(out)["students"]) == 2


def test_paths_are_those_from_the_document(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the current folder has is refused, and a name stays one beside a folder called so."""
    inner = world.root / "inner"
    inner.mkdir()
    begun = save_teacher(world.root / "begun", seed=4)
    shutil.copytree(begun, inner / "begun")
    text = (
        "dump: {teacher: ../teacher, corpus: ../corpus.txt, max_length: 32}\n"
        "arch: [3x32]\ntrain: {steps: 1, batch_size: 4, init: begun}\n"
    )
    (inner / "study.yaml").write_text(text)
    monkeypatch.chdir(world.root)
    (planned,) = read_study(inner / "study.yaml").passes
    assert planned.config.init == str(inner / "begun")
    shutil.rmtree(inner / "begun")
    command.fails("study", inner / "study.yaml", code=2, says="init: there is no")
    for key, value in (("teacher", "teacher"), ("corpus", "corpus.txt")):
        (inner / "study.yaml").write_text(text.replace(f"../{value}", value).replace(", init: begun", ""))
        command.fails("study", inner / "study.yaml", code=2, says=f"{key}: there is no")
    for folder in ("mini", "slice"):
        (world.root / folder).mkdir()
        (inner / folder).mkdir()
    (inner / "study.yaml").write_text(text.replace("../teacher", "mini").replace("begun", "slice"))
    study = read_study(inner / "study.yaml")
    assert study.teacher == ("mini", None)
    assert study.passes[0].config.init == "slice"


def test_tables_name_the_layer_where_students_learn_from_several(world: World, command: Command) -> None:
    """Losses to different layers cannot be compared, so nobody may take their rows for equal ones."""
    caches = "\n  one: {codec: vectors, max_kl: 0.05, layers: all, for: [minilm, embedding], pooling: mean}"
    both = " [{objective: minilm, teacher_layer: 0}, {objective: minilm, teacher_layer: 1}, embedding]"
    study = document(world, caches=caches, objective=both, arch=" [1x16]", seed=" [0]")
    code, out, err = command("study", study)
    assert code == 0, err
    assert "layer of the teacher" in out
    rows = pq.read_table(world.root / "shapes/students.parquet").select(["objective", "teacher_layer"])
    assert rows.to_pylist() == [
        {"objective": "minilm", "teacher_layer": 0},
        {"objective": "minilm", "teacher_layer": 1},
        {"objective": "embedding", "teacher_layer": None},
    ]
    page = (world.root / "shapes/report.html").read_text()
    assert '<td class="name">1</td>' in page
    assert '<td class="name">None</td>' not in page
