"""Stage two from end to end: shards -> batches -> objective -> students -> checkpoints -> model folders."""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import DivergedError, IdentityMismatchError, InvalidConfigError, StorageError
from minilm_cache.models.arch import StudentShape
from minilm_cache.models.files import weights_sha256
from minilm_cache.models.student import teacher_config
from minilm_cache.models.student_tokens import StudentTokens, Vocabulary
from minilm_cache.objectives.check import Objective, choose_objective
from minilm_cache.relations.loss import KERNELS
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import refuse_other_kind
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.store.durable import PARTIAL, lock_if_free, storage_errors
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.urls import is_url, place_of, without_secrets
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.card import save_student
from minilm_cache.train.checkpoint import RunState, load_best, load_state, load_students
from minilm_cache.train.config import TrainConfig, first_config
from minilm_cache.train.folder import RunFolder, state_name
from minilm_cache.train.graph import Graphs, graphs_of
from minilm_cache.train.heldout import (
    MAX_SEQUENCES,
    HeldOutLosses,
    batch_size,
    compared_texts,
    held_out_losses,
    without_lone,
)
from minilm_cache.train.initial import Beginnings, folder_of, initial_weights
from minilm_cache.train.loop import TrainingLoop
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.record import (
    RunIdentity,
    RunRecord,
    StudentRecord,
    VocabularyRecord,
    run_recipe,
    write_record,
)
from minilm_cache.train.resume import (
    after_first,
    check_first,
    first_folder,
    read_record,
    recorded,
    refuse_beginning,
)
from minilm_cache.train.sampler import StepPlan, plan_steps
from minilm_cache.train.setup import (
    build_trainers,
    fit_objectives,
    larger_than_teacher,
    num_steps,
    refuse_other_texts,
    same_students,
    student_shapes,
)
from minilm_cache.train.students import lost_students, refuse_other_weights
from minilm_cache.train.tracking import tracking
from minilm_cache.train.trainer import StudentTrainer, faster_option, precision_of
from minilm_cache.train.vocabulary import held_out_coverage, unread_in_words
from minilm_cache.wording import Made, Place, counted, number_text, some_of


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainResult(Made):
    """Result of a training."""

    path: Path
    """Folder of the run."""
    record: RunRecord
    tokens_per_s: float | None
    """Tokens of batches per second, counted once for all students. None means that no step was taken."""
    num_held_out: int
    """Held-out sequences that the students' losses before and after are those of."""
    is_first: bool = True
    """True in the process that shows the results of all processes."""

    def student_path(self, arch: str) -> Path:
        """Return the folder of a student with this shape.

        Raises:
            InvalidConfigError: the run has no such student, or it diverged.
        """
        known = [student.arch for student in self.record.trained]
        if arch not in known:
            raise InvalidConfigError(
                f"{self.path} has no student {arch}. Its students: {', '.join(known) or 'none'}."
            )
        return RunFolder(path=self.path).student(arch)

    @property
    def worse_in_words(self) -> str | None:
        """Which students ended worse than they began, in words. None means none, as far as one can tell."""
        worse = self.record.ended_worse(self.num_held_out)
        held_out = counted(self.num_held_out, "held-out sequence")
        if not worse:
            return None
        return f"{some_of(worse)} ended worse than with the weights that training began with ({held_out})"

    def note_worse(self, session: Session) -> None:
        """Say which students ended worse than they began, before anything is made of them."""
        if worse := self.worse_in_words:
            session.progress.note(f"{self.path.name}: {worse}. A lower rate, or more steps, may help.")

    def describe(self) -> dict[str, object]:
        """Return the lines of its description, by the names that people read."""
        identity = self.record.identity
        words = {
            student.arch: "diverged"
            if student.diverged_at is not None
            else f"{number_text(student.loss_before)} -> {number_text(student.loss_after)}"
            for student in self.record.students
        }
        return {
            "run": self.path,
            "objective": identity.in_words(),
            "steps": f"{identity.steps:,} of {identity.batch_size} sequences",
            **{f"held-out loss of {arch}": change for arch, change in words.items()},
        }


def train_students(
    config: TrainConfig,
    cache: Place,
    *,
    out: str | Path | None = None,
    session: Session = ALONE,
    resume: bool = True,
) -> TrainResult:
    """Train students from a cache; no step runs the teacher.

    Args:
        config: settings of the training.
        cache: the cache, its folder or URL, or the result of its dump.
        out: folder of the run. None means a folder below `home`, named by content.
        resume: resume an unfinished run in the same folder; if false, the folder must not exist.
        session: its home is the folder of runs, and of what is kept of caches at URLs. Its progress shows
            tokens done. Its `should_stop` is called before each step; True stops the run and keeps its state.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; the last checkpoint is always kept.
    """
    refuse_other_kind(config, TrainConfig)
    out = None if out is None else Path(out)
    opened = open_cache(cache, home=session.home, local_bytes=config.local_bytes)
    if config.first is not None:
        check_first(config, opened, out=out, home=session.home)
        begun = train_students(
            first_config(config), cache, out=first_folder(out), resume=resume, session=session
        )
        config = after_first(config, begun.record, begun.path)
    place = place_of(os.fspath(cache))
    ranks = Ranks.join(config.place, config.device)
    try:
        with ranks.explaining():
            return _train(
                config,
                opened,
                place=place,
                out=out,
                ranks=ranks,
                resume=resume,
                session=session if ranks.is_first else session.with_progress(None),
            )
    finally:
        ranks.leave()


def _train(
    config: TrainConfig,
    cache: Cache,
    *,
    place: str,
    out: Path | None,
    session: Session,
    ranks: Ranks,
    resume: bool,
) -> TrainResult:
    """Check that settings and cache go together, then train or resume in the folder of the run."""
    manifest = cache.manifest
    objective = choose_objective(
        config, cache, arch=config.arch, home=session.home, local_bytes=config.local_bytes
    )
    shapes, steps = student_shapes(config, objective), num_steps(config, manifest)
    _refuse_no_held_out(config, cache)
    plan = plan_steps(config, cache.reader, num_ranks=ranks.num_data, rank=ranks.data_number)
    beginnings = initial_weights(config, cache, shapes=shapes, head=objective.head, home=session.home)
    tokens = beginnings.tokens
    refuse_other_texts(cache, objective, tokens)
    identity = RunIdentity.of(
        config,
        manifest,
        layer=_teacher_layer(config, objective),
        steps=steps,
        plan=plan,
        precision=precision_of(config, ranks.device),
        init=beginnings.name,
        vocab=None if tokens is None else tokens.name,
        also=objective.wanted.also,
        own_labels=None if objective.wanted.labels is None else objective.wanted.labels.sha256,
    )
    path, identity, beginnings = recorded(
        config, out, identity=identity, beginnings=beginnings, home=session.home
    )
    refuse_beginning(path, config, beginnings=beginnings, resume=resume)
    session.progress.note(_run_in_words(path, config, objective=objective, steps=steps))
    remarks = (*larger_than_teacher(config, shapes, cache), *unread_in_words(tokens, cache))
    for line in (*beginnings.in_words, *remarks):
        session.progress.note(line)
    ranks.refuse_difference(beginnings.name)
    teacher = teacher_config(cache.reader.attachment(TEACHER_CONFIG), manifest)
    run = _Run(
        config=config,
        cache=cache,
        place=place,
        identity=identity,
        folder=RunFolder(path=path),
        objective=objective,
        beginnings=beginnings,
        ranks=ranks,
        shapes=shapes,
        pad_token=teacher.pad_token_id or 0,
        tokens=tokens,
    )
    ranks.check_common(path)
    with _locked(path, ranks):
        return run.train(plan, session)


def _refuse_no_held_out(config: TrainConfig, cache: Cache) -> None:
    if config.eval_steps is not None and not cache.manifest.num_held_out:
        raise InvalidConfigError(
            "--eval-steps: the cache has no held-out sequences to evaluate on. Leave it out."
        )


def _teacher_layer(config: TrainConfig, objective: Objective) -> int | None:
    """Return the one layer of the teacher that students learn from. None means the layers of the map."""
    layers = objective.wanted.layers
    return layers[0] if config.layer_map == "last" and len(layers) == 1 else None


def _run_in_words(path: Path, config: TrainConfig, *, objective: Objective, steps: int) -> str:
    layers = ", ".join(map(str, objective.wanted.layers))
    noun = "layers" if "," in layers else "layer"
    others = config.spec.describes_layers(config.layer_map, config.teacher_layer)
    source = f"{noun} {layers} of the teacher, counted from 0" if layers else others
    what = f"{', '.join(config.arch)}, {counted(steps, 'step')}, objective {config.objective}"
    return f"run {path}: {what}, {source}"


@contextmanager
def _locked(path: Path, ranks: Ranks) -> Iterator[None]:
    """Lock the folder of a run against other trainings; the first process holds the lock.

    Raises:
        StorageError: another process trains in it, or the file system refused.
    """
    if not ranks.is_first:
        yield
        return
    with storage_errors("write", path):
        path.mkdir(parents=True, exist_ok=True)
    lock = lock_if_free(RunFolder(path=path).lock)
    if lock is None:
        raise StorageError(f"another process trains in {path}. Wait for it, or choose another --out.")
    try:
        for left in (
            *path.glob(f".*{PARTIAL}"),
            *path.glob(f"best/.*{PARTIAL}"),
            *path.glob(f"students/.*{PARTIAL}"),
        ):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink(missing_ok=True)
        yield
    finally:
        RunFolder(path=path).lock.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # it is not empty: something was written
            path.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run: evaluates the initial students, trains them, and writes their folders."""

    config: TrainConfig
    cache: Cache
    place: str
    """Folder or URL of the cache."""
    identity: RunIdentity
    folder: RunFolder
    objective: Objective
    beginnings: Beginnings
    ranks: Ranks
    shapes: Sequence[StudentShape]
    """Shapes of all students, those of other processes included."""
    pad_token: int
    tokens: StudentTokens | None
    """How students read the sequences of the cache. None means that they read its token ids."""

    def train(self, plan: StepPlan, session: Session) -> TrainResult:
        """Train from the beginning, or from the last checkpoint."""
        ranks, folder, config = self.ranks, self.folder, self.config
        ranks.barrier()  # now the first process holds the lock of the folder
        earlier = read_record(folder.path, self.identity)
        ranks.barrier()  # no process writes before all have read the record
        if earlier is not None and self._has_moved(earlier.cache):
            earlier = earlier.model_copy(update={"cache": self.place})
            self._write(earlier)
        if earlier is not None and earlier.complete and not self._lost(earlier, session):
            session.progress.note("this run is already complete: nothing to do")
            self._remove_checkpoints()
            return self._result(earlier, None)
        KERNELS.begin(are_used=config.kernels, say=session.progress.note)
        graphs = graphs_of(config, self.objective, ranks, say=session.progress.note)
        hint = faster_option(config, ranks.device, self.objective.head, has_graphs=graphs is not None)
        if earlier is None and hint is not None:
            session.progress.note(hint)
        state = load_state(folder.checkpoints)
        state.check(folder.checkpoints, arch=self.identity.arch, steps=self.identity.steps)
        alive = [shape for shape in ranks.mine(self.shapes) if shape.arch not in state.diverged]
        trainers = self.build(alive, ranks, graphs)
        if not state.step:
            fit_objectives(trainers, self.batches(), self.cache.manifest.num_train)
            for trainer in trainers:  # machines may round a fit differently, and replicas must not differ
                ranks.share_first(trainer.learner.objective.parameters())
            for names in same_students(trainers, config):
                session.progress.note(
                    f"{names}: students that begin with the same weights, and drop nothing out, end with the "
                    "same ones, whatever their seeds. Leave one out"
                )
        load_students(folder.checkpoints, state, trainers=trainers, device=ranks.device)
        record = earlier or self.begin(trainers)
        if not state.step:  # an extension whose state is gone begins anew
            record = record.model_copy(update={"continued_at": ()})
        if record.continued_at[-1:] == (state.step,):
            self._write(record)  # so that an interrupted run goes on to the larger number of steps
            session.progress.note(
                f"this run was over after step {state.step:,} and goes on to {self.identity.steps:,}"
            )
        tracker_name = config.tracker if ranks.is_first else "none"
        settings = config.model_dump() | {"also": tuple(map(without_secrets, config.also))}
        with tracking(tracker_name, folder.path, settings=settings, session=session) as tracker:
            loop = TrainingLoop(
                config=config,
                steps=self.identity.steps,
                cache=self.cache,
                folder=folder,
                ranks=ranks,
                trainers=trainers,
                state=state,
                evaluate=self.held_out if graphs is None else partial(self._held_out_beside, graphs),
                tracker=tracker,
                session=session,
            )
            tokens_per_s = loop.run(self.batches(graphs), plan)
        return self._result(self.finish(record, trainers, state), tokens_per_s)

    def _has_moved(self, known: str) -> bool:
        """Return whether the folder that the record names as the cache is one no more."""
        return known != self.place and not is_url(known) and not (Path(known) / MANIFEST).is_file()

    def _lost(self, record: RunRecord, session: Session) -> bool:
        """Return whether students of the complete run are gone, and can be written from its last state.

        Raises:
            IdentityMismatchError: they are gone and the state is, too; or they have other weights.
        """
        refuse_other_weights(self.folder.path, record)
        lost = lost_students(self.folder.path, record)
        if lost and not (self.folder.checkpoints / state_name(record.identity.steps)).is_dir():
            raise IdentityMismatchError(
                f"{lost[0]} is gone, and this run keeps no state to write it from. Train again with another "
                "--out."
            )
        if lost:
            session.progress.note(f"{lost[0]} is gone: the students are written again from the last state")
        return bool(lost)

    def _result(self, record: RunRecord, tokens_per_s: float | None) -> TrainResult:
        path, is_first = self.folder.path, self.ranks.is_first
        held_out = min(self.cache.manifest.num_held_out, MAX_SEQUENCES)
        return TrainResult(
            path=path, record=record, tokens_per_s=tokens_per_s, num_held_out=held_out, is_first=is_first
        )

    def build(
        self, shapes: Sequence[StudentShape], ranks: Ranks, graphs: Graphs | None = None
    ) -> list[StudentTrainer]:
        """Return students with their initial weights."""
        return build_trainers(
            self.config,
            self.cache,
            shapes=shapes,
            objective=self.objective,
            beginnings=self.beginnings,
            steps=self.identity.steps,
            ranks=ranks,
            tokens=self.tokens,
            graphs=graphs,
        )

    def batches(self, graphs: Graphs | None = None) -> BatchReader:
        """Return a reader of batches for the students.

        Args:
            graphs: graphs that decode batches of steps. None means that there are none.
        """
        return BatchReader(
            self.cache,
            self.objective.wanted,
            pad_token=self.pad_token,
            device=self.ranks.device,
            tokens=self.tokens,
            graphs=graphs,
        )

    def _can_compare(self, trainers: Sequence[StudentTrainer]) -> bool:
        """Return whether held-out texts have a loss: one by itself may have none."""
        least = 1 + any(trainer.learner.objective.compares_texts for trainer in trainers)
        return self.cache.manifest.num_held_out >= least

    def held_out(self, trainers: Sequence[StudentTrainer]) -> list[HeldOutLosses] | list[None]:
        """Return the held-out losses of students, or None for each where nothing held out has a loss."""
        if not self._can_compare(trainers):
            return [None] * len(trainers)
        of_step = self.config.batch_size // self.identity.num_parts
        is_of_vectors = POOLED in self.objective.wanted.signals
        most = compared_texts(self.cache.manifest) if is_of_vectors else of_step
        size = without_lone(
            batch_size(self.objective.wanted, self.cache.manifest, most),
            min(self.cache.manifest.num_held_out, MAX_SEQUENCES),
        )
        evaluators = [trainer.evaluate for trainer in trainers]
        return held_out_losses(evaluators, self.batches().held_out_batches(size, MAX_SEQUENCES))

    def _held_out_beside(
        self, graphs: Graphs, trainers: Sequence[StudentTrainer]
    ) -> list[HeldOutLosses] | list[None]:
        """Return the same beside graphs, which are given up where memory is short."""
        return graphs.with_memory(lambda: self.held_out(trainers))

    def begin(self, trainers: Sequence[StudentTrainer]) -> RunRecord:
        """Evaluate the initial students, and write the run's record.

        Raises:
            DivergedError: no loss is finite before the first step.
            InvalidConfigError: held-out texts cannot be compared with each other, and are to be.
        """
        if self.config.eval_steps is not None and not self._can_compare(trainers):
            raise InvalidConfigError(
                "--eval-steps: one text is held out, and this loss compares texts with each other. Leave it "
                "out, or dump more text."
            )
        all_before: list[HeldOutLosses | None] = [*self.held_out(trainers)]
        losses = [trainer.loss_of(before) for trainer, before in zip(trainers, all_before, strict=True)]
        lost = [number for number, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)]
        if lost and len(lost) == len(trainers):
            raise DivergedError(
                f"{self.folder.path}: no student's held-out loss is finite before the first step. Check "
                "temperatures and weights of the loss, and the cache: verify --full."
            )
        for number in lost:  # it diverges in its first step, which is said then
            all_before[number] = None
        records = {
            trainer.shape.arch: StudentRecord(
                arch=trainer.shape.arch,
                num_parameters=trainer.num_parameters,
                target="teacher" if self.cache.is_unbiased else "stored rows",
                init=self.beginnings.of[trainer.shape.arch].kind,
                begun_with=self.beginnings.of[trainer.shape.arch].in_words,
                of_layers=trainer.settings_of_layers or None,
                held_out_before=before,
                loss_before=trainer.loss_of(before),
            )
            for trainer, before in zip(trainers, all_before, strict=True)
        }
        record = RunRecord(
            identity=self.identity,
            cache=self.place,
            init=folder_of(self.config.init),
            init_recipe=run_recipe(self.config.init),
            init_teacher=self.config.init_teacher,
            init_layers=self.config.init_layers,
            also=tuple(map(place_of, self.config.also)),
            own_labels=None if self.config.own_labels is None else place_of(self.config.own_labels),
            label_column=None if self.config.own_labels is None else self.config.label_column,
            complete=False,
            vocabulary=self._vocabulary_of_run(),
            students=self._in_order(records),
        )
        self._write(record)
        return record

    def _vocabulary_of_run(self) -> VocabularyRecord | None:
        """Return what the record says of the pieces that students have. None means that they have all."""
        if not isinstance(self.tokens, Vocabulary):
            return None
        coverage = held_out_coverage(self.tokens, self.cache)
        return VocabularyRecord(
            asked=str(self.config.vocab),
            pieces=len(self.tokens.kept),
            of_pieces=self.tokens.pieces.size,
            **({} if coverage is None else asdict(coverage)),
        )

    def finish(self, record: RunRecord, trainers: Sequence[StudentTrainer], state: RunState) -> RunRecord:
        """Evaluate the trained students, write their folders, and mark the run as complete."""
        before = {student.arch: student for student in record.students}
        nothing = {"held_out_after": None, "loss_after": None, "best_step": None, "weights_sha256": None}
        records = {
            student.arch: student.model_copy(update=nothing | {"diverged_at": state.diverged[student.arch]})
            for student in record.students
            if student.arch in state.diverged
        }
        if self.config.eval_steps is not None:
            for trainer in trainers:
                load_best(self.folder.best, trainer, state)
        for trainer, after in zip(trainers, self.held_out(trainers), strict=True):
            arch = trainer.shape.arch
            best = state.best.get(arch)
            changes: dict[str, object] = {"held_out_after": after, "loss_after": trainer.loss_of(after)}
            changes |= {"best_step": best and best.step, "diverged_at": None}
            if after is not None and not math.isfinite(sum(after.values())):
                changes = nothing | {"diverged_at": state.step}
            records[arch] = before[arch].model_copy(update=changes)
        students = self._in_order(records)
        if self.ranks.is_first:
            trainer_of = {trainer.shape.arch: trainer for trainer in trainers}
            lost = lost_students(self.folder.path, record)  # of a complete run, the others stay as they are
            students = tuple(
                self._save(student, trainer_of, record=record, state=state)
                if student.diverged_at is None
                and (not record.complete or self.folder.student(student.arch) in lost)
                else student
                for student in students
            )
        totals = {"complete": True, "train_s": state.train_s, "bytes_read": state.bytes_read}
        complete = record.model_copy(update={**totals, "students": students})
        self._write(complete)
        self._remove_checkpoints()
        return complete

    def _save(
        self,
        student: StudentRecord,
        trainer_of: Mapping[str, StudentTrainer],
        *,
        record: RunRecord,
        state: RunState,
    ) -> StudentRecord:
        """Write the folder of a student, and return its record with the hash of its weights."""
        trainer = trainer_of.get(student.arch) or self._load_trained(student.arch, state)
        folder, reader = self.folder.student(student.arch), self.cache.reader
        save_student(folder, trainer, reader=reader, run=record, record=student, tokens=self.tokens)
        return student.model_copy(update={"weights_sha256": weights_sha256(folder)})

    def _remove_checkpoints(self) -> None:
        if self.ranks.is_first and self.config.keep_checkpoints == 0:
            for folder in (self.folder.checkpoints, self.folder.best):
                shutil.rmtree(folder, ignore_errors=True)

    def _load_trained(self, arch: str, state: RunState) -> StudentTrainer:
        """Load a student that another process trained: transformers saves in the first process only."""
        (shape,) = [shape for shape in self.shapes if shape.arch == arch]
        (trainer,) = self.build([shape], Ranks.alone(self.ranks.device))
        if self.config.eval_steps is not None:
            load_best(self.folder.best, trainer, state)
        else:
            last = load_state(self.folder.checkpoints)
            load_students(self.folder.checkpoints, last, trainers=[trainer], device=self.ranks.device)
        return trainer

    def _in_order(self, records: dict[str, StudentRecord]) -> tuple[StudentRecord, ...]:
        """Return the records of all processes' students, in the order of `--arch`."""
        students = self.ranks.union(records)
        return tuple(students[arch] for arch in self.identity.arch)

    def _write(self, record: RunRecord) -> None:
        if self.ranks.is_first:
            with storage_errors("write", self.folder.path):
                write_record(self.folder.path, record)
        self.ranks.barrier()
