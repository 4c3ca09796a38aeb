"""Dump on a Ray cluster: each rank is a task.

Ranks write their own shards and then those that nobody else writes, and never talk to each other, so that a
rank that is started again goes on from the shards that are committed.
"""

from contextlib import nullcontext
from pathlib import Path

from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.into_store import dump_into_store
from minilm_cache.dump.run import DumpResult, dump_cache
from minilm_cache.engines.ray_cluster import RayCluster
from minilm_cache.session import ALONE, Session
from minilm_cache.store.reader import read_manifest
from minilm_cache.wording import counted


def dump_on_ray(
    config: DumpConfig,
    *,
    out: Path | str | None = None,
    session: Session = ALONE,
    gpus_per_task: float | None = None,
) -> DumpResult:
    """Dump as `config.world_size` tasks of the cluster that RAY_ADDRESS names, or of a local cluster.

    Args:
        config: what to dump; its rank is ignored.
        out: folder of the cache, the same on every machine, or the URL of a cache in a store. None means a
            folder below `home`, named by content.
        gpus_per_task: GPUs that a rank takes, which may be a fraction. None means one where the cluster has
            any; ranks take a core where it has none.
        session: its home is the folder of caches. Its progress shows ranks done. Its `should_stop` is called
            about once a second; True stops, and keeps what is committed.

    Raises:
        InvalidConfigError: Ray is not installed.
        InterruptedRunError: a stop was requested; what is committed is kept.
        MiniLMCacheError: same as for `dump_cache`.
    """
    cluster = RayCluster(gpus_per_task)
    session = session.with_absolute_home()
    place = out.absolute() if isinstance(out, Path) else out
    world_size = config.world_size
    session.progress.note(
        f"{world_size} ranks as tasks of Ray, each with {_resources(cluster.gpus_per_task)}"
    )
    session.progress.start("dump", world_size, "ranks")
    with nullcontext() if isinstance(place, str) else cluster.common(place.parent if place else session.home):
        pending = [
            cluster.submit(_dump_rank, config.with_changes(rank=rank), place, session.of_worker())
            for rank in range(world_size)
        ]
        results: list[DumpResult] = cluster.results(
            pending,
            session,
            interrupted=f"interrupted with {{}} of {world_size} ranks to do: committed shards are kept. "
            "Run the same command again to go on.",
        )
    manifest = next((result.manifest for result in results if result.manifest.complete), None)
    written = sum(result.shards_written for result in results)
    return DumpResult(
        path=results[0].path,
        manifest=manifest or read_manifest(results[0].path),
        shards_written=written,
        # Ranks write a shard twice if one of them was slower than its lease.
        shards_kept=max(0, results[0].num_shards - written),
        num_shards=results[0].num_shards,
        url=results[0].url,
    )


def _resources(gpus: float) -> str:
    """Return what a task takes, in words."""
    if not gpus:
        return "a core"
    if gpus < 1:
        return f"{gpus:g} of a GPU"
    return counted(int(gpus), "GPU")


def _dump_rank(config: DumpConfig, out: Path | str | None, session: Session) -> DumpResult:
    if isinstance(out, str):
        return dump_into_store(config, out, session=session)
    return dump_cache(config, out=out, session=session)
