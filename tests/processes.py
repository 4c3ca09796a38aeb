"""The command line in processes of its own, which start at once: a server that has imported it forks them."""

import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from minilm_cache.cli import entry
from minilm_cache.dump.run import dump_cache
from minilm_cache.train.run import train_students

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes that have imported this module."""
CONTEXT.set_forkserver_preload(["tests.processes"])
IMPORTED = (dump_cache, train_students)
"""What most of the time of a start goes into."""


def _run(
    arguments: list[str], environment: dict[str, str], printed: tuple[str, str], limit_bytes: int | None
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(printed, start=1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    sys.argv = ["minilm-cache", *arguments]
    entry.main()


class CommandProcess:
    """The command line in a process of its own."""

    def __init__(
        self, *arguments: object, environment: Mapping[str, object], limit_bytes: int | None = None
    ) -> None:
        """Start a command.

        Args:
            arguments: Its words.
            environment: What its environment has that this one's has not.
            limit_bytes: No file may grow larger. None sets no limit.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._printed = tuple(Path(self._folder.name, name) for name in ("out", "err"))
        for file in self._printed:
            file.touch()
        out, err = map(str, self._printed)
        changed = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        words = [str(word) for word in arguments]
        self._process = CONTEXT.Process(target=_run, args=(words, changed, (out, err), limit_bytes))
        self._process.start()

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait_for(self, path: Path) -> None:
        """Wait until a file is there, whose name may have wildcards."""
        deadline = time.monotonic() + 120
        while not list(path.parent.glob(path.name)):
            assert self._process.exitcode is None, self.end()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end, and return exit code (-9 after SIGKILL), stdout and stderr."""
        self._process.join(200)
        code = self._process.exitcode
        assert code is not None, "it does not end"
        out, err = (file.read_text() for file in self._printed)
        self._folder.cleanup()
        return code, out, err


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def two_ranks(*arguments: object, environment: Mapping[str, object]) -> list[CommandProcess]:
    """Start a command in two processes as torchrun would.

    Both import nothing, and end within a second, where torchrun and its processes take ten.
    """
    both = {**environment, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        CommandProcess(*arguments, environment={**both, "RANK": rank, "LOCAL_RANK": rank})
        for rank in range(2)
    ]


def by_two_ranks(*arguments: object, environment: Mapping[str, object]) -> tuple[list[int], str, str]:
    """Run a command in two processes as torchrun would; return their exit codes, stdout and stderr."""
    ranks = two_ranks(*arguments, environment=environment)
    codes, outs, errs = zip(*(rank.end() for rank in ranks), strict=True)
    return list(codes), "".join(outs), "".join(errs)
