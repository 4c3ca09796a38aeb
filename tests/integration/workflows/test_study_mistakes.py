"""Mistakes in STUDY.yaml: each is one line that names the place."""

import json
import re

import pytest

from tests.conftest import Command
from tests.integration.workflows.test_study import document
from tests.support import World

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
