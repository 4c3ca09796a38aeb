"""Options of a training other than its shapes: each does what it says, and nothing else."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minilm_cache.cache import open_cache
from minilm_cache.errors import IdentityMismatchError, InterruptedRunError, InvalidConfigError
from minilm_cache.models import device as cpu
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.batch import UNITS
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.checkpoint import RunState, load_state
from minilm_cache.train.config import TrainConfig, presets, with_preset
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.record import load_record
from minilm_cache.train.resume import read_record
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.fixtures import Command
from tests.integration.cli.test_processes import start
from tests.integration.train.test_train import assert_same, settings, stop_after, weights
from tests.support import TINY, World, save_teacher
from tests.unit.store.support import Recorder

CPU = Ranks.alone(torch.device("cpu"))
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def go(world: World, name: str = "run", **changes: Any) -> TrainResult:
    """Train on the world's cache."""
    return train_students(
        settings(**changes), world.root / "cache", out=world.root / name, session=Session(world.home)
    )


def lines(result: TrainResult, kind: str) -> list[dict[str, Any]]:
    log = [json.loads(line) for line in (result.path / "log.jsonl").read_text().splitlines()]
    return [line for line in log if kind in line]


def trainer_of(world: World, arch: str = "2x16", **changes: Any) -> tuple[StudentTrainer, BatchReader]:
    """Return a student and what reads batches for it."""
    cache = open_cache(world.root / "cache")
    config = settings(arch=(arch,), **changes)
    objective = choose_objective(config, cache, arch=config.arch)
    shapes = [parse_arch(arch, cache.manifest.identity.relation_heads)]
    (trainer,) = build_trainers(config, cache, shapes=shapes, objective=objective, steps=12, ranks=CPU)
    return trainer, BatchReader(cache, objective.wanted, pad_token=0, device=CPU.device)


@pytest.fixture
def still(tmp_path: Path, world: World) -> World:
    """Return a world whose models drop nothing out, with a cache of sequences of unlike lengths."""
    still = World(tmp_path, save_teacher(tmp_path / "still", **NO_DROPOUT), world.corpus)
    still.dump(packing="records")
    return still


def test_the_weights_closest_to_the_teacher_become_the_student(world: World) -> None:
    world.dump()
    result = go(world, steps=40, lr=0.3, warmup=0.0, eval_steps=8, keep_checkpoints=1)
    looks = lines(result, "held_out")

    assert [look["step"] for look in looks] == [8, 16, 24, 32, 40]
    for student in result.record.students:
        sums = {look["step"]: look["held_out"][student.arch]["loss"] for look in looks}
        assert student.best_step == min(sums, key=lambda step: sums[step])
        assert student.held_out_after is not None
        assert sum(student.held_out_after.values()) == pytest.approx(sums[student.best_step], rel=1e-5)
    assert any(student.best_step != 40 for student in result.record.students)


def test_looking_at_held_out_sequences_changes_nothing(world: World) -> None:
    world.dump()
    plain, looked = go(world, "plain", steps=20), go(world, "looked", steps=20, eval_steps=3)
    for arch in ("2x16", "1x32"):
        left = [line["students"][arch] for line in lines(plain, "students")]
        right = {line["step"]: line["students"][arch] for line in lines(looked, "students")}
        assert left[-1]["loss"] > 0
        assert set(right) == {3, 6, 9, 10, 12, 15, 18, 20}
    last = max(student.best_step or 0 for student in looked.record.students)
    if last == 20:
        best = next(student.arch for student in looked.record.students if student.best_step == 20)
        assert_same(weights(looked)[best], weights(plain)[best])


def test_a_resumed_run_finds_its_best_weights_again(world: World) -> None:
    cache = world.dump().path
    options = settings(steps=40, lr=0.3, warmup=0.0, eval_steps=8)
    with pytest.raises(InterruptedRunError):
        train_students(
            options, cache, out=world.root / "run", session=Session(world.home, should_stop=stop_after(27))
        )
    resumed = train_students(options, cache, out=world.root / "run", session=Session(world.home))
    whole = train_students(options, cache, out=world.root / "whole", session=Session(world.home))
    assert resumed.record.students == whole.record.students
    for arch, expected in weights(whole).items():
        assert_same(weights(resumed)[arch], expected)


@pytest.mark.parametrize(("keep", "left"), [(0, []), (1, [40]), (3, [20, 30, 40])])
def test_the_newest_checkpoints_are_kept(world: World, keep: int, left: list[int]) -> None:
    world.dump()
    result = go(world, steps=40, checkpoint_steps=10, keep_checkpoints=keep)
    found = sorted(folder.name for folder in result.path.glob("checkpoints/step-*"))
    assert found == [f"step-{step:08d}" for step in left]


def test_a_run_that_is_over_goes_on_with_more_steps(world: World) -> None:
    """Oracle: a run of 40 steps that is stopped after 20 and resumes from the first run's state."""
    world.dump()

    def stopped(name: str, steps: int) -> None:
        cache, out = world.root / "cache", world.root / name
        with pytest.raises(InterruptedRunError):
            train_students(
                settings(steps=40), cache, out=out, session=Session(world.home, should_stop=stop_after(steps))
            )

    first = go(world, steps=20)
    stopped("run", 5)
    assert not load_record(first.path).complete
    longer = go(world, steps=40)
    stopped("whole", 20)
    again = go(world, "again", steps=20)
    states = "checkpoints/step-00000020"
    state_file = world.root / "whole" / states / "state.json"
    state = RunState.model_validate_json(state_file.read_bytes())
    for file in (world.root / "whole" / states).glob("*.safetensors"):
        shutil.copy(again.path / states / file.name, file)
    state_file.write_text(state.sealed(load_state(again.path / "checkpoints").files or {}).model_dump_json())
    whole = go(world, "whole", steps=40)
    for arch, expected in weights(whole).items():
        assert_same(weights(longer)[arch], expected)
    assert longer.record.continued_at == (20,)
    assert longer.record.recipe != whole.record.recipe
    assert longer.record.students[0].held_out_before == first.record.students[0].held_out_before


def test_a_run_whose_state_was_not_kept_cannot_go_on(world: World) -> None:
    world.dump()
    result = go(world, steps=20, keep_checkpoints=0, eval_steps=10)
    kept = {path.name for path in result.path.iterdir()}
    assert not {"checkpoints", "best"} & kept, "weights of students are kept twice"
    with pytest.raises(IdentityMismatchError, match=f"not there .* --init {result.path} and another --out"):
        go(world, steps=40, eval_steps=10)
    with pytest.raises(IdentityMismatchError, match=r"holds another run, which differs in steps"):
        go(world, steps=10, eval_steps=10)
    assert load_record(result.path).complete


def test_a_run_that_never_began_leaves_its_folder_free(world: World) -> None:
    world.dump()
    with pytest.raises(InvalidConfigError, match="No module named 'wandb'"):
        go(world, steps=20, tracker="wandb")
    assert go(world, steps=10).record.identity.steps == 10


def test_a_step_larger_than_the_cache_is_refused(world: World) -> None:
    world.dump()
    with pytest.raises(InvalidConfigError, match=r"--batch-size 10000: the cache has \d+ sequences"):
        go(world, batch_size=10_000)


def test_a_run_stops_when_its_hours_are_over_and_goes_on(world: World) -> None:
    world.dump()
    with pytest.raises(InterruptedRunError, match="the hours of --max-hours are over: the state after step"):
        go(world, max_hours=1e-9)
    resumed, whole = go(world), go(world, "whole")
    for arch, expected in weights(whole).items():
        assert_same(weights(resumed)[arch], expected)


def test_parts_of_a_step_add_up_to_it(still: World) -> None:
    """Sequences of unlike lengths: a part weighs as many tokens as it has."""
    common = {"batch_size": 8, "max_grad_norm": 0.01, "steps": 20}
    whole, parts = go(still, "whole", **common), go(still, "parts", accumulate=4, **common)
    for left, right in zip(lines(whole, "students"), lines(parts, "students"), strict=True):
        for arch in ("2x16", "1x32"):
            # Attention without a mask, in parts that happen to have no padding, rounds otherwise.
            assert right["students"][arch] == pytest.approx(left["students"][arch], rel=3e-5)
    for arch, expected in weights(whole).items():
        for name, weight in weights(parts)[arch].items():
            # Adam makes as much of the rounding in a gradient that should be zero as of any other.
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-3)


def test_gradient_checkpointing_changes_no_bit(world: World) -> None:
    world.dump()
    plain, saving = go(world, "plain"), go(world, "saving", gradient_checkpointing=True)
    for arch, expected in weights(plain).items():
        assert_same(weights(saving)[arch], expected)


def test_activations_inside_layers_are_not_kept(world: World) -> None:
    world.dump()
    sizes = []
    for checkpointing in (False, True):
        trainer, reader = trainer_of(world, gradient_checkpointing=checkpointing)
        batch = next(reader.held_out_batches(4, 4))
        kept: list[int] = []

        def pack(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        trainer.begin(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer._losses(trainer.learner, batch, method=None)
        sizes.append(sum(kept))
    assert sizes[1] < 0.6 * sizes[0]


def test_compiled_layers_train_the_same(still: World) -> None:
    """In a process of its own: the compiler cannot look through the tests' type checks."""
    plain = go(still, "plain", arch=("1x16",), steps=3, init="random")
    options = ("--batch-size", 4, "--lr", 5e-3, "--device", "cpu", "--steps", 3, "--init", "random")
    train = ("train", still.root / "cache", "--arch", "1x16", *options, "--out", still.root / "run")
    process = start(still, *train, "--compile")
    code, _, err = process.end()
    assert code == 0, err
    found = load_file(still.root / "run/students/1x16/model.safetensors")
    for name, expected in weights(plain)["1x16"].items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-3)
    assert json.loads((still.root / "run/run.json").read_text())["identity"]["compiled"]


def test_bfloat16_is_of_matrix_products_alone(world: World) -> None:
    world.dump()
    plain, rounded = go(world, "plain", steps=20), go(world, "rounded", steps=20, precision="bfloat16")
    for arch in ("2x16", "1x32"):
        left, right = (lines(run, "students")[-1]["students"][arch]["loss"] for run in (plain, rounded))
        assert left != right
        assert right == pytest.approx(left, rel=0.02)
        assert {weight.dtype for weight in weights(rounded)[arch].values()} == {torch.float32}


def test_a_cpu_with_instructions_for_bfloat16_says_what_they_are_worth(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dump()
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu, "CPUINFO", info)
    hint = "this CPU trains in about half the time with --precision bfloat16"
    notes = {}
    for number, flags in enumerate(("avx512f avx512_bf16 fpu", "amx_bf16", "avx512f", None)):
        if flags:
            info.write_text(f"model name\t: a CPU\nflags\t\t: {flags}\n")
        else:
            info.unlink()
        for precision in (None, "float32"):
            progress = Recorder()
            changes = settings(steps=1, precision=precision)
            out = tmp_path / f"run-{number}-{precision}"
            train_students(
                changes, world.root / "cache", out=out, session=Session(world.home, progress=progress)
            )
            notes[flags, precision] = hint in progress.notes
            again = Recorder()  # a run that is there keeps its precision
            train_students(
                changes, world.root / "cache", out=out, session=Session(world.home, progress=again)
            )
            assert hint not in again.notes
    assert [key for key, is_said in notes.items() if is_said] == [
        ("avx512f avx512_bf16 fpu", None),
        ("amx_bf16", None),
    ]


def test_gradients_are_clipped_to_the_norm(world: World) -> None:
    world.dump()
    norms = []
    for limit in (None, 1e-3):
        trainer, reader = trainer_of(world, max_grad_norm=limit)
        trained = trainer.trained
        trainer.optimizer.register_step_pre_hook(
            lambda *_, trained=trained: norms.append(
                torch.nn.utils.get_total_norm([weight.grad for weight in trained if weight.grad is not None])
            )
        )
        trainer.step(next(reader.held_out_batches(4, 4)), 0)
    assert norms[0] > 1e-2
    assert float(norms[1]) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("family", TINY)
def test_what_gets_no_gradient_is_frozen_and_nothing_else(tmp_path: Path, family: str) -> None:
    world = World(tmp_path, save_teacher(tmp_path / "teacher", family), tmp_path / "corpus.txt")
    world.corpus.write_text("ba be bi bo\n\nfa fe fi fo fun fan\n\n" * 20)
    world.dump()
    trainer, reader = trainer_of(world)
    trainer.begin(0)
    trainer.learn(next(reader.held_out_batches(4, 4)), 0, dict.fromkeys(UNITS, 1.0))
    for name, weight in trainer.model.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, name
    assert not all(weight.requires_grad for weight in trainer.model.parameters())


def test_students_of_one_shape_may_have_seeds_of_their_own(world: World) -> None:
    world.dump()
    together = go(world, "together", arch=("1x32", "1x32:s1"))
    alone = go(world, "alone", arch=("1x32",), seed=0)
    first, second = weights(together)["1x32"], weights(together)["1x32:s1"]
    assert_same(first, weights(alone)["1x32"])
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_a_tracker_is_told_what_the_log_is_told(world: World) -> None:
    world.dump()
    result = go(world, steps=20, eval_steps=10, tracker="tensorboard")
    found = EventAccumulator(str(result.path / result.path.name))
    found.Reload()
    shown = {scalar.step: scalar.value for scalar in found.Scalars("1x32/students/loss")}
    logged = {line["step"]: line["students"]["1x32"]["loss"] for line in lines(result, "students")}
    assert shown == pytest.approx(logged)
    assert [scalar.step for scalar in found.Scalars("1x32/held_out/attention")] == [10, 20]


def test_a_tracker_that_is_not_there_is_one_line(world: World, command: Command) -> None:
    cache = world.dump().path
    command.fails(
        *("train", cache, "--arch", "1x32", "--steps", 2, "--tracker", "mlflow"),
        code=2,
        says="Install it: `pip install mlflow`",
    )
    command.fails(*("train", cache, "--arch", "1x32", "--tracker", "paper"), code=2, says="--tracker paper")


def test_a_tracker_that_fails_ends_nothing(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.dump().path

    def unreachable(*_: object, **__: object) -> None:
        sys.stdout.write("trackers print\n")
        raise RuntimeError("no route to host")

    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.log", unreachable)
    options = ("--steps", 20, "--out", world.root / "run", "--tracker", "tensorboard", "--device", "cpu")
    code, out, err = command("train", cache, "--arch", "1x32", *options, "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] == 20
    assert "trackers print" in err
    assert err.count("--tracker tensorboard failed: no route to host. Nothing more is sent to it") == 1


def test_presets_are_printed_and_overridden(world: World, command: Command) -> None:
    cache = world.dump().path
    options = ("--steps", 2, "--batch-size", 4, "--json", "--out", world.root / "run")
    code, _, err = command("train", cache, "--arch", "1x32", "--preset", "minilm", *options)
    assert code == 0, err
    assert "preset minilm: objective minilm, steps 2, warmup 0.01, weight_decay 0.01, batch_size 4" in err
    assert "arXiv 2002.10957" in err
    identity = json.loads((world.root / "run/run.json").read_text())["identity"]
    assert (identity["lr"], identity["warmup"], identity["batch_size"]) == (3e-4, 0.01, 4)
    command.fails("train", cache, "--arch", "1x32", "--preset", "best", code=2, says="minilm-6x768")
    command.fails(
        *("train", cache, "--arch", "1x32", "--preset", "minilm", "--steps", 2, "--epochs", 1),
        code=2,
        says="exclude each other",
    )
    command.fails(
        *("train", cache, "--arch", "1x32", "--compile", "--gradient-checkpointing"),
        code=2,
        says="--compile and --gradient-checkpointing exclude each other",
    )
    given = {"objective": "minilm", "epochs": 2.0}
    assert with_preset("minilmv2", given).keys().isdisjoint({"relation_heads", "steps"})


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_valid_setting(name: str) -> None:
    config = validated(TrainConfig, {"arch": ("6x768",), **presets()[name].settings})
    assert round(config.warmup * (config.steps or 0)) == 4000


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 6, "accumulate": 4}, "--batch-size 6 does not divide into 4 parts"),
        ({"streams": 2}, "--streams 2 does not divide the 1 parts"),
        ({"streams": 999, "accumulate": 999}, "--streams 999 .*: the cache has"),
    ],
)
def test_parts_that_do_not_fit_are_refused(shared_world: World, changes: dict[str, int], says: str) -> None:
    reader = open_cache(shared_world.root / "cache").reader
    with pytest.raises(InvalidConfigError, match=says):
        plan_steps(settings(**changes), reader)


@pytest.mark.parametrize(("accumulate", "num_ranks"), [(4, 1), (2, 2), (1, 4)])
def test_the_parts_of_a_step_are_the_same_whoever_does_them(
    shared_world: World, accumulate: int, num_ranks: int
) -> None:
    """All processes' parts together are all parts, each once, and from the same streams."""
    reader = open_cache(shared_world.root / "cache").reader
    config = settings(batch_size=8, accumulate=accumulate, streams=2)
    plans = [plan_steps(config, reader, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]

    assert sorted(part for plan in plans for part in plan.own_parts) == [0, 1, 2, 3]
    assert all(plan.streams == plans[0].streams and plan.part_size == 2 for plan in plans)


def test_records_of_the_first_releases_stay_as_they_were(shared_world: World, tmp_path: Path) -> None:
    """What came later is left out where it says nothing, so old runs keep their names and go on."""
    config = settings(arch=("1x16",), steps=2)
    result = train_students(
        config, shared_world.root / "cache", out=tmp_path / "run", session=Session(tmp_path)
    )
    identity = json.loads((tmp_path / "run/run.json").read_text())["identity"]

    assert identity.keys().isdisjoint({"form", "dealing", "patience", "temperature", "ground_truth"})
    assert read_record(tmp_path / "run", result.record.identity) == result.record
    assert result.record.identity.model_copy(update={"patience": 0.0}).name() != result.record.identity.name()
    hints = {("form", "authors"): "--form paper", ("dealing", "sequences"): "only go on with"}
    for (name, value), hint in hints.items():
        other = result.record.identity.model_copy(update={name: value})
        with pytest.raises(IdentityMismatchError, match=hint):
            read_record(tmp_path / "run", other)


def test_a_run_knows_where_its_cache_was_moved_to(world: World) -> None:
    moved = world.dump().path
    result = go(world, steps=4)
    moved.rename(world.root / "moved")
    again = train_students(
        settings(steps=4), world.root / "moved", out=result.path, session=Session(world.home)
    )
    assert again.record.cache == load_record(result.path).cache == str(world.root / "moved")
