"""`study --dry-run`: what is to be made, without making it."""

import json
import shutil
from pathlib import Path

import pytest

from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.session import Session
from minilm_cache.workflows.study import check_study, run_study
from minilm_cache.workflows.study_spec import read_study
from tests.fixtures import Command
from tests.integration.workflows.test_study import document
from tests.support import VOCABULARY, World, save_teacher
from tests.tasks import write_glue


def test_a_preview_makes_nothing(world: World, command: Command) -> None:
    before = sorted(world.root.rglob("*"))
    shapes = document(world)
    code, out, _ = command("study", shapes, "--dry-run")

    assert code == 0
    for words in ("sampled", "coded", "4 passes train 8 students", "1x16, 1x32", "to do"):
        assert words in out
    assert sorted(world.root.rglob("*")) == sorted([*before, shapes])


def test_a_preview_knows_what_is_there(world: World, command: Command) -> None:
    shapes, folder = document(world), world.root / "shapes"

    def stop() -> bool:
        return any((folder / "runs").glob("*/students/*/config.json"))

    with pytest.raises(InterruptedRunError):
        run_study(read_study(shapes), folder, session=Session(world.home, should_stop=stop))
    preview = json.loads(command("study", shapes, "--dry-run", "--json")[1])

    assert preview["caches"] == {"sampled": "complete", "coded": "complete"}
    states = [planned["state"] for planned in preview["passes"]]
    assert (states[0], states[-1]) == ("complete", "to do")
    assert [planned["students"] for planned in preview["passes"]] == [["1x16", "1x32"]] * 4


def test_a_preview_refuses_what_the_study_would(world: World, command: Command) -> None:
    shapes = document(world, arch=" [1x17]")
    line = command.fails("study", shapes, "--dry-run", code=2, says=("line ", "1x17"))

    assert line == command.fails("study", shapes, code=2, says="1x17")
    assert not Path(world.root / "shapes").exists()


def test_embeddings_fit_students_of_any_depth(world: World, command: Command) -> None:
    path = document(world, init=" [embeddings]", arch=" [5x32]")
    code, _, err = command("study", path, "--dry-run")
    assert code == 0, err


def test_a_preview_shows_what_trains_assistants(world: World, command: Command) -> None:
    shapes = document(world, caches="\n  one: {codec: vectors}", seed=" [0]", assistants=" [2x32]")
    preview = json.loads(command("study", shapes, "--dry-run", "--json")[1])
    assert [each["students"] for each in preview["assistants"]] == [["2x32"]]
    assert "3 passes train 4 students and 1 assistant" in command("study", shapes, "--dry-run")[1]


SMALL = {"caches": "\n  one: {codec: topk, k: 6}", "seed": " [0]"}


def changed(world: World, change: str, other: Path) -> Path:
    """Change what a study was made of, and return its document."""
    if change == "setting":
        return document(world, **SMALL | {"caches": "\n  one: {codec: topk, k: 5}"})
    if change == "text":
        world.corpus.write_text(world.corpus.read_text() + "\n\nba be bi\n")
    elif change == "teacher":
        save_teacher(world.teacher, seed=5)
    else:
        shutil.rmtree(world.root / "shapes/caches/one")
        shutil.copytree(other, world.root / "shapes/caches/one")
        return document(world, **SMALL | {"caches": "\n  one: {cache: shapes/caches/one}"})
    return document(world, **SMALL)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("setting", "differs in codec.k"),
        ("text", "differs in corpus"),
        ("teacher", "teacher.weights_sha256"),
        ("cache", "differs in fingerprint"),
    ],
)
def test_a_preview_sees_what_changed(world: World, command: Command, change: str, says: str) -> None:
    other = world.dump("other", k=4).path
    assert command("study", document(world, **SMALL))[0] == 0
    assert command("study", document(world, **SMALL), "--dry-run")[0] == 0
    path = changed(world, change, other)
    line = command.fails("study", path, "--dry-run", code=1, says=says)
    assert line == command.fails("study", path, code=1, says=says)


def test_a_preview_sees_that_there_is_no_beginning(world: World, command: Command) -> None:
    for key, init in (("train", "\n  steps: 6\n  init: nothere"), ("init", " [nothere]")):
        words = ("line ", "init", "--init nothere: there is no such folder")
        command.fails("study", document(world, **SMALL | {key: init}), "--dry-run", code=2, says=words)
    missing = document(world, **SMALL)
    missing.write_text(missing.read_text().replace(f"teacher: {world.teacher}", "teacher: nothere"))
    command.fails("study", missing, "--dry-run", code=2, says=("line 2", "dump.teacher", "nothere"))


def test_a_study_that_loses_a_shape_keeps_its_students(world: World, command: Command) -> None:
    assert command("study", document(world, **SMALL))[0] == 0
    path = document(world, **SMALL | {"arch": " [1x32, 2x16]"})
    passes = json.loads(command("study", path, "--dry-run", "--json")[1])["passes"]
    states = [(planned["students"], planned["state"]) for planned in passes]
    assert states == [(["1x16", "1x32"], "complete"), (["2x16"], "to do")]


def test_names_of_passes_are_the_same_from_everywhere(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the document lies does not matter to a beginning that it names relative to itself."""
    cache = world.dump("cache").path
    asked = ("--arch", "1x16", "--steps", 2, "--batch-size", 4, "--device", "cpu")
    assert command("train", cache, *asked, "--out", world.root / "begun")[0] == 0
    path = document(world, **SMALL | {"init": " [begun]", "arch": " [1x16]"})
    names = []
    for folder, given in ((world.root, path.name), (world.root.parent, path)):
        monkeypatch.chdir(folder)
        found = json.loads(command("study", given, "--dry-run", "--json")[1])
        names.append([planned["pass"] for planned in found["passes"]])
    assert names[0] == names[1]


def test_files_that_have_changed_since_a_pass_are_seen_before_another_one_trains(
    world: World, command: Command
) -> None:
    pieces = world.root / "pieces.txt"
    pieces.write_text("\n".join([*VOCABULARY[:8], "ba", "be"]))
    train = f"\n  steps: 2\n  batch_size: 4\n  device: cpu\n  vocab: {pieces}"
    given = {"caches": "\n  sampled: {codec: topk, k: 6}", "arch": " [1x16]", "train": train}
    code, _, err = command("study", document(world, **given, seed=" [1]"))
    assert code == 0, err
    pieces.write_text("\n".join([*VOCABULARY[:8], "bi", "bo"]))
    study, says = document(world, **given, seed=" [0, 1]"), "differs in vocab"
    line = command.fails("study", study, "--dry-run", code=1, says=says)
    assert command.fails("study", study, code=1, says=says) == line
    assert not list((world.root / "shapes/runs").glob("*-s0*"))


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("tracker: wandb", "wandb is not installed"),
        ("teacher_layer: 9", "the dump stores layer 2"),
        ("batches: by-query", "for pairs of texts"),
        ("init: random, frozen: embeddings", "not with --init random"),
        ("init_teacher: nowhere", "nowhere"),
    ],
)
def test_trainings_that_cannot_be_are_refused_before_anything_is_made(
    world: World, command: Command, train: str, says: str
) -> None:
    study = document(world, train=f" {{steps: 2, device: cpu, {train}}}")
    for words in (("--dry-run",), ()):
        command.fails("study", study, *words, code=2, says=says)
    assert not (world.root / "shapes" / "caches").exists()


def test_texts_longer_than_the_teacher_reads_are_refused_before_it_is_dumped(
    world: World, command: Command
) -> None:
    glue = write_glue(world.root / "glue")
    for length, says in (("", 128), ("\n  max_length: 100", 100)):
        evaluate = f"\n  task: [sst2]\n  data: {glue}{length}"
        study = document(world, evaluate=evaluate)
        line = command.fails("study", study, code=2, says=(f"--max-length {says} is more than", " 66"))
        assert "evaluate" in line
    assert not (world.root / "shapes" / "caches").exists()


@pytest.mark.parametrize(
    ("evaluate", "says"),
    [
        ("\n  task: [FILE]\n  predict: true", "has no test set to predict"),
        ("\n  task: [FILE]\n  dev: DEV", "is not a class of the training set"),
        ("\n  task: [FILE]\n  device: 'cuda:7'", "cuda:7"),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused_before_anything_is_made(
    world: World, command: Command, evaluate: str, says: str
) -> None:
    for name, labels in (("FILE", "ab"), ("DEV", "ac")):
        rows = [f"ba be {number},{labels[number % 2]}" for number in range(12)]
        (world.root / f"{name.lower()}.csv").write_text("\n".join(["text,label", *rows]))
        evaluate = evaluate.replace(name, str(world.root / f"{name.lower()}.csv"))
    study = document(world, evaluate=f"{evaluate}\n  max_length: 32")
    for words in (("--dry-run",), ()):
        command.fails("study", study, *words, code=2, says=("evaluate", says))
    assert not (world.root / "shapes" / "caches").exists()


def test_a_chain_preview_sees_what_changed(world: World, command: Command) -> None:
    words = ("--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32, "--k", 6)
    recipe = ("--codec", "topk", "--arch", "1x32", "--steps", 2, "--batch-size", 4, "--device", "cpu")
    chain = ("chain", *words, *recipe, "--assistant", "2x32", "--out", world.root / "chain")
    assert command(*chain)[0] == 0
    assert command(*chain, "--dry-run")[0] == 0
    save_teacher(world.teacher, seed=5)
    line = command.fails(*chain, "--dry-run", code=1, says="teacher.weights_sha256")
    assert line == command.fails(*chain, code=1, says="teacher.weights_sha256")


def test_weights_that_a_run_has_not_written_are_seen(world: World, command: Command) -> None:
    cache = world.dump("cache").path
    asked = ("--arch", "1x16", "--arch", "1x16:s3", "--steps", 2, "--batch-size", 4, "--device", "cpu")
    run = world.root / "run"
    assert command("train", cache, *asked, "--out", run)[0] == 0
    one, other = (run / "students" / name / "model.safetensors" for name in ("1x16", "1x16-s3"))
    shutil.copyfile(other, one)
    says = ("has other weights than those that the run has written", "students/1x16")
    command.fails("report", run, "--out", world.root / "page.html", code=1, says=says)
    own = world.root / "own.jsonl"
    own.write_text('{"question": "ba be", "answer": "bi bo"}\n')
    measured = ("--retrieval", own, "--max-length", 32)
    command.fails("embeddings", world.teacher, run, *measured, code=1, says=says)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("teacher_layer: 9", "the dump stores layer 2"),
        ("batches: by-query", "for pairs of texts"),
        ("device: 'cuda:3'", "each task sees its own GPUs"),
    ],
)
def test_a_cluster_is_asked_for_nothing_that_settings_refuse(world: World, train: str, says: str) -> None:
    study = read_study(document(world, train=f" {{steps: 2, {train}}}"))
    with pytest.raises(InvalidConfigError, match=says):
        check_study(study, world.root / "shapes", Session(world.home), here=False)


def test_a_folder_of_another_shape_is_refused_before_anything_is_made(world: World, command: Command) -> None:
    cache = world.dump("ready").path
    asked = ("--arch", "1x16:ff32", "--steps", 1, "--batch-size", 4, "--device", "cpu")
    assert command("train", cache, *asked, "--out", world.root / "begun")[0] == 0
    begun = world.root / "begun/students" / "1x16-ff32"
    study = document(world, **SMALL | {"init": f" [{begun}]", "arch": " [1x16]"})
    command.fails("study", study, "--dry-run", code=2, says=("intermediate_size is 32", "has 64"))


def test_batches_that_a_cache_cannot_fill_are_refused_before_the_first_pass(
    world: World, command: Command
) -> None:
    train = "\n  steps: 2\n  batch_size: 4096\n  device: cpu"
    study = document(world, **SMALL | {"train": train, "seed": " [0]"})
    command.fails("study", study, code=2, says="--batch-size 4096: the cache has")
    assert not (world.root / "shapes/runs").exists()


def test_weights_that_changed_since_a_pass_are_seen_at_once(world: World, command: Command) -> None:
    cache = world.dump("ready").path
    asked = ("--arch", "1x16", "--steps", 1, "--batch-size", 4, "--device", "cpu", "--out")
    assert command("train", cache, *asked, world.root / "begun")[0] == 0
    shutil.copytree(world.root / "begun/students/1x16", world.root / "start")
    given = SMALL | {"init": " [start]", "arch": " [1x16]"}
    assert command("study", document(world, **given))[0] == 0
    assert command("train", cache, *asked, world.root / "other", "--seed", 1)[0] == 0
    shutil.copytree(world.root / "other/students/1x16", world.root / "start", dirs_exist_ok=True)
    study = document(world, **given | {"seed": " [1, 0]"})
    command.fails("study", study, "--dry-run", code=1, says="differs in init")
    assert not list((world.root / "shapes/runs").glob("*-s1*"))
