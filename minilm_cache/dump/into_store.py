"""Dump by several machines: straight into a store, with no file system in common, or on a Ray cluster."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.reading import SequenceReader
from minilm_cache.dump.run import DumpResult, dump_cache, outside_identity, write_cache
from minilm_cache.dump.setup import ResolvedDump, resolve_dump
from minilm_cache.engines.ray_cluster import RayCluster
from minilm_cache.errors import CacheCorruptError, CacheNotFoundError, InvalidConfigError, StorageError
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.manifest import RANGES, TEACHER_PROMPTS, CacheManifest
from minilm_cache.store.creation import (
    OtherBeginningError,
    begun_manifest,
    finished_manifest,
    join,
    refuse_store,
    remove_leftovers,
)
from minilm_cache.store.durable import lock_if_free, storage_errors, write_file
from minilm_cache.store.index import read_ranges
from minilm_cache.store.layout import below
from minilm_cache.store.reader import read_manifest
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.store.store_writer import StoreWriter, attach_in_store
from minilm_cache.wording import counted


def dump_into_store(config: DumpConfig, url: str, *, session: Session = ALONE) -> DumpResult:
    """Run a teacher over a corpus and write its relations into a cache in a store.

    Processes may begin, end and be killed at any time, each with any rank: all write shards that no other one
    is writing, and the last one seals the cache.

    Args:
        config: what to dump.
        url: URL of the cache: `s3://`, `gs://`, `az://` or `file://`.
        session: its home is the folder of caches, runs and tokens; shards lie in it until they are sent. Its
            progress shows tokens done. Its `should_stop` is called before each batch; True stops the dump and
            keeps what is committed.

    Raises:
        InvalidConfigError: a file cannot be created in such a store only if there is none.
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    if url.startswith("hf://"):
        raise InvalidConfigError(
            f"--out {url}: a repository of the hub is no place to dump into. Dump into a folder, then "
            "`minilm-cache push` it."
        )
    target = open_store(url)
    refuse_store(target)
    if config.precision is None and (begun := begun_manifest(target)) is not None:
        config = config.with_changes(precision=begun.identity.precision or "float32")
    with _scratch(session.home, url) as scratch:
        resolved = resolve_dump(config, out=scratch, resume=True, add=None, tokens_of=None, session=session)
        while True:
            finished = finished_manifest(target, resolved.identity)
            if finished is not None:
                return _complete(resolved, target, manifest=finished, session=session)
            result = _write(resolved, target, session=session)
            if result is not None:
                return replace(result, url=target.url)
            shutil.rmtree(scratch, ignore_errors=True)


def _write(resolved: ResolvedDump, target: RemoteFolder, *, session: Session) -> DumpResult | None:
    """Write what is missing in the store. None means that another process has begun or finished the dump."""
    try:
        join(target, resolved.path, resolved.identity)
        return write_cache(
            resolved,
            SequenceReader.of(resolved.teacher, resolved.identity.states),
            sequences=resolved.sequences(session),
            writer_type=partial(StoreWriter, target=target),
            session=session,
        )
    except OtherBeginningError:
        session.progress.note("another process has begun this dump: joining it")
    except (StorageError, CacheNotFoundError, CacheCorruptError):
        if finished_manifest(target, resolved.identity) is None:
            raise
        session.progress.note("another process has finished this cache meanwhile")
    return None


def _complete(
    resolved: ResolvedDump, target: RemoteFolder, *, manifest: CacheManifest, session: Session
) -> DumpResult:
    """Return what a store holds already, after adding the weights that are to be kept.

    Raises:
        InvalidConfigError: it is to be checked in full, which takes a copy.
    """
    if resolved.config.check == "full":
        raise InvalidConfigError(
            f"--check full: {target.url} is complete. Fetch it with `minilm-cache pull`, and run "
            "`minilm-cache verify --full` on the copy."
        )
    session.progress.note("this cache is already complete: nothing to do")
    remove_leftovers(target)
    root = resolved.path
    if RANGES in manifest.files:  # format 1 has its ranges in the manifest
        write_file(below(root, RANGES), target.read(RANGES, manifest.files[RANGES].size), durable=False)
    num_shards = len(read_ranges(root, manifest))
    digest = manifest.files.get(TEACHER_PROMPTS)
    stored = None if digest is None else target.read(TEACHER_PROMPTS, digest.size)
    for path, content in outside_identity(resolved.teacher, stored, config=resolved.config, session=session):
        manifest = attach_in_store(target, root, manifest, path=path, content=content)
    return DumpResult(
        path=root,
        manifest=manifest,
        shards_written=0,
        shards_kept=num_shards,
        num_shards=num_shards,
        url=target.url,
    )


@contextmanager
def _scratch(home: Path, url: str) -> Iterator[Path]:
    """Yield a folder of this process' own; those that were killed have left theirs, which are used again."""
    name = canonical_sha256(url)[:16]
    for number in count():
        folder = home / "uploads" / f"{name}-{number}"
        with storage_errors("write", folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_if_free(folder.with_suffix(".lock"))
            if lock is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
        return


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
