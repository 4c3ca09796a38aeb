"""Mistakes in STUDY.yaml: each is one line that names the place."""

import json
import re

import pytest

from minilm_cache.session import Session
from minilm_cache.workflows.study import check_study
from minilm_cache.workflows.study_spec import read_study
from tests.fixtures import Command
from tests.integration.workflows.test_study import document
from tests.support import World, save_teacher

STATES = {"caches": "\n  a: {for: [minilm, mobilebert, bert-pkd], codec: vectors, layers: all}"}
"""A cache for objectives that compare layers."""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"caches": "\n  sampled: {codec: topk, k: 0}"}, "line 9, caches.sampled.k: give at least 1"),
        ({"caches": "\n  sampled: {codec: tipk}"}, "line 9, caches.sampled.codec: give 'topk'"),
        ({"caches": "\n  a: {codec: dense, k: 3}"}, "line 9, caches.a: --k goes with --codec topk"),
        ({"caches": "\n  Big Name: {codec: dense}"}, "line 9, caches.Big Name: a name begins"),
        ({"caches": "\n  a: {cache: x, k: 3}"}, "line 9, caches.a: give an existing cache as"),
        ({"caches": "\n  a: {codec: topk, world_size: 2}"}, "caches.a.world_size: a study dumps in one"),
        ({"caches": " {}"}, "line 8, caches: give at least 1"),
        ({"dump": "\n  corpus: x"}, "line 1, dump.teacher: field required"),
        (
            {"dump": "\n  teacher: x\n  teecher: y"},
            "line 3, dump.teecher: there is no such setting (did you mean teacher?)",
        ),
        ({"dump": "\n  teacher: x\n  max_length: long"}, "line 3, dump.max_length: give"),
        ({"seed": " [0, 0]"}, "line 12, seed.1: 0 is given twice"),
        ({"seed": " [0, one]"}, "line 12, seed.1: give a whole number"),
        ({"seed": " [-1]"}, "seed: give at least 0"),
        ({"seed": " [010]"}, "line 12: YAML reads 010 as 8"),
        ({"seed": " [1:30]"}, "line 12: YAML reads 1:30 as 90"),
        ({"arch": " {a: 1}"}, "line 11, arch: give a list"),
        ({"arch": " [1x16, big]"}, "line 11, arch.1: --arch big: write LAYERSxHIDDEN"),
        ({"arch": " [1x15]"}, "line 11, arch.0: --arch 1x15: hidden size 15 is not divisible by 4 heads"),
        ({"objective": " [minilm, best]"}, "objective.1: there is no objective best"),
        ({"objective": " [minilmv2]"}, "caches.sampled: --objective minilmv2 needs the query"),
        ({"objective": " [{objective: minilm, relation_heads: 2}]"}, "--relation-heads goes with"),
        ({"train": "\n  seed: 3"}, "line 14, train.seed: a study varies this; give it under seed"),
        ({"init": " [random, random]"}, "init.1: random is given twice"),
        (
            {"init": " [random]", "train": "\n  init: slice"},
            "train.init: a study varies this; give it under init",
        ),
        ({"init": " [slice]", "arch": " [5x32]"}, "arch.0: --arch 5x32: more layers than the teacher's 3"),
        (
            {"init": " [teacher-layers]", "arch": " [1x16]"},
            "arch.0: --init teacher-layers: the teacher's layers",
        ),
        ({"train": "\n  init_layers: 0,9", "arch": " [2x32]"}, "--init-layers 0,9: give different"),
        (
            {"objective": " [mobilebert]", "arch": " ['3x16:b8']", **STATES},
            "arch.0: --objective mobilebert compares hidden states as they are, and the student's width 16",
        ),
        ({"objective": " [mobilebert]", "arch": " ['2x32:b8']", **STATES}, "arch.0: --objective mobilebert"),
        ({"objective": " [bert-pkd]", "arch": " [2x16]", **STATES}, "arch.0: --objective bert-pkd compares"),
        ({"objective": " [bert-pkd]", "arch": " [1x32]", **STATES}, "a student has one layer"),
        (
            {"objective": " [{objective: minilm, first: bert-pkd}]", "arch": " [2x16]", **STATES},
            "arch.0: --objective bert-pkd compares",
        ),
        (
            {"objective": " [{objective: minilm, layer_map: all}]", "arch": " [4x32]", **STATES},
            "arch.0: --layer-map all is for students of 1 to 3 layers",
        ),
        (
            {"objective": " [embedding, minilm]", "caches": "\n  a: {codec: vectors, pooled: false}"},
            "needs pooled, which this cache will not hold; leave out pooled",
        ),
        (
            {"objective": " [tinybert]", "caches": "\n  a: {codec: vectors, hidden: last}"},
            "needs hidden, which this cache will not hold; give {for: [tinybert]} in place of hidden",
        ),
        (
            {"objective": " [{objective: minilm, layer_map: all}]"},
            "caches.sampled: layer_map all needs several layers; give {layers: all}",
        ),
        ({"train": "\n  stops: 3"}, "line 14, train.stops: there is no such setting (did you mean steps?)"),
        ({"train": "\n  steps: 3\n  epochs: 2"}, "line 13, train: --steps and --epochs exclude each other"),
        ({"train": "\n  preset: best"}, "line 14, train.preset: --preset best: give one of"),
        ({"train": "\n  steps: 3\n  steps: 4"}, "line 14, steps: this key is given twice"),
        ({"price_per_hour": " -1"}, "price_per_hour: give more than 0"),
        ({"archs": " [3x384]"}, "archs: there is no such setting (did you mean arch?)"),
        ({"arch": " [1x16"}, "this is not YAML"),
        ({"arch": " [1x16, '1x16:s1']"}, "line 11, arch.1: give seeds under seed"),
        ({"seed": " 2020-13-45"}, "a value in it cannot be read"),
        ({"objective": " [{objective: minilmv2, heads: 3}]"}, "objective.0.heads: there is no such setting"),
        ({"train": "\n  preset: [a]"}, "line 14, train.preset: a preset is a name"),
        ({"train": "\n  accumulate: 3\n  batch_size: 4"}, "--batch-size 4 does not divide into 3 parts"),
        ({"train": "\n  device: gpu9"}, "--device gpu9"),
        (
            {"objective": " [minilm, distilbert]", "caches": "\n  a: {codec: vectors}"},
            "line 1, dump: {teacher} has no head for masked tokens",
        ),
        (
            {"caches": "\n  a: {codec: vectors, layers: [7]}"},
            "line 9, caches.a.layers: --layers 7: teacher teacher has layers 0 to 2",
        ),
        (
            {"caches": "\n  a: {codec: dense, max_length: 200}"},
            "line 9, caches.a.max_length: --max-length 200 is more than teacher teacher has",
        ),
        ({"caches": "\n  a: null"}, "line 9, caches.a: give a mapping of names to settings"),
        ({"caches": "\n  0-teacher: {codec: dense}"}, "a name begins with a letter"),
        ({"caches": " {a: {cache: nowhere}}"}, "nowhere"),
    ],
)
def test_mistakes_are_told_with_line_and_key(
    world: World, command: Command, changes: dict[str, str], says: str
) -> None:
    path, says = document(world, **changes), says.replace("{teacher}", str(world.teacher))
    is_elsewhere = "nowhere" in says or "gpu9" in says
    code = 1 if "nowhere" in says else 2
    command.fails("study", path, code=code, says=says if is_elsewhere else (str(path), says))
    assert not (world.root / "shapes").exists()


def test_a_study_without_caches_has_one_with_the_settings_of_dump(world: World, command: Command) -> None:
    path = document(world)
    path.write_text(re.sub(r"caches:.*\n(  .*\n)+", "", path.read_text()))
    code, out, _ = command("study", path, "--dry-run", "--json")
    assert (code, json.loads(out)["caches"]) == (0, {"cache": "to do"})
    path.write_text(path.read_text().replace("teacher:", "teecher:"))
    command.fails("study", path, code=2, says="line 2, dump.teecher: there is no such setting")


@pytest.mark.parametrize(
    ("name", "says"), [("students.csv", "holds no study (students.csv)"), ("settings.json", "holds a chain")]
)
def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(
    world: World, command: Command, name: str, says: str
) -> None:
    (world.root / "study").mkdir()
    (world.root / "study" / name).write_text("mine")
    path = document(world)
    for more in ((), ("--dry-run",)):
        command.fails("study", path, "--out", world.root / "study", *more, code=1, says=says)
    assert [file.name for file in (world.root / "study").iterdir()] == [name]


def test_a_document_that_is_not_there_or_no_mapping(world: World, command: Command) -> None:
    command.fails("study", world.root / "none.yaml", code=2, says="cannot read")
    path = world.root / "list.yaml"
    path.write_text("- 1\n")
    command.fails("study", path, code=2, says="this is no mapping")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"assistants": " [2x33]"}, "assistants"),
        ({"assistants": " [2x32:h2]"}, "the objective compares head with head. Leave out :h2"),
        (
            {"assistants": " [2x32]", "objective": " [mlm-kd]", "caches": "\n  one: {for: [mlm-kd]}"},
            "an assistant needs an objective about relations or vectors",
        ),
        (
            {"assistants": " [2x32]", "train": " {steps: 6, vocab: '30'}"},
            "an assistant needs students with all pieces of the teacher (leave vocab out",
        ),
        ({"assistants": " [2x32, 2x32]"}, "2x32 is given twice"),
        ({"assistants": " ['2x32:s1']"}, "give seeds under seed"),
        ({"assistants": " [2x32]", "caches": "\n  one-via-two: {codec: vectors}"}, "choose another name"),
        ({"evaluate": " {task: 3}"}, "name tasks, as {task: [sst2]"),
        ({"evaluate": " {task: sst2, data: nosuch}"}, "nosuch does not exist"),
        ({"evaluate": " {task: sst2, data: ., as_is: true}"}, "leave it out"),
        ({"evaluate": " {task: nosuch}"}, "there is no task nosuch"),
        ({"evaluate": " {task: sst2}"}, "--data is missing"),
        ({"evaluate": " {task: sst2, data: ., nosuch: 1}"}, "nosuch"),
    ],
)
def test_mistakes_of_assistants_and_scores_are_named(
    world: World, command: Command, changes: dict[str, str], says: str
) -> None:
    line = command.fails("study", document(world, **changes), "--dry-run", code=2, says=says)
    assert "shapes.yaml, line" in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agreement_steps": " 3"}, "agreement_steps: cache sampled will hold no labels"),
        (
            {"agreement_steps": " 3", "dump": " {max_tokens: 999}", "caches": "\n  one: {cache: nowhere}"},
            "students are compared with a teacher",
        ),
        (
            {
                "agreement_steps": " 3",
                "caches": "\n  one: {for: [minilm], labels: true}",
                "train": " {steps: 6, vocab: '9'}",
            },
            "agreement_steps: masked tokens are pieces of the teacher's",
        ),
        ({"objective": " [mlm-kd]", "caches": "\n  one: {for: [minilm]}"}, "objective mlm-kd needs labels"),
        (
            {"objective": " [hidden-mse]", "caches": "\n  one: {for: [minilm]}"},
            "add hidden-mse to `for`, or leave `for` out",
        ),
        ({"objective": " [{objective: mlm-kd, layer_map: all}]"}, "does not go with --objective mlm-kd"),
        ({"caches": "\n  one: {for: [bert]}"}, "there is no objective bert"),
        ({"caches": "\n  one: {for: 3}"}, "--for 3: give objectives"),
        ({"objective": " [{objective: minilm, arch: ['1x16:s1']}]"}, "give seeds under seed"),
        ({"objective": " [{objective: minilm, arch: ['1x17']}]"}, "is not divisible by 4 heads"),
    ],
)
def test_states_that_a_study_lacks_are_named(
    world: World, command: Command, changes: dict[str, str], says: str
) -> None:
    command.fails("study", document(world, **changes), code=2, says=says)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("batch_size: 4096", "sequences"),
        ("batches: by-query", "is for pairs of texts"),
        ("streams: 999", "--streams 999"),
        ("vocab: '3'", "stay in any case"),
        ("vocab: nowhere.txt", "there is no such file"),
    ],
)
def test_what_a_cache_cannot_serve_is_refused_by_a_dry_run(
    world: World, shared_world: World, command: Command, train: str, says: str
) -> None:
    path = document(world, dump="", caches=f"\n  c: {{cache: {shared_world.root / 'cache'}}}")
    path.write_text(path.read_text().replace("dump:\n", "").replace("  batch_size: 4\n", f"  {train}\n"))
    for more in (("--dry-run",), ()):
        command.fails("study", path, "--out", world.root / "study", *more, code=2, says=says)
    assert not (world.root / "study").exists()


def test_shapes_of_a_donor_are_checked_by_the_donor(world: World, command: Command) -> None:
    deep = save_teacher(world.root / "deep", num_hidden_layers=6)
    flat = save_teacher(world.root / "flat", num_hidden_layers=1)
    for donor, arch in ((flat, "2x32"), (deep, "7x32")):
        train = f"\n  steps: 2\n  batch_size: 4\n  init: slice\n  init_teacher: {donor}\n  device: cpu"
        path = document(world, train=train, arch=f" [{arch}]", objective=" [hidden-mse]")
        command.fails("study", path, "--dry-run", code=2, says="more layers than the teacher's")
    away = train.replace(str(deep), str(world.root / "of-the-workers"))
    path = document(world, train=away, arch=" [4x32]", caches=" {a: {k: 6}}", seed=" [0]")
    check_study(read_study(path), world.root / "study", session=Session(world.home), here=False)
    path = document(world, train=train, arch=" [4x32]", caches=" {a: {k: 6}}", seed=" [0]")
    code, _, err = command("study", path, "--out", world.root / "study")
    assert code == 0, err


def test_equal_objectives_are_refused_however_they_are_written(world: World, command: Command) -> None:
    objectives = " [minilm, {objective: minilm, value_relation: true}]"
    path = document(world, objective=objectives)
    command.fails("study", path, code=2, says="objective.1: minilm is given twice")
    path = document(world, objective=" [minilm, 3]")
    command.fails("study", path, code=2, says="objective.1: give the name of an objective")
    path = document(world, objective=" [{objective: tinybert, form: ''}]")
    command.fails("study", path, code=2, says="objective.0.form: give")
