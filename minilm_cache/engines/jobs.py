"""Jobs that need each other's results: run one after the other here, or together on a Ray cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minilm_cache.engines.ray_cluster import RayCluster
from minilm_cache.session import Session


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
