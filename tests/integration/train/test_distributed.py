"""Several processes under torchrun: the same students whoever trains what, and whoever is killed."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from minilm_cache.errors import StorageError
from minilm_cache.session import Session
from minilm_cache.train import heldout
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import arch_slug
from minilm_cache.train.heldout import HeldOutLosses
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.record import load_record
from minilm_cache.train.run import train_students
from tests.integration.train.test_train import settings
from tests.processes import CONTEXT, by_two_ranks, free_port, two_ranks
from tests.support import World, save_teacher, write_corpus

ARCHS = ("2x16", "1x32", "3x16")
STEPS = 12
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def words(world: World, out: Path, *options: object) -> list[object]:
    """Return a training as words of the command line."""
    archs = [word for arch in ARCHS for word in ("--arch", arch)]
    begin = ["train", world.root / "cache", *archs, "--batch-size", 8, "--device", "cpu", "--lr", 5e-3]
    return [*begin, "--max-grad-norm", 0.01, "--out", out, "--json", *options]


def torchrun(world: World, out: Path, *options: object) -> subprocess.Popen[str]:
    """Start a training by two processes of torchrun."""
    return subprocess.Popen(
        [*TORCHRUN, "-m", "minilm_cache", *map(str, words(world, out, *options))],
        env={**os.environ, **ENVIRONMENT, "MINILM_CACHE_HOME": str(world.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def by_two(world: World, out: Path, *options: object) -> tuple[list[int], str, str]:
    """Train by two processes with the environment that torchrun gives them; return what they end with."""
    environment = ENVIRONMENT | {"MINILM_CACHE_HOME": world.home}
    return by_two_ranks(*words(world, out, *options), environment=environment)


def check_common(number: int, port: int, folder: Path, said: Path) -> None:
    """Check a folder as one of two processes, and write what is wrong with it."""
    os.environ.update({"WORLD_SIZE": "2", "RANK": str(number), "LOCAL_RANK": str(number)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    ranks = Ranks.join("data", "cpu")
    try:
        ranks.check_common(folder)
    except StorageError as error:
        said.write_text(str(error))
    ranks.leave()


@pytest.mark.parametrize("is_common", [True, False])
def test_processes_without_a_common_folder_all_say_so(tmp_path: Path, is_common: bool) -> None:
    port, said = free_port(), [tmp_path / "0", tmp_path / "1"]
    folders = [tmp_path / "run", tmp_path / ("run" if is_common else "other")]
    processes = [
        CONTEXT.Process(target=check_common, args=(number, port, folders[number], said[number]))
        for number in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)

    assert [process.exitcode for process in processes] == [0, 0]
    texts = [file.read_text() for file in said if file.exists()]
    assert texts == ([] if is_common else [texts[0]] * 2)
    assert is_common or f"does not see what another machine writes in {folders[1]}" in texts[0]


def train_unlike(number: int, port: int, world: World) -> None:
    """Train as one of two replicas, the second of which finds students worse the longer they learn."""
    os.environ.update({"WORLD_SIZE": "2", "RANK": str(number), "LOCAL_RANK": str(number)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    worse, measured = itertools.count(1), heldout.held_out_losses

    def by_another_device(*given: Any) -> list[HeldOutLosses]:
        factor = next(worse) if number else 1
        return [{name: value * factor for name, value in losses.items()} for losses in measured(*given)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minilm_cache.train.run.held_out_losses", by_another_device)
        alone(world, world.root / "two", arch=ARCHS[:1], eval_steps=4)


def test_replicas_on_unlike_devices_keep_the_best_weights_of_the_first(world: World) -> None:
    world.dump()
    port = free_port()
    processes = [CONTEXT.Process(target=train_unlike, args=(number, port, world)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)

    assert [process.exitcode for process in processes] == [0, 0]
    assert [student.best_step for student in load_record(world.root / "two").students] == [STEPS]


def alone(world: World, out: Path, **changes: object) -> Path:
    """Train in this process."""
    config: TrainConfig = settings(
        **{"arch": ARCHS, "batch_size": 8, "steps": STEPS, "max_grad_norm": 0.01, **changes}
    )
    return train_students(config, world.root / "cache", out=out, session=Session(world.home)).path


def curve(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    means = [line.get("students", line.get("held_out")) for line in lines]
    return [value for one in means for arch in ARCHS for value in one[arch].values()]


def weights(run: Path, arch: str) -> dict[str, torch.Tensor]:
    return load_file(run / "students" / arch_slug(arch) / "model.safetensors")


def assert_alike(run: Path, expected: Path) -> None:
    assert curve(run) == pytest.approx(curve(expected), rel=1e-4)
    for arch in ARCHS:
        for name, weight in weights(expected, arch).items():
            # Adam makes as much of the rounding in a gradient that should be zero as of any other.
            torch.testing.assert_close(weights(run, arch)[name], weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("packing", ["packed", "records"])
def test_processes_that_divide_the_data_train_what_one_does(world: World, packing: str) -> None:
    """Two processes are one with twice the parts; sequences of unlike lengths weigh as many tokens."""
    world.dump(packing=packing)
    codes, out, err = by_two(world, world.root / "two", "--steps", STEPS)
    assert codes == [0, 0], err

    assert [student["arch"] for student in json.loads(out)["students"]] == list(ARCHS)
    assert err.count("objective minilm") == 1
    assert_alike(world.root / "two", alone(world, world.root / "one", accumulate=2, streams=2))


@pytest.mark.parametrize("objective", ["tinybert", "mlm-kd"])
def test_processes_share_what_objectives_learn(tmp_path: Path, objective: str) -> None:
    """Projections, heads, and means over masked tokens of unlike lengths."""
    teacher = save_teacher(tmp_path / "teacher", head="tokens")
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    world.dump(**{"for": objective}, codec="vectors", packing="records")
    codes, _, err = by_two(world, world.root / "two", "--steps", STEPS, "--objective", objective)
    assert codes == [0, 0], err

    one = alone(world, world.root / "one", accumulate=2, streams=2, objective=objective)
    # Gradients of attention are small beside their rounding here, and Adam makes as much of it.
    assert curve(world.root / "two") == pytest.approx(curve(one), rel=5e-3)


def test_processes_that_divide_the_students_train_what_one_does(world: World) -> None:
    world.dump()
    options = ("--steps", STEPS, "--place", "students", "--eval-steps", 6)
    codes, out, err = by_two(world, world.root / "two", *options)
    assert codes == [0, 0], err

    one = alone(world, world.root / "one", eval_steps=6)
    assert json.loads(out)["students"][2]["held_out_after"] is not None
    assert_alike(world.root / "two", one)


@pytest.mark.parametrize("place", ["data", "students"])
def test_a_rank_that_is_killed_is_taken_up_again(world: World, place: str, soak: int) -> None:
    if soak == 1 and place == "students":
        pytest.skip("processes that divide the data wait for each other more often; both with --soak")
    world.dump()
    steps = 40
    options = ("--steps", steps, "--checkpoint-steps", 5, "--place", place)
    run = world.root / "killed"
    process = torchrun(world, run, *options)
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks = [child for child in psutil.Process(process.pid).children() if "train" in child.cmdline()]
    ranks[1].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "minilm_cache/train" not in err  # no traceback of ours
    assert not (run / "students").exists()

    codes, _, err = by_two(world, run, *options)
    assert codes == [0, 0], err
    assert "resuming after step" in err
    if place == "students":  # each process trains its students as a process of their own does
        alone(world, world.root / "whole", steps=steps, checkpoint_steps=5)
    else:
        codes, _, err = by_two(world, world.root / "whole", *options)
        assert codes == [0, 0], err
    assert curve(run) == curve(world.root / "whole")
    for arch in ARCHS:
        for name, weight in weights(world.root / "whole", arch).items():
            assert torch.equal(weights(run, arch)[name], weight), (arch, name)


def test_an_interrupt_stops_all_processes_at_one_step(world: World) -> None:
    world.dump()
    run = world.root / "two"
    command = words(world, run, "--steps", 100_000, "--checkpoint-steps", 25)
    ranks = two_ranks(*command, environment=ENVIRONMENT | {"MINILM_CACHE_HOME": world.home})
    ranks[0].wait_for(run / "checkpoints/step-*")
    ranks[1].send(signal.SIGINT)
    codes, _, errs = zip(*(rank.end() for rank in ranks), strict=True)
    assert 0 not in codes
    assert "is kept in" in errs[0]
    (last,) = run.glob("checkpoints/step-*")
    assert json.loads((last / "state.json").read_text())["step"] == int(last.name.removeprefix("step-"))


def test_settings_that_do_not_divide_are_refused(world: World) -> None:
    world.dump()
    codes, _, err = by_two(world, world.root / "two", "--steps", 2, "--batch-size", 7)
    assert 0 not in codes
    assert "--batch-size 7 does not divide into 2 parts" in err
    assert "minilm_cache/" not in err.replace("minilm_cache/cli", "")
