"""What runs have come to, as Arrow tables: for notebooks, for a study's table, for the report.

from minilm_cache.results import TrainedRun, students_table
students_table([TrainedRun.open("RUN")]).to_pandas()
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from transformers import AutoConfig, PreTrainedConfig

from minilm_cache.cache import Cache, open_cache
from minilm_cache.compare import live_held_out_kl
from minilm_cache.config import TrainConfig, cache_home
from minilm_cache.device import choose_device
from minilm_cache.dump.teacher import Teacher
from minilm_cache.errors import IdentityMismatchError
from minilm_cache.sizes import inference_rates, model_size
from minilm_cache.storage_schema.identity import RelationKind, codec_words
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.train.objective import Objective, choose_objective
from minilm_cache.train.record import LOG_FILE, RUN_FILE, RunRecord, StudentRecord, load_record
from minilm_cache.train.run import student_folder
from minilm_cache.train.student import teacher_config

_SEED: Final = re.compile(r":s\d+")
TEACHER_CACHE: Final = "0-teacher"
"""Folder of the cache in a chain that all its students are compared with."""
KL_COLUMNS: Final = {kind: f"kl_{kind}" for kind in RelationKind}
_GROUP: Final = ["cache", "objective", "arch"]
STUDENTS: Final = pa.schema(
    [
        ("run", pa.string()),
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

    @property
    def name(self) -> str:
        """Name of the cache in tables and pictures."""
        return Path(self.record.cache.rstrip("/")).name

    @classmethod
    def open(
        cls,
        path: str | Path,
        cache_place: str | None = None,
        home: Path | None = None,
        reference: Path | None = None,
    ) -> "TrainedRun":
        """Open a run.

        Args:
            path: its folder.
            cache_place: folder or URL of its cache; none: where it was when the run began.
            home: folder of what is kept of caches at URLs; none: `~/.cache/minilm-cache`.
            reference: cache whose teacher the students are compared with; none: that of the run.

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
        cache = open_cache(cache_place or record.cache, home or cache_home(None))
        if cache.manifest.fingerprint != record.identity.fingerprint:
            raise IdentityMismatchError(
                f"{cache_place or record.cache} is not the cache that run {folder} was trained from "
                f"(fingerprint {record.identity.fingerprint[:12]}). Give that one by --cache."
            )
        other = cache if reference is None else open_cache(reference)
        return cls(path=folder, record=record, cache=cache, reference=other)

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
                "teacher_layer": identity.teacher_layer if self.reference is self.cache else None,
            }
        )
        return choose_objective(config, self.reference)

    def folder(self, student: StudentRecord) -> Path:
        """Return a student's folder."""
        return student_folder(self.path, student.arch)

    def config(self, student: StudentRecord) -> PreTrainedConfig:
        """Return a student's configuration."""
        config = AutoConfig.from_pretrained(
            self.folder(student), trust_remote_code=False, local_files_only=True
        )
        assert isinstance(config, PreTrainedConfig)
        return config

    @property
    def teacher_config(self) -> PreTrainedConfig:
        """The configuration of the teacher that students are compared with."""
        return teacher_config(self.reference.reader.attachment(TEACHER_CONFIG), self.reference.manifest)


def open_runs(path: Path, cache_place: str | None, home: Path) -> list[TrainedRun]:
    """Open a run, or every run of a chain or a study.

    Args:
        path: folder of a run, a chain or a study.
        cache_place: folder or URL of the cache of a run; none: where it was when the run began.
        home: folder of what is kept of caches at URLs.

    Raises:
        InvalidConfigError: there is no run.
        MiniLMCacheError: as `TrainedRun.open`.
    """
    inner = sorted(file.parent for file in path.glob(f"runs/*/{RUN_FILE}"))
    if (path / RUN_FILE).exists() or not inner:
        return [TrainedRun.open(path, cache_place, home)]
    first = path / "caches" / TEACHER_CACHE
    return [TrainedRun.open(run, None, home, first if first.is_dir() else None) for run in inner]


def students_table(
    runs: Sequence[TrainedRun],
    teacher: Teacher | None = None,
    *,
    device: str | None = None,
    price_per_hour: float | None = None,
) -> pa.Table:
    """Return a row for each student of complete runs; of one that diverged, little more than its name.

    Columns: parameters (embedding tables, layers, all), FLOPs per token of a forward pass over a full
    sequence, tokens per second of inference and their ratio to the teacher's (both of random weights, in
    turns, here), held-out KL of each relation in nats and what it is to, bytes of shard files read and
    seconds of the pass that the student shared, its own seconds (by FLOPs), and their cost.

    Args:
        runs: complete runs.
        teacher: makes KLs exact, and those of several codecs comparable; none: as the runs recorded them.
        device: where it measures; none: a GPU where there is one.
        price_per_hour: of the machine; none: no costs.

    Raises:
        IdentityMismatchError: the teacher is not the one of a run's cache.
    """
    length = max(run.cache.manifest.identity.packing.max_length for run in runs)
    configs = {
        **{f"teacher {run.reference.manifest.fingerprint}": run.teacher_config for run in runs},
        **{_plain(one.arch): run.config(one) for run in runs for one in run.students},
    }
    rates = inference_rates(configs, length, choose_device(device))
    rows = []
    for run in runs:
        teacher_rate = rates[f"teacher {run.reference.manifest.fingerprint}"]
        flops = {one.arch: model_size(run.config(one), length).flops_per_token for one in run.students}
        kls = _held_out(run, teacher)
        for one in run.record.students:
            if one.diverged_at is not None:
                rows.append({**_of_run(run), **_names(run, one), "diverged_at": one.diverged_at})
                continue
            rate = rates[_plain(one.arch)]
            share = flops[one.arch] / sum(flops.values())
            own_s = None if run.record.train_s is None else run.record.train_s * share
            rows.append(
                {
                    **_of_run(run),
                    **_names(run, one),
                    **asdict(model_size(run.config(one), length)),
                    "inference_tokens_per_s": rate,
                    "speedup": rate / teacher_rate,
                    "kl_to": "teacher" if teacher is not None else one.target,
                    **_kl_columns(kls[one.arch]),
                    "own_train_s": own_s,
                    "cost": None
                    if price_per_hour is None or own_s is None
                    else own_s / 3600 * price_per_hour,
                }
            )
    return pa.Table.from_pylist(rows, schema=STUDENTS)


def _of_run(run: TrainedRun) -> dict[str, Any]:
    measured, identity = run.cache.manifest.measured, run.record.identity
    assert measured is not None
    heads = "" if identity.relation_heads is None else f" ({identity.relation_heads} relation heads)"
    return {
        "run": run.path.name,
        "cache": run.name,
        "codec": codec_words(run.cache.manifest.identity.codec),
        "cache_bytes_per_token": measured.bytes_per_token,
        "objective": identity.objective + heads,
        "steps": identity.steps,
        "students_in_pass": len(identity.arch),
        "bytes_read": run.record.bytes_read,
        "train_s": run.record.train_s,
    }


def _names(run: TrainedRun, student: StudentRecord) -> dict[str, Any]:
    seed = _SEED.search(student.arch)
    return {
        "arch": _plain(student.arch),
        "seed": int(seed[0][2:]) if seed else run.record.identity.seed,
    }


def _held_out(run: TrainedRun, teacher: Teacher | None) -> Mapping[str, Mapping[RelationKind, float] | None]:
    if teacher is None:
        own = run.reference is run.cache
        return {one.arch: one.held_out_after if own else None for one in run.students}
    found = live_held_out_kl(
        run.reference, teacher, run.objective, [run.folder(student) for student in run.students]
    )
    return {student.arch: kl for student, kl in zip(run.students, found, strict=True)}


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
    """Return means over seeds of each cache, objective and shape, and the standard deviations of KLs.

    `kl_..._stddev` is the deviation of a sample (n - 1), null for one seed.
    """
    sample = pc.VarianceOptions(ddof=1, min_count=2)
    kls = [*KL_COLUMNS.values(), "kl_sum"]
    means = ["speedup", "inference_tokens_per_s", "bytes_read", "train_s", "own_train_s", "cost", *kls]
    same = ["codec", "cache_bytes_per_token", "flops_per_token", "num_parameters"]
    same += ["embedding_parameters", "transformer_parameters", "kl_to"]
    grouped = students.group_by(_GROUP, use_threads=False).aggregate(
        [("seed", "count")]
        + [(name, "first") for name in same]
        + [(name, "mean") for name in means]
        + [(name, "stddev", sample) for name in kls]
    )
    names = {f"{name}_first": name for name in same} | {f"{name}_mean": name for name in means}
    names["seed_count"] = "seeds"
    return grouped.rename_columns([names.get(name, name) for name in grouped.column_names])


def curves_table(run: TrainedRun) -> pa.Table:
    """Return the log of a run: step, student, `students` (training) or `held_out`, relation or loss, nats."""
    rows = []
    for line in (run.path / LOG_FILE).read_text().splitlines():
        content = json.loads(line)
        for what in ("students", "held_out"):
            for arch, means in content.get(what, {}).items():
                rows += [
                    {"step": content["step"], "student": arch, "what": what, "of": name, "nats": value}
                    for name, value in means.items()
                ]
    columns = {"step": pa.int64(), "student": pa.string(), "what": pa.string(), "of": pa.string()}
    return pa.Table.from_pylist(rows, schema=pa.schema([*columns.items(), ("nats", pa.float64())]))
