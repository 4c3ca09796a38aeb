"""Commands in processes of their own: signals, kills, and a file system that refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minilm_cache.dump.config import VerifyConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.session import Session
from minilm_cache.workflows.verify import verify_cache
from tests.integration.dump.test_dump import arrays_of, stop_after
from tests.processes import CommandProcess
from tests.support import World, dump_arguments


def start(world: World, *arguments: object, limit_bytes: int | None = None) -> CommandProcess:
    """Start a command with the world's home."""
    return CommandProcess(*arguments, environment={"MINILM_CACHE_HOME": world.home}, limit_bytes=limit_bytes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_dump_keeps_its_shards_and_goes_on(world: World, number: signal.Signals) -> None:
    world.corpus.write_text(world.corpus.read_text() * 20)
    arguments = dump_arguments(world, "--shard-tokens", 1024)
    process = start(world, *arguments, "--batch-size", 1)
    process.wait_for(world.root / "cache/commits/00001.json")
    process.send(number)
    code, _, err = process.end()

    assert code == 130
    assert "Run the same command again to go on." in err
    assert "Traceback" not in err
    kept = {file: file.read_bytes() for file in (world.root / "cache/commits").glob("*.json")}
    assert len(kept) >= 2
    assert start(world, *arguments).end()[0] == 0
    assert {file: file.read_bytes() for file in kept} == kept


def test_an_interrupted_training_keeps_its_state_and_goes_on(world: World) -> None:
    world.dump()
    arguments = [
        "train",
        world.root / "cache",
        "--arch",
        "2x64",
        "--steps",
        4000,
        "--out",
        world.root / "run",
    ]
    process = start(world, *arguments)
    process.wait_for(world.root / "run/log.jsonl")
    time.sleep(1)
    process.send(signal.SIGINT)
    code, _, err = process.end()

    assert code == 130
    assert "is kept in" in err
    assert "Traceback" not in err
    (checkpoint,) = (world.root / "run/checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["step"] > 0
    kept = json.loads((checkpoint / "state.json").read_text())["step"]
    process = start(world, *arguments)
    process.wait_for(world.root / "run/run.json")
    deadline = time.monotonic() + 60
    while f'"step": {kept + 10 - kept % 10}' not in (world.root / "run/log.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send(signal.SIGTERM)
    code, _, err = process.end()

    assert code == 130
    assert f"resuming after step {kept}" in err
    (checkpoint,) = (world.root / "run/checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["step"] > kept


def test_a_file_system_that_refuses_is_one_line(world: World) -> None:
    """A limit on file sizes stands in for a full disk: the same failure of the same calls."""
    with pytest.raises(InterruptedRunError):
        dump_cache(
            world.config(k=6),
            out=world.root / "cache",
            session=Session(world.home, should_stop=stop_after(4)),
        )
    committed = {file: file.read_bytes() for file in (world.root / "cache/commits").iterdir()}
    code, _, err = start(world, *dump_arguments(world), limit_bytes=2500).end()

    assert code == 1, err
    assert committed
    assert all(file.read_bytes() == content for file, content in committed.items())
    assert err.count("error: ") == 1
    assert "File too large" in err
    assert "Traceback" not in err
    assert start(world, *dump_arguments(world)).end()[0] == 0
    assert arrays_of(world.root / "cache") == arrays_of(world.dump("whole").path)


IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
FULL_THEN_READ_ONLY = """
import os, shutil, subprocess, sys
from minilm_cache.cli.main import run

def mount(*options):
    subprocess.run(["mount", *options, os.environ["MOUNT"]], check=True)

mount("-t", "tmpfs", "-o", "size=150k", "none")
codes = [run(sys.argv[1:])]
mount("-o", "remount,ro")
codes.append(run(sys.argv[1:]))
mount("-o", "remount,rw,size=64m")
codes.append(run(sys.argv[1:]))
shutil.copytree(os.environ["MOUNT"], os.environ["MOUNT"] + ".kept")
print("ended with", *codes)
"""
"""Prints exit codes: of a dump into a file system that is full, then read-only, then has room."""


@pytest.mark.skipif(
    subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="this system lets no test mount a file system",
)
def test_a_full_and_a_read_only_file_system_lose_nothing(world: World) -> None:
    mount = world.root / "mount"
    mount.mkdir()
    arguments = dump_arguments(world, "--out", mount / "cache")
    done = subprocess.run(
        [*IN_A_NAMESPACE, sys.executable, "-c", FULL_THEN_READ_ONLY, *map(str, arguments)],
        env={**os.environ, "MINILM_CACHE_HOME": str(world.home), "MOUNT": str(mount)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "ended with 1 1 0", done.stderr
    assert "Free some space and run the same command again" in done.stderr
    assert "Read-only file system. Choose a folder on a writable file system" in done.stderr
    assert "Traceback" not in done.stderr
    assert arrays_of(Path(f"{mount}.kept/cache")) == arrays_of(world.dump("whole").path)


@pytest.mark.parametrize("closed", [">&-", "<&- 2>&-"])
def test_a_process_without_streams_does_its_work(world: World, closed: str) -> None:
    """Supervisors start some like this. What is printed leads nowhere, and is written into no file."""
    words = [sys.executable, "-m", "minilm_cache", *map(str, dump_arguments(world))]
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *words], check=False, capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert verify_cache(world.root / "cache", VerifyConfig(full=True)).verdict.damage == ()


def test_a_killed_dump_resumes(world: World) -> None:
    world.corpus.write_text(world.corpus.read_text() * 5)
    expected = world.dump("whole", batch_size=4).path
    process = start(world, *dump_arguments(world, "--batch-size", 4))
    process.wait_for(world.root / "cache/commits/00001.json")
    process.send(signal.SIGKILL)
    process.end()
    code, _, err = start(world, *dump_arguments(world, "--batch-size", 4)).end()

    assert code == 0, err
    files = [file.relative_to(expected) for file in (expected / "relations").rglob("*") if file.is_file()]
    for file in files:
        assert (world.root / "cache" / file).read_bytes() == (expected / file).read_bytes()
