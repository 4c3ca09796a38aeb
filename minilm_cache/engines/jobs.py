"""Jobs that need each other's results: run one after the other here, or together on a Ray cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minilm_cache.engines.ray_cluster import RayCluster
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One dump, training or comparison."""

    name: str
    """What is done, for people."""
    call: Callable[..., Any]
    """Called with the results of the jobs in `after`, `progress=` and `should_stop=`."""
    after: tuple[int, ...] = ()
    """Numbers of the jobs before this one whose results it needs."""


def run_jobs(
    jobs: Sequence[Job],
    cluster: RayCluster | None,
    *,
    folder: Path,
    progress: Progress,
    should_stop: ShouldStop,
) -> list[Any]:
    """Run jobs and return their results.

    Args:
        jobs: jobs, each after those that it needs.
        cluster: runs each job as a task, with as many at once as it has room for. None means that jobs run
            here, one after the other.
        folder: folder that the jobs write in, an absolute path.
        progress: shows what each job does; with a cluster, jobs done.
        should_stop: True stops the jobs that run.

    Raises:
        InterruptedRunError: a stop was requested.
        MiniLMCacheError: the error of a job; what others have finished is kept.
    """
    results: list[Any] = []
    if cluster is None:
        for number, job in enumerate(jobs, 1):
            progress.note(f"{number} of {len(jobs)}: {job.name}")
            needed = [results[other] for other in job.after]
            results.append(job.call(*needed, progress=progress, should_stop=should_stop))
        return results
    progress.start("run", len(jobs), "jobs")
    with cluster.common(folder):
        for job in jobs:
            call = partial(job.call, progress=Silent(), should_stop=never_stop)
            results.append(cluster.submit(call, *(results[other] for other in job.after)))
        return cluster.results(
            results,
            progress,
            should_stop=should_stop,
            interrupted="interrupted with {} of " + f"{len(jobs)} jobs to do: what is complete, and the last "
            "checkpoint of each run, is kept. Run the same command again to go on.",
        )
