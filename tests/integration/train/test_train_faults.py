"""What goes wrong in training: students that diverge, disks, kills, processes in each other's way."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from minilm_cache.errors import DivergedError, IdentityMismatchError, InterruptedRunError, StorageError
from minilm_cache.session import Session
from minilm_cache.train.run import train_students
from minilm_cache.train.trainer import StudentTrainer
from tests.fixtures import Command
from tests.integration.train.test_train import assert_same, settings, stop_after, weights
from tests.integration.train.test_train_options import go, lines
from tests.support import World, save_teacher, write_corpus


def spoil(monkeypatch: pytest.MonkeyPatch, archs: tuple[str, ...], at: int) -> None:
    """Make weights of some students infinite at a step, as a bad memory chip would."""
    begin = StudentTrainer.begin

    def spoiled(trainer: StudentTrainer, step: int) -> None:
        begin(trainer, step)
        if step == at and trainer.shape.arch in archs:
            with torch.no_grad():
                trainer.trained[0].fill_(float("inf"))

    monkeypatch.setattr(StudentTrainer, "begin", spoiled)


def test_a_student_that_diverges_is_stopped_and_harms_nobody(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.dump().path
    alone = go(world, "alone", arch=("1x32",), steps=30)
    spoil(monkeypatch, ("2x16",), at=5)
    options = ("--batch-size", 4, "--lr", 5e-3, "--device", "cpu", "--steps", 30, "--out", world.root / "run")
    code, out, err = command("train", cache, "--arch", "2x16", "--arch", "1x32", *options)

    assert code == 0, err
    assert "student 2x16 diverged and is stopped at step 10. Train it again with a lower --lr" in err
    assert "diverged, stopped at step 10" in out
    assert_same(load_file(world.root / "run/students/1x32/model.safetensors"), weights(alone)["1x32"])
    assert not (world.root / "run/students/2x16").exists()
    spoiled, sound = json.loads((world.root / "run/run.json").read_text())["students"]
    assert (spoiled["diverged_at"], spoiled["held_out_after"]) == (10, None)
    assert sound["diverged_at"] is None

    timed = ("speed", world.teacher, world.root / "run", "--length", 8, "--turns", 1, "--device", "cpu")
    code, out, err = command(*timed)
    assert code == 0, err
    assert "run: 2x16 diverged, and is left out" in err
    record = json.loads((world.root / "run/run.json").read_text())
    begun = ("--init", world.root / "run", "--arch", "2x16", "--steps", 2, "--out", world.root / "next")
    command.fails("train", cache, *begun, code=2, says="student 2x16 diverged")
    record["students"] = [spoiled]
    record["identity"]["arch"] = ["2x16"]
    (world.root / "run/run.json").write_text(json.dumps(record))
    command.fails(*timed, code=1, says="run: all students diverged")


def test_few_held_out_sequences_decide_nothing(world: World, command: Command) -> None:
    world.dump()
    train = ("train", world.root / "cache", "--arch", "2x16", "--steps", 20, "--out", world.root / "run")
    code, out, err = command(*train, "--lr", 1)

    assert code == 0, err
    assert "too few to tell whether students became better" in out
    code, out, _ = command(*train, "--lr", 1, "--json")
    assert json.loads(out)["students"][0]["ended_worse"] is None


def test_a_student_that_ends_worse_is_an_error_after_the_results(world: World, command: Command) -> None:
    write_corpus(world.corpus, 400)
    world.dump()
    train = ("train", world.root / "cache", "--arch", "2x16", "--steps", 20, "--out", world.root / "run")
    line = command.fails(
        *train, "--lr", 1, code=1, says=("2x16 ended worse", "like --lr 0.001 instead of 1", "kept in")
    )
    code, out, err = command(*train, "--lr", 1, "--json")  # complete: nothing is trained again
    (student,) = json.loads(out)["students"]

    assert (code, student["ended_worse"], line in err) == (1, True, True)
    assert Path(student["path"], "model.safetensors").is_file()


def test_a_student_that_diverged_stays_stopped_after_an_interruption(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.dump().path
    spoil(monkeypatch, ("2x16",), at=5)
    with pytest.raises(InterruptedRunError):
        train_students(
            settings(steps=30),
            cache,
            out=world.root / "run",
            session=Session(world.home, should_stop=stop_after(17)),
        )
    monkeypatch.undo()
    result = go(world, steps=30)
    assert [student.diverged_at for student in result.record.students] == [10, None]


def test_a_run_ends_when_its_last_student_diverges(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.dump()
    spoil(monkeypatch, ("2x16", "1x32"), at=5)
    with pytest.raises(
        DivergedError, match=r"student 2x16, 1x32 diverged: its loss is not finite at step 10"
    ):
        go(world, steps=30)


@pytest.mark.parametrize("eval_steps", [None, 1])
def test_a_student_that_its_last_step_spoils_is_no_student(world: World, eval_steps: int | None) -> None:
    """Its loss before that step was a number; weights after it, and its held-out KL, are not."""
    world.dump()
    options: dict[str, Any] = {
        "arch": ("2x16",),
        "steps": 1,
        "lr": 1e38,
        "warmup": 0.0,
        "eval_steps": eval_steps,
    }
    with pytest.raises(DivergedError, match="student 2x16 diverged"):
        go(world, **options)
    with pytest.raises(DivergedError, match="student 2x16 diverged"):
        go(world, **options)


def test_a_disk_that_refuses_weights_is_an_error_of_storage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Safetensors has an exception of its own for a full disk."""
    world.dump()

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("minilm_cache.models.files.save_file", full)
    with pytest.raises(StorageError, match=r"cannot write checkpoint in .*No space left on device"):
        go(world)


def test_a_state_that_is_there_is_not_written_again(world: World) -> None:
    """A kill between removing and renaming would lose it."""
    cache = world.dump().path
    inodes = []
    for calls in (5, 0, 0):
        with pytest.raises(InterruptedRunError):
            train_students(
                settings(),
                cache,
                out=world.root / "run",
                session=Session(world.home, should_stop=stop_after(calls)),
            )
        (state,) = (world.root / "run/checkpoints").iterdir()
        inodes.append((state.name, state.stat().st_ino, (state / "state.json").stat().st_ino))
    assert inodes[0] == inodes[1] == inodes[2]


def test_a_line_of_the_log_that_a_kill_cut_short_is_dropped(world: World) -> None:
    cache = world.dump().path
    with pytest.raises(InterruptedRunError):
        train_students(
            settings(steps=40),
            cache,
            out=world.root / "run",
            session=Session(world.home, should_stop=stop_after(25)),
        )
    log = world.root / "run/log.jsonl"
    log.write_text(log.read_text() + '{"step": 12, "lr": 0.1, "students": {"a": {"loss": 1}')
    resumed, whole = go(world, steps=40), go(world, "whole", steps=40)
    assert lines(resumed, "students")[-1] == lines(whole, "students")[-1]


def test_two_runs_do_not_share_a_folder(world: World) -> None:
    cache = world.dump().path

    def second() -> bool:
        with pytest.raises(StorageError, match="another process trains in"):
            train_students(settings(), cache, out=world.root / "run", session=Session(world.home))
        return False

    train_students(settings(), cache, out=world.root / "run", session=Session(world.home, should_stop=second))
    assert not list((world.root / "run").glob(".*"))


def test_processes_that_torchrun_did_not_start_are_refused(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.dump().path
    for size in ("2", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        command.fails("train", cache, "--arch", "1x32", code=2, says="Start this by torchrun, or unset")


def test_what_processes_cannot_divide_is_refused_under_torchrun(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in (("evaluate", "x"), ("export-model", "x"), ("import", "x"), ("search", "x"), ("speed", "x")):
        command.fails(*words, code=2, says=f"{words[0]} runs in one process, and WORLD_SIZE is 2")
    assert command("ls", "--help")[0] == 0


def test_a_teacher_that_drops_all_attention_trains_students(tmp_path: Path, world: World) -> None:
    dropping = World(tmp_path, save_teacher(tmp_path / "t", attention_probs_dropout_prob=1.0), world.corpus)
    dropping.dump()
    assert go(dropping, steps=2).record.complete


def test_seeds_of_students_that_draw_nothing_are_said_to_be_the_same(world: World, command: Command) -> None:
    world.dump()
    train = ("train", world.root / "cache", "--arch", "1x32", "--arch", "1x32:s1", "--steps", 2, "--init")
    same = command(*train, "slice", "--dropout", "none", "--out", world.root / "same")
    drawn = command(*train, "random", "--dropout", "none", "--out", world.root / "drawn")

    assert (same[0], drawn[0]) == (0, 0)
    assert "1x32:s1 as 1x32: students that begin with the same weights" in same[2]
    assert "begin with the same weights" not in drawn[2]


def test_families_without_dropout_draw_nothing(tmp_path: Path, command: Command) -> None:
    world = World(
        tmp_path, save_teacher(tmp_path / "teacher", "modernbert"), write_corpus(tmp_path / "corpus.txt")
    )
    world.dump()
    shapes = ("--arch", "4x32:ff48", "--arch", "4x32:ff48:s1", "--init", "slice", "--steps", 1)
    code, _, err = command(
        "train", world.root / "cache", *shapes, "--device", "cpu", "--out", tmp_path / "run"
    )
    assert code == 0, err
    assert "4x32:ff48:s1 as 4x32:ff48: students that begin with the same weights" in err


def test_students_that_are_gone_are_written_again(world: World, command: Command) -> None:
    world.dump()
    run = world.root / "run"
    shapes = ("--arch", "2x16", "--arch", "1x32")
    train = ("train", world.root / "cache", *shapes, "--steps", 4, "--batch-size", 4, "--out", run)
    assert command(*train)[0] == 0
    other_card = run / "students/1x32/README.md"
    other_card.write_text(other_card.read_text() + "mine\n")
    folder, away = run / "students/2x16", world.root / "away"
    before = (folder / "model.safetensors").read_bytes()
    folder.rename(away)
    code, _, err = command(*train)
    assert code == 0, err
    assert "2x16 is gone: the students are written again from the last state" in err
    assert (folder / "model.safetensors").read_bytes() == before
    assert other_card.read_text().endswith("mine\n")
    (folder / "model.safetensors").unlink()
    assert command(*train)[0] == 0
    assert (folder / "model.safetensors").read_bytes() == before
    assert "already complete" in command(*train)[2]

    (folder / "model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    other = "other weights than those that the run has written"
    command.fails(*train, code=1, says=(other, str(folder)))
    code, printed, _ = command("info", run)
    assert (code, "caution" in printed) == (0, True)
    assert other in json.loads(command("info", run, "--json")[1])["caution"]
    begun = ("--arch", "2x16", "--steps", 2, "--init", run, "--out", world.root / "begun")
    command.fails("train", world.root / "cache", *begun, code=1, says=other)
    shutil.rmtree(folder)
    shutil.rmtree(run / "checkpoints")
    command.fails(*train, code=1, says=(str(folder), "is gone", "no state"))


@pytest.mark.parametrize("file", ["state.json", "2x16.safetensors"])
def test_a_damaged_state_names_the_older_one(world: World, file: str) -> None:
    cache, run = world.dump().path, world.root / "run"
    config = settings(arch=("2x16",), steps=8, checkpoint_steps=2, keep_checkpoints=3, batch_size=4)
    with pytest.raises(InterruptedRunError):
        train_students(config, cache, out=run, session=Session(world.home, should_stop=stop_after(6)))
    newest, older = sorted((run / "checkpoints").glob("step-*"))[:-3:-1]
    (newest / file).write_bytes(b"!!")
    with pytest.raises(IdentityMismatchError, match=f"Remove {newest}: .* goes on from {older.name}"):
        train_students(config, cache, out=run, session=Session(world.home))
    shutil.rmtree(newest)
    result = train_students(config, cache, out=run, session=Session(world.home))
    expected = train_students(config, cache, out=world.root / "whole", session=Session(world.home))
    assert_same(weights(result)["2x16"], weights(expected)["2x16"])


def test_layers_that_do_not_fit_unchanged_name_the_shape_that_does(world: World, command: Command) -> None:
    cache = world.dump().path
    asked = ("--arch", "1x32", "--init", "teacher-layers", "--steps", 2, "--out", world.root / "run")
    says = ("a feed-forward size of 128", "Take --arch 1x32:ff64")
    command.fails("train", cache, *asked, code=2, says=says)
