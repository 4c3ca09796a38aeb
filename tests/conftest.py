"""How tests run. What they share is in fixtures.py, which only processes that run tests import."""

import gc
import os
import shutil
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # there is no GPU that kernels could be compiled for
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch refuses the pretend accelerator where it has a real one, too
os.environ.pop("COLUMNS", None)  # test runners set it, and tables would be as narrow

# Python looked for cycles among half a million objects that live as long as the process, a tenth of the time.
gc.set_threshold(10_000, 10, 10)

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


def pytest_configure(config: pytest.Config) -> None:
    """Get fixtures, unless other processes run the tests, and keep files in memory if it has room."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**33:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first, whatever order the others were shuffled into."""
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))
