"""Commands in processes of their own: signals, kills, and a file system that refuses."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import InterruptedRunError
from tests.integration.dump.test_dump import arrays_of, stop_after
from tests.support import World, dump_arguments

COMMAND = [sys.executable, "-m", "minilm_cache"]


class Process:
    """The command line in a process of its own."""

    def __init__(self, world: World, *arguments: object, limit_bytes: int | None = None) -> None:
        """Start a command; `limit_bytes`: no file may grow larger."""

        def limit() -> None:
            if limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            env={**os.environ, "MINILM_CACHE_HOME": str(world.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )

    def wait_for(self, path: Path) -> None:
        """Wait until a file is there."""
        deadline = time.monotonic() + 120
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return exit code and stderr."""
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_dump_keeps_its_shards_and_goes_on(world: World, number: signal.Signals) -> None:
    world.corpus.write_text(world.corpus.read_text() * 20)
    arguments = dump_arguments(world, "--shard-tokens", 1024)
    process = Process(world, *arguments, "--batch-size", 1)
    process.wait_for(world.root / "cache/commits/00001.json")
    process.process.send_signal(number)
    code, err = process.end()

    assert code == 130
    assert "Run the same command again to go on." in err
    assert "Traceback" not in err
    kept = {file: file.read_bytes() for file in (world.root / "cache/commits").glob("*.json")}
    assert len(kept) >= 2
    assert Process(world, *arguments).end()[0] == 0
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
    process = Process(world, *arguments)
    process.wait_for(world.root / "run/log.jsonl")
    time.sleep(1)
    process.process.send_signal(signal.SIGINT)
    code, err = process.end()

    assert code == 130
    assert "is kept in" in err
    assert "Traceback" not in err
    (checkpoint,) = (world.root / "run/checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["step"] > 0
    kept = json.loads((checkpoint / "state.json").read_text())["step"]
    process = Process(world, *arguments)
    process.wait_for(world.root / "run/run.json")
    deadline = time.monotonic() + 60
    while f'"step": {kept + 10 - kept % 10}' not in (world.root / "run/log.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.process.send_signal(signal.SIGTERM)
    code, err = process.end()

    assert code == 130
    assert f"resuming after step {kept}" in err
    (checkpoint,) = (world.root / "run/checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["step"] > kept


def test_a_file_system_that_refuses_is_one_line(world: World) -> None:
    """A limit on file sizes stands in for a full disk: the same failure of the same calls."""
    with pytest.raises(InterruptedRunError):
        dump_cache(world.config(k=6), out=world.root / "cache", home=world.home, should_stop=stop_after(4))
    committed = {file: file.read_bytes() for file in (world.root / "cache/commits").iterdir()}
    code, err = Process(world, *dump_arguments(world), limit_bytes=2500).end()

    assert code == 1, err
    assert committed
    assert all(file.read_bytes() == content for file, content in committed.items())
    assert err.count("error: ") == 1
    assert "File too large" in err
    assert "Traceback" not in err
    assert Process(world, *dump_arguments(world)).end()[0] == 0
    assert arrays_of(world.root / "cache") == arrays_of(world.dump("whole").path)


IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
FULL_THEN_READ_ONLY = """
mount -t tmpfs -o size=150k none "$MOUNT" || exit 77
dump() { "$@" >&2; echo $?; }
dump "$@"
mount -o remount,ro "$MOUNT"; dump "$@"
mount -o remount,rw,size=64m "$MOUNT"; dump "$@"
cp -r "$MOUNT" "$MOUNT.kept"
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
        [*IN_A_NAMESPACE, "sh", "-c", FULL_THEN_READ_ONLY, "sh", *COMMAND, *map(str, arguments)],
        env={**os.environ, "MINILM_CACHE_HOME": str(world.home), "MOUNT": str(mount)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "1", "0"], done.stderr
    assert "Free some space and run the same command again" in done.stderr
    assert "Read-only file system. Choose a folder on a writable file system" in done.stderr
    assert "Traceback" not in done.stderr
    assert arrays_of(Path(f"{mount}.kept/cache")) == arrays_of(world.dump("whole").path)


def test_a_killed_dump_resumes(world: World) -> None:
    world.corpus.write_text(world.corpus.read_text() * 5)
    expected = world.dump("whole", batch_size=4).path
    process = Process(world, *dump_arguments(world, "--batch-size", 4))
    process.wait_for(world.root / "cache/commits/00001.json")
    process.process.kill()
    process.end()
    code, err = Process(world, *dump_arguments(world, "--batch-size", 4)).end()

    assert code == 0, err
    files = [file.relative_to(expected) for file in (expected / "relations").rglob("*") if file.is_file()]
    for file in files:
        assert (world.root / "cache" / file).read_bytes() == (expected / file).read_bytes()
