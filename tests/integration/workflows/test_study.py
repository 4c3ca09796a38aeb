"""Studies: which students share a pass, what the table shows, and the errors for mistakes in STUDY.yaml."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from markupsafe import escape
from transformers import AutoModelForMaskedLM

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import DivergedError, InterruptedRunError
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.tables import curves_table, results, students_table, summary_table
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.workflows.chain_plan import chain_folder
from minilm_cache.workflows.config import ChainConfig
from minilm_cache.workflows.study import compared, run_study
from minilm_cache.workflows.study_spec import read_study
from tests.fixtures import Command
from tests.integration.workflows.test_chain import after
from tests.support import World, save_teacher, write_corpus
from tests.tasks import write_sst2

TIMED = {"train_s", "own_train_s", "inference_tokens_per_s", "speedup", "cost"}


def document(world: World, **changes: str) -> Path:
    """Write a study of two shapes, two codecs and two seeds."""
    lines = {
        "dump": f"""
  teacher: {world.teacher}
  corpus: {world.corpus}
  max_length: 32
  shard_tokens: 256
  batch_size: 8
  device: cpu""",
        "caches": """
  sampled: {codec: topk, k: 6}
  coded: {codec: vectors, max_kl: 0.05}""",
        "arch": " [1x16, 1x32]",
        "seed": " [0, 1]",
        "train": """
  steps: 6
  batch_size: 4
  checkpoint_steps: 3
  device: cpu""",
        **changes,
    }
    path = world.root / "shapes.yaml"
    path.write_text("".join(f"{key}:{value}\n" for key, value in lines.items()))
    return path


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without what no two runs have in common."""
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


def test_a_study_is_one_table_and_one_page(world: World, command: Command) -> None:
    code, out, _ = command("study", document(world, price_per_hour=" 3.6"), "--json")
    found = json.loads(out)
    rows, folder = found["students"], Path(found["study"])

    assert code == 0
    assert folder == world.root / "shapes"
    assert len({(row["cache"], row["arch"], row["seed"]) for row in rows}) == len(rows) == 8
    for row in rows:
        assert row["kl_to"] == "teacher"
        assert row["kl_sum"] == pytest.approx(row["kl_attention"] + row["kl_value"])
        assert row["cost"] == pytest.approx(row["own_train_s"] * 3.6 / 3600)
    for run in {row["run"] for row in rows}:
        own = [row for row in rows if row["run"] == run]
        assert sum(row["own_train_s"] for row in own) == pytest.approx(own[0]["train_s"])
    assert pq.read_table(folder / "students.parquet").to_pylist() == rows
    assert len(pyarrow.csv.read_csv(folder / "students.csv")) == 8
    assert [row["seeds"] for row in found["summary"]] == [2] * 4
    for row in found["summary"]:
        values = [one["kl_sum"] for one in rows if (one["cache"], one["arch"]) == (row["cache"], row["arch"])]
        mean = sum(values) / 2
        assert row["kl_sum"] == pytest.approx(mean)
        assert row["kl_sum_stddev"] == pytest.approx(sum((x - mean) ** 2 for x in values) ** 0.5)
    assert (folder / "report.html").stat().st_size > 10_000
    code, out, _ = command("study", document(world, price_per_hour=" 3.6"))
    assert code == 0
    assert all(words in out for words in ("1x16", "1x32", "sampled", "coded", "+-", "KL, attention"))


def test_shapes_of_one_cache_and_seed_went_through_one_pass(world: World) -> None:
    study = read_study(document(world))
    result = run_study(study, world.root / "study", session=Session(world.home))
    rows = result.students.to_pylist()
    alone = TrainConfig(arch=("1x16",), steps=6, batch_size=4, seed=0, checkpoint_steps=3, device="cpu")
    path = world.root / "alone"
    train_students(alone, world.root / "study/caches/sampled", out=path, session=Session(world.home))
    (one,) = students_table([TrainedRun.open(path)]).to_pylist()

    both = [row for row in rows if (row["cache"], row["seed"]) == ("sampled", 0)]
    assert {row["students_in_pass"] for row in both} == {2}
    assert {row["bytes_read"] for row in both} == {one["bytes_read"]}
    assert both[0]["run"] == both[1]["run"]
    caches = [world.root / "study/caches" / name for name in ("sampled", "coded")]
    for file in caches[0].glob("tokens/c/*"):
        assert file.stat().st_ino == (caches[1] / "tokens/c" / file.name).stat().st_ino


def test_a_study_stopped_anywhere_goes_on_to_the_same_table(world: World) -> None:
    study = read_study(document(world))
    whole = run_study(study, world.root / "whole", session=Session(world.home))
    stops = 0
    while True:
        try:
            parts = run_study(
                study, world.root / "parts", session=Session(world.home, should_stop=after(15 * (stops + 1)))
            )
            break
        except InterruptedRunError:
            stops += 1

    assert stops >= 2
    rows = [timeless(one.students.to_pylist()) for one in (whole, parts)]
    for row in [*rows[0], *rows[1]]:
        del row["bytes_read"]  # a sitting more reads its shards once more
    assert rows[0] == rows[1]


def test_caches_that_are_there_are_taken_as_they_are(world: World, command: Command) -> None:
    """With a teacher to compare with, and without; the path is relative to the document."""
    world.dump("there", codec="vectors", max_kl=0.05)
    objective = " [minilm, minilmv2]"
    lists = {"caches": " {there: {cache: there}}", "objective": objective, "init": " [random]"}
    with_teacher = document(world, **lists)
    code, out, _ = command("study", with_teacher, "--json")
    compared = json.loads(out)["students"]
    command("study", document(world, **lists, dump=" {}"))
    recorded = pq.read_table(world.root / "shapes/students.parquet").to_pylist()

    assert code == 0
    assert {row["objective"] for row in compared} == {"minilm", "minilmv2"}
    assert {row["kl_to"] for row in compared} == {"teacher"}
    assert {row["kl_to"] for row in recorded} == {"stored rows"}
    for row, other in zip(compared, recorded, strict=True):
        assert (row["kl_query"] is None) == (row["objective"] == "minilm")
        assert row["kl_sum"] != other["kl_sum"]
        assert row["kl_sum"] == pytest.approx(other["kl_sum"], rel=0.5)


def test_objectives_may_have_their_own_relation_heads(world: World) -> None:
    caches = " {coded: {codec: vectors, max_kl: 0.05}}"
    objective = " [minilmv2, {objective: minilmv2, relation_heads: 8}]"
    study = read_study(document(world, caches=caches, objective=objective, seed=" [0]"))
    result = run_study(study, world.root / "study", session=Session(world.home))

    names = [one.name.rpartition("-")[0] for one in study.passes]
    assert names == ["coded-minilmv2-s0", "coded-minilmv2-h8-s0"]
    assert len(result.summary) == 4


def test_tables_are_arrow_tables_for_notebooks(world: World) -> None:
    world.dump()
    config = TrainConfig(arch=("1x16", "1x16:s3"), steps=20, batch_size=4, eval_steps=10, device="cpu")
    train_students(config, world.root / "cache", out=world.root / "run", session=Session(world.home))
    run = TrainedRun.open(world.root / "run")
    curves = curves_table(run).to_pylist()
    students = students_table([run])

    assert students["seed"].to_pylist() == [0, 3]
    assert len(summary_table(students)) == 1
    assert {row["what"] for row in curves} == {"students", "held_out"}
    lines = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    losses = [line["students"]["1x16:s3"]["loss"] for line in lines if "students" in line]
    found = [
        row for row in curves if (row["student"], row["what"], row["of"]) == ("1x16:s3", "students", "loss")
    ]
    assert [row["nats"] for row in found] == losses


def test_a_preset_brings_its_objective(world: World) -> None:
    caches = " {coded: {codec: vectors, max_kl: 0.05}}"
    train_students = "\n  preset: minilmv2-large"
    passes = read_study(document(world, caches=caches, train=train_students)).passes
    assert {(one.config.objective, one.config.relation_heads) for one in passes} == {("minilmv2", 64)}
    passes = read_study(document(world, caches=caches, train=train_students, objective=" [minilm]")).passes
    assert {one.config.objective for one in passes} == {"minilm"}


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(world: World, command: Command) -> None:
    world.dump()
    options = ("--arch", "1x16", "--steps", 10, "--batch-size", 4, "--device", "cpu")
    for name, more in (("a", ("--lr", 5e-3)), ("b", ("--lr", 1e-3)), ("c", ("--lr", 5e-3, "--seed", 1))):
        command("train", world.root / "cache", *options, *more, "--out", world.root / name)
    runs = [TrainedRun.open(world.root / name) for name in "abc"]
    students = students_table(runs)

    assert summary_table(students)["seeds"].to_pylist() == [2, 1]
    code, out, _ = command(
        *("report", world.root / "a", world.root / "a", "--json", "--out", world.root / "page.html")
    )
    assert (code, len(json.loads(out)["students"])) == (0, 1)
    shutil.copytree(world.root / "a", world.root / "again")
    twice = students_table([*runs, TrainedRun.open(world.root / "again")])
    # Seed 0 was trained twice, so no mean over seeds is known.
    assert summary_table(twice)["seeds"].to_pylist() == [1, 1, 1, 1]
    diverged = students.set_column(
        students.column_names.index("diverged_at"), "diverged_at", pa.array([None, None, 3], pa.int64())
    )
    assert summary_table(diverged)["seeds"].to_pylist() == [1, 1]


def test_a_study_that_grows_trains_what_is_missing(world: World) -> None:
    """However often it grows, students that are there stay as they are."""
    folder, session = world.root / "study", Session(world.home)

    def run(arch: str) -> pa.Table:
        return run_study(read_study(document(world, seed=" [0]", arch=arch)), folder, session=session).summary

    run(" [1x16, 1x32]")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/students/*/model.safetensors")}
    assert len(run(" [1x16, 1x32, 1x48]")) == 6
    assert len(run(" [1x48, 1x32, 2x16, 1x16]")) == 8
    trained = [path for path in folder.glob("runs/*/students/*/model.safetensors") if path not in before]
    assert sorted(path.parent.name for path in trained) == ["1x48", "1x48", "2x16", "2x16"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_caches_hold_what_the_objectives_need(world: World, command: Command) -> None:
    """A study says objectives; `for` is filled in where it is not given."""
    changes = {
        "objective": " [minilm, hidden-mse, embedding]",
        "caches": "\n  one: {codec: vectors, pooling: mean}",
        "seed": " [0]",
    }
    code, out, err = command("study", document(world, **changes), "--json")
    assert code == 0, err
    rows = json.loads(out)["students"]
    assert {row["objective"] for row in rows} == {"minilm", "hidden-mse", "embedding"}
    for row in rows:  # what vectors lose has a column of its own
        assert [name for name in row if name.startswith("loss: ")] == ["loss: embedding, cosine"]
        own = row["held_out_loss"] if row["objective"] == "embedding" else None
        assert row["loss: embedding, cosine"] == own


def check_row_of_teacher(page: str, accuracy: float) -> None:
    """Check that a page has a row of the teacher, as wide as the table, with its score."""
    row, head = (
        page.partition(first)[2].partition(last)[0]
        for first, last in (('<tr class="teacher">', "</tr>"), ("<thead>", "</thead>"))
    )
    assert f"<td>{accuracy:.1f}</td>" in row
    assert row.count("<td") + row.count("<th") == head.count("<th ")


def check_results(world: World, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that data frames of a study have its KLs: exactly if the teacher runs, else those recorded."""
    frame = results(world.root / "shapes").set_index(["run", "arch"])
    recorded, scores = frame["kl_sum"], frame["score: sst2 dev accuracy"]
    exact = results(world.root / "shapes", teacher=str(world.teacher)).set_index(["run", "arch"])["kl_sum"]
    for row in rows:  # the cache stands for the teacher here, and an assistant's is not compared with it
        name, is_own = (row["run"], row["arch"]), row["cache"] == "one"
        assert exact[name] == pytest.approx(row["kl_sum"])
        assert scores[name] == row["score: sst2 dev accuracy"]
        assert recorded[name] == pytest.approx(row["kl_sum"] if is_own else np.nan, abs=0.1, nan_ok=True)


def test_a_study_is_the_papers_table(world: World, command: Command) -> None:
    """Assistants in between, scores of all models, and one closeness to one teacher for all."""
    data = write_sst2(world.root / "glue" / "SST-2", num_train=16, num_dev=8)
    changes = {
        "caches": "\n  one: {codec: vectors, max_kl: 0.05}",
        "seed": " [0]",
        "assistants": " [2x32]",
        "evaluate": " {task: sst2, data: glue, epochs: [1], max_length: 16, seeds: 2, device: cpu}",
    }
    path = document(world, **changes)
    code, out, err = command("study", path, "--dry-run", "--json")
    assert code == 0, err
    (via,) = json.loads(out)["caches"].keys() - {"one"}
    assert json.loads(out)["fine_tunings"] == (1 + 1 + 4) * 2
    assert (
        "12 fine-tunings of the teacher, 1 assistant and 4 students on sst2"
        in command("study", path, "--dry-run")[1]
    )
    assert via.startswith("one-via-2x32-")

    code, out, err = command("study", path, "--json")
    assert code == 0, err
    printed = json.loads(out)
    rows = printed["students"]
    assert [(row["cache"], row["arch"]) for row in rows] == [
        ("one", "2x32"),
        ("one", "1x16"),
        ("one", "1x32"),
        ("one-via-2x32", "1x16"),
        ("one-via-2x32", "1x32"),
    ]
    assert {row["kl_to"] for row in rows} == {"teacher"}
    (remark,) = (line for line in printed["cautions"] if "no better than chance" in line)
    assert remark in Path(printed["report"]).read_text().replace("&#39;", "'")
    assert all(row["kl_sum"] > 0 and 0 <= row["score: sst2 dev accuracy"] <= 100 for row in rows)
    models = [summary["model"] for summary in printed["scores"]["summaries"]]
    assert models == ["teacher", *(f"{row['run']}/{row['arch']}" for row in rows)]
    page = (world.root / "shapes" / "report.html").read_text()
    assert printed["cautions"]
    assert all(str(escape(line)) in page for line in printed["cautions"])
    assert "sst2 dev accuracy" in page
    assert "one-via-2x32 is the cache of an assistant" in page
    assert re.search(r"1x16, one-via-2x32-minilm-s0\b[^-]", page), "the legend has names without digests"
    check_row_of_teacher(page, printed["scores"]["summaries"][0]["scores"]["dev"]["accuracy"]["mean"])
    check_results(world, rows)
    command.fails("speed", world.root / "shapes", code=2, says="is a run of students")

    code, out, err = command("study", path)  # all is there, and the table has the scores
    assert code == 0, err
    assert ("sst2 dev accuracy" in out, "layer of the teacher" in out) == (True, False)
    code, out, err = command(
        *("evaluate", world.root / "shapes", "--task", "sst2", "--data", data, "--epochs", 1, "--json"),
        *("--max-length", 16, "--seeds", 2, "--device", "cpu", "--out", world.root / "shapes/evaluations"),
    )
    assert code == 0, err
    scored = {one["model"]: one["scores"] for one in json.loads(out)["summaries"]}
    first = {
        one["model"]: one["scores"] for one in printed["scores"]["summaries"] if one["model"] != "teacher"
    }
    assert scored == first


def test_a_pass_whose_students_diverge_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def diverging(config: TrainConfig, *arguments: Any, **others: Any) -> TrainResult:
        if config.seed == 1:
            raise DivergedError("student 1x16 diverged.")
        return train_students(config, *arguments, **others)

    monkeypatch.setattr("minilm_cache.workflows.study.train_students", diverging)
    code, out, err = command("study", document(world), "--json")

    assert code == 0
    assert {row["seed"] for row in json.loads(out)["students"]} == {0}
    assert err.count("The study goes on without them") == 2
    command.fails("study", document(world, seed=" [1]"), code=1, says="every student of")


def test_a_pass_whose_students_end_worse_says_so_before_anything_is_made_of_them(
    world: World, command: Command
) -> None:
    world.corpus.write_text("\n\n".join([world.corpus.read_text()] * 4))
    changes = {"caches": "\n  coded: {codec: vectors, max_kl: 0.05}", "arch": " [1x16]", "seed": " [0]"}
    train = "\n  steps: 6\n  batch_size: 4\n  lr: 1.0\n  device: cpu"
    code, _, err = command("study", document(world, **changes, train=train, assistants=" [2x32]"))
    assert code == 0, err
    said = "2x32 ended worse than with the weights that training began with"
    assert 0 < err.index(said) < err.index("cache coded-via-2x32")


def test_a_moved_study_is_still_one(world: World, command: Command) -> None:
    path = document(world, seed=" [0]")
    command("study", path)
    (world.root / "shapes").rename(world.root / "moved")
    code, _, err = command("study", path, "--out", world.root / "moved")
    assert (code, err.count("nothing to do")) == (0, 4)
    assert command("report", world.root / "moved", "--out", world.root / "page.html")[0] == 0
    command.fails("report", world.root / "moved", "--cache", "x", code=2, says="--cache goes with one run")


def test_caches_of_unlike_lengths_are_measured_each_at_its_own(world: World, command: Command) -> None:
    caches = "\n  short: {codec: topk, k: 4, max_length: 16}\n  long: {codec: topk, k: 4, max_length: 64}"
    code, out, err = command("study", document(world, caches=caches, seed=" [0]"), "--json")
    flops = {(row["cache"], row["arch"]): row["flops_per_token"] for row in json.loads(out)["students"]}

    assert code == 0, err
    assert flops["short", "1x16"] < flops["long", "1x16"]


def labelled(tmp_path: Path) -> World:
    """Return a world whose teacher tells masked tokens."""
    teacher = save_teacher(tmp_path / "teacher", head="tokens")
    return World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))


def test_students_of_all_objectives_are_asked_for_masked_tokens(tmp_path: Path, command: Command) -> None:
    world = labelled(tmp_path)
    changes = {
        "caches": "\n  all: {for: [tinybert, mlm-kd, bert-pkd, mobilebert], codec: vectors, max_kl: 0.05}",
        "arch": " [2x32]",
        "objective": """
  - minilm
  - tinybert
  - {objective: tinybert, layer_map: top}
  - mlm-kd
  - bert-pkd
  - {objective: mobilebert, arch: ['3x32:b16']}""",
        "seed": " [0]",
        "agreement_steps": " 4",
    }
    code, out, err = command("study", document(world, **changes), "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {row["objective"]: row for row in found["students"]}
    tinybert = ["tinybert (layers: all)", "tinybert (layers: top)"]
    assert list(rows) == ["minilm", *tinybert, "mlm-kd", "bert-pkd (layers: all)", "mobilebert"]
    assert rows["mobilebert"]["arch"] == "3x32:b16"
    cache = open_cache(Path(found["study"]) / "caches/all")
    for row in rows.values():
        assert row["kl_to"] == "teacher"
        assert row["kl_attention"] > 0
        assert row["kl_value"] > 0
        folder = (
            Path(found["study"]) / "masked" / f"4-{row['run']}" / "students" / row["arch"].replace(":", "-")
        )
        assert row["masked_agreement"] == pytest.approx(plain_agreement(folder, world.teacher, cache))
        assert json.loads((folder.parents[1] / "run.json").read_text())["identity"]["steps"] == 4
    page = (Path(found["study"]) / "report.html").read_text()
    assert "masked tokens like the teacher" in page
    code, out, _ = command("study", document(world, **changes))
    assert code == 0
    assert "masked tokens like the teacher" in out


def test_students_of_another_teacher_are_not_asked_beside_it(tmp_path: Path, command: Command) -> None:
    world = labelled(tmp_path)
    cache = world.dump("cache", labels=True).path
    world = World(tmp_path, save_teacher(tmp_path / "other", head="tokens", seed=9), world.corpus)
    changes = {"caches": f"\n  one: {{cache: {cache}}}", "agreement_steps": " 4"}
    says = ("agreement_steps", "which has other weights than")
    command.fails("study", document(world, **changes), code=2, says=says)
    assert not (tmp_path / "shapes" / "runs").exists()


def plain_agreement(folder: Path, teacher: Path, cache: Cache) -> float:
    """Return the share of held-out chosen tokens that two whole models tell alike."""
    models = [AutoModelForMaskedLM.from_pretrained(one).eval() for one in (folder, teacher)]
    same = []
    for number in range(cache.manifest.num_train, len(cache)):
        masked = cache[number].states().masked
        assert masked is not None
        with torch.no_grad():
            own, told = (model(input_ids=masked.ids).logits[masked.chosen].argmax(-1) for model in models)
        same += (own == told).tolist()
    return sum(same) / len(same)


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        ("{objective: minilm, value_relation: 0}", "minilm-novr"),
        ("{objective: minilm, query_key_relations: true}", "minilm-qk"),
        ("{objective: minilm, layer_map: last}", "minilm-last"),
        ("{objective: tinybert, form: paper}", "tinybert-paper"),
        ("{objective: bert-pkd, patience: 5e2, arch: [2x32]}", "bert-pkd-b500"),
        ("{objective: minilm, teacher_layer: 1}", "minilm-l1"),
    ],
)
def test_passes_are_named_by_what_an_objective_sets(world: World, objective: str, name: str) -> None:
    """As earlier releases named them: a study that was begun finds its passes again."""
    fitting = " {a: {codec: vectors, for: [tinybert, bert-pkd], layers: all}}"
    study = read_study(document(world, caches=fitting, objective=f" [{objective}]"))

    assert {one.name.rsplit("-s", 1)[0] for one in study.passes} == {f"a-{name}"}


def test_what_students_begin_with_is_an_axis(world: World) -> None:
    study = read_study(
        document(
            world,
            init=" [random, slice, teacher-layers]",
            arch=" ['1x32:ff64']",
            seed=" [0]",
            caches=" {a: {k: 6}}",
        )
    )
    assert [name.name.rsplit("-", 1)[0] for name in study.passes] == [
        "a-minilm-random-s0",
        "a-minilm-slice-s0",
        "a-minilm-teacher-layers-s0",
    ]
    result = run_study(study, world.root / "study", session=Session(world.home))
    assert result.summary["init"].to_pylist() == ["random", "slice", "teacher-layers"]
    assert "teacher-layers" in result.report.read_text()


@pytest.mark.parametrize(("assistants", "shapes"), [("2x32", ["2x32", "1x16"]), ("1x16", ["1x16"])])
def test_an_assistant_is_compared_once(world: World, assistants: str, shapes: list[str]) -> None:
    changes = {"caches": "\n  one: {codec: vectors}", "seed": " [0]", "arch": " [1x16]"}
    study = read_study(document(world, assistants=f" [{assistants}]", **changes))
    trained = [planned for planned in compared(study) if planned.cache == "one"]
    assert [arch for planned in trained for arch in planned.config.arch] == shapes


def test_chains_and_passes_have_the_names_that_earlier_releases_gave_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "dump": {"teacher": "mini"},
        "train": {"arch": ("3x384",)},
        "assistants": ("12x384",),
    }
    assert chain_folder(ChainConfig.model_validate(settings), tmp_path).name == "12x384-33913d18031d"
    unlike = "max_hours: 5, tracker: mlflow, keep_checkpoints: 2, local_bytes: 1, gradient_checkpointing: on"
    for more in ("", f", {unlike}"):  # these settings change no student, so its pass is not trained again
        (tmp_path / "study.yaml").write_text(
            "dump: {teacher: mini, max_tokens: 1000}\ncaches:\n  a: {codec: topk, k: 4}\n"
            f"arch: [2x96]\nseed: [0]\ntrain: {{steps: 3{more}}}\n"
        )
        (only,) = read_study(tmp_path / "study.yaml").passes
        assert only.name == "a-minilm-s0-aba70a9a"
        assert replace(only, kept=1).name == "a-minilm-s0-2e013029"  # as the code of 0.1.0 names it
    of_first_release = tmp_path / "chains/12x384-f600dfc2cc75"
    of_first_release.mkdir(parents=True)
    assert chain_folder(ChainConfig.model_validate(settings), tmp_path) == of_first_release


def test_a_run_of_the_first_release_is_one_of_its_study(world: World, trained: World) -> None:
    path = document(world, caches="\n  one: {codec: topk, k: 6}", arch=" [1x16]", seed=" [0]")
    (planned,) = read_study(path).passes
    earlier = replace(planned, kept=1).name
    assert earlier != planned.name
    shutil.copytree(trained.root / "run", world.root / "shapes/runs" / earlier)
    assert [each.name for each in read_study(path).grown(world.root / "shapes").passes] == [earlier]


@pytest.mark.parametrize("objectives", ["[minilm, embedding]", "[embedding, minilm]"])
def test_an_assistant_gives_what_all_objectives_need(world: World, objectives: str) -> None:
    """One that learned relations alone has no vectors of texts: the study failed in its middle."""
    changes = {"caches": "\n  one: {codec: vectors, max_kl: 0.05}", "assistants": " [2x32]"}
    study = read_study(document(world, objective=f" {objectives}", **changes))
    (assistant,) = study.assistants
    assert assistant.training.config.objective == "embedding"
    learned = {planned.config.objective for planned in study.passes if planned.cache == assistant.name}
    assert learned == {"minilm", "embedding"}
