"""What runs have come to, as Arrow tables: for notebooks, for a study's table, for the report.

from minilm_cache.train.folder import RUN_FILE, RunFolder, arch_slug, is_run
from minilm_cache.results import students_table
from minilm_cache.runs import TrainedRun

students_table([TrainedRun.open("RUN")]).to_pandas()
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedConfig

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, first_line
from minilm_cache.models.device import choose_device
from minilm_cache.models.size import ModelSize, Timed, inference_rates, model_size
from minilm_cache.models.teacher import Teacher
from minilm_cache.report.compare import is_teacher_of, live_held_out_kl
from minilm_cache.report.runs import TrainedRun
from minilm_cache.storage_schema.identity import RelationKind, canonical_sha256, codec_words
from minilm_cache.storage_schema.problems import refuse_costly
from minilm_cache.store.regular_files import first_bytes
from minilm_cache.train.folder import RunFolder
from minilm_cache.train.record import MAX_LOG_BYTES, LogLine, RunIdentity, StudentRecord

_SECONDS_PER_HOUR: Final = 3600
_SEED: Final = re.compile(r":s\d+")
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
        ("masked_agreement", pa.float64()),
        ("students_in_pass", pa.int64()),
        ("bytes_read", pa.int64()),
        ("train_s", pa.float64()),
        ("own_train_s", pa.float64()),
        ("cost", pa.float64()),
    ]
)
"""One row for each student; `bytes_read` and `train_s` are those of the pass that it shared."""


def students_table(
    runs: Sequence[TrainedRun],
    teacher: Teacher | None = None,
    *,
    device: str | None = None,
    price_per_hour: float | None = None,
    agreements: Mapping[tuple[str, str], float] | None = None,
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
        agreements: of students with the teacher on masked tokens, by name of the run and shape.

    Raises:
        MiniLMCacheError: a cache, a configuration or a student is damaged.
    """
    models: dict[str, Timed] = {}
    teachers = [_add(models, run.teacher_config, run.length) for run in runs]
    added = [[_add(models, run.config(one), run.length) for one in run.record.students] for run in runs]
    sizes = {name: model_size(model.config, model.length) for name, model in models.items()}
    rates = inference_rates(models, choose_device(device))
    rows = []
    for run, teacher_name, names in zip(runs, teachers, added, strict=True):
        kls, kl_to = _held_out(run, teacher)
        shares = _shares(run, [sizes[name] for name in names])
        for one, name, share in zip(run.record.students, names, shares, strict=True):
            own_s = None if run.record.train_s is None else run.record.train_s * share
            row = {**_of_run(run), **_names(run, one), "diverged_at": one.diverged_at, "own_train_s": own_s}
            if price_per_hour is not None and own_s is not None:
                row["cost"] = own_s / _SECONDS_PER_HOUR * price_per_hour
            row |= {"inference_tokens_per_s": rates[name], "speedup": rates[name] / rates[teacher_name]}
            row["masked_agreement"] = (agreements or {}).get((run.path.name, one.arch))
            row |= {"kl_to": kl_to, **asdict(sizes[name]), **_kl_columns(kls.get(one.arch))}
            rows.append({column: row.get(column) for column in STUDENTS.names})
    return pa.Table.from_pylist(rows, schema=STUDENTS)


def _add(models: dict[str, Timed], config: PreTrainedConfig, length: int) -> str:
    """Add a model to those that are measured, once, and return its name: shapes of one name may differ."""
    name = canonical_sha256([config.to_dict(), length])
    models[name] = Timed(config, length)
    return name


def _shares(run: TrainedRun, sizes: Sequence[ModelSize]) -> list[float]:
    """Return each student's share of a pass, by the operations of the steps that it took."""
    work = [
        (run.record.identity.steps if one.diverged_at is None else one.diverged_at)
        * size.stopped_flops_per_token
        for one, size in zip(run.record.students, sizes, strict=True)
    ]
    total = sum(work)
    return [done / total if total else 0.0 for done in work]


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
        "the paper's equations": identity.form is None and identity.spec.has_forms,
        f"patience {identity.patience}": identity.patience is not None,
        f"temperature {identity.temperature}": identity.temperature is not None,
        f"ground truth {identity.ground_truth}": identity.ground_truth is not None,
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
) -> tuple[Mapping[str, Mapping[str, float] | None], str]:
    """Return KLs by student, and what they are to."""
    if teacher is not None and is_teacher_of(teacher, run.reference):
        alike = [student for student in run.students if run.has_teachers_heads(student)]
        folders = [run.folder(student) for student in alike]
        found = live_held_out_kl(run.reference, teacher, objective=run.objective, students=folders)
        return {student.arch: kl for student, kl in zip(alike, found, strict=True)}, "teacher"
    target = run.record.students[0].target
    has_kls = run.is_compared_with_own and run.record.identity.objective in ("minilm", "minilmv2")
    kept = {one.arch: one.held_out_after for one in run.students if has_kls}
    return kept, target


def _kl_columns(kl: Mapping[str, float] | None) -> dict[str, float | None]:
    if kl is None:
        return {}
    return {
        "kl_sum": sum(kl.values()),
        **{KL_COLUMNS[RelationKind(kind)]: value for kind, value in kl.items()},
    }


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
    kls = [*KL_COLUMNS.values(), "kl_sum", "masked_agreement"]
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
    file = RunFolder(path=run.path).log
    rows = []
    try:
        for text in first_bytes(file, MAX_LOG_BYTES).splitlines():
            refuse_costly(text, str(file))
            line = LogLine.model_validate_json(text)
            for what, students in (("students", line.students), ("held_out", line.held_out)):
                for arch, means in students.items():
                    named = {"step": line.step, "student": arch, "what": what}
                    rows += [{**named, "of": name, "nats": value} for name, value in means.items()]
    except (CacheCorruptError, OSError, ValueError) as error:
        raise IdentityMismatchError(
            f"{file} is damaged: {first_line(error)}. Remove the damaged lines, or train again."
        ) from error
    columns = {"step": pa.int64(), "student": pa.string(), "what": pa.string(), "of": pa.string()}
    return pa.Table.from_pylist(rows, schema=pa.schema([*columns.items(), ("nats", pa.float64())]))
