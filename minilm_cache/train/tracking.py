"""Reports a run to an experiment tracker, in addition to its own log; accelerate provides the trackers."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from minilm_cache.errors import InvalidConfigError, TrackerError, first_line
from minilm_cache.session import Session

Numbers = Mapping[str, float]


@contextmanager
def tracking(name: str, run: Path, *, settings: Mapping[str, Any], session: Session) -> Iterator["Tracker"]:
    """Yield a tracker: `none`, `tensorboard` (files in the run's folder), `trackio`, `wandb` or `mlflow`.

    Args:
        name: name of the tracker; `none` reports nothing.
        run: folder of the run.
        settings: settings of the run, reported once.
        session: its progress shows the first failure of the tracker.

    Raises:
        InvalidConfigError: the tracker's package is not installed.
        TrackerError: the tracker does not start: its service does not answer, or requires a login.
    """
    if name == "none":
        yield Tracker(name, None, session)
        return
    PartialState()  # accelerate's trackers need it to know which process they are in
    kind = LOGGER_TYPE_TO_CLASS[name]
    try:
        tracker = (
            kind(run.name, run) if name == "tensorboard" else kind("minilm-cache", **_run_name(name, run))
        )
        with redirect_stdout(sys.stderr):  # only results go to stdout
            tracker.start()
        tracker.store_init_configuration({key: _plain(value) for key, value in settings.items()})
    except ImportError as error:
        raise InvalidConfigError(f"--tracker {name}: {error}. Install it: `pip install {name}`.") from error
    except Exception as error:  # each service has errors of its own
        raise TrackerError(
            f"--tracker {name} does not start: {first_line(error)}. Fix that, or leave the option "
            "out: log.jsonl is written in any case."
        ) from error
    safe = Tracker(name, tracker, session)
    try:
        yield safe
    finally:
        safe.finish()


class Tracker:
    """A tracker, or none. Its first failure is shown, and ends reporting but not the training."""

    def __init__(self, name: str, tracker: GeneralTracker | None, session: Session) -> None:
        self._name = name
        self._tracker = tracker
        self._progress = session.progress

    def log(self, values: Numbers, step: int) -> None:
        """Report the numbers of a step, unless there is no tracker, or it failed before."""
        self._try(lambda tracker: tracker.log(dict(values), step=step))

    def finish(self) -> None:
        """Close the tracker."""
        self._try(lambda tracker: tracker.finish())

    def _try(self, work: Callable[[GeneralTracker], object]) -> None:
        if self._tracker is None:
            return
        try:
            with redirect_stdout(sys.stderr):
                work(self._tracker)
        except Exception as error:  # noqa: BLE001 - each service has errors of its own
            self._progress.note(
                f"--tracker {self._name} failed: {first_line(error)}. Nothing more is sent to it; "
                "log.jsonl is still written."
            )
            self._tracker = None


def _run_name(tracker: str, run: Path) -> dict[str, str]:
    return {"run_name" if tracker == "mlflow" else "name": run.name}


def _plain(value: object) -> str | int | float:
    return value if isinstance(value, str | int | float) else str(value)
