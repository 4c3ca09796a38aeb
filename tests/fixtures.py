"""Fixtures that every test may use. No network, no GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from minilm_cache.cli.main import run
from minilm_cache.models import student
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from minilm_cache.workflows import search_space
from tests import accelerator
from tests.s3 import BUCKET, CREDENTIALS, s3_server
from tests.support import World, save_teacher, write_corpus

accelerator.register()  # before the first backward pass of a process


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> int:
    """Return how many times as many kills and damaged caches a test shall try: 1, or 4 with `--soak`.

    A test may skip, where it is 1, a case that takes long and whose kind other cases try.
    """
    return 4 if request.config.getoption("--soak") else 1


@pytest.fixture(scope="session", autouse=True)
def few_turns() -> Iterator[None]:
    """Time models in one turn, where users wait for several: no test says how fast one is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(student, "_TURNS", 1)
        patched.setattr(search_space, "_TURNS", 1)
        patched.setattr(search_space, "_REPEATS", 2)
        yield


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a teacher, a corpus and a finished cache (`cache`) that no test may change."""
    root = tmp_path_factory.mktemp("world")
    world = World(root, save_teacher(root / "teacher"), write_corpus(root / "corpus.txt"))
    world.dump()
    return world


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with a finished cache (`cache`) and a complete run (`run`) that no test may change."""
    root = tmp_path_factory.mktemp("trained")
    world = World(root, save_teacher(root / "teacher"), write_corpus(root / "corpus.txt"))
    world.dump()
    recipe = TrainConfig(arch=("1x16",), steps=2, batch_size=4, device="cpu")
    train_students(recipe, root / "cache", out=root / "run", session=Session(world.home))
    return world


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a teacher and a corpus of one test's own."""
    return World(tmp_path, save_teacher(tmp_path / "teacher"), write_corpus(tmp_path / "corpus.txt"))


class Command:
    """The command line, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Read what is printed from `capsys`."""
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Run a command and return its exit code, stdout and stderr."""
        self._capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def fails(self, *arguments: object, code: int, says: str | tuple[str, ...]) -> str:
        """Run a command that must fail with one line on stderr that says these words; return the line."""
        found, _, err = self(*arguments)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]

        assert (code, 1) == (found, len(errors)), err
        assert "Traceback" not in err
        for words in (says,) if isinstance(says, str) else says:
            assert words in errors[0]
        return errors[0]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the command line with a home of its own."""
    monkeypatch.setenv("MINILM_CACHE_HOME", str(tmp_path / "home"))
    return Command(capsys)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the endpoint of a real S3 server."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty store, with credentials in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"
