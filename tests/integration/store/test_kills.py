"""SIGKILL at random moments: nothing that was committed is lost, and the end is the one without kills."""

import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.dump.run import dump_cache
from minilm_cache.session import Session
from minilm_cache.store.reader import CacheReader
from minilm_cache.train.record import load_record
from minilm_cache.train.run import train_students
from tests.integration.dump.test_dump import arrays_of
from tests.integration.train.test_train import settings as train_settings
from tests.processes import CONTEXT
from tests.support import World

DUMP_KILLS = 5
"""Kills of dumps with each codec; four times as many with `--soak`."""
TRAIN_KILLS = 4


def run_dump(world: World, out: Path, begun: Any, settings: dict[str, Any]) -> None:
    begun.set()
    dump_cache(world.config(**settings), out=out, session=Session(world.home))


def run_training(world: World, out: Path, begun: Any, settings: dict[str, Any]) -> None:
    begun.set()
    train_students(train_settings(**settings), world.root / "cache", out=out, session=Session(world.home))


class Killer:
    """Runs work in processes of their own, and kills them after a while."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._work = work
        self._arguments = arguments

    def run(self, seconds: float | None, out: Path, settings: dict[str, Any]) -> float | None:
        """Run to the end, and return the seconds that took; none if it was killed before, after so many."""
        begun = CONTEXT.Event()
        process = CONTEXT.Process(target=self._work, args=(*self._arguments, out, begun, settings))
        process.start()
        assert begun.wait(120)
        started = time.perf_counter()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return None
        assert process.exitcode == 0
        return time.perf_counter() - started


def committed(path: Path) -> dict[str, str]:
    """Return the files of every shard that a commit record acknowledges, and their SHA-256."""
    found = {}
    for record in path.glob("commits/[0-9]*.json"):
        content = record.read_bytes()
        found[f"commits/{record.name}"] = hashlib.sha256(content).hexdigest()
        for name, digest in json.loads(content)["files"].items():
            assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest["sha256"]
            found[name] = digest["sha256"]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["topk", "vectors"])
def test_a_dump_killed_at_random_moments_ends_as_if_it_had_not_been(
    world: World, codec: str, soak: int
) -> None:
    if soak == 1 and codec == "topk":
        pytest.skip("codes of `vectors` are more to lose; both codecs are tried with --soak")
    world.corpus.write_text(world.corpus.read_text() * 2)
    settings = {"codec": codec, "batch_size": 2}
    expected = arrays_of(world.dump("whole", **settings).path)
    killer = Killer(run_dump, world)
    whole = killer.run(None, world.root / "timed", settings)
    assert whole is not None
    chance = random.Random(codec)
    kills = acknowledged = rounds = 0
    while kills < DUMP_KILLS * soak or not acknowledged:  # some kill must come after a commit
        out = world.root / f"killed{rounds}"
        before: dict[str, str] = {}
        while killer.run(chance.uniform(0, whole), out, settings) is None:
            kills += 1
            after = committed(out)
            assert before.items() <= after.items()
            acknowledged += len(after) - len(before)
            before = after
        assert before.items() <= committed(out).items()
        assert arrays_of(out) == expected
        assert CacheReader(out).manifest.complete
        assert not list(out.rglob("*.partial"))
        rounds += 1


@pytest.mark.timeout(900)
def test_a_training_killed_at_random_moments_ends_as_if_it_had_not_been(world: World, soak: int) -> None:
    """Weights and the loss curve: bit for bit, on the CPU."""
    world.dump()
    settings = {"steps": 60, "checkpoint_steps": 7}
    killer = Killer(run_training, world)
    whole = killer.run(None, world.root / "whole", settings)
    assert whole is not None
    chance = random.Random(0)
    kills = rounds = 0
    while kills < TRAIN_KILLS * soak:
        out = world.root / f"killed{rounds}"
        while killer.run(chance.uniform(0, whole), out, settings) is None:
            kills += 1
        students = [f"students/{arch}/model.safetensors" for arch in ("2x16", "1x32")]
        for file in ("log.jsonl", *students):
            assert (out / file).read_bytes() == (world.root / "whole" / file).read_bytes(), file
        records = [load_record(run) for run in (out, world.root / "whole")]
        left, right = (one.model_copy(update={"train_s": None, "bytes_read": None}) for one in records)
        assert left == right
        rounds += 1
