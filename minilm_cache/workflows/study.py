"""Runs a study: its caches, then its passes, then its tables and its page.

Students that can share a pass do so: all shapes of one cache, one objective and one seed are trained from
each batch together. Caches and runs are ordinary ones in the study's folder; complete ones are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from transformers import PreTrainedConfig

from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import DivergedError, InvalidConfigError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.device import choose_device
from minilm_cache.models.load import locate_teacher, read_config
from minilm_cache.models.student import shape_config, teacher_config
from minilm_cache.models.tap import Head
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.check import check_codec, choose_objective
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.relations import split_into
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.report.compare import is_teacher_of, masked_agreement
from minilm_cache.report.page import write_report
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.tables import students_table, summary_table
from minilm_cache.settings import cache_home
from minilm_cache.slicing.shapes import check_cut
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.store.durable import storage_errors
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.initial import EMBEDDINGS, SLICE
from minilm_cache.train.ranks import refuse_ranks
from minilm_cache.train.run import train_students
from minilm_cache.train.sampler import check_parts
from minilm_cache.workflows.study_spec import Study

PARQUET_FILE = "students.parquet"
CSV_FILE = "students.csv"
SUMMARY_FILE = "summary.csv"
REPORT_FILE = "report.html"
_OBJECTIVE_SETTINGS = {"epochs", "init_teacher", "init_layers", "eval_steps", *ObjectiveConfig.model_fields}
"""Settings of a pass that the steps of `mlm-kd` after it do not share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """Results of a study."""

    path: Path
    students: pa.Table
    """A row for each student of each seed (`report.tables.students_table`)."""
    summary: pa.Table
    """Means and standard deviations over seeds (`report.tables.summary_table`)."""

    @property
    def report(self) -> Path:
        """File of the page."""
        return self.path / REPORT_FILE


def run_study(
    study: Study,
    folder: Path,
    *,
    home: Path | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> StudyResult:
    """Make the caches and runs of a study that are not complete, then write its tables and its page.

    Args:
        study: the study.
        folder: folder of the study.
        home: folder for local copies of caches at URLs. None means MINILM_CACHE_HOME.
        progress: shows each cache and pass. None means that nothing is shown.
        should_stop: called between steps; True stops.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; complete caches and runs are kept after every error.
    """
    progress = progress or Silent()
    home = home or cache_home()
    check_shapes(study, home)
    places = _dump_caches(study, folder, home=home, progress=progress, should_stop=should_stop)
    runs = []
    for number, planned in enumerate(study.passes, 1):
        progress.note(f"pass {number} of {len(study.passes)}: {planned.name}")
        path, place = folder / "runs" / planned.name, places[planned.cache]
        try:
            train_students(
                planned.config, place, out=path, home=home, progress=progress, should_stop=should_stop
            )
        except DivergedError as error:
            progress.note(f"{error} The study goes on without this pass.")
            continue
        runs.append(TrainedRun.open(path, cache_place=place, home=home, name=planned.cache))
    if not runs:
        raise DivergedError(f"every student of {study.source.path} diverged. Lower lr under train.")
    teacher = _teacher(study)
    agreements = _agreements(
        study, runs, teacher=teacher, folder=folder, home=home, progress=progress, should_stop=should_stop
    )
    progress.note("measuring sizes, speed and closeness to the teacher")
    students = students_table(
        runs,
        teacher,
        device=study.passes[0].config.device,
        price_per_hour=study.price_per_hour,
        agreements=agreements,
    )
    summary = summary_table(students)
    with storage_errors("write results in", folder):
        pq.write_table(students, folder / PARQUET_FILE)
        pa_csv.write_csv(students, folder / CSV_FILE)
        pa_csv.write_csv(summary, folder / SUMMARY_FILE)
    shown = teacher if teacher is not None and is_teacher_of(teacher, runs[0].reference) else None
    write_report(folder / REPORT_FILE, runs, students, teacher=shown, title=study.source.path.stem)
    return StudyResult(path=folder, students=students, summary=summary)


def _agreements(
    study: Study,
    runs: Sequence[TrainedRun],
    *,
    teacher: Teacher | None,
    folder: Path,
    home: Path,
    progress: Progress,
    should_stop: ShouldStop,
) -> dict[tuple[str, str], float]:
    """Return how often students predict masked tokens like the teacher, by name of the run and shape.

    Before that, the students of every run take the same number of steps of `mlm-kd`.
    """
    if study.agreement_steps is None or teacher is None:
        return {}
    configs = {planned.name: planned.config for planned in study.passes}
    agreements: dict[tuple[str, str], float] = {}
    for run in runs:
        progress.note(f"agreement on masked tokens: {run.path.name}")
        config = configs[run.path.name]
        arch = tuple(student.arch for student in run.students)
        changes = {"objective": "mlm-kd", "arch": arch, "init": str(run.path), "steps": study.agreement_steps}
        kept = config.model_dump(exclude=_OBJECTIVE_SETTINGS | set(config.spec.recipe))
        masked = TrainConfig.model_validate({**kept, **changes})
        path = folder / "masked" / f"{study.agreement_steps}-{run.path.name}"
        try:
            result = train_students(
                masked, run.record.cache, out=path, home=home, progress=progress, should_stop=should_stop
            )
        except DivergedError as error:
            progress.note(f"{error} The study goes on without this agreement.")
            continue
        learned = [student.arch for student in result.record.students if student.diverged_at is None]
        shares = masked_agreement(run.cache, teacher, [result.student_path(shape) for shape in learned])
        agreements |= {(run.path.name, shape): share for shape, share in zip(learned, shares, strict=True)}
    return agreements


def check_shapes(study: Study, home: Path) -> None:
    """Check that shapes, objectives and devices fit the caches, before anything is dumped or trained.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`.
    """
    refuse_ranks("a study", "it has made, or `minilm-cache dump` makes for `{cache: FOLDER}`")
    for name, cache in study.caches.items():
        opened: Cache | None = None
        if isinstance(cache, DumpConfig):
            source = locate_teacher(cache.teacher, cache.revision, without_weights=True)
            config, codec = read_config(source.folder), cache.codec
            heads = config.num_attention_heads
        else:
            opened = open_cache(cache, home=home)
            config = teacher_config(opened.reader.attachment(TEACHER_CONFIG), opened.manifest)
            codec, heads = opened.manifest.identity.codec.name, opened.manifest.identity.relation_heads
            states = opened.manifest.identity.states
            if study.agreement_steps is not None and (states is None or states.labels is None):
                study.source.fail(("agreement_steps",), f"cache {name} holds no labels; leave this out")
        for planned in study.passes:
            if planned.cache == name:
                _check_pass(study, planned.config, teacher=config, codec=codec, heads=heads)
                if opened is not None:
                    choose_objective(planned.config, opened, arch=planned.config.arch)


def _check_pass(
    study: Study, training: TrainConfig, *, teacher: PreTrainedConfig, codec: str, heads: int
) -> None:
    choose_device(training.device)
    try:
        check_codec(training, codec)
        check_parts(training)
    except InvalidConfigError as error:
        study.source.fail(("train",), str(error))
    split = split_into(training.objective, training.relation_heads, heads)
    for arch in training.arch:
        try:
            shape = parse_arch(arch, heads, split_into=split, compares_heads=training.spec.compares_heads)
            shape_config(shape, teacher.to_dict(), teacher.model_type)
            if training.init in (SLICE, EMBEDDINGS):
                check_cut(shape, teacher, training.init_layers)
        except InvalidConfigError as error:
            location = ("arch", study.arch.index(arch)) if arch in study.arch else ("objective",)
            study.source.fail(location, str(error))


def _dump_caches(
    study: Study, folder: Path, *, home: Path, progress: Progress, should_stop: ShouldStop
) -> dict[str, str]:
    """Dump the caches that are not complete, and return the folder or URL of every cache.

    Caches share their files of tokens.
    """
    places = {}
    first: Path | None = None
    for name, cache in study.caches.items():
        if isinstance(cache, str):
            places[name] = cache
            continue
        path = folder / "caches" / name
        progress.note(f"cache {name}")
        dump_cache(cache, out=path, home=home, tokens_of=first, progress=progress, should_stop=should_stop)
        first = first or path
        places[name] = str(path)
    return places


def _teacher(study: Study) -> Teacher | None:
    """Load the teacher that the study names; None if it names none."""
    if study.teacher is None:
        return None
    name, revision = study.teacher
    head: Head | None = None if study.agreement_steps is None else "tokens"
    return Teacher(locate_teacher(name, revision), choose_device(study.passes[0].config.device), head=head)
