"""Results of runs as Arrow tables: for notebooks, for the table of a study and for the report.

from minilm_cache.report.runs import TrainedRun, open_runs
from minilm_cache.report.tables import students_table

students_table([TrainedRun.open("RUN")]).to_pandas()
"""

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import PreTrainedConfig

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, first_line
from minilm_cache.models.arch import own_seed
from minilm_cache.models.device import choose_device
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import num_map_weights
from minilm_cache.models.student import ModelSize, Timed, inference_rates, model_size
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.check import Objective
from minilm_cache.report.compare import check_is_teacher_of, held_out_cosine, is_teacher_of, live_held_out_kl
from minilm_cache.report.runs import TrainedRun, folder_names, open_runs, with_short_names
from minilm_cache.storage_schema.base import refuse_costly
from minilm_cache.storage_schema.identity import RelationKind, canonical_sha256, codec_words
from minilm_cache.store.durable import open_regular, regular_bytes
from minilm_cache.store.parquet_headers import refuse_bomb
from minilm_cache.train.folder import RunFolder, runs_of
from minilm_cache.train.record import MAX_LOG_BYTES, LogLine, StudentRecord, load_record
from minilm_cache.train.students import unfinished_in_words
from minilm_cache.wording import Place, number_text, some_of

if TYPE_CHECKING:
    import pandas as pd

_SECONDS_PER_HOUR: Final = 3600
_SEED: Final = re.compile(r":s\d+")
KL_COLUMNS: Final = {kind: f"kl_{kind}" for kind in RelationKind}
_COMMON: Final = (RelationKind.ATTENTION, RelationKind.VALUE)
_GROUP: Final = ["cache", "recipe", "objective", "arch", "init", "kl_to"]
"""Columns that the seeds of a summary's row share; a recipe is that of `RunRecord`."""
_APART: Final = "apart"
NAMES: Final = {
    "run": "run",
    "cache": "cache",
    "objective": "objective",
    "teacher_layer": "layer of the teacher",
    "arch": "student",
    "init": "began with",
    "kl_to": "KL to",
}
"""Columns that name a row of a summary, and their headings."""
STUDENTS_FILE: Final = "students.parquet"
"""Table of the students of a study, in its folder."""
SCORE: Final = "score: "
"""Beginning of the names of columns that hold scores on tasks."""
PART: Final = "loss: "
"""Beginning of the names of columns that hold a part of an objective's held-out loss."""
STUDENTS: Final = pa.schema(
    [
        ("run", pa.string()),
        ("recipe", pa.string()),
        ("cache", pa.string()),
        ("codec", pa.string()),
        ("cache_bytes_per_token", pa.float64()),
        ("needed_bytes_per_token", pa.float64()),
        ("objective", pa.string()),
        ("teacher_layer", pa.int64()),
        ("arch", pa.string()),
        ("init", pa.string()),
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
        ("kl_common", pa.float64()),
        ("held_out_loss", pa.float64()),
        ("masked_agreement", pa.float64()),
        ("students_in_pass", pa.int64()),
        ("bytes_read", pa.int64()),
        ("train_s", pa.float64()),
        ("own_train_s", pa.float64()),
        ("cost", pa.float64()),
    ]
)
"""One row for each student. `needed_bytes_per_token` is the part of the cache that its objective needs.

`kl_sum` adds the KLs that the row has: those of the relations that its run recorded, or, where the teacher
runs again, also of the value relation that `--no-value-relation` leaves out of the loss. `kl_common` adds
those by which students of all objectives are compared: attention and value at the teacher's heads.
`bytes_read` and `train_s` are those of the pass that it shared.
"""


def students_table(
    runs: Sequence[TrainedRun],
    teacher: Teacher | None = None,
    *,
    device: str | None = None,
    price_per_hour: float | None = None,
    agreements: Mapping[tuple[str, str], float] | None = None,
    scores: Mapping[str, Mapping[str, float]] | None = None,
) -> pa.Table:
    """Return a row for each student of complete runs; one that diverged has no KL.

    Columns: parameters (embedding tables, layers, all), FLOPs per token of a forward pass over a full
    sequence, tokens per second of inference and their ratio to the teacher's (both measured here in turns,
    with random weights), held-out KL of each relation in nats and the model that it is to, held-out loss of
    the objective, bytes of shard files read and seconds of the pass that the student shared, its own seconds
    (by FLOPs of the steps that it took), and the cost of those seconds. No student's cost includes the dump
    of the cache.

    Args:
        runs: complete runs.
        teacher: teacher that runs again: it makes the KLs of runs that are compared with it exact, and those
            of several codecs comparable. None means the KLs that the runs recorded.
        device: torch device to measure on. None means a GPU where there is one.
        price_per_hour: price of the machine for an hour. None means that costs are left out.
        agreements: share of masked tokens that students predict like the teacher, by name of the run and
            shape. None means that the column is empty.
        scores: scores on tasks by metric, of each student by the absolute path of its run, a slash and its
            shape. Each metric is a further column, whose name begins with `SCORE`. None means that there are
            none.

    Raises:
        MiniLMCacheError: a cache, a configuration or a student is damaged.
    """
    models: dict[str, Timed] = {}
    teachers = [_add(models, run.teacher_config, run.length) for run in runs]
    added = [
        [_add(models, run.config(student), run.length) for student in run.record.students] for run in runs
    ]
    sizes = {name: model_size(model.config, model.length) for name, model in models.items()}
    rates = inference_rates(models, choose_device(device))
    losses = {run.path: _losses(run, teacher) for run in runs}
    folders = folder_names([run.path for run in runs])
    rows = []
    for run, teacher_name, names in zip(runs, teachers, added, strict=True):
        kls, common, kl_to = _held_out(run, teacher)
        shares = _shares(run, [sizes[name] for name in names])
        for student, name, share in zip(run.record.students, names, shares, strict=True):
            own_s = None if run.record.train_s is None else run.record.train_s * share
            row = {"run": folders[run.path], **_run_columns(run), **_name_columns(run, student)}
            row |= {"own_train_s": own_s, "kl_to": kl_to, "kl_common": common.get(student.arch)}
            row |= {"diverged_at": student.diverged_at, "held_out_loss": losses[run.path][student.arch][0]}
            if price_per_hour is not None and own_s is not None:
                row["cost"] = own_s / _SECONDS_PER_HOUR * price_per_hour
            row |= {"inference_tokens_per_s": rates[name], "speedup": rates[name] / rates[teacher_name]}
            row["masked_agreement"] = (agreements or {}).get((run.path.name, student.arch))
            row |= {**asdict(sizes[name]), **_kl_columns(kls.get(student.arch))}
            row["num_parameters"] += num_map_weights(run.folder(student))
            rows.append({column: row.get(column) for column in STUDENTS.names})
    table = _with_parts(pa.Table.from_pylist(rows, schema=STUDENTS), runs, losses)
    return _with_scores(table, runs, scores or {})


_Losses = Mapping[str, tuple[float | None, Mapping[str, float]]]
"""Held-out loss of an objective and its parts, by student."""


def _losses(run: TrainedRun, teacher: Teacher | None) -> _Losses:
    """Return held-out losses to the teacher that students are compared with.

    A run has recorded losses to what its cache holds. Those to an assistant are left out. The cosine of
    vectors is measured again where the teacher is given, since each cache has rounded them in its own way.
    """
    found: dict[str, tuple[float | None, Mapping[str, float]]]
    found = {
        student.arch: (student.loss_after, student.held_out_after or {})
        if run.is_compared_with_own
        else (None, {})
        for student in run.record.students
    }
    pooled, spec = run.reference.manifest.identity.pooled, run.record.identity.spec
    if pooled is None or not spec.needs.pooled or not run.has_teachers_pieces or run.record.identity.also:
        return found
    if teacher is None or not is_teacher_of(teacher, run.reference):
        return found
    cosines = held_out_cosine(run.reference, teacher, [run.folder(student) for student in run.students])
    identity = run.record.identity
    is_whole = identity.loss in ((), ("cosine",)) and not identity.matryoshka
    for student, cosine in zip(run.students, cosines, strict=True):
        # Of several objectives at once it is called `embedding/cosine`.
        names = [name for name in student.held_out_after or () if name.rpartition("/")[2] == "cosine"]
        if cosine is not None and names:
            loss, parts = found[student.arch]
            loss = cosine if is_whole and names == ["cosine"] else loss
            found[student.arch] = loss, {**parts, names[0]: cosine}
    return found


def _with_scores(
    table: pa.Table, runs: Sequence[TrainedRun], scores: Mapping[str, Mapping[str, float]]
) -> pa.Table:
    """Add a column for each metric of scores on tasks."""
    names = [f"{run.path.resolve()}/{student.arch}" for run in runs for student in run.record.students]
    for metric in dict.fromkeys(metric for of_model in scores.values() for metric in of_model):
        values = [scores.get(name, {}).get(metric) for name in names]
        table = table.append_column(f"{SCORE}{metric}", pa.array(values, pa.float64()))
    return table


def _with_parts(table: pa.Table, runs: Sequence[TrainedRun], losses: Mapping[Path, _Losses]) -> pa.Table:
    """Add the parts of the held-out loss of an objective that compares no relations.

    Of several objectives those get columns, named after them, whose students give vectors or scores: their
    KLs do not say what they are worth.
    """
    specs = {run.record.identity.in_words(): run.record.identity.spec for run in runs}
    for objective, spec in specs.items():
        of_students = [
            losses[run.path][student.arch][1] if run.record.identity.in_words() == objective else {}
            for run in runs
            for student in run.record.students
        ]
        has_parts = not (spec.is_relational if len(specs) == 1 else spec.needs.relations)
        named = "" if len(specs) == 1 else f"{objective}, "
        for part in dict.fromkeys(part for each in of_students for part in each) if has_parts else ():
            column = pa.array([of_student.get(part) for of_student in of_students], pa.float64())
            table = table.append_column(f"{PART}{named}{part}", column)
    return table


def results(*folders: Place, teacher: str | None = None) -> "pd.DataFrame":
    """Return a row for each student of runs, chains and studies, with the columns that have values.

    Args:
        folders: folders of complete runs, of chains or of studies, or results of trainings.
        teacher: name or folder of the teacher, which then runs again, so that KLs are exact, as those of a
            study. None means the KLs that runs recorded, to what their caches hold.

    Raises:
        IdentityMismatchError: the teacher is that of none of the runs.
        MiniLMCacheError: a folder holds no complete run, a cache or a student is damaged, or the teacher
            does not exist.
    """
    places = {Path(folder).resolve(): Path(folder) for folder in folders}.values()
    opened = {run.path.resolve(): run for place in places for run in open_runs(place)}
    runs = with_short_names(list(opened.values()))
    scores: dict[str, dict[str, float]] = {}
    for place in places:
        known, left_out = known_scores(place)
        scores |= known
        for line in left_out:
            warnings.warn(line, stacklevel=2)
    live = None if teacher is None else Teacher(locate_teacher(teacher), choose_device(None))
    if live is not None and not any(is_teacher_of(live, run.reference) for run in runs):
        check_is_teacher_of(live, runs[0].reference)
    table = students_table(runs, live, scores=scores)
    frame: pd.DataFrame = table.to_pandas().dropna(axis="columns", how="all")
    return frame


def known_scores(study: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the scores on tasks that the table of a study has, by run and shape, and what is left out.

    The scores are empty for a folder without such a table. Runs that are not complete are left out, and
    scores of students that were trained for longer after they were scored; each in words.
    """
    unfinished = unfinished_in_words(study)
    left_out = [] if unfinished is None else [unfinished]
    file = study / STUDENTS_FILE
    if not file.is_file():
        return {}, left_out
    try:
        with open_regular(file, follow_links=True) as opened:
            metrics = [name for name in pq.read_schema(opened).names if name.startswith(SCORE)]
            kinds = {"run": pa.string(), "arch": pa.string(), "steps": pa.int64()}
            kinds |= dict.fromkeys(metrics, pa.float64())
            refuse_bomb(opened, list(kinds))
            schema = pa.schema([pa.field(name, kind, name in metrics) for name, kind in kinds.items()])
            table = pq.read_table(opened, columns=list(kinds)).select(list(kinds)).cast(schema)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise CacheCorruptError(
            f"cannot read {file}: {first_line(error)}. Run the study again; it makes the table anew."
        ) from error
    known: dict[str, dict[str, float]] = {}
    steps = {run.name: load_record(run).identity.steps for run in runs_of(study)}
    older: list[str] = []
    for row in table.to_pylist() if metrics else ():
        if steps.get(row["run"], row["steps"]) != row["steps"]:
            older.append(f"{row['run']}/{row['arch']}")
            continue
        scored = {name.removeprefix(SCORE): row[name] for name in metrics if row[name] is not None}
        known[f"{study.resolve() / 'runs' / row['run']}/{row['arch']}"] = scored
    if older:
        name = study.resolve().name
        left_out.append(f"{name}: scores from before further training are left out, of {some_of(older)}")
    return known, left_out


def _add(models: dict[str, Timed], config: PreTrainedConfig, length: int) -> str:
    """Add a model to those that are measured, and return its key.

    The key is a hash of the configuration, because models of the same shape may differ. Equal models have one
    key and are measured once.
    """
    name = canonical_sha256([config.to_dict(), length])
    models[name] = Timed(config, length)
    return name


def _shares(run: TrainedRun, sizes: Sequence[ModelSize]) -> list[float]:
    """Return each student's share of a pass, between 0 and 1, by the operations of the steps that it took."""
    work = [
        (run.record.identity.steps if student.diverged_at is None else student.diverged_at)
        * size.pass_flops(stops_early=run.record.identity.spec.stops_early)
        for student, size in zip(run.record.students, sizes, strict=True)
    ]
    total = sum(work)
    return [done / total if total else 0.0 for done in work]


def _run_columns(run: TrainedRun) -> dict[str, Any]:
    """Return the columns that all students of a run share."""
    measured, identity = run.cache.manifest.measured, run.record.identity
    assert measured is not None
    return {
        "recipe": run.record.recipe,
        "cache": run.name,
        "codec": codec_words(run.cache.manifest.identity.codec),
        "cache_bytes_per_token": measured.bytes_per_token,
        "needed_bytes_per_token": run.bytes_per_token,
        "objective": identity.in_words(),
        "teacher_layer": identity.teacher_layer if identity.spec.one_layer else None,
        "steps": identity.steps,
        "students_in_pass": len(identity.arch),
        "bytes_read": run.record.bytes_read,
        "train_s": run.record.train_s,
    }


def _name_columns(run: TrainedRun, student: StudentRecord) -> dict[str, Any]:
    """Return a student's shape and its seed."""
    return {
        "arch": _SEED.sub("", student.arch),
        "init": student.init or run.record.identity.init,
        "seed": seed_of(run, student),
    }


def seed_of(run: TrainedRun, student: StudentRecord) -> int:
    """Return the seed of a student: its own, or that of its run."""
    own = own_seed(student.arch)
    return run.record.identity.seed if own is None else own


_Kls = Mapping[str, Mapping[str, float] | None]


def _held_out(run: TrainedRun, teacher: Teacher | None) -> tuple[_Kls, dict[str, float], str]:
    """Return KLs by student, their sums that all objectives have, and the name of the model they are to."""
    if teacher is not None and is_teacher_of(teacher, run.reference) and run.has_teachers_pieces:
        kls = _live(run, teacher, run.objective)
        return kls, _common(kls) or _common(_live(run, teacher, run.common_objective)), "teacher"
    target = run.record.students[0].target
    # A run has recorded one figure for all layers that it compared: only that of the last one is comparable.
    is_of_last = run.record.identity.layer_map == "last"
    has_kls = run.is_compared_with_own and run.record.identity.spec.is_relational and is_of_last
    recorded = {student.arch: student.held_out_after for student in run.students if has_kls}
    return recorded, _common(recorded), target


def of_several_codecs(students: pa.Table) -> list[str]:
    """Return a caution where KLs to rows that several codecs have stored stand side by side, or nothing."""
    codecs: dict[str, set[str]] = {}
    for row in students.to_pylist():
        if row["kl_sum"] is not None and row["kl_to"] != "teacher":
            codecs.setdefault(row["objective"], set()).add(row["codec"])
    several = [objective for objective, found in codecs.items() if len(found) > 1]
    if not several:
        return []
    return [
        f"KLs of {some_of(several)} are to rows that several codecs have stored more or less closely, and "
        "cannot be compared with each other. Give --teacher: KLs are then to the teacher itself."
    ]


def _live(run: TrainedRun, teacher: Teacher, objective: Objective) -> _Kls:
    """Return KLs by student to a teacher that runs again, for students that have its heads."""
    comparable = [student for student in run.students if run.has_teachers_heads(student, objective)]
    if not comparable:
        return {}
    folders = [run.folder(student) for student in comparable]
    kls = live_held_out_kl(run.reference, teacher, objective=objective, students=folders)
    return {student.arch: kl for student, kl in zip(comparable, kls, strict=True)}


def _common(kls: _Kls) -> dict[str, float]:
    """Return the sum of attention's and value's KL by student, where both are known."""
    known = {arch: kl for arch, kl in kls.items() if kl is not None and kl.keys() >= set(_COMMON)}
    return {arch: sum(kl[kind] for kind in _COMMON) for arch, kl in known.items()}


def _kl_columns(kl: Mapping[str, float] | None) -> dict[str, float | None]:
    if kl is None:
        return {}
    return {
        "kl_sum": sum(kl.values()),
        **{KL_COLUMNS[RelationKind(kind)]: value for kind, value in kl.items()},
    }


def held_out_of(row: Mapping[str, Any]) -> dict[RelationKind, float] | None:
    """Return the KL of each relation, in nats, from a row of `students_table`; None where it has no KL."""
    kls = {kind: row[column] for kind, column in KL_COLUMNS.items() if row[column] is not None}
    return kls or None


def summary_table(students: pa.Table) -> pa.Table:
    """Return means over seeds for each cache, recipe and shape, and the standard deviations of KLs.

    `run` is the first run of a row, `seeds` counts the seeds that did not diverge. `kl_..._stddev` is the
    standard deviation of a sample (n - 1), null for one seed. Where runs of one recipe have the same seed, as
    from two weights to begin with, each run has a row of its own.
    """
    sample = pc.VarianceOptions(ddof=1, min_count=2)
    scores = [name for name in students.column_names if name.startswith((PART, SCORE))]
    kls = [*KL_COLUMNS.values(), "kl_sum", "kl_common", "held_out_loss", "masked_agreement", *scores]
    means = ["speedup", "inference_tokens_per_s", "bytes_read", "train_s", "own_train_s", "cost", *kls]
    same = [
        "run",
        "codec",
        "teacher_layer",
        "cache_bytes_per_token",
        "needed_bytes_per_token",
        "flops_per_token",
        "num_parameters",
    ]
    same += ["embedding_parameters", "transformer_parameters"]
    numbered = students.append_column("place", pa.array(range(len(students)), pa.int64()))
    numbered = numbered.append_column(_APART, pa.array(_runs_apart(students), pa.string()))
    grouped = numbered.group_by([*_GROUP, _APART], use_threads=False).aggregate(
        [("diverged_at", "count", pc.CountOptions(mode="only_null"))]
        + [("place", "min")]
        + [(name, "first") for name in same]
        + [(name, "mean") for name in means]
        + [(name, "stddev", sample) for name in kls]
    )
    grouped = grouped.sort_by("place_min").drop_columns(["place_min", _APART])
    names = {f"{name}_first": name for name in same} | {f"{name}_mean": name for name in means}
    names["diverged_at_count"] = "seeds"
    return grouped.rename_columns([names.get(name, name) for name in grouped.column_names])


def _runs_apart(students: pa.Table) -> list[str]:
    """Return the run of each student whose recipe has several runs of a seed, and nothing for others."""
    of_students = [tuple(row.values()) for row in students.select(_GROUP).to_pylist()]
    seeds = Counter(zip(of_students, students["seed"].to_pylist(), strict=True))
    repeated = {group for (group, _), number in seeds.items() if number > 1}
    runs = students["run"].to_pylist()
    return [run if group in repeated else "" for group, run in zip(of_students, runs, strict=True)]


def measures(summary: pa.Table) -> list[str]:
    """Return the columns of what was measured on held-out sequences, as far as they have values.

    The loss of an objective is among them where a row has no KL, and the sum that all objectives have where
    it differs from that of their own.
    """
    names = [name.removesuffix("_stddev") for name in summary.column_names if name.endswith("_stddev")]
    all_have_kls = not summary["kl_sum"].null_count
    empty = {name for name in names if summary[name].null_count == len(summary)}
    if summary["kl_common"].equals(summary["kl_sum"]):
        empty.add("kl_common")
    if any(summary[name].equals(summary["held_out_loss"]) for name in names if name.startswith(PART)):
        empty.add("held_out_loss")
    return [name for name in names if name not in empty and not (name == "held_out_loss" and all_have_kls)]


def heading_of(column: str) -> str:
    """Return the heading of a column of `measures`."""
    words = {
        "masked_agreement": "masked tokens like the teacher",
        "held_out_loss": "held-out loss",
        "kl_common": "KL, attention + value",
    }
    if column.startswith(PART):
        return f"held-out {column.removeprefix(PART)}"
    return words.get(column, f"KL, {column[3:]}" if column.startswith("kl_") else column.removeprefix(SCORE))


def measured_text(row: Mapping[str, Any], column: str, sign: str = "+-") -> str:
    """Return a value of a column of `measures`, with its deviation where a row stands for several seeds.

    Args:
        row: row of a summary.
        column: name of the column.
        sign: what stands before the deviation.
    """
    digits, spread = 1 if column.startswith(SCORE) else 4, row[f"{column}_stddev"]
    return number_text(row[column], digits) + ("" if spread is None else f" {sign} {spread:.{digits}f}")


def row_names(summary: pa.Table) -> tuple[list[str], list[str]]:
    """Return the columns of `NAMES` that tell the rows of a summary apart, and those that all rows share.

    Runs are among them where nothing else tells two rows apart.
    """
    shown = summary.select([name for name in NAMES if name != "run"])
    is_unique = len(shown.group_by(shown.column_names).aggregate([])) == len(shown)
    # Of each cache, since that of an assistant has a last layer of its own.
    layers = summary.group_by("cache").aggregate([("teacher_layer", "count_distinct")])
    left_out = {
        "run": is_unique,
        "kl_to": "kl_sum" not in measures(summary),
        "teacher_layer": max(layers["teacher_layer_count_distinct"].to_pylist(), default=0) <= 1,
    }
    names = [name for name in NAMES if not left_out.get(name)]
    differing = [name for name in names if name == "arch" or len(summary[name].unique()) > 1]
    return differing, [name for name in names if name not in differing]


def curves_table(run: TrainedRun) -> pa.Table:
    """Return the log of a run: step, student, `students` (training) or `held_out`, relation or loss, nats.

    Raises:
        IdentityMismatchError: the log is damaged.
    """
    file = RunFolder(path=run.path).log
    rows = []
    try:
        for text in regular_bytes(file, MAX_LOG_BYTES).splitlines():
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
