"""Run work as tasks of a Ray cluster.

Ray decides what runs where and when, and starts a task again when its worker is lost; dumps and trainings
resume from what they have kept. The machines of a cluster need a common file system.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.progress import Progress, ShouldStop

Engine = Literal["ray"]
_POLL_S: Final = 1.0
"""Longest wait for a task, in seconds, before `should_stop` is called again."""


def import_ray() -> Any:  # noqa: ANN401 - a module
    """Return the module `ray`.

    Raises:
        InvalidConfigError: Ray is not installed.
    """
    try:
        import ray  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidConfigError("Ray is not installed. Run: pip install 'minilm-cache[ray]'") from error
    return ray


class RayCluster:
    """The cluster that RAY_ADDRESS names, or a local one of this machine."""

    def __init__(self, gpus_per_task: float | None = None) -> None:
        """Connect to the cluster.

        Args:
            gpus_per_task: GPUs that a task takes, which may be a fraction. None means one where the cluster
                has any. A task takes a core, too.

        Raises:
            InvalidConfigError: Ray is not installed, or the cluster has fewer GPUs than a task takes.
        """
        self._ray = import_ray()
        self._ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
        resources = self._ray.cluster_resources()
        self.num_gpus = int(resources.get("GPU", 0))
        """GPUs of the cluster."""
        self.gpus_per_task = min(1, self.num_gpus) if gpus_per_task is None else gpus_per_task
        if self.gpus_per_task > self.num_gpus:
            raise InvalidConfigError(
                f"--gpus-per-task {self.gpus_per_task:g}: the cluster has {self.num_gpus} GPUs. Lower it, or "
                "leave it out."
            )
        self._options = {
            "num_gpus": self.gpus_per_task,
            "num_cpus": 1,
            "max_retries": -1,
        }

    def submit(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - Ray's reference
        """Submit a call, and return Ray's reference to its result.

        Args:
            call: what is called in a worker, in this process' working folder where the worker has it.
            arguments: what it is called with. A reference stands for the result of another call, which is
                waited for.
        """
        task = self._ray.remote(_in_folder).options(name=_name_of(call), **self._options)
        return task.remote(str(Path.cwd()), call, *arguments)

    def results(
        self, pending: Sequence[Any], progress: Progress, *, should_stop: ShouldStop, interrupted: str
    ) -> list[Any]:
        """Return the results of calls, in their order.

        Args:
            pending: Ray's references to the results.
            progress: shows calls done.
            should_stop: called about once a second; True cancels the calls that have not finished.
            interrupted: message when that happens; `{}` in it stands for the number of those calls.

        Raises:
            InterruptedRunError: a stop was requested.
            MiniLMCacheError: the error of a call.
        """
        left = list(pending)
        try:
            while left:
                done, left = self._ray.wait(left, timeout=_POLL_S)
                self._ray.get(done)
                progress.advance(len(done))
                if left and should_stop():
                    raise InterruptedRunError(interrupted.format(len(left)))
            return list(self._ray.get(list(pending)))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None  # the call's own error, without the trace of where Ray ran it
        finally:
            for task in left:
                self._ray.cancel(task, force=True)


def _in_folder(folder: str, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - of any call
    """Call something where relative paths mean what they mean to the user."""
    if Path(folder).is_dir():
        os.chdir(folder)
    return call(*arguments)


def _name_of(call: Callable[..., Any]) -> str:
    """Return the name of a function, or of the one that a `partial` calls."""
    return str(getattr(getattr(call, "func", call), "__name__", "call"))
