"""Runs a study: its caches, then its passes, then its tables and its page.

Students that can share a pass do so: all shapes of one cache, one objective and one seed are trained from
each batch together. Caches and runs are ordinary ones in the study's folder; complete ones are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from transformers import PreTrainedConfig

from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.engines.ray_cluster import Job, RayCluster, run_jobs
from minilm_cache.errors import DivergedError, IdentityMismatchError, InvalidConfigError, TeacherError
from minilm_cache.evaluate.card import Summary
from minilm_cache.evaluate.run import Evaluation, check_evaluation, evaluate_models
from minilm_cache.models.device import choose_device
from minilm_cache.models.files import weights_sha256
from minilm_cache.models.load import read_config, refuse_no_head
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.student import teacher_config
from minilm_cache.models.tap import Head
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.config import ObjectiveConfig, check_codec
from minilm_cache.objectives.labelled import own_labels
from minilm_cache.objectives.several import check_also
from minilm_cache.report.compare import is_teacher_of, masked_agreement
from minilm_cache.report.page import write_report
from minilm_cache.report.runs import TrainedRun, cautions, with_short_names
from minilm_cache.report.tables import STUDENTS_FILE, students_table, summary_table
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, CacheManifest
from minilm_cache.store.durable import storage_errors
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.config import TrainConfig, check_parts
from minilm_cache.train.folder import RunFolder, is_run
from minilm_cache.train.initial import folder_of, name_of_folder
from minilm_cache.train.ranks import refuse_ranks
from minilm_cache.train.record import RunRecord, has_trained_nothing, load_record, refuse_other_run
from minilm_cache.train.run import train_students
from minilm_cache.train.vocabulary import listed_name
from minilm_cache.workflows.config import CACHES, RUNS, SETTINGS_FILE
from minilm_cache.workflows.stages import (
    assistants_dump,
    check_student,
    check_training,
    check_with_cache,
    refuse_foreign,
)
from minilm_cache.workflows.study_pass import Assistant, Pass
from minilm_cache.workflows.study_spec import ASSISTANT, Study

CSV_FILE = "students.csv"
SUMMARY_FILE = "summary.csv"
REPORT_FILE = "report.html"
EVALUATIONS = "evaluations"
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
    diverged: tuple[str, ...] = ()
    """Names of the passes whose students all diverged, so that the tables lack them."""
    cautions: tuple[str, ...] = ()
    """What readers of the tables must know, such as students that ended worse than they began."""
    evaluation: Evaluation | None = None
    """Trials of the teacher and of all students. None means that the study asks for none."""

    @property
    def report(self) -> Path:
        """File of the page."""
        return self.path / REPORT_FILE


def run_study(
    study: Study, folder: Path, *, session: Session = ALONE, cluster: RayCluster | None = None
) -> StudyResult:
    """Make the caches and runs of a study that are not complete, then write its tables and its page.

    Args:
        study: the study.
        folder: folder of the study; with a cluster, the same on every machine.
        cluster: makes caches and runs at the same time, each as a task. None means that they are made here,
            one after the other.
        session: its home is the folder for local copies of caches at URLs. Its progress shows each cache and
            pass. Its `should_stop` is called between steps; True stops.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; complete caches and runs are kept after every error.
    """
    session, folder = session.with_absolute_home(), folder.absolute()
    study = study.grown(folder)
    check_study(study, folder, session, here=cluster is None)
    opened = lru_cache(partial(open_cache, home=session.home))
    for planned in study.passes:
        known_record(study, folder, planned, opened=opened, home=session.home)
    results = run_jobs(_jobs(study, folder), cluster, folder=folder, session=session)
    result: StudyResult = results[-1]
    return result


def known_record(
    study: Study, folder: Path, planned: Pass, *, opened: Callable[[str], Cache], home: Path | None
) -> RunRecord | None:
    """Return the record of a pass that is there. None means that it has trained nothing yet.

    Args:
        study: the study.
        folder: folder of the study.
        planned: the pass.
        opened: opens a cache, which several passes may have in common.
        home: folder of what is kept of texts. None means that nothing is kept.

    Raises:
        IdentityMismatchError: the pass was trained from another cache, or with other pieces or labels than
            the files that the study names have now.
    """
    run, place = folder / RUNS / planned.name, place_of_cache(study, folder, planned.cache)
    record = load_record(run) if is_run(run) else None
    if record is None or has_trained_nothing(run, record):
        return None
    is_given = isinstance(study.caches.get(planned.cache), str)
    if is_given or ((Path(place) / MANIFEST).is_file() and read_manifest(Path(place)).complete):
        cache, config = opened(place), planned.config
        asked: dict[str, Any] = {"fingerprint": cache.manifest.fingerprint}
        if (pieces := listed_name(config, cache)) is not None:
            asked["vocab"] = pieces
        if (labels := own_labels(cache, config, home=home)) is not None:
            asked["own_labels"] = labels.sha256
        if folder_of(config.init) is not None:
            asked["init"] = name_of_folder(str(config.init), record.identity.arch)
        refuse_other_run(run, record, asked)
    return record


def _jobs(study: Study, folder: Path) -> list[Job]:
    """Return the dumps of a study, its passes, the passes of `mlm-kd` after them, and the comparison."""
    jobs: list[Job] = []
    numbers: dict[str, int] = {}
    trained: dict[str, int] = {}
    for name, cache in study.caches.items():
        if isinstance(cache, DumpConfig):
            after = (next(iter(numbers.values())),) if numbers else ()
            numbers[name] = len(jobs)
            trainings = [planned.config for planned in study.passes if planned.cache == name]
            call: Callable[..., Any] = partial(_dump, cache, folder / CACHES / name, trainings=trainings)
            jobs.append(Job(name=f"cache {name}", call=call, after=after))
    for name, assistant in study.made.items():
        place = place_of_cache(study, folder, assistant.teacher)
        training = assistant.training
        call = partial(_train, training.config, place, out=folder / RUNS / training.name)
        trained[training.name] = len(jobs)
        jobs.append(Job(name=f"assistant {training.name}", call=call, after=(numbers[assistant.teacher],)))
        numbers[name] = len(jobs)
        call = partial(_dump_assistant, study, assistant, folder=folder)
        jobs.append(Job(name=f"cache {name}", call=call, after=(len(jobs) - 1,)))
    for planned in study.passes:
        place = place_of_cache(study, folder, planned.cache)
        trained[planned.name] = len(jobs)
        call = partial(_train, planned.config, place, out=folder / RUNS / planned.name)
        after = (numbers[planned.cache],) if planned.cache in numbers else ()
        jobs.append(Job(name=f"pass {planned.name}", call=call, after=after))
    learned = [trained[planned.name] for planned in compared(study)]
    masked: list[int] = []
    if study.agreement_steps is not None and study.teacher is not None:
        for number, planned in zip(learned, compared(study), strict=True):
            masked.append(len(jobs))
            call = partial(_train_masked, study, planned, folder=folder)
            jobs.append(Job(name=_agreement_of(planned), call=call, after=(number,)))
    scored: list[int] = []
    if study.evaluation is not None:
        scored.append(len(jobs))
        jobs.append(Job(name="scores", call=partial(_evaluate, study, folder), after=tuple(learned)))
    compare = partial(_compare, study, folder)
    jobs.append(Job(name="comparison with the teacher", call=compare, after=(*scored, *learned, *masked)))
    return jobs


def compared(study: Study) -> tuple[Pass, ...]:
    """Return the trainings whose students are compared: those of assistants, and then the passes.

    An assistant whose shape is one of the study's is left out: a pass has a student like it.
    """
    trained = {(each.label, arch) for each in study.passes for arch in each.config.arch}
    assistants = [
        each.training
        for each in study.assistants
        if (each.training.label.removesuffix(ASSISTANT), *each.training.config.arch) not in trained
    ]
    return (*assistants, *study.passes)


def _agreement_of(planned: Pass) -> str:
    """Return the name of the pass of `mlm-kd` after a pass."""
    return f"agreement on masked tokens: {planned.name}"


def place_of_cache(study: Study, folder: Path, cache: str) -> str:
    """Return the folder or URL of a cache of the study."""
    known = study.caches.get(cache)
    return known if isinstance(known, str) else str(folder / CACHES / cache)


def _reference(study: Study, folder: Path, cache: str) -> Path | None:
    """Return the cache of the teacher that students are compared with. None means their own cache."""
    assistant = study.made.get(cache)
    return None if assistant is None else folder / CACHES / assistant.teacher


def _dump(
    config: DumpConfig,
    path: Path,
    tokens_of: Path | None = None,
    *,
    trainings: Sequence[TrainConfig],
    session: Session,
) -> Path:
    """Dump a cache, which shares the first one's token files, check its passes, and return its folder."""
    dump_cache(config, out=path, tokens_of=tokens_of, session=session)
    check_with_cache(trainings, open_cache(path, home=session.home), home=session.home)
    return tokens_of or path


def _dump_assistant(
    study: Study, assistant: Assistant, has_learned: bool, *, folder: Path, session: Session
) -> Path:
    """Dump what an assistant computes over its teacher's sequences."""
    if not has_learned:
        raise DivergedError(f"assistant {assistant.name} diverged. Lower lr under train.")
    of_teacher = study.caches[assistant.teacher]
    assert isinstance(of_teacher, DumpConfig)
    first, out = folder / CACHES / assistant.teacher, folder / CACHES / assistant.name
    (arch,) = assistant.training.config.arch
    student = RunFolder(path=folder / RUNS / assistant.training.name).student(arch)
    config = assistants_dump(of_teacher, student, first=first, out=out)
    dump_cache(config, out=out, tokens_of=first, session=session)
    return first


def _evaluate(study: Study, folder: Path, *have_learned: bool, session: Session) -> Evaluation:
    """Fine-tune and score the teacher, and the assistants and students that have learned."""
    assert study.evaluation is not None
    assert study.teacher is not None
    name, revision = study.teacher
    passes = zip(compared(study), have_learned, strict=True)
    runs = [str(folder / RUNS / planned.name) for planned, has_learned in passes if has_learned]
    teacher = str(locate_teacher(name, revision).folder) if revision is not None else name
    return evaluate_models(study.evaluation, [teacher, *runs], out=folder / EVALUATIONS, session=session)


def _train(
    config: TrainConfig, cache: str, dumped: Path | None = None, *, out: Path, session: Session
) -> bool:
    """Train a pass, and return whether a student has learned; if all diverge, the study goes on."""
    del dumped  # only waited for
    try:
        train_students(config, cache, out=out, session=session).note_worse(session)
    except DivergedError as error:
        session.progress.note(f"{error} The study goes on without them.")
        return False
    return True


def _train_masked(study: Study, planned: Pass, has_learned: bool, *, folder: Path, session: Session) -> bool:
    """Train the students of a pass by `mlm-kd`, all by the same number of steps."""
    if not has_learned:
        return False
    place, config = place_of_cache(study, folder, planned.cache), planned.config
    run = TrainedRun.open(folder / RUNS / planned.name, cache_place=place, home=session.home)
    arch = tuple(student.arch for student in run.students)
    changes = {"objective": "mlm-kd", "arch": arch, "init": str(run.path), "steps": study.agreement_steps}
    kept = config.model_dump(exclude=_OBJECTIVE_SETTINGS | set(config.spec.recipe))
    masked = TrainConfig.model_validate({**kept, **changes})
    out = _masked_folder(study, folder, planned)
    return _train(masked, place, out=out, session=session)


def _masked_folder(study: Study, folder: Path, planned: Pass) -> Path:
    return folder / "masked" / f"{study.agreement_steps}-{planned.name}"


def _compare(
    study: Study,
    folder: Path,
    *results: Any,  # noqa: ANN401 - of jobs of several kinds
    session: Session,
) -> StudyResult:
    """Write the tables and the page of complete runs.

    Args:
        study: the study.
        folder: folder of the study.
        results: the evaluation, if the study asks for one; whether each training that is compared has a
            student that did not diverge; then the same of the passes of `mlm-kd` after them.
        session: its home is the folder for local copies of caches at URLs. Its progress shows what is
            measured. Its `should_stop` is not called, since what is measured takes seconds.

    Raises:
        DivergedError: no pass has such a student.
    """
    num_scores = int(study.evaluation is not None)
    evaluation: Evaluation | None = results[0] if num_scores else None
    have_learned: tuple[bool, ...] = results[num_scores:]
    runs = _opened(study, folder, have_learned, home=session.home)
    if not runs:
        raise DivergedError(f"every student of {study.source.path} diverged. Lower lr under train.")
    teacher = _teacher(study)
    masked = {
        planned.name: _masked_folder(study, folder, planned)
        for planned, has_learned in zip(compared(study), have_learned[len(compared(study)) :], strict=False)
        if has_learned
    }
    scores = {} if evaluation is None else _scores_of(evaluation.summaries)
    session.progress.note("measuring sizes, speed and closeness to the teacher")
    students = students_table(
        runs,
        teacher,
        device=study.passes[0].config.device,
        price_per_hour=study.price_per_hour,
        agreements=_agreements(runs, teacher, masked),
        scores={f"{folder.resolve() / 'runs'}/{model}": found for model, found in scores.items()},
    )
    summary = _write_tables(students, folder)
    shown = teacher if teacher is not None and is_teacher_of(teacher, runs[0].reference) else None
    write_report(
        folder / REPORT_FILE,
        runs,
        students,
        teacher=shown,
        title=study.source.path.stem,
        teachers_scores=None if evaluation is None else scores.get(evaluation.trials[0].model),  # the first
        remarks=evaluation.remarks if evaluation else (),
    )
    return StudyResult(
        path=folder,
        students=students,
        summary=summary,
        diverged=_diverged(study, have_learned),
        cautions=(*cautions(runs), *(evaluation.remarks if evaluation else ())),
        evaluation=evaluation,
    )


def _diverged(study: Study, have_learned: Sequence[bool]) -> tuple[str, ...]:
    """Return the names of passes without a student that learned."""
    names = [*(planned.name for planned in compared(study)), *map(_agreement_of, compared(study))]
    return tuple(name for name, has_learned in zip(names, have_learned, strict=False) if not has_learned)


def _write_tables(students: pa.Table, folder: Path) -> pa.Table:
    """Write a table of students and its means over seeds, and return the means."""
    summary = summary_table(students)
    with storage_errors("write results in", folder):
        pq.write_table(students, folder / STUDENTS_FILE)
        pa_csv.write_csv(students, folder / CSV_FILE)
        pa_csv.write_csv(summary, folder / SUMMARY_FILE)
    return summary


def _opened(
    study: Study, folder: Path, have_learned: Sequence[bool], *, home: Path | None
) -> list[TrainedRun]:
    """Return the runs of passes with a student that did not diverge."""
    runs = [
        TrainedRun.open(
            folder / RUNS / planned.name,
            cache_place=place_of_cache(study, folder, planned.cache),
            home=home,
            name=planned.cache,
            reference=_reference(study, folder, planned.cache),
            reference_layer=planned.config.teacher_layer,
        )
        for planned, has_learned in zip(compared(study), have_learned, strict=False)
        if has_learned
    ]
    return with_short_names(runs)


def _scores_of(summaries: Sequence[Summary]) -> dict[str, dict[str, float]]:
    """Return the means over seeds of each model's scores on dev sets, by name of the model and metric."""
    scores: dict[str, dict[str, float]] = {}
    for summary in summaries:
        for name, metrics in summary.scores.items():
            words = " ".join(filter(None, (Path(summary.task).name, summary.track, name)))
            for metric, score in metrics.items():
                scores.setdefault(summary.model, {})[f"{words} {metric}"] = score.mean
    return scores


def _agreements(
    runs: Sequence[TrainedRun], teacher: Teacher | None, masked: Mapping[str, Path]
) -> dict[tuple[str, str], float]:
    """Return how often students predict masked tokens like the teacher, by name of the run and shape."""
    agreements: dict[tuple[str, str], float] = {}
    for run in runs:
        if teacher is None or run.path.name not in masked:
            continue
        path = masked[run.path.name]
        learned = [student.arch for student in load_record(path).trained]
        places = [RunFolder(path=path).student(shape) for shape in learned]
        shares = masked_agreement(run.cache, teacher, places)
        agreements |= {(run.path.name, shape): share for shape, share in zip(learned, shares, strict=True)}
    return agreements


def check_study(study: Study, folder: Path, session: Session, *, here: bool = True) -> None:
    """Check that shapes, objectives, devices and tasks fit, before anything is dumped or trained.

    Args:
        study: the study.
        folder: folder of the study.
        session: its home is the folder for local copies of caches at URLs.
        here: whether this machine trains the students, so that it must have their device and the data of
            tasks.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`.
    """
    home = session.home
    refuse_ranks("a study", "it has made, or `minilm-cache dump` makes for `{cache: FOLDER}`")
    if (folder / SETTINGS_FILE).exists():
        raise IdentityMismatchError(f"{folder} holds a chain. Choose another --out.")
    refuse_foreign(folder, "study", own=(CACHES, RUNS))
    if here:
        _check_scores(study, folder, session)
    for assistant in study.assistants:
        _check_assistant(study, assistant, here=here)
    for name, cache in study.caches.items():
        _check_cache(study, name, cache, home=home, here=here)


def _check_cache(study: Study, name: str, cache: DumpConfig | str, *, home: Path, here: bool) -> None:
    """Check that the passes of a cache fit it; arguments as for `check_study`."""
    opened: Cache | None = None
    if isinstance(cache, DumpConfig):
        source = locate_teacher(cache.teacher, cache.revision, without_weights=True)
        config, codec = read_config(source.folder), cache.codec
        if (here and Path(cache.teacher).is_dir()) or cache.teacher == MINI:
            _check_head(study, cache, source.folder)
        heads = config.num_attention_heads
    else:
        opened = open_cache(cache, home=home)
        config = teacher_config(opened.reader.attachment(TEACHER_CONFIG), opened.manifest)
        codec, heads = opened.manifest.identity.codec.name, opened.manifest.identity.relation_heads
        if study.agreement_steps is not None:
            _check_agreement(study, name, opened.manifest, here=here)
    for planned in study.passes:
        if planned.cache == name:
            with study.located(("train",)):
                dumped = cache if isinstance(cache, DumpConfig) else None
                check_training(planned.config, dumped, depth=config.num_hidden_layers, here=here)
            _check_pass(study, planned.config, teacher=config, codec=codec, heads=heads, here=here)
            check_also(planned.config.also, home=home)
            if opened is not None and not here:
                choose_objective(planned.config, opened, arch=planned.config.arch, home=home)
    if opened is not None and here:
        passes = (each.config.with_changes(seed=0) for each in study.passes if each.cache == name)
        with study.located(("train",)):  # seeds do not matter, and weights are read for each training
            check_with_cache(dict.fromkeys(passes), opened, home=home)


def _check_scores(study: Study, folder: Path, session: Session) -> None:
    """Raise InvalidConfigError if the teacher, and so its students, cannot be scored on the study's tasks."""
    if study.evaluation is None or study.teacher is None:
        return
    name, revision = study.teacher
    with study.located(("evaluate",)):
        config = study.evaluation.with_changes(revision=revision)
        check_evaluation(config, [name], out=folder / EVALUATIONS, session=session)


def _check_agreement(study: Study, name: str, manifest: CacheManifest, *, here: bool) -> None:
    """Raise InvalidConfigError if students of a cache cannot be asked beside the study's teacher."""
    if manifest.identity.labels is None:
        study.source.fail(("agreement_steps",), f"cache {name} holds no labels; leave this out")
    if not here:
        return
    assert study.teacher is not None, "agreement is measured with a teacher"
    teacher, revision = study.teacher
    if weights_sha256(locate_teacher(teacher, revision).folder) != manifest.identity.teacher.weights_sha256:
        problem = f"cache {name} was dumped from {manifest.labels.teacher}, which has other weights than "
        study.source.fail(("agreement_steps",), f"{problem}{teacher}; leave this out, or name that teacher")


def _check_head(study: Study, cache: DumpConfig, folder: Path) -> None:
    """Raise InvalidConfigError if a teacher on this machine lacks the head that a cache needs."""
    head: Head | None = "sequences" if cache.logits else "tokens" if cache.labels else None
    if head is None:
        return
    try:
        refuse_no_head(folder, head, name=cache.teacher)
    except TeacherError as error:
        study.source.fail(("dump",), str(error))


def _check_assistant(study: Study, assistant: Assistant, *, here: bool) -> None:
    """Raise InvalidConfigError for an assistant that cannot learn, or whose students could not."""
    cache = study.caches[assistant.teacher]
    assert isinstance(cache, DumpConfig)
    source = locate_teacher(cache.teacher, cache.revision, without_weights=True)
    config, teacher = assistant.training.config, read_config(source.folder)
    heads = teacher.num_attention_heads
    try:
        student = check_student(config, config.arch[0], teacher, heads=heads, is_assistant=True, here=here)
        for planned in study.passes:
            if planned.cache == assistant.name:
                for arch in planned.config.arch:
                    check_student(planned.config, arch, student, heads=heads, here=here)
    except InvalidConfigError as error:
        study.source.fail(("assistants",), str(error))


def _check_pass(
    study: Study, training: TrainConfig, *, teacher: PreTrainedConfig, codec: str, heads: int, here: bool
) -> None:
    try:
        for each in training.each:
            check_codec(each, codec)
        check_parts(training)
    except InvalidConfigError as error:
        study.source.fail(("train",), str(error))
    for arch in training.arch:
        try:
            check_student(training, arch, teacher, heads=heads, here=here)
        except InvalidConfigError as error:
            study.refuse_arch(arch, str(error))


def _teacher(study: Study) -> Teacher | None:
    """Load the teacher that the study names; None if it names none."""
    if study.teacher is None:
        return None
    name, revision = study.teacher
    head: Head | None = None if study.agreement_steps is None else "tokens"
    return Teacher(locate_teacher(name, revision), choose_device(study.passes[0].config.device), head=head)
