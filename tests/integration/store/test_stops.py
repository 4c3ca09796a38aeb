"""What hangs, breaks off or goes on for ever in a store: it is repeated, it ends, and a signal ends it."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import IdentityMismatchError, MiniLMCacheError, StorageError
from minilm_cache.store import object_store
from minilm_cache.store.remote import open_store
from tests.processes import CommandProcess
from tests.s3 import Between
from tests.support import World, pushed


class Trickle(BaseHTTPRequestHandler):
    """Answers one byte at a time, without an end."""

    def do_GET(self) -> None:
        """Send bytes until the other side hangs up."""
        asked = self.headers.get("Range", "bytes=0-999").removeprefix("bytes=").split("-")
        first, last = int(asked[0]), int(asked[1])
        self.send_response(206)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{last + 1}")
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x")
                time.sleep(0.2)
        except OSError:
            return

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def trickling() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.timeout(60)
def test_one_signal_ends_a_pull_that_trickles(tmp_path: Path) -> None:
    with trickling() as endpoint:
        variables = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "MINILM_CACHE_HOME": str(tmp_path),
        }
        process = CommandProcess(
            "pull", "s3://bucket/cache", "--out", tmp_path / "out", environment=variables
        )
        time.sleep(6)
        began = time.monotonic()
        process.send(signal.SIGTERM)
        code, _, err = process.end()
        assert time.monotonic() - began < 8
        assert code == 130, err
        assert "Traceback" not in err


def test_a_request_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_MOST_S", 0.5)
    monkeypatch.setattr(object_store, "_FOLDERS_S", 0.5)
    monkeypatch.setattr(object_store, "_LEAST_RATE", 10**9)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with trickling() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StorageError, match="no answer in"):
            open_store("s3://bucket/cache").read("manifest.json", 1000)
        with pytest.raises(StorageError, match="no answer in"):
            open_store("s3://bucket/cache").folders()


@pytest.mark.parametrize("period", [2, 3, 5])
def test_every_kind_of_request_is_repeated(
    server: str, store: str, monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    between = Between(server, period=period)
    with between.serving() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        folder = open_store(store).below("repeated")
        for number in range(9):
            folder.write(f"a{number}", b"content")
            assert folder.read(f"a{number}", 100) == b"content"
            folder.copy(f"a{number}", f"b{number}")
            assert folder.sizes() == {f"a{number}": 7, f"b{number}": 7}
            assert folder.below("none").folders() == []
            folder.remove([f"a{number}", f"b{number}"])


class Ids(torch.utils.data.Dataset[torch.Tensor]):
    """The token ids of a cache, for workers that are spawned."""

    def __init__(self, cache: Cache) -> None:
        """Take a cache."""
        self.cache = cache

    def __len__(self) -> int:
        """Return the number of sequences that are read."""
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return the first tokens of a sequence."""
        return self.cache[number].input_ids[:3]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_cache_goes_to_other_processes(world: World, store: str, is_remote: bool) -> None:
    path = world.dump().path
    place = pushed(world, store) if is_remote else path
    cache = open_cache(place, home=world.home)
    expected = [cache[number].input_ids[:3] for number in range(4)]
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301 - our own bytes
    assert torch.equal(again[0].input_ids, cache[0].input_ids)
    if is_remote:
        loader = DataLoader(Ids(cache), batch_size=4, num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(next(iter(loader)), torch.stack(expected))
    else:
        pickled = pickle.dumps(cache)
        path.rename(world.root / "old")
        world.dump(max_length=16)
        with pytest.raises(IdentityMismatchError, match="another cache"):
            pickle.loads(pickled)  # noqa: S301 - our own bytes


def _read_again(store: str, answers: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        open_store(store).sizes()
    except MiniLMCacheError as error:
        answers.put(str(error))


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork by default")
def test_a_forked_process_says_so_instead_of_hanging(store: str) -> None:
    open_store(store).sizes()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_read_again, args=(store, answers))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert "forked" in answers.get()


def test_a_user_without_a_home_gets_one_line(tmp_path: Path) -> None:
    """Without HOME and without an entry in passwd, as in containers that run as any user."""
    hidden = (
        "import pwd; pwd.getpwuid = lambda _: {}['no entry']; from minilm_cache.cli.entry import main; main()"
    )

    def ls(**environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", hidden, "ls"]
        environment |= {"PATH": os.environ["PATH"]}
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    without = ls()
    assert (without.returncode, "Traceback" in without.stderr) == (2, False)
    assert "MINILM_CACHE_HOME" in without.stderr
    home = tmp_path / "home"
    given = ls(MINILM_CACHE_HOME=str(home))
    assert (given.returncode, given.stderr.count("Traceback")) == (0, 0)
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}
