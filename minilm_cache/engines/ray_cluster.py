"""Jobs that need each other's results: run one after the other here, or as tasks of a Ray cluster.

Ray decides what runs where and when, and starts a task again when its worker is lost; dumps and trainings
resume from what they have kept. The machines of a cluster need a common file system.
"""

import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

from minilm_cache.errors import (
    InterruptedRunError,
    InvalidConfigError,
    MiniLMCacheError,
    StorageError,
    first_line,
)
from minilm_cache.session import Session

_WAIT_S: Final = 5.0
_COMMON_FOLDER_POLL_S: Final = 0.1


@contextmanager
def common_file(folder: Path) -> Iterator[Path]:
    """Write an empty file into a folder, which is made if it is not there, and remove it in the end.

    Raises:
        StorageError: the file system refused.
    """
    file = folder / f".common-{uuid4().hex}.partial"  # the suffix of files that may be left over
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise StorageError(f"cannot write in {folder}: {error.strerror}. Choose another --out.") from error
    try:
        yield file
    finally:
        with suppress(OSError):
            file.unlink()


def check_common(file: Path) -> None:
    """Raise StorageError if this machine does not see the file that another one has written.

    A network file system may show it some seconds later.
    """
    deadline = time.monotonic() + _WAIT_S
    while not file.exists():
        if time.monotonic() < deadline and file.parent.exists():
            time.sleep(_COMMON_FOLDER_POLL_S)
            continue
        raise StorageError(
            f"machine {platform.node()} does not see what another machine writes in {file.parent}. Choose an "
            "--out on a file system that all of them have."
        )


Engine = Literal["ray"]
_POLL_S: Final = 1.0
"""Longest wait for a task, in seconds, before `should_stop` is called again."""
_RETRIES: Final = 3
"""How often a task is started again whose process has died; each start goes on from what was kept."""
_ANSWERS_WITHIN_S: Final = 10.0
"""Longest wait, in seconds, for a cluster to answer."""
_CANCEL_S: Final = 30.0
"""Longest wait, in seconds, until the workers of cancelled tasks have ended."""


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


def _refuse_no_cluster(address: str) -> None:
    """Raise InvalidConfigError for an address where nothing answers; Ray itself asks it for many minutes.

    Args:
        address: value of RAY_ADDRESS. Without a port it names no place that can be asked.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
        except (OSError, OverflowError) as error:
            raise InvalidConfigError(
                f"no Ray cluster answers at RAY_ADDRESS {address} ({first_line(error)}). Correct it, or "
                "unset it to begin a cluster on this machine."
            ) from error


class RayCluster:
    """The cluster that RAY_ADDRESS names, or a local one of this machine."""

    def __init__(self, gpus_per_task: float | None = None) -> None:
        """Connect to the cluster.

        Args:
            gpus_per_task: GPUs that a task takes, which may be a fraction. None means one where the cluster
                has any. A task takes a core, too.

        Raises:
            InvalidConfigError: Ray is not installed, RAY_ADDRESS names no cluster, or no machine has the GPUs
                that a task takes.
        """
        self._ray = import_ray()
        _refuse_no_cluster(os.environ.get("RAY_ADDRESS", ""))
        self._ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
        machines = [node["Resources"].get("GPU", 0) for node in self._ray.nodes() if node["Alive"]]
        most = int(max(machines, default=0))
        self.gpus_per_task: float = min(1, most) if gpus_per_task is None else gpus_per_task
        """GPUs that a task takes."""
        if self.gpus_per_task > most:
            raise InvalidConfigError(
                f"--gpus-per-task {self.gpus_per_task:g}: no machine of the cluster has more than {most} "
                "GPUs. Lower it, or leave it out."
            )
        if self.gpus_per_task > 1 and not float(self.gpus_per_task).is_integer():
            raise InvalidConfigError(
                f"--gpus-per-task {self.gpus_per_task:g}: Ray gives a task a share of one GPU, or whole "
                f"GPUs. Take {int(self.gpus_per_task)}, or a number below 1."
            )
        self._options = {"num_gpus": self.gpus_per_task, "num_cpus": 1, "max_retries": _RETRIES}
        self._common: Path | None = None

    @contextmanager
    def common(self, folder: Path) -> Iterator[None]:
        """Let calls that are submitted meanwhile fail on machines that do not have a folder in common.

        Args:
            folder: folder that the calls write in; it is made if it is not there.
        """
        with common_file(folder) as file:
            self._common = file
            try:
                yield
            finally:
                self._common = None

    def submit(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - Ray's reference
        """Submit a call, and return Ray's reference to its result.

        Args:
            call: what is called in a worker, in this process' working folder where the worker has it.
            arguments: what it is called with. A reference stands for the result of another call, which is
                waited for.
        """
        # The decorator names the GPUs, so that Ray does not use a worker again that has held one.
        task = self._ray.remote(**self._options)(_in_folder).options(name=_name_of(call))
        settings = {name: value for name, value in os.environ.items() if name.startswith("MINILM_CACHE_")}
        surroundings = _Surroundings(settings=settings, folder=Path.cwd(), common=self._common)
        return task.remote(surroundings, call, *arguments)

    def results(self, pending: Sequence[Any], session: Session, *, interrupted: str) -> list[Any]:
        """Return the results of calls, in their order.

        Args:
            pending: Ray's references to the results.
            session: its progress shows calls done. Its `should_stop` is called about once a second; True
                cancels the calls that have not finished.
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
                session.progress.advance(len(done))
                if left and session.should_stop():
                    raise InterruptedRunError(interrupted.format(len(left)))
            return list(self._ray.get(list(pending)))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None  # the call's own error, without the trace of where Ray ran it
        except (
            self._ray.exceptions.WorkerCrashedError,
            self._ray.exceptions.NodeDiedError,
            self._ray.exceptions.OutOfMemoryError,
        ) as error:
            raise StorageError(
                f"a task of the cluster was lost {_RETRIES + 1} times: {first_line(error)}. Look at its "
                "machine (memory, disk), and run the same command again; what is complete is kept."
            ) from error
        finally:
            for task in left:
                self._ray.cancel(task, force=True)
            if left:  # a worker holds its locks until it has ended, and whoever goes on at once needs them
                self._ray.wait(left, num_returns=len(left), timeout=_CANCEL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """What calls find in a worker as the user has it."""

    settings: dict[str, str]
    """Variables of the environment that this package reads."""
    folder: Path
    """Working folder, where the worker has it: relative paths then mean what they mean to the user."""
    common: Path | None
    """File that the worker must see. None means that the machines need nothing in common."""


def _in_folder(surroundings: _Surroundings, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - of any call
    """Call something in a worker.

    Raises:
        StorageError: this machine does not see the common file.
    """
    if surroundings.common is not None:
        check_common(surroundings.common)
    os.environ.update(surroundings.settings)
    if surroundings.folder.is_dir():
        os.chdir(surroundings.folder)
    try:
        return call(*arguments)
    except MiniLMCacheError:
        raise
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        # An error of a library may not arrive as it is, and would hide what it says.
        what = f"{type(error).__name__}: {first_line(error)}"
        raise StorageError(f"{_name_of(call)} failed: {what}.") from error


def _name_of(call: Callable[..., Any]) -> str:
    """Return the name of a function, or of the one that a `partial` calls."""
    return str(getattr(getattr(call, "func", call), "__name__", "call"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One dump, training or comparison."""

    name: str
    """What is done, for people."""
    call: Callable[..., Any]
    """Called with the results of the jobs in `after`, and `session=`."""
    after: tuple[int, ...] = ()
    """Numbers of the jobs before this one whose results it needs."""


def run_jobs(jobs: Sequence[Job], cluster: RayCluster | None, *, folder: Path, session: Session) -> list[Any]:
    """Run jobs and return their results.

    Args:
        jobs: jobs, each after those that it needs.
        cluster: runs each job as a task, with as many at once as it has room for. None means that jobs run
            here, one after the other.
        folder: folder that the jobs write in, an absolute path.
        session: its progress shows what each job does; with a cluster, jobs done. Its `should_stop` is
            called; True stops the jobs that run.

    Raises:
        InterruptedRunError: a stop was requested.
        MiniLMCacheError: the error of a job; what others have finished is kept.
    """
    results: list[Any] = []
    if cluster is None:
        for number, job in enumerate(jobs, 1):
            session.progress.note(f"{number} of {len(jobs)}: {job.name}")
            needed = [results[other] for other in job.after]
            results.append(job.call(*needed, session=session))
        return results
    session.progress.start("run", len(jobs), "jobs")
    with cluster.common(folder):
        for job in jobs:
            call = partial(job.call, session=session.of_worker())
            results.append(cluster.submit(call, *(results[other] for other in job.after)))
        return cluster.results(
            results,
            session,
            interrupted="interrupted with {} of " + f"{len(jobs)} jobs to do: what is complete, and the last "
            "checkpoint of each run, is kept. Run the same command again to go on.",
        )
