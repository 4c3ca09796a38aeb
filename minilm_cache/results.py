"""What runs have come to, as Arrow tables: for notebooks, for a study's table, for the report.

from minilm_cache.results import TrainedRun, students_table
students_table([TrainedRun.open("RUN")]).to_pandas()
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedConfig

from minilm_cache.cache import Cache, open_cache
from minilm_cache.compare import is_teacher_of, live_held_out_kl
from minilm_cache.config import TrainConfig, cache_home
from minilm_cache.device import choose_device
from minilm_cache.dump.teacher import Teacher
from minilm_cache.errors import IdentityMismatchError, InvalidConfigError, first_line
from minilm_cache.sizes import Timed, inference_rates, model_size
from minilm_cache.storage_schema.identity import RelationKind, canonical_sha256, codec_words
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.train.objective import Objective, choose_objective
from minilm_cache.train.record import (
    LOG_FILE,
    RUN_FILE,
    LogLine,
    RunIdentity,
    RunRecord,
    StudentRecord,
    load_record,
)
from minilm_cache.train.run import student_folder
from minilm_cache.train.student import parse_arch, student_config, teacher_config

_SECONDS_PER_HOUR: Final = 3600
_SEED: Final = re.compile(r":s\d+")
TEACHER_CACHE: Final = "0-teacher"
"""Folder of the cache in a chain that all its students are compared with."""
KL_COLUMNS: Final = {kind: f"kl_{kind}" for kind in RelationKind}
_GROUP: Final = ["cache", "recipe", "objective", "arch", "kl_to"]
"""What one row over several seeds has in common; a recipe is a run's identity without shapes and seed."""
STUDENTS: Final = pa.schema(
    [
        ("run", pa.string()),
        ("recipe", pa.string()),
        ("cache", pa.string()),
        ("codec", pa.string()),
        ("cache_bytes_per_token", pa.float64()),
        ("objective", pa.string()),
        ("arch", pa.string()),
        ("seed", pa.int64()),
        ("steps", pa.int64()),
        ("diverged_at", pa.int64()),
        ("embedding_parameters", pa.int64()),
        ("transformer_parameters", pa.int64()),
        ("num_parameters", pa.int64()),
        ("flops_per_token", pa.float64()),
        ("stopped_flops_per_token", pa.float64()),
        ("inference_tokens_per_s", pa.float64()),
        ("speedup", pa.float64()),
        ("kl_to", pa.string()),
        *((column, pa.float64()) for column in KL_COLUMNS.values()),
        ("kl_sum", pa.float64()),
        ("students_in_pass", pa.int64()),
        ("bytes_read", pa.int64()),
        ("train_s", pa.float64()),
        ("own_train_s", pa.float64()),
        ("cost", pa.float64()),
    ]
)
"""One row for each student; `bytes_read` and `train_s` are those of the pass that it shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A complete run and the cache that it is from."""

    path: Path
    record: RunRecord
    cache: Cache
    reference: Cache
    """Whose teacher the students are compared with: the run's own cache, or in a chain the first one."""
    layer: int | None
    """Of the reference's teacher that they are compared with; none: its last."""
    name: str
    """Of the cache in tables and pictures."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        cache_place: str | None = None,
        home: Path | None = None,
        *,
        name: str | None = None,
        reference: Path | None = None,
        reference_layer: int | None = None,
    ) -> "TrainedRun":
        """Open a run.

        Args:
            path: its folder.
            cache_place: folder or URL of its cache; none: where it was when the run began.
            home: folder of what is kept of caches at URLs; none: `~/.cache/minilm-cache`.
            name: of the cache, in tables; none: the end of its place.
            reference: cache whose teacher the students are compared with; none: that of the run.
            reference_layer: of that teacher; none: its last.

        Raises:
            InvalidConfigError: there is no run.
            IdentityMismatchError: it is not complete, or the cache is another one.
            MiniLMCacheError: the cache cannot be opened.
        """
        folder = Path(path)
        record = load_record(folder)
        if not record.complete:
            raise IdentityMismatchError(
                f"run {folder} is not complete. Finish it with the command that began it; it resumes."
            )
        place = cache_place or record.cache
        cache = open_cache(place, home or cache_home(None))
        if cache.manifest.fingerprint != record.identity.fingerprint:
            raise IdentityMismatchError(
                f"{place} is not the cache that run {folder} was trained from "
                f"(fingerprint {record.identity.fingerprint[:12]}). Give that one by --cache."
            )
        other = cache if reference is None else open_cache(reference)
        own = other.manifest.fingerprint == cache.manifest.fingerprint
        return cls(
            path=folder,
            record=record,
            cache=cache,
            reference=other,
            layer=record.identity.teacher_layer if own else reference_layer,
            name=name or Path(place.rstrip("/")).name,
        )

    @property
    def is_compared_with_own(self) -> bool:
        """True where students are compared with the teacher whose relations they learned."""
        return self.reference.manifest.fingerprint == self.cache.manifest.fingerprint

    @property
    def students(self) -> list[StudentRecord]:
        """Students that have weights: those that did not diverge."""
        return [one for one in self.record.students if one.diverged_at is None]

    @property
    def objective(self) -> Objective:
        """What they learned, as it is asked of the reference."""
        identity = self.record.identity
        config = TrainConfig.model_validate(
            {
                "arch": identity.arch,
                "objective": identity.objective,
                "relation_heads": identity.relation_heads,
                "value_relation": identity.value_relation,
                "query_key_relations": identity.query_key_relations,
                "layer_map": identity.layer_map,
                "teacher_layer": self.layer if identity.layer_map == "last" else None,
            }
        )
        return choose_objective(config, self.reference)

    @property
    def length(self) -> int:
        """Tokens of a sequence, at most."""
        return self.reference.manifest.identity.packing.max_length

    def folder(self, student: StudentRecord) -> Path:
        """Return a student's folder."""
        return student_folder(self.path, student.arch)

    def config(self, student: StudentRecord) -> PreTrainedConfig:
        """Return a student's configuration, from its cache and its shape."""
        manifest = self.cache.manifest
        shape = parse_arch(student.arch, manifest.identity.relation_heads, self._split_into)
        return student_config(shape, self.cache.reader.attachment(TEACHER_CONFIG), manifest)

    @property
    def _split_into(self) -> int | None:
        identity = self.record.identity
        heads = self.cache.manifest.identity.relation_heads
        return identity.relation_heads or heads if identity.objective == "minilmv2" else None

    @property
    def teacher_config(self) -> PreTrainedConfig:
        """The configuration of the teacher that students are compared with."""
        return teacher_config(self.reference.reader.attachment(TEACHER_CONFIG), self.reference.manifest)


def open_runs(path: Path, cache_place: str | None, home: Path) -> list[TrainedRun]:
    """Open a run, or every complete run of a chain or a study.

    Args:
        path: folder of a run, a chain or a study.
        cache_place: folder or URL of the cache of a run; none: where it was when the run began.
        home: folder of what is kept of caches at URLs.

    Raises:
        InvalidConfigError: there is no run, or a place is given for the several caches of several runs.
        MiniLMCacheError: as `TrainedRun.open`.
    """
    inner = sorted(file.parent for file in path.glob(f"runs/*/{RUN_FILE}"))
    if (path / RUN_FILE).exists() or not inner:
        return [TrainedRun.open(path, cache_place, home)]
    if cache_place is not None:
        raise InvalidConfigError(f"--cache goes with a run, and {path} holds several. Leave it out.")
    first = path / "caches" / TEACHER_CACHE
    reference = first if first.is_dir() else None
    found = []
    layer: int | None = None
    for run in inner:
        record = load_record(run)
        if not record.complete:
            continue
        # The folder may have been moved since; its caches have moved with it.
        moved = path / "caches" / Path(record.cache).name
        place = str(moved) if moved.is_dir() else record.cache
        opened = TrainedRun.open(run, place, home, reference=reference)
        layer = opened.layer if opened.is_compared_with_own else layer
        found.append(opened)
    if not found:
        raise InvalidConfigError(f"no run in {path} is complete. Finish it with the command that began it.")
    return [one if one.is_compared_with_own else replace(one, layer=layer) for one in found]


def students_table(
    runs: Sequence[TrainedRun],
    teacher: Teacher | None = None,
    *,
    device: str | None = None,
    price_per_hour: float | None = None,
) -> pa.Table:
    """Return a row for each student of complete runs; one that diverged has no KL.

    Columns: parameters (embedding tables, layers, all), FLOPs per token of a forward pass over a full
    sequence, tokens per second of inference and their ratio to the teacher's (both of random weights, in
    turns, here), held-out KL of each relation in nats and what it is to, bytes of shard files read and
    seconds of the pass that the student shared, its own seconds (by FLOPs of the steps it took), and their
    cost. A cache's dump is in no student's cost.

    Args:
        runs: complete runs.
        teacher: makes KLs exact, and those of several codecs comparable, of runs that are compared with it;
            none: as the runs recorded them.
        device: where it measures; none: a GPU where there is one.
        price_per_hour: of the machine; none: no costs.

    Raises:
        MiniLMCacheError: a cache, a configuration or a student is damaged.
    """
    timed = {_key(run.teacher_config, run.length): Timed(run.teacher_config, run.length) for run in runs}
    for run in runs:
        for one in run.record.students:
            config = run.config(one)
            timed[_key(config, run.length)] = Timed(config, run.length)
    rates = inference_rates(timed, choose_device(device))
    rows = []
    for run in runs:
        teacher_rate = rates[_key(run.teacher_config, run.length)]
        kls, kl_to = _held_out(run, teacher)
        shares = _shares(run)
        for one in run.record.students:
            own_s = None if run.record.train_s is None else run.record.train_s * shares[one.arch]
            row = {**_of_run(run), **_names(run, one), "diverged_at": one.diverged_at, "own_train_s": own_s}
            if price_per_hour is not None and own_s is not None:
                row["cost"] = own_s / _SECONDS_PER_HOUR * price_per_hour
            config = run.config(one)
            rate = rates[_key(config, run.length)]
            row |= {"inference_tokens_per_s": rate, "speedup": rate / teacher_rate, "kl_to": kl_to}
            row |= asdict(model_size(config, run.length)) | _kl_columns(kls.get(one.arch))
            rows.append({name: row.get(name) for name in STUDENTS.names})
    return pa.Table.from_pylist(rows, schema=STUDENTS)


def _key(config: PreTrainedConfig, length: int) -> str:
    """Return what names a model in measurements: shapes of one name may differ."""
    return canonical_sha256([config.to_dict(), length])


def _shares(run: TrainedRun) -> dict[str, float]:
    """Return each student's share of a pass, by the operations of the steps that it took."""
    work = {}
    for one in run.record.students:
        steps = run.record.identity.steps if one.diverged_at is None else one.diverged_at
        work[one.arch] = steps * model_size(run.config(one), run.length).stopped_flops_per_token
    total = sum(work.values())
    return {arch: done / total if total else 0.0 for arch, done in work.items()}


def _of_run(run: TrainedRun) -> dict[str, Any]:
    measured, identity = run.cache.manifest.measured, run.record.identity
    assert measured is not None
    recipe = identity.model_dump(mode="json", exclude={"arch", "seed"})
    return {
        "run": run.path.name,
        "recipe": canonical_sha256(recipe)[:12],
        "cache": run.name,
        "codec": codec_words(run.cache.manifest.identity.codec),
        "cache_bytes_per_token": measured.bytes_per_token,
        "objective": _objective_words(identity),
        "steps": identity.steps,
        "students_in_pass": len(identity.arch),
        "bytes_read": run.record.bytes_read,
        "train_s": run.record.train_s,
    }


def _objective_words(identity: RunIdentity) -> str:
    """Return an objective and what was asked of it beside its name."""
    parts = {
        f"{identity.relation_heads} relation heads": identity.relation_heads is not None,
        "no value relation": not identity.value_relation,
        "query and key relations": identity.query_key_relations,
        f"layers: {identity.layer_map}": identity.layer_map != "last",
    }
    found = [words for words, is_asked in parts.items() if is_asked]
    return identity.objective + (f" ({', '.join(found)})" if found else "")


def _names(run: TrainedRun, student: StudentRecord) -> dict[str, Any]:
    seed = _SEED.search(student.arch)
    return {
        "arch": _plain(student.arch),
        "seed": int(seed[0][2:]) if seed else run.record.identity.seed,
    }


def _held_out(
    run: TrainedRun, teacher: Teacher | None
) -> tuple[Mapping[str, Mapping[RelationKind, float] | None], str]:
    """Return KLs by student, and what they are to."""
    if teacher is not None and is_teacher_of(teacher, run.reference):
        folders = [run.folder(student) for student in run.students]
        found = live_held_out_kl(run.reference, teacher, run.objective, folders)
        return {student.arch: kl for student, kl in zip(run.students, found, strict=True)}, "teacher"
    target = run.record.students[0].target
    kept = {one.arch: one.held_out_after for one in run.students if run.is_compared_with_own}
    return kept, target


def _kl_columns(kl: Mapping[RelationKind, float] | None) -> dict[str, float | None]:
    if kl is None:
        return {}
    return {"kl_sum": sum(kl.values()), **{KL_COLUMNS[kind]: value for kind, value in kl.items()}}


def held_out_of(row: Mapping[str, Any]) -> dict[RelationKind, float] | None:
    """Return the KL of each relation from a row of `students_table`."""
    found = {kind: row[column] for kind, column in KL_COLUMNS.items() if row[column] is not None}
    return found or None


def _plain(arch: str) -> str:
    """Return a shape without its seed."""
    return _SEED.sub("", arch)


def summary_table(students: pa.Table) -> pa.Table:
    """Return means over seeds of each cache, recipe and shape, and the standard deviations of KLs.

    `seeds` counts those that did not diverge.
    `kl_..._stddev` is the deviation of a sample (n - 1), null for one seed.
    """
    sample = pc.VarianceOptions(ddof=1, min_count=2)
    kls = [*KL_COLUMNS.values(), "kl_sum"]
    means = ["speedup", "inference_tokens_per_s", "bytes_read", "train_s", "own_train_s", "cost", *kls]
    same = ["codec", "cache_bytes_per_token", "flops_per_token", "num_parameters"]
    same += ["embedding_parameters", "transformer_parameters"]
    numbered = students.append_column("place", pa.array(range(len(students)), pa.int64()))
    grouped = numbered.group_by(_GROUP, use_threads=False).aggregate(
        [("diverged_at", "count", pc.CountOptions(mode="only_null"))]
        + [("place", "min")]
        + [(name, "first") for name in same]
        + [(name, "mean") for name in means]
        + [(name, "stddev", sample) for name in kls]
    )
    grouped = grouped.sort_by("place_min").drop_columns("place_min")
    names = {f"{name}_first": name for name in same} | {f"{name}_mean": name for name in means}
    names["diverged_at_count"] = "seeds"
    return grouped.rename_columns([names.get(name, name) for name in grouped.column_names])


def curves_table(run: TrainedRun) -> pa.Table:
    """Return the log of a run: step, student, `students` (training) or `held_out`, relation or loss, nats.

    Raises:
        IdentityMismatchError: it is damaged.
    """
    file = run.path / LOG_FILE
    rows = []
    try:
        for line in map(LogLine.model_validate_json, file.read_text().splitlines()):
            for what, students in (("students", line.students), ("held_out", line.held_out)):
                for arch, means in students.items():
                    named = {"step": line.step, "student": arch, "what": what}
                    rows += [{**named, "of": name, "nats": value} for name, value in means.items()]
    except (OSError, ValueError) as error:
        raise IdentityMismatchError(
            f"{file} is damaged: {first_line(error)}. Remove the damaged lines, or train again."
        ) from error
    columns = {"step": pa.int64(), "student": pa.string(), "what": pa.string(), "of": pa.string()}
    return pa.Table.from_pylist(rows, schema=pa.schema([*columns.items(), ("nats", pa.float64())]))
