"""Caches for the tests of the store."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support import World


@pytest.fixture(scope="session")
def complete(shared_world: World) -> Path:
    """Return a finished cache of 6 shards that no test may change."""
    return shared_world.root / "cache"


@pytest.fixture
def cache(complete: Path, tmp_path: Path) -> Path:
    """Return a copy of it that a test may change."""
    return Path(shutil.copytree(complete, tmp_path / "cache"))


@pytest.fixture(autouse=True)
def quick_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fsync check its descriptor and wait for no disk: no test cuts the power."""

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
