"""What a study would do: which caches and passes are there, and which are still to be made."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from minilm_cache.cache import open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.setup import refuse_other_dump
from minilm_cache.evaluate.files import task_like
from minilm_cache.session import Session
from minilm_cache.workflows.config import CACHES, RUNS
from minilm_cache.workflows.stages import COMPLETE, TO_DO, cache_state, run_state
from minilm_cache.workflows.study import check_study, compared, known_record
from minilm_cache.workflows.study_pass import Assistant, Pass
from minilm_cache.workflows.study_spec import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """State of each cache and each pass of a study, in the order in which they are made."""

    caches: dict[str, str]
    """State by name of the cache."""
    assistants: list[tuple[Pass, str]]
    """Trainings of assistants, and their states."""
    passes: list[tuple[Pass, str]]
    """Passes of students, and their states."""
    num_trials: int
    """Fine-tunings of all models that are scored; of tasks that train on each language, those of one."""

    @property
    def num_students(self) -> int:
        """Number of students of all passes."""
        return sum(len(planned.config.arch) for planned, _ in self.passes)


def preview_study(study: Study, folder: Path, session: Session, *, here: bool = True) -> Preview:
    """Check a study as running it would, and return what is to be made.

    Nothing is written to the study. Where it has a cache, the teacher is loaded and the text is read, to
    compare them with those of the cache.

    Args:
        study: the study.
        folder: folder of the study.
        session: its home is the folder for local copies of caches at URLs.
        here: whether this machine would make caches and students, so that it must have teacher and device.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; what a study would refuse is refused here.
    """
    study = study.grown(folder)
    check_study(study, folder, session, here=here)
    caches: dict[str, DumpConfig | str | Assistant] = {**study.caches, **study.made}
    of_caches = {
        name: COMPLETE if isinstance(cache, str) else cache_state(folder / CACHES / name)
        for name, cache in caches.items()
    }
    for name, cache in study.caches.items():
        if here and isinstance(cache, DumpConfig):
            refuse_other_dump(cache, folder / CACHES / name, session)

    opened = lru_cache(partial(open_cache, home=session.home))

    def states(passes: Iterable[Pass]) -> list[tuple[Pass, str]]:
        found = []
        for planned in passes:
            is_known = known_record(study, folder, planned, opened=opened, home=session.home) is not None
            found.append((planned, run_state(folder / RUNS / planned.name) if is_known else TO_DO))
        return found

    return Preview(
        caches=of_caches,
        assistants=states(assistant.training for assistant in study.made.values()),
        passes=states(study.passes),
        num_trials=_num_trials(study),
    )


def _num_trials(study: Study) -> int:
    config = study.evaluation
    if config is None:
        return 0
    models = 1 + sum(len(planned.config.arch) for planned in compared(study))
    settings = sum(len(config.settings(task_like(name, config))) for name in config.task)
    return models * config.seeds * settings
