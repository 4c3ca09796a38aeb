"""What a study would do: which caches and passes are there, and which are still to be made."""

from dataclasses import dataclass
from pathlib import Path

from minilm_cache.dump.config import DumpConfig
from minilm_cache.workflows.states import COMPLETE, cache_state, run_state
from minilm_cache.workflows.study import check_shapes
from minilm_cache.workflows.study_spec import Pass, Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """State of each cache and each pass of a study, in the order in which they are made."""

    caches: dict[str, str]
    """State by name of the cache."""
    passes: list[tuple[Pass, str]]
    """Passes and their states."""

    @property
    def num_students(self) -> int:
        """Number of students of all passes."""
        return sum(len(planned.config.arch) for planned, _ in self.passes)


def preview_study(study: Study, folder: Path, home: Path, *, here: bool = True) -> Preview:
    """Check a study as running it would, and return what is to be made. Nothing is written.

    Args:
        study: the study.
        folder: folder of the study.
        home: folder for local copies of caches at URLs.
        here: whether this machine would train the students, so that it must have their device.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; what a study would refuse is refused here.
    """
    check_shapes(study, home, here=here)
    return Preview(
        caches={
            name: cache_state(folder / "caches" / name) if isinstance(cache, DumpConfig) else COMPLETE
            for name, cache in study.caches.items()
        },
        passes=[(planned, run_state(folder / "runs" / planned.name)) for planned in study.passes],
    )
