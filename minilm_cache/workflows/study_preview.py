"""What a study would do: which caches and passes are there, and which are still to be made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minilm_cache.dump.config import DumpConfig
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.folder import is_run
from minilm_cache.train.record import load_record
from minilm_cache.workflows.study import check_shapes
from minilm_cache.workflows.study_spec import Pass, Study

State = Literal["complete", "unfinished", "to be made"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """State of each cache and each pass of a study, in the order in which they are made."""

    caches: dict[str, State]
    """By name of the cache."""
    passes: list[tuple[Pass, State]]

    @property
    def num_students(self) -> int:
        """Number of students of all passes."""
        return sum(len(planned.config.arch) for planned, _ in self.passes)


def preview_study(study: Study, folder: Path, home: Path) -> Preview:
    """Check a study as running it would, and return what is to be made. Nothing is written.

    Args:
        study: the study.
        folder: folder of the study.
        home: folder for local copies of caches at URLs.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; what a study would refuse is refused here.
    """
    check_shapes(study, home)
    return Preview(
        caches={
            name: _cache_state(folder / "caches" / name) if isinstance(cache, DumpConfig) else "complete"
            for name, cache in study.caches.items()
        },
        passes=[(planned, _run_state(folder / "runs" / planned.name)) for planned in study.passes],
    )


def _cache_state(path: Path) -> State:
    if not (path / MANIFEST).is_file():
        return "to be made"
    return "complete" if read_manifest(path).complete else "unfinished"


def _run_state(path: Path) -> State:
    if not is_run(path):
        return "to be made"
    return "complete" if load_record(path).complete else "unfinished"
