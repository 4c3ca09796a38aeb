"""Teacher -> assistants -> students: each stage is an ordinary cache or an ordinary run in one folder.

A student much smaller than its teacher learns better from an assistant in between (MiniLM, Wang et al. 2020,
arXiv 2002.10957, section 3.3 and table 3). A complete stage is not done again, and an incomplete one resumes
where it stopped, because dump and train do so. The chain adds only their order.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from minilm_cache.cache import open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.dump.setup import load_teacher, refuse_other_dump
from minilm_cache.engines.ray_cluster import Job, RayCluster, run_jobs
from minilm_cache.report.page import write_report
from minilm_cache.report.runs import TrainedRun, cautions
from minilm_cache.report.tables import held_out_of, students_table
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.store.durable import bounded_bytes, storage_errors, write_file
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.ranks import Ranks, refuse_ranks
from minilm_cache.train.run import train_students
from minilm_cache.workflows.chain_plan import Stage, Way, chain_settings, check_chain, stages
from minilm_cache.workflows.config import SETTINGS_FILE, ChainConfig
from minilm_cache.workflows.stages import COMPLETE, assistants_dump, check_with_cache

CHAIN_FILE = "chain.json"
REPORT_FILE = "report.html"
_POLL_S: Final = 0.5
"""Seconds between two looks at a cache that other processes write."""


class ChainStudent(BaseModel):
    """A student at the end of a chain, or an assistant in between."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arch: str
    seed: int
    way: Way
    num_parameters: int | None
    """Number of parameters. None means that the student diverged."""
    held_out_kl: dict[RelationKind, float] | None
    """KL(teacher || student) to the chain's first teacher, in nats. None means that nothing is held out, or
    that the student diverged."""
    held_out_loss: float | None = None
    """Held-out loss to the chain's first teacher, of objectives that compare no relations, such as the cosine
    distance of vectors. None means that students learned relations, or that it could not be measured."""


class ChainRecord(BaseModel):
    """Record of a complete chain, as its file holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["minilm-cache chain 1"] = "minilm-cache chain 1"
    teacher: str
    assistants: tuple[str, ...]
    caches: tuple[str, ...]
    """Folders of the caches, relative to the chain's folder; the teacher's cache is the first."""
    runs: tuple[str, ...]
    """Folders of the runs, relative to the chain's folder."""
    students: tuple[ChainStudent, ...]
    gains: dict[str, float]
    """KL via assistants divided by KL direct, for each student that was trained both ways; of objectives that
    compare no relations, their held-out losses are divided."""
    cautions: tuple[str, ...] = ()
    """What readers must know, such as students that ended worse than they began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainResult:
    """A complete chain: its folder and its record."""

    path: Path
    record: ChainRecord
    is_first: bool = True
    """True in the process that shows the results of all processes."""


def run_chain(
    config: ChainConfig,
    folder: Path,
    *,
    session: Session = ALONE,
    cache_store: str | None = None,
    cluster: RayCluster | None = None,
) -> ChainResult:
    """Run the stages that are not complete, then compare the students with the teacher.

    Under torchrun all processes dump and train each stage together.

    Args:
        config: what to dump and train.
        folder: folder of the chain; with a cluster or torchrun, the same on every machine.
        cache_store: URL of a store to pull caches from, if they are there already. None means that every
            cache is dumped here.
        cluster: runs stages as tasks, those at the same time that do not need each other. None means that
            they run here.
        session: its home is the folder for local copies of caches at URLs. Its progress shows each stage. Its
            `should_stop` is called between steps; True stops.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; complete stages are kept after every error.
    """
    if cluster is not None:
        refuse_ranks("a chain on Ray", "`chain --dry-run` shows")
    config = check_chain(config, folder, here=cluster is None)
    folder = folder.absolute()
    ranks = Ranks.join("data", config.train.device if cluster is None else None)
    session = session if ranks.is_first else session.with_progress(None)
    try:
        with ranks.explaining():
            ranks.check_common(folder)
            if ranks.is_first:
                with storage_errors("write", folder):
                    write_file(folder / SETTINGS_FILE, json.dumps(chain_settings(config), indent=1).encode())
            jobs = _jobs(config, folder, ranks=ranks, cache_store=cache_store)
            results = run_jobs(jobs, cluster, folder=folder, session=session)
    finally:
        ranks.leave()
    return ChainResult(path=folder, record=results[-1], is_first=ranks.is_first)


def preview_chain(config: ChainConfig, folder: Path, *, here: bool, session: Session) -> tuple[Stage, ...]:
    """Check a chain as running it would, and return its stages.

    Where its first cache is there, the teacher is loaded and the text is read, to compare them with those of
    the cache.

    Args:
        config: what to dump and train.
        folder: folder of the chain.
        here: whether this machine runs the stages, so that it must have teacher and device.
        session: its home is the folder for local copies of caches at URLs.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; what a chain would refuse is refused here.
    """
    planned = stages(check_chain(config, folder, here=here), folder)
    if here:
        refuse_other_dump(config.dump, planned[0].path, session)
    return planned


def _jobs(config: ChainConfig, folder: Path, *, ranks: Ranks, cache_store: str | None) -> list[Job]:
    """Return the stages of a chain and the comparison of its students, as jobs."""
    planned = stages(config, folder)
    first = planned[0].path
    # A dump reads the student of the stage before it, and the shards of the first dump.
    numbers = {str(stage.path): number for number, stage in enumerate(planned)}
    jobs = []
    for number, stage in enumerate(planned):
        name = f"{stage.does} {', '.join(stage.arch) or stage.source}"
        if stage.does == "dump":
            call: Callable[..., Any] = partial(
                _dump, config, stage, first=first, ranks=ranks, cache_store=cache_store
            )
            after: tuple[int, ...] = (0, number - 1) if number else ()
        else:
            call = partial(_train, config, stage, first=first)
            after = (numbers[stage.source],)
        jobs.append(Job(name=name, call=call, after=after))
    compare = partial(_finish, config, folder, planned, ranks=ranks)
    return [*jobs, Job(name="comparison with the teacher", call=compare, after=tuple(range(len(jobs))))]


def _dump(
    config: ChainConfig,
    stage: Stage,
    *done: None,
    first: Path,
    ranks: Ranks,
    session: Session,
    cache_store: str | None,
) -> None:
    """Dump a stage's teacher, together with the other processes of torchrun.

    `done` are the results of the stages before; they are only waited for. `first` is the folder of the first
    dump. Without a `cache_store` to pull from, everything is dumped. The session's `should_stop` is called
    before each batch.
    """
    del done
    dump_cache(
        _dump_settings(config, stage, first).with_changes(rank=ranks.number, world_size=ranks.size),
        out=stage.path,
        cache_store=cache_store,
        tokens_of=None if stage.path == first else first,
        session=session,
    )
    if not read_manifest(stage.path).complete:
        session.progress.note("waiting for the shards of other processes")
    while not read_manifest(stage.path).complete:  # ranks that began later are still writing
        session.stop_if_asked(
            f"interrupted while other processes dump into {stage.path}. Run the same command again."
        )
        time.sleep(_POLL_S)
    if stage.path == first:
        cache = open_cache(first, home=session.home)
        check_with_cache([config.train], cache, home=session.home, num_ranks=ranks.num_data)
    ranks.barrier()


def _train(config: ChainConfig, stage: Stage, *done: None, first: Path, session: Session) -> None:
    """Train a stage's students from its cache; `done` are the stages before, which are only waited for."""
    del done
    layer = config.train.teacher_layer if stage.source == str(first) else None
    settings = config.train.with_changes(
        arch=stage.arch, teacher_layer=layer, keep_checkpoints=config.train.keep_checkpoints or 0
    )
    train_students(settings, stage.source, out=stage.path, session=session).note_worse(session)


def _dump_settings(config: ChainConfig, stage: Stage, first: Path) -> DumpConfig:
    """Return the settings of a dump: assistants read the teacher's sequences, in the same shards."""
    if stage.path != first:
        return assistants_dump(config.dump, Path(stage.source), first=first, out=stage.path)
    # A complete cache keeps its shards, as it may have been pulled.
    return config.dump.with_changes(**{"shard_tokens": None} if stage.state() == COMPLETE else {})


def _finish(
    config: ChainConfig, folder: Path, planned: Sequence[Stage], *done: None, ranks: Ranks, session: Session
) -> ChainRecord:
    """Compare every student with the first teacher, and write the record and the report.

    `done` are the results of all stages; they are only waited for. The first process of torchrun compares,
    and the others read its record. The session's `should_stop` is not called, since this takes seconds.
    """
    del done
    if not ranks.is_first:
        ranks.barrier()  # it lasts seconds, where a dump may last longer than a group of processes waits
        return ChainRecord.model_validate_json(bounded_bytes(folder / CHAIN_FILE, 2**20))
    trainings = [stage for stage in planned if stage.does == "train"]
    runs = [
        TrainedRun.open(
            stage.path,
            cache_place=stage.source,
            reference=planned[0].path,
            reference_layer=config.train.teacher_layer,
        )
        for stage in trainings
    ]
    session.progress.note("comparing students with the teacher")
    teacher = load_teacher(
        config.dump, precision=read_manifest(planned[0].path).identity.precision or "float32"
    )
    table = students_table(runs, teacher, device=config.dump.device)
    students = _students(table, trainings, compares_kl=config.train.spec.is_relational)
    record = ChainRecord(
        teacher=config.dump.teacher,
        assistants=config.assistants,
        caches=tuple(str(stage.path.relative_to(folder)) for stage in planned if stage.does == "dump"),
        runs=tuple(str(stage.path.relative_to(folder)) for stage in trainings),
        students=students,
        gains=_gains(students, compares_kl=config.train.spec.is_relational),
        cautions=tuple(cautions(runs)),
    )
    with storage_errors("write", folder / CHAIN_FILE):
        write_file(folder / CHAIN_FILE, record.model_dump_json(indent=1).encode())
        write_report(
            folder / REPORT_FILE, runs, table, teacher=teacher, title=folder.name, remarks=remarks(record)
        )
    ranks.barrier()
    return record


def _students(table: pa.Table, trainings: Sequence[Stage], *, compares_kl: bool) -> tuple[ChainStudent, ...]:
    """Return the students of a table (`report.tables.students_table`) with their roles in the chain."""
    ways = {stage.path.name: stage.way for stage in trainings}
    return tuple(
        ChainStudent(
            arch=row["arch"],
            seed=row["seed"],
            way=ways[row["run"]],
            num_parameters=row["num_parameters"],
            held_out_kl=held_out_of(row),
            held_out_loss=None if compares_kl else row["held_out_loss"],
        )
        for row in table.to_pylist()
    )


def _gains(students: Sequence[ChainStudent], *, compares_kl: bool) -> dict[str, float]:
    """Return KL or loss via assistants divided by that of the direct way, for each shape and seed of both."""

    def measured(way: Way) -> dict[str, float]:
        found = {
            f"{each.arch}:s{each.seed}": sum((each.held_out_kl or {}).values())
            if compares_kl
            else each.held_out_loss
            for each in students
            if each.way == way
        }
        return {name: value for name, value in found.items() if value}

    via, direct = measured("via assistants"), measured("direct")
    return {name: via[name] / direct[name] for name in via if name in direct}


def remarks(record: ChainRecord) -> list[str]:
    """Return sentences, without full stops, that say how much the assistants gained."""
    measure = "held-out loss" if any(each.held_out_loss is not None for each in record.students) else "KL"
    return [
        f"{name} via assistants has {ratio:.4f} times the {measure} that it has directly from the teacher"
        for name, ratio in record.gains.items()
    ]
