"""Fixtures that every test may use. No network, no GPU."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minilm_cache.session import Session

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # there is no GPU that kernels could be compiled for
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch refuses the pretend accelerator where it has a real one, too
os.environ.pop("COLUMNS", None)  # test runners set it, and tables would be as narrow

from minilm_cache.cli.main import run
from minilm_cache.models import student
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from minilm_cache.workflows import search_space
from tests import accelerator
from tests.s3 import BUCKET, CREDENTIALS, s3_server
from tests.support import World, save_teacher, write_corpus

SLOW = (
    "test_on_ray.py",
    *("test_fuzz.py", "test_kills.py", "test_many_machines.py", "test_distributed.py", "test_trials.py"),
    *("test_pages.py", "test_study.py", "test_export_model.py", "test_search.py", "test_chain.py"),
    *("test_report.py", "test_into_store.py", "test_tokens.py", "test_evaluate.py", "test_generation.py"),
    *("test_speed.py", "test_learning.py", "test_site.py", "test_cli.py", "test_export.py"),
)
"""Files that take a minute or more: they begin first, so that no process waits for one at the end."""

MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of its own in it
"""A file system in memory, where the system has one: stores sync every file they write, and a disk takes
milliseconds for each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--soak`."""
    parser.addoption(
        "--soak",
        action="store_true",
        help="four times as many kills and damaged caches, and the cases that are skipped without it",
    )


def pytest_configure() -> None:
    """Make the pretend accelerator known to torch; keep the files of tests in memory if there is room."""
    accelerator.register()
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**33:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> int:
    """Return how many times as many kills and damaged caches a test shall try: 1, or 4 with `--soak`.

    A test may skip, where it is 1, a case that takes long and whose kind other cases try.
    """
    return 4 if request.config.getoption("--soak") else 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first, whatever order the others were shuffled into."""
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


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


CommandFixture = Callable[..., tuple[int, str, str]]


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
