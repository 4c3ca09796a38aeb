"""Stage two on one page: shards -> batches -> objective -> students -> checkpoints -> model folders."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import IdentityMismatchError, InvalidConfigError, StorageError
from minilm_cache.models.arch import StudentShape, parse_arch
from minilm_cache.models.student import build_student, student_config
from minilm_cache.models.tap import TappedModel
from minilm_cache.objectives.check import Objective, choose_objective
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.settings import cache_home
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, CacheManifest
from minilm_cache.store.durable import refuse_file, storage_errors
from minilm_cache.store.remote import is_url
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.card import save_student
from minilm_cache.train.checkpoint import RunState, load_best, load_state, load_students, remove_checkpoints
from minilm_cache.train.config import DEFAULT_EPOCHS, TrainConfig
from minilm_cache.train.folder import RunFolder
from minilm_cache.train.heldout import MAX_SEQUENCES, HeldOutLosses, batch_size, held_out_losses
from minilm_cache.train.initial import initial_weights
from minilm_cache.train.loop import TrainingLoop
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.record import RunIdentity, RunRecord, StudentRecord, read_record, write_record
from minilm_cache.train.sampler import StepPlan, plan_steps
from minilm_cache.train.tracking import tracking
from minilm_cache.train.trainer import StudentTrainer, precision_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run did."""

    path: Path
    record: RunRecord
    tokens_per_s: float | None
    """Tokens of batches per second of training, each counted once for all students; none: no step taken."""
    is_first: bool = True
    """True in the process that tells what all have done."""

    def student_path(self, arch: str) -> Path:
        """Return the folder of a student."""
        return RunFolder(path=self.path).student(arch)


def train_students(
    config: TrainConfig,
    cache: str | Path,
    *,
    out: Path | None = None,
    home: Path | None = None,
    resume: bool = True,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> TrainResult:
    """Train students from a cache; the teacher is not needed.

    Args:
        config: what to train.
        cache: folder or URL of the cache.
        out: folder of the run. None means a folder below `home`, named by content.
        home: folder of runs, and of what is kept of caches at URLs. None means `~/.cache/minilm-cache`.
        resume: resume an unfinished run in the same folder; if false, the folder must not exist.
        progress: shows tokens done. None means that nothing is shown.
        should_stop: called before each step; True stops the run and keeps its state.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; the last checkpoint is kept whatever happens.
    """
    home = home or cache_home(None)
    opened = open_cache(cache, home=home, local_bytes=config.local_bytes)
    place = str(cache) if is_url(str(cache)) else str(Path(cache).resolve())
    ranks = Ranks.join(config.place, config.device)
    try:
        return _train(
            config,
            opened,
            place=place,
            out=out,
            home=home,
            ranks=ranks,
            resume=resume,
            progress=progress or Silent(),
            should_stop=should_stop,
        )
    except RuntimeError as error:
        explained = ranks.explain(error)
        if explained is None:
            raise
        raise explained from error
    finally:
        ranks.leave()


def _train(
    config: TrainConfig,
    cache: Cache,
    *,
    place: str,
    out: Path | None,
    home: Path,
    ranks: Ranks,
    resume: bool,
    progress: Progress,
    should_stop: ShouldStop,
) -> TrainResult:
    progress = progress if ranks.is_first else Silent()
    manifest = cache.manifest
    objective = choose_objective(config, cache, arch=config.arch)
    heads = manifest.identity.relation_heads
    shapes = [
        parse_arch(
            arch,
            heads,
            split_into=objective.wanted.relation_heads,
            compares_heads=config.spec.compares_heads,
        )
        for arch in config.arch
    ]
    steps = num_steps(config, manifest)
    layers = objective.wanted.layers
    layer = layers[0] if config.layer_map == "last" and len(layers) == 1 else None
    if config.eval_steps is not None and not manifest.num_held_out:
        raise InvalidConfigError(
            "--eval-steps: the cache has no held-out sequences to look at. Leave it out."
        )
    plan = plan_steps(config, manifest, num_ranks=ranks.num_data, rank=ranks.data_number)
    begun = initial_weights(config, manifest).name
    identity = RunIdentity.of(
        config,
        manifest,
        layer=layer,
        steps=steps,
        plan=plan,
        precision=precision_of(config, ranks.device),
        init=begun,
    )
    path = out or home / "runs" / identity.name()
    refuse_file(path)
    if not resume and path.exists():
        raise IdentityMismatchError(
            f"{path} exists. Leave out --no-resume to take it up, or choose another --out."
        )
    progress.note(
        f"run {path}: {', '.join(config.arch)}, {steps} steps, objective {config.objective}, "
        + (
            f"layer {', '.join(map(str, layers))} of the teacher, counted from 0"
            if layers
            else "states of the teacher"
        )
    )
    first = student_config(shapes[0], cache.reader.attachment(TEACHER_CONFIG), manifest)
    pad_token = first.pad_token_id or 0
    run = _Run(config, cache, place, identity, RunFolder(path=path), objective, ranks, shapes, pad_token)
    with _alone(path, ranks):
        return run.go(plan, progress, should_stop)


@contextmanager
def _alone(path: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of a folder.

    Raises:
        StorageError: another one is in it, or the file system refused.
    """
    if not ranks.is_first:
        yield
        return
    lock = FileLock(RunFolder(path=path).lock)
    with storage_errors("write", path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StorageError(
                f"another process trains in {path}. Wait for it, or choose another --out."
            ) from None
    try:
        yield
    finally:
        RunFolder(path=path).lock.unlink(missing_ok=True)
        lock.release()


def num_steps(config: TrainConfig, manifest: CacheManifest) -> int:
    """Return the optimizer steps of a run."""
    if config.steps is not None:
        return config.steps
    epochs = config.epochs or DEFAULT_EPOCHS
    return max(1, math.ceil(epochs * manifest.num_train / config.batch_size))


def build_trainers(
    config: TrainConfig,
    cache: Cache,
    *,
    shapes: Sequence[StudentShape],
    objective: Objective,
    steps: int,
    ranks: Ranks,
) -> list[StudentTrainer]:
    """Return students with initial weights: each the same whether trained alone or beside others.

    Raises:
        InvalidConfigError: a student is not of a shape that can learn this, or begin so.
    """
    initial = initial_weights(config, cache.manifest)
    teacher_config = cache.reader.attachment(TEACHER_CONFIG)
    trainers = []
    for shape in shapes:
        seed = config.seed if shape.seed is None else shape.seed
        own = student_config(shape, teacher_config, cache.manifest)
        if objective.num_classes is not None:
            own.num_labels = objective.num_classes
        model = build_student(own, seed, objective.head)
        initial.begin(model, shape.arch, objective.head)
        tapped = TappedModel(model).to(ranks.device)
        trainers.append(
            StudentTrainer(shape, tapped, config=config, objective=objective, steps=steps, ranks=ranks)
        )
    return trainers


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: its beginning, its steps, its end."""

    config: TrainConfig
    cache: Cache
    place: str
    identity: RunIdentity
    folder: RunFolder
    objective: Objective
    ranks: Ranks
    shapes: Sequence[StudentShape]
    pad_token: int

    def go(self, plan: StepPlan, progress: Progress, should_stop: ShouldStop) -> TrainResult:
        """Go through the run, or through what is left of it."""
        ranks, folder, config = self.ranks, self.folder, self.config
        ranks.barrier()  # the first process has the folder for itself now
        found = read_record(folder.path, self.identity)
        ranks.barrier()  # nobody writes before all have looked
        if found is not None and found.complete:
            progress.note("this run is already complete: nothing to do")
            self._remove_checkpoints()
            return TrainResult(path=folder.path, record=found, tokens_per_s=None, is_first=ranks.is_first)
        state = load_state(folder.checkpoints)
        alive = [shape for shape in ranks.mine(self.shapes) if shape.arch not in state.diverged]
        trainers = build_trainers(
            config, self.cache, shapes=alive, objective=self.objective, steps=self.identity.steps, ranks=ranks
        )
        load_students(folder.checkpoints, state, trainers=trainers, device=ranks.device)
        record = found or self.begin(trainers)
        tracker_name = config.tracker if ranks.is_first else "none"
        with tracking(tracker_name, folder.path, settings=config.model_dump(), progress=progress) as tracker:
            loop = TrainingLoop(
                config=config,
                steps=self.identity.steps,
                cache=self.cache,
                folder=folder,
                ranks=ranks,
                trainers=trainers,
                state=state,
                evaluate=self.held_out,
                tracker=tracker,
                progress=progress,
            )
            tokens_per_s = loop.run(self.batches(), plan, should_stop)
        record = self.finish(record, trainers, state)
        return TrainResult(
            path=folder.path, record=record, tokens_per_s=tokens_per_s, is_first=ranks.is_first
        )

    def batches(self) -> BatchReader:
        """Return what reads batches for the students."""
        return BatchReader(
            self.cache, self.objective.wanted, pad_token=self.pad_token, device=self.ranks.device
        )

    def held_out(self, trainers: Sequence[StudentTrainer]) -> list[HeldOutLosses] | list[None]:
        """Return the held-out KL of students; none where nothing is held out."""
        if not self.cache.manifest.num_held_out:
            return [None] * len(trainers)
        most = self.config.batch_size // self.identity.num_parts
        size = batch_size(self.objective.wanted, self.cache.manifest, most)
        looks = [trainer.look for trainer in trainers]
        return held_out_losses(looks, self.batches().held_out_batches(size, MAX_SEQUENCES))

    def begin(self, trainers: Sequence[StudentTrainer]) -> RunRecord:
        """Look at the initial students, and write the run's record."""
        own = {
            trainer.shape.arch: StudentRecord(
                arch=trainer.shape.arch,
                num_parameters=trainer.num_parameters,
                target="teacher" if self.cache.codec.is_unbiased else "stored rows",
                held_out_before=before,
            )
            for trainer, before in zip(trainers, self.held_out(trainers), strict=True)
        }
        record = RunRecord(
            identity=self.identity,
            cache=self.place,
            init=self.config.init if Path(self.config.init).is_dir() else None,
            init_teacher=self.config.init_teacher,
            complete=False,
            students=self._in_order(own),
        )
        self._write(record)
        return record

    def finish(self, record: RunRecord, trainers: Sequence[StudentTrainer], state: RunState) -> RunRecord:
        """Look at the trained students, write their folders, and declare the run complete."""
        before = {student.arch: student for student in record.students}
        own = {
            student.arch: student.model_copy(update={"diverged_at": state.diverged[student.arch]})
            for student in record.students
            if student.arch in state.diverged
        }
        if self.config.eval_steps is not None:
            for trainer in trainers:
                load_best(self.folder.best, trainer, state.best[trainer.shape.arch].step)
        for trainer, after in zip(trainers, self.held_out(trainers), strict=True):
            arch = trainer.shape.arch
            best = state.best.get(arch)
            changes: dict[str, object] = {"held_out_after": after, "best_step": best and best.step}
            if after is not None and not math.isfinite(sum(after.values())):
                changes = {"diverged_at": state.step}
            own[arch] = before[arch].model_copy(update=changes)
        students = self._in_order(own)
        if self.ranks.is_first:
            mine = {trainer.shape.arch: trainer for trainer in trainers}
            for student in students:
                if student.diverged_at is None:
                    trainer = mine.get(student.arch) or self._fetched(student.arch, state)
                    folder = self.folder.student(student.arch)
                    save_student(
                        folder, trainer, reader=self.cache.reader, identity=self.identity, record=student
                    )
        done = {"complete": True, "train_s": state.train_s, "bytes_read": state.bytes_read}
        complete = record.model_copy(update={**done, "students": students})
        self._write(complete)
        self._remove_checkpoints()
        return complete

    def _remove_checkpoints(self) -> None:
        if self.ranks.is_first and not self.config.keep_checkpoints:
            remove_checkpoints(self.folder.checkpoints)

    def _fetched(self, arch: str, state: RunState) -> StudentTrainer:
        """Return another process's student from its files: transformers saves in the first process only."""
        (shape,) = [shape for shape in self.shapes if shape.arch == arch]
        ranks = Ranks.alone(self.ranks.device)
        steps = self.identity.steps
        (trainer,) = build_trainers(
            self.config, self.cache, shapes=[shape], objective=self.objective, steps=steps, ranks=ranks
        )
        if self.config.eval_steps is not None:
            load_best(self.folder.best, trainer, state.best[arch].step)
        else:
            load_students(self.folder.checkpoints, state, trainers=[trainer], device=ranks.device)
        return trainer

    def _in_order(self, own: dict[str, StudentRecord]) -> tuple[StudentRecord, ...]:
        students = self.ranks.union(own)
        return tuple(students[arch] for arch in self.identity.arch)

    def _write(self, record: RunRecord) -> None:
        if self.ranks.is_first:
            with storage_errors("write", self.folder.path):
                write_record(self.folder.path, record)
        self.ranks.barrier()
