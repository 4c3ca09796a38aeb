"""Teacher -> assistants -> students: each stage an ordinary cache or an ordinary run in one folder.

A student much smaller than its teacher learns better from an assistant in between (MiniLM, Wang et al. 2020,
arXiv 2002.10957, section 3.3 and table 3). A stage that is complete is not done again, and one that is not
is taken up where it stopped, because dump and train do so; the chain adds only their order.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from minilm_cache.config import ChainConfig, DumpConfig
from minilm_cache.device import choose_device
from minilm_cache.dump.run import dump
from minilm_cache.dump.teacher import Teacher, locate_teacher, num_heads_of
from minilm_cache.errors import InvalidConfigError
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.report.page import write_report
from minilm_cache.results import TEACHER_CACHE, TrainedRun, held_out_of, students_table
from minilm_cache.storage_schema.identity import RelationKind, canonical_sha256
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.store.layout import MANIFEST, commit_path
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.objective import check_codec
from minilm_cache.train.record import RUN_FILE, arch_slug, load_record
from minilm_cache.train.run import student_folder, train
from minilm_cache.train.student import parse_arch

CHAIN_FILE = "chain.json"
REPORT_FILE = "report.html"
Way = Literal["assistant", "via assistants", "direct"]
_NOT_NAMED: Final[dict[str, Any]] = {
    "compare_direct": True,
    "dump": {"device": True},
    "train": {"arch": True, "device": True},
}
"""What does not make another chain: other students may be added to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One dump or one training."""

    does: Literal["dump", "train"]
    path: Path
    """Of the cache or the run."""
    source: str
    """Teacher that is dumped, or cache that is trained from."""
    arch: tuple[str, ...] = ()
    """Students that are trained."""
    way: Way = "assistant"
    """What they are in the chain."""

    def state(self) -> str:
        """Return how far it has come: `complete`, `to do`, or what is there.

        Raises:
            MiniLMCacheError: what is there is damaged.
        """
        if self.does == "dump":
            if not (self.path / MANIFEST).exists():
                return "to do"
            manifest = read_manifest(self.path)
            committed = sum((self.path / commit_path(n)).is_file() for n in range(manifest.num_shards))
            return "complete" if manifest.complete else f"{committed} of {manifest.num_shards} shards"
        if not (self.path / RUN_FILE).exists():
            return "to do"
        return "complete" if load_record(self.path).complete else "begun"


class ChainStudent(BaseModel):
    """One student at the end of a chain, or an assistant within."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arch: str
    seed: int
    way: Way
    num_parameters: int | None
    """None: it diverged."""
    held_out_kl: dict[RelationKind, float] | None
    """KL(teacher || student), nats, to the chain's first teacher; none: nothing held out, or it diverged."""


class ChainRecord(BaseModel):
    """What a complete chain says of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["minilm-cache chain 1"] = "minilm-cache chain 1"
    teacher: str
    assistants: tuple[str, ...]
    caches: tuple[str, ...]
    """Folders below the chain's, the teacher's cache first."""
    runs: tuple[str, ...]
    students: tuple[ChainStudent, ...]

    def gains(self) -> dict[str, float]:
        """Return, for each student trained both ways, its KL via assistants over its KL direct."""
        sums: dict[str, dict[str, float]] = {"via assistants": {}, "direct": {}, "assistant": {}}
        for one in self.students:
            if one.held_out_kl:
                sums[one.way][f"{one.arch}:s{one.seed}"] = sum(one.held_out_kl.values())
        via, direct = sums["via assistants"], sums["direct"]
        return {name: via[name] / direct[name] for name in via if name in direct}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainResult:
    """What a chain has come to."""

    path: Path
    record: ChainRecord


def chain_folder(config: ChainConfig, home: Path) -> Path:
    """Return where a chain lies if nothing else is asked for, named by content."""
    shapes = "_".join(map(arch_slug, config.assistants))[:64]
    content = config.model_dump(mode="json", exclude=_NOT_NAMED)
    return home / "chains" / f"{shapes}-{canonical_sha256(content)[:12]}"


def stages(config: ChainConfig, folder: Path) -> tuple[Stage, ...]:
    """Return the stages of a chain, in order."""
    caches, runs = folder / "caches", folder / "runs"
    first = caches / TEACHER_CACHE
    found = [Stage(does="dump", path=first, source=config.dump.teacher)]
    for number, assistant in enumerate(config.assistants, 1):
        name = f"{number}-{arch_slug(assistant)}"
        last = found[-1].path
        found += [
            Stage(does="train", path=runs / name, source=str(last), arch=(assistant,)),
            Stage(does="dump", path=caches / name, source=str(student_folder(runs / name, assistant))),
        ]
    shapes = "_".join(map(arch_slug, config.train.arch))[:64]
    arch, last = config.train.arch, found[-1].path
    ways: list[tuple[Path, Path, Way]] = [(runs / f"students-{shapes}", last, "via assistants")]
    if config.compare_direct:
        ways.append((runs / f"direct-{shapes}", first, "direct"))
    found += [
        Stage(does="train", path=path, source=str(cache), arch=arch, way=way) for path, cache, way in ways
    ]
    return tuple(found)


def check_chain(config: ChainConfig) -> None:
    """Raise what a later stage would raise on shapes, objective or teacher, before hours are spent.

    Raises:
        InvalidConfigError: a shape does not fit the teacher's heads, or the objective the codec.
        TeacherError: the teacher is not there.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InvalidConfigError(
            "a chain runs in one process. Run its stages by `minilm-cache dump` and `torchrun ... train` "
            "with the folders that `chain --dry-run` shows; the chain takes up what they have completed."
        )
    check_codec(config.train.objective, config.dump.codec)
    heads = num_heads_of(locate_teacher(config.dump.teacher, config.dump.revision))
    split_into = None
    if config.train.objective == "minilmv2":
        split_into = config.train.relation_heads or heads
    for arch in (*config.assistants, *config.train.arch):
        parse_arch(arch, heads, split_into)


def run_chain(
    config: ChainConfig,
    folder: Path,
    home: Path,
    *,
    cache_store: str | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> ChainResult:
    """Go through the stages that are left, then compare the students with the teacher.

    Args:
        config: what to dump and train.
        folder: of the chain.
        home: folder of what is kept of caches at URLs.
        cache_store: URL of a store where the caches are looked for before a teacher runs.
        progress: told of each stage.
        should_stop: asked between steps.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; what is complete is kept whatever happens.
    """
    progress = progress or Silent()
    check_chain(config)
    todo = stages(config, folder)
    first = todo[0].path
    for number, stage in enumerate(todo, 1):
        what = ", ".join(stage.arch) or stage.source
        progress.note(f"stage {number} of {len(todo)}: {stage.does} {what} ({stage.state()})")
        is_first = stage.path == first
        if stage.does == "train":
            layer = config.train.teacher_layer if stage.source == str(first) else None
            settings = config.train.model_copy(update={"arch": stage.arch, "teacher_layer": layer})
            train(settings, stage.source, stage.path, home, progress=progress, should_stop=should_stop)
            continue
        dump(
            config.dump if is_first else _assistant_dump(config, stage, first),
            stage.path,
            home,
            cache_store=cache_store,
            tokens_of=None if is_first else first,
            progress=progress,
            should_stop=should_stop,
        )
    return ChainResult(path=folder, record=_finish(config, folder, todo, progress))


def _assistant_dump(config: ChainConfig, stage: Stage, first: Path) -> DumpConfig:
    """Return how an assistant is dumped: over the same sequences, in the same shards."""
    shard_tokens = read_manifest(first).shard_tokens
    update = {"teacher": stage.source, "layers": "last", "revision": None, "shard_tokens": shard_tokens}
    return config.dump.model_copy(update=update)


def _finish(config: ChainConfig, folder: Path, done: Sequence[Stage], progress: Progress) -> ChainRecord:
    """Compare every student with the first teacher; write the record and the page."""
    trainings = [stage for stage in done if stage.does == "train"]
    runs = [TrainedRun.open(stage.path, reference=done[0].path) for stage in trainings]
    progress.note("comparing students with the teacher")
    source = locate_teacher(config.dump.teacher, config.dump.revision)
    teacher = Teacher(source, choose_device(config.dump.device), config.dump.layers)
    table = students_table(runs, teacher, device=config.dump.device)
    ways = {stage.path.name: stage.way for stage in trainings}
    record = ChainRecord(
        teacher=config.dump.teacher,
        assistants=config.assistants,
        caches=tuple(str(one.path.relative_to(folder)) for one in done if one.does == "dump"),
        runs=tuple(str(one.path.relative_to(folder)) for one in trainings),
        students=tuple(
            ChainStudent(
                arch=row["arch"],
                seed=row["seed"],
                way=ways[row["run"]],
                num_parameters=row["num_parameters"],
                held_out_kl=held_out_of(row),
            )
            for row in table.to_pylist()
        ),
    )
    with storage_errors("write", folder / CHAIN_FILE):
        write_file(folder / CHAIN_FILE, record.model_dump_json(indent=1).encode())
        write_report(folder / REPORT_FILE, runs, table, teacher=teacher, title=folder.name)
    return record
