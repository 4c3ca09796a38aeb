"""Teacher -> assistants -> students: each stage is an ordinary cache or an ordinary run in one folder.

A student much smaller than its teacher learns better from an assistant in between (MiniLM, Wang et al. 2020,
arXiv 2002.10957, section 3.3 and table 3). A complete stage is not done again, and an incomplete one resumes
where it stopped, because dump and train do so. The chain adds only their order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import IdentityMismatchError, InvalidConfigError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.device import choose_device
from minilm_cache.models.load import locate_teacher, read_config
from minilm_cache.models.student import shape_config
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.check import check_codec
from minilm_cache.objectives.relations import split_into
from minilm_cache.objectives.spec import OBJECTIVES, Needs
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.report.page import write_report
from minilm_cache.report.runs import TEACHER_CACHE, TrainedRun
from minilm_cache.report.tables import held_out_of, students_table
from minilm_cache.slicing.shapes import check_cut
from minilm_cache.storage_schema.identity import RelationKind, canonical_sha256
from minilm_cache.store.creation import differing_values
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.first import first_config
from minilm_cache.train.folder import RunFolder, arch_slug
from minilm_cache.train.initial import FROM_TEACHER, RANDOM, SLICE
from minilm_cache.train.ranks import refuse_ranks
from minilm_cache.train.run import train_students
from minilm_cache.train.sampler import check_parts
from minilm_cache.workflows.config import (
    LATER_DUMP_SETTINGS,
    LATER_TRAIN_SETTINGS,
    ChainConfig,
    without_defaults,
)
from minilm_cache.workflows.states import cache_state, run_state

CHAIN_FILE = "chain.json"
SETTINGS_FILE = "settings.json"
REPORT_FILE = "report.html"
_MAX_SLUG: Final = 64
_NEEDS: Final = (Needs(), Needs(vectors=True), Needs(pooled=True, relations=False))
"""Needs of objectives that learn relations or vectors of texts, which caches of a chain hold."""
Way = Literal["assistant", "via assistants", "direct"]
_NOT_IDENTIFYING: Final[dict[str, Any]] = {
    "compare_direct": True,
    "dump": {"device": True, "batch_size": True, "keep_weights": True, "check": True},
    "train": {"arch": True, "device": True, "checkpoint_steps": True, "init_layers": True},
}
"""Settings that may differ between commands for the same chain; for example, students may be added."""
_ANY_VALUE: Final = ("max_hours", "tracker", "keep_checkpoints", "local_bytes", "gradient_checkpointing")
"""Settings that change no student. Chains of earlier releases were named with their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One dump or one training."""

    does: Literal["dump", "train"]
    path: Path
    """Folder of the cache or the run."""
    source: str
    """Teacher that is dumped, or cache that is trained from."""
    arch: tuple[str, ...] = ()
    """Shapes of the students that are trained; empty for a dump."""
    way: Way = "assistant"
    """Role of these students in the chain."""

    def state(self) -> str:
        """Return how far the stage is: `to do`, `unfinished`, the number of shards written, or `complete`.

        Raises:
            MiniLMCacheError: the cache or the run is damaged.
        """
        return cache_state(self.path) if self.does == "dump" else run_state(self.path)


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
    """KL via assistants divided by KL direct, for each student that was trained both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainResult:
    """A complete chain: its folder and its record."""

    path: Path
    record: ChainRecord


def chain_folder(config: ChainConfig, home: Path) -> Path:
    """Return the default folder of a chain, which is named after its settings."""
    shapes = _slug(config.assistants)
    return home / "chains" / f"{shapes}-{canonical_sha256(_settings(config))[:12]}"


def _settings(config: ChainConfig) -> dict[str, Any]:
    """Return the settings that identify a chain."""
    settings = config.model_dump(mode="json", exclude=_NOT_IDENTIFYING)
    fields = TrainConfig.model_fields
    same = {name: fields[name].default for name in _ANY_VALUE}
    same["keep_checkpoints"] = 0
    same["init"] = settings["train"]["init"] or RANDOM  # as chains have been named before slices
    train = without_defaults(settings["train"] | same, LATER_TRAIN_SETTINGS)
    return settings | {"train": train, "dump": without_defaults(settings["dump"], LATER_DUMP_SETTINGS)}


def _slug(arch: Sequence[str]) -> str:
    """Return shapes as part of a path; a long list is cut and gets a hash that identifies it."""
    joined = "_".join(map(arch_slug, arch))
    return joined if len(joined) <= _MAX_SLUG else f"{joined[:_MAX_SLUG]}-{canonical_sha256(list(arch))[:8]}"


def stages(config: ChainConfig, folder: Path) -> tuple[Stage, ...]:
    """Return the stages of a chain, in order."""
    caches, runs = folder / "caches", folder / "runs"
    first = caches / TEACHER_CACHE
    planned = [Stage(does="dump", path=first, source=config.dump.teacher)]
    for number, assistant in enumerate(config.assistants, 1):
        name = f"{number}-{arch_slug(assistant)}"
        last = planned[-1].path
        planned += [
            Stage(does="train", path=runs / name, source=str(last), arch=(assistant,)),
            Stage(
                does="dump", path=caches / name, source=str(RunFolder(path=runs / name).student(assistant))
            ),
        ]
    shapes = _slug(config.train.arch)
    arch, last = config.train.arch, planned[-1].path
    ways: list[tuple[Path, Path, Way]] = [(runs / f"students-{shapes}", last, "via assistants")]
    if config.compare_direct:
        ways.append((runs / f"direct-{shapes}", first, "direct"))
    planned += [
        Stage(does="train", path=path, source=str(cache), arch=arch, way=way) for path, cache, way in ways
    ]
    return tuple(planned)


def check_chain(config: ChainConfig, folder: Path) -> ChainConfig:
    """Check the settings of all stages before the first one runs.

    Returns:
        The settings, with the number of relation heads that every stage splits into filled in.

    Raises:
        InvalidConfigError: a shape does not fit the teacher's heads or family, or the objective does not fit
            the codec.
        IdentityMismatchError: the folder holds another chain.
        TeacherError: the teacher cannot be found or read.
    """
    refuse_ranks("a chain", "`chain --dry-run` shows")
    choose_device(config.train.device)
    check_parts(config.train)
    check_codec(config.train, config.dump.codec)
    if config.train.first is not None:
        first = first_config(config.train)
        check_codec(first, config.dump.codec)
        if first.spec.needs not in _NEEDS:
            raise InvalidConfigError(
                f"--first {first.objective}: a chain's caches do not hold what it needs."
            )
    if config.train.spec.needs not in _NEEDS:
        fitting = " or ".join(name for name, spec in OBJECTIVES.items() if spec.needs in _NEEDS)
        raise InvalidConfigError(
            f"--objective {config.train.objective}: a chain's students learn relations or vectors of texts. "
            f"Use {fitting}, or dump and train stage by stage."
        )
    _check_init(config.train)
    if config.train.layer_map != "last":
        raise InvalidConfigError("a chain's students learn from last layers. Leave out --layer-map.")
    source = locate_teacher(config.dump.teacher, config.dump.revision, without_weights=True)
    teacher = read_config(source.folder)
    heads = teacher.num_attention_heads
    split = split_into(config.train.objective, config.train.relation_heads, heads)
    for arch in (*config.assistants, *config.train.arch):
        shape = parse_arch(arch, heads, split_into=split)
        if shape.num_heads != heads and arch in config.assistants:
            raise InvalidConfigError(
                f"--assistant {arch}: an assistant must have its teacher's {heads} heads, so that the same "
                f"students can be trained with and without it. Leave out :h{shape.num_heads}."
            )
        student = shape_config(shape, teacher.to_dict(), teacher.model_type)
        if config.train.init == SLICE:
            check_cut(shape, teacher)
        if arch in config.assistants:
            teacher = student
    checked = config.with_changes(train=config.train.with_changes(relation_heads=split))
    _check_folder(checked, folder)
    return checked


def _check_init(config: TrainConfig) -> None:
    """Raise InvalidConfigError for initial weights that do not fit every stage of a chain."""
    if config.init not in (None, RANDOM, *FROM_TEACHER):
        raise InvalidConfigError(
            f"--init {config.init}: the stages of a chain have different teachers, and no folder fits all of "
            f"them. Give {RANDOM} or {', '.join(FROM_TEACHER)}, or dump and train stage by stage."
        )
    for name in ("init_layers", "init_teacher"):
        if getattr(config, name) is not None:
            raise InvalidConfigError(
                f"--{name.replace('_', '-')}: each stage of a chain takes its students from its own teacher. "
                "Leave it out, or dump and train stage by stage."
            )


def _check_folder(config: ChainConfig, folder: Path) -> None:
    """Raise IdentityMismatchError where a folder holds a chain of other settings."""
    file = folder / SETTINGS_FILE
    if not file.exists():
        return
    try:
        stored = json.loads(file.read_text())
    except ValueError as error:
        raise IdentityMismatchError(f"{file} is damaged. Choose another --out.") from error
    differing = list(differing_values(stored, _settings(config)))
    if differing:
        raise IdentityMismatchError(
            f"{folder} holds another chain, which differs in {', '.join(differing)}. Choose another --out."
        )


def run_chain(
    config: ChainConfig,
    folder: Path,
    *,
    home: Path | None = None,
    cache_store: str | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> ChainResult:
    """Run the stages that are not complete, then compare the students with the teacher.

    Args:
        config: what to dump and train.
        folder: folder of the chain.
        home: folder for local copies of caches at URLs. None means MINILM_CACHE_HOME.
        cache_store: URL of a store to pull caches from, if they are there already. None means that every
            cache is dumped here.
        progress: shows each stage. None means that nothing is shown.
        should_stop: called between steps; True stops.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; complete stages are kept after every error.
    """
    progress = progress or Silent()
    config = check_chain(config, folder)
    with storage_errors("write", folder):
        write_file(folder / SETTINGS_FILE, json.dumps(_settings(config), indent=1).encode())
    planned = stages(config, folder)
    first = planned[0].path
    for number, stage in enumerate(planned, 1):
        what = ", ".join(stage.arch) or stage.source
        progress.note(f"stage {number} of {len(planned)}: {stage.does} {what} ({stage.state()})")
        if stage.does == "train":
            layer = config.train.teacher_layer if stage.source == str(first) else None
            settings = config.train.with_changes(
                arch=stage.arch, teacher_layer=layer, keep_checkpoints=config.train.keep_checkpoints or 0
            )
            train_students(
                settings, stage.source, out=stage.path, home=home, progress=progress, should_stop=should_stop
            )
            continue
        dump_cache(
            _dump_settings(config, stage, first),
            out=stage.path,
            home=home,
            cache_store=cache_store,
            tokens_of=None if stage.path == first else first,
            progress=progress,
            should_stop=should_stop,
        )
    return ChainResult(path=folder, record=_finish(config, folder, done=planned, progress=progress))


def _dump_settings(config: ChainConfig, stage: Stage, first: Path) -> DumpConfig:
    """Return the settings of a dump: assistants read the teacher's sequences, in the same shards."""
    changes: dict[str, Any] = {}
    if stage.path != first:
        shard_tokens = read_manifest(first).shard_tokens
        changes = {"teacher": stage.source, "layers": "last", "revision": None, "shard_tokens": shard_tokens}
    if (stage.path / MANIFEST).exists() and read_manifest(stage.path).complete:
        changes["shard_tokens"] = None  # keep the shards as they are: the cache may have been pulled
    return config.dump.with_changes(**changes)


def _finish(config: ChainConfig, folder: Path, *, done: Sequence[Stage], progress: Progress) -> ChainRecord:
    """Compare every student with the first teacher, and write the record and the report."""
    trainings = [stage for stage in done if stage.does == "train"]
    runs = [
        TrainedRun.open(
            stage.path,
            cache_place=stage.source,
            reference=done[0].path,
            reference_layer=config.train.teacher_layer,
        )
        for stage in trainings
    ]
    progress.note("comparing students with the teacher")
    source = locate_teacher(config.dump.teacher, config.dump.revision)
    teacher = Teacher(source, choose_device(config.dump.device), layers=config.dump.layers)
    table = students_table(runs, teacher, device=config.dump.device)
    ways = {stage.path.name: stage.way for stage in trainings}
    students = tuple(
        ChainStudent(
            arch=row["arch"],
            seed=row["seed"],
            way=ways[row["run"]],
            num_parameters=row["num_parameters"],
            held_out_kl=held_out_of(row),
        )
        for row in table.to_pylist()
    )
    gains = _gains(students)
    record = ChainRecord(
        teacher=config.dump.teacher,
        assistants=config.assistants,
        caches=tuple(str(stage.path.relative_to(folder)) for stage in done if stage.does == "dump"),
        runs=tuple(str(stage.path.relative_to(folder)) for stage in trainings),
        students=students,
        gains=gains,
    )
    with storage_errors("write", folder / CHAIN_FILE):
        write_file(folder / CHAIN_FILE, record.model_dump_json(indent=1).encode())
        write_report(
            folder / REPORT_FILE, runs, table, teacher=teacher, title=folder.name, remarks=remarks(gains)
        )
    return record


def _gains(students: Sequence[ChainStudent]) -> dict[str, float]:
    """Return KL via assistants divided by KL direct, for each shape and seed that was trained both ways."""

    def sums(way: Way) -> dict[str, float]:
        measured = [student for student in students if student.way == way and student.held_out_kl]
        return {
            f"{student.arch}:s{student.seed}": sum((student.held_out_kl or {}).values())
            for student in measured
        }

    via, direct = sums("via assistants"), sums("direct")
    return {name: via[name] / direct[name] for name in via if name in direct}


def remarks(gains: Mapping[str, float]) -> list[str]:
    """Return sentences, without full stops, that say how much the assistants gained."""
    return [
        f"{name} via assistants has {ratio:.4f} times the KL that it has directly from the teacher"
        for name, ratio in gains.items()
    ]
