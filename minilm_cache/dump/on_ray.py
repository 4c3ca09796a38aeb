"""Dump on a Ray cluster: each rank is a task, and Ray starts a task again when its worker is lost.

Ray decides what runs where and when. Ranks write their own shards and never talk to each other, so that a
rank that is started again resumes from the shards that it had committed. Machines need a common file system.
"""

import logging
from pathlib import Path
from typing import Any

from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.into_store import dump_into_store
from minilm_cache.dump.run import DumpResult, dump_cache
from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.settings import cache_home
from minilm_cache.store.reader import read_manifest

_POLL_S = 1.0
"""Longest wait for a rank, in seconds, before `should_stop` is called again."""


def dump_on_ray(
    config: DumpConfig,
    *,
    out: Path | str | None = None,
    home: Path | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> DumpResult:
    """Dump as `config.world_size` tasks of the cluster that RAY_ADDRESS names, or of a local cluster.

    A task takes a GPU where the cluster has any, else a CPU core.

    Args:
        config: what to dump; its rank is ignored.
        out: folder of the cache, the same on every machine, or the URL of a cache in a store. None means a
            folder below `home`, named by content.
        home: folder of caches. None means MINILM_CACHE_HOME.
        progress: shows ranks done. None means that nothing is shown.
        should_stop: called about once a second; True stops, and keeps what is committed.

    Raises:
        InvalidConfigError: Ray is not installed.
        InterruptedRunError: a stop was requested; what is committed is kept.
        MiniLMCacheError: same as for `dump_cache`.
    """
    try:
        import ray  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidConfigError("Ray is not installed. Run: pip install 'minilm-cache[ray]'") from error
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    progress = progress or Silent()
    num_gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
    task = ray.remote(_dump_rank).options(num_cpus=1, num_gpus=num_gpus, max_retries=-1)
    everywhere = config.with_changes(
        teacher=_from_anywhere(config.teacher), corpus=_from_anywhere(config.corpus)
    )
    place = out.resolve() if isinstance(out, Path) else out
    pending = [
        task.remote(everywhere.with_changes(rank=rank), place, (home or cache_home()).resolve())
        for rank in range(config.world_size)
    ]
    progress.note(f"{config.world_size} ranks as tasks of Ray, each with {'a GPU' if num_gpus else 'a core'}")
    progress.start("dump", config.world_size, "ranks")
    results = _wait_for_ranks(pending, progress, should_stop)
    manifest = next((result.manifest for result in results if result.manifest.complete), None)
    written = sum(result.shards_written for result in results)
    return DumpResult(
        path=results[0].path,
        manifest=manifest or read_manifest(results[0].path),
        shards_written=written,
        shards_kept=results[0].num_shards - written,
        num_shards=results[0].num_shards,
        url=results[0].url,
    )


def _wait_for_ranks(pending: list[Any], progress: Progress, should_stop: ShouldStop) -> list[DumpResult]:
    """Return the results of all ranks, in the order in which they finish.

    Args:
        pending: Ray's references to the results, one for each rank.
        progress: shows ranks done.
        should_stop: called about once a second; True cancels the ranks that have not finished.

    Raises:
        InterruptedRunError: a stop was requested.
        MiniLMCacheError: the error of a rank.
    """
    import ray  # noqa: PLC0415 - an extra

    world_size = len(pending)
    results: list[DumpResult] = []
    while pending:
        done, pending = ray.wait(pending, timeout=_POLL_S)
        try:
            results += ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # a rank's own error, without the trace of where Ray ran it
        progress.advance(len(done))
        if pending and should_stop():
            for task in pending:
                ray.cancel(task, force=True)
            raise InterruptedRunError(
                f"interrupted with {len(pending)} of {world_size} ranks to do: committed shards are "
                "kept. Run the same command again to go on."
            )
    return results


def _dump_rank(config: DumpConfig, out: Path | str | None, home: Path) -> DumpResult:
    if isinstance(out, str):
        return dump_into_store(config, out, home=home)
    return dump_cache(config, out=out, home=home)


def _from_anywhere(name: str) -> str:
    """Return an existing path as an absolute path, since workers run in other folders; else the name."""
    return str(Path(name).resolve()) if Path(name).exists() else name
