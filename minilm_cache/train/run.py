"""Stage two on one page: shards -> batches -> objective -> students -> checkpoints -> model folders."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from minilm_cache.cache import Cache, open_cache
from minilm_cache.config import TrainConfig
from minilm_cache.device import choose_device
from minilm_cache.errors import DivergedError, IdentityMismatchError, InterruptedRunError
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, CacheManifest
from minilm_cache.store.durable import storage_errors
from minilm_cache.tap import TappedModel
from minilm_cache.train.batches import BatchReader, StudentBatch
from minilm_cache.train.card import save_student
from minilm_cache.train.checkpoint import load_checkpoint, remove_checkpoints, save_checkpoint
from minilm_cache.train.heldout import MAX_SEQUENCES, HeldOutKL, held_out_kl
from minilm_cache.train.objective import Losses, Objective, choose_objective
from minilm_cache.train.record import (
    RunIdentity,
    RunRecord,
    StudentRecord,
    TrainingLog,
    arch_slug,
    read_record,
    write_record,
)
from minilm_cache.train.sampler import SequenceOrder
from minilm_cache.train.student import StudentShape, build_student, parse_arch, student_config
from minilm_cache.train.trainer import StudentTrainer, learning_rate

DEFAULT_EPOCHS = 5.0
LOG_STEPS = 10
"""Steps between lines of the log, and between looks at whether losses are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run did."""

    path: Path
    record: RunRecord
    tokens_per_s: float | None
    """Tokens of batches per second of training, each counted once for all students; none: no step taken."""

    def student_path(self, arch: str) -> Path:
        """Return the folder of a student."""
        return student_folder(self.path, arch)


def student_folder(run: Path, arch: str) -> Path:
    """Return the folder of a student of a run."""
    return run / "students" / arch_slug(arch)


def train(  # noqa: PLR0913 - what is trained, where, and who is told: each a thing of its own
    config: TrainConfig,
    cache_place: str | Path,
    out: Path | None,
    home: Path,
    *,
    resume: bool = True,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> TrainResult:
    """Train students from a cache; the teacher is not needed.

    Args:
        config: what to train.
        cache_place: folder or URL of the cache.
        out: folder of the run; none: below `home`, named by content.
        home: folder of runs, and of what is kept of caches at URLs.
        resume: take up an unfinished run in the same folder; if false, the folder must not exist.
        progress: told of tokens done.
        should_stop: asked before each step.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; the last checkpoint is kept whatever happens.
    """
    progress = progress or Silent()
    cache = open_cache(cache_place, home, config.local_bytes)
    manifest = cache.manifest
    objective = choose_objective(config, cache)
    heads = manifest.identity.relation_heads
    shapes = [parse_arch(arch, heads, objective.wanted.relation_heads) for arch in config.arch]
    steps = num_steps(config, manifest)
    layer = cache.layers[-1] if config.teacher_layer is None else config.teacher_layer
    identity = RunIdentity.of(config, manifest, layer, steps)
    path = out or home / "runs" / identity.name()
    if not resume and path.exists():
        raise IdentityMismatchError(
            f"{path} exists. Leave out --no-resume to take it up, or choose another --out."
        )
    found = read_record(path, identity)
    progress.note(
        f"run {path}: {', '.join(config.arch)}, {steps} steps, objective {config.objective}, "
        f"layer {layer} of the teacher, counted from 0"
    )
    if found is not None and found.complete:
        progress.note("this run is already complete: nothing to do")
        return TrainResult(path=path, record=found, tokens_per_s=None)
    device = choose_device(config.device)
    trainers = build_trainers(config, cache, shapes, objective, steps, device)
    run = _Run(
        config=config,
        cache=cache,
        identity=identity,
        path=path,
        objective=objective,
        trainers=trainers,
        device=device,
    )
    with storage_errors("write", path):
        path.mkdir(parents=True, exist_ok=True)
    record = found or run.begin()
    tokens_per_s = run.take_steps(progress, should_stop)
    return TrainResult(path=path, record=run.finish(record), tokens_per_s=tokens_per_s)


def num_steps(config: TrainConfig, manifest: CacheManifest) -> int:
    """Return the optimizer steps of a run."""
    if config.steps is not None:
        return config.steps
    epochs = config.epochs or DEFAULT_EPOCHS
    return max(1, math.ceil(epochs * manifest.num_train / config.batch_size))


def build_trainers(
    config: TrainConfig,
    cache: Cache,
    shapes: Sequence[StudentShape],
    objective: Objective,
    steps: int,
    device: torch.device,
) -> list[StudentTrainer]:
    """Return students with initial weights: each the same whether trained alone or beside others."""
    teacher_config = cache.reader.attachment(TEACHER_CONFIG)
    trainers = []
    for shape in shapes:
        model = build_student(student_config(shape, teacher_config, cache.manifest), config.seed)
        trainers.append(StudentTrainer(shape, TappedModel(model).to(device), config, objective, steps))
    return trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What it takes to go through a run."""

    config: TrainConfig
    cache: Cache
    identity: RunIdentity
    path: Path
    objective: Objective
    trainers: list[StudentTrainer]
    device: torch.device

    def begin(self) -> RunRecord:
        """Look at the initial students, and write the run's record."""
        students = tuple(
            StudentRecord(
                arch=trainer.shape.arch,
                num_parameters=trainer.num_parameters,
                target="teacher" if self.cache.codec.is_unbiased else "stored rows",
                held_out_before=before,
            )
            for trainer, before in zip(self.trainers, self._held_out(), strict=True)
        )
        record = RunRecord(identity=self.identity, complete=False, students=students)
        with storage_errors("write", self.path):
            write_record(self.path, record)
        return record

    def finish(self, record: RunRecord) -> RunRecord:
        """Look at the trained students, write their folders, and declare the run complete."""
        students = []
        for trainer, before, after in zip(self.trainers, record.students, self._held_out(), strict=True):
            student = before.model_copy(update={"held_out_after": after})
            folder = student_folder(self.path, student.arch)
            save_student(folder, trainer, self.cache.reader, self.identity, student)
            students.append(student)
        complete = record.model_copy(update={"complete": True, "students": tuple(students)})
        with storage_errors("write", self.path):
            write_record(self.path, complete)
        remove_checkpoints(self._checkpoints)
        return complete

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def _pad_token(self) -> int:
        return self.trainers[0].model.model.config.pad_token_id or 0

    def _batches(self) -> BatchReader:
        return BatchReader(self.cache, self.objective.wanted, self._pad_token, self.device)

    def _held_out(self) -> list[HeldOutKL] | list[None]:
        if not self.cache.manifest.num_held_out:
            return [None] * len(self.trainers)
        batches = self._batches().held_out_batches(self.config.batch_size, MAX_SEQUENCES)
        return held_out_kl(self.trainers, batches)

    def take_steps(self, progress: Progress, should_stop: ShouldStop) -> float | None:
        """Take the steps that are left, and return the tokens per second."""
        first = load_checkpoint(self._checkpoints, self.trainers, self.device)
        if first:
            progress.note(f"going on after step {first}")
        if first == self.identity.steps:
            return None
        manifest = self.cache.manifest
        order = SequenceOrder(
            shards=manifest.shards,
            num_train=manifest.num_train,
            seed=self.config.seed,
            buffer_shards=self.config.buffer_shards,
        )
        mean_tokens = manifest.num_tokens / manifest.num_sequences * self.config.batch_size
        progress.start("train", round((self.identity.steps - first) * mean_tokens), "tokens")
        stream = self._batches().train_batches(order, self.config.batch_size, first)
        with closing(stream), closing(_Journal(self, first)) as journal:
            return self._steps(stream, first, journal, progress, should_stop)

    def _steps(
        self,
        stream: Iterator[StudentBatch],
        first: int,
        journal: "_Journal",
        progress: Progress,
        should_stop: ShouldStop,
    ) -> float:
        started = time.perf_counter()
        num_tokens = 0
        for step in range(first, self.identity.steps):
            if should_stop():
                journal.write(step)
                save_checkpoint(self._checkpoints, self.trainers, step)
                raise InterruptedRunError(
                    f"interrupted: the state after step {step} of {self.identity.steps} is kept in "
                    f"{self.path}. Run the same command again to go on."
                )
            batch = next(stream)
            journal.add([trainer.step(batch, step) for trainer in self.trainers])
            num_tokens += batch.num_tokens
            progress.advance(batch.num_tokens)
            taken = step + 1
            at_checkpoint = taken % self.config.checkpoint_steps == 0 or taken == self.identity.steps
            if at_checkpoint or taken % LOG_STEPS == 0:
                journal.write(taken)
            if at_checkpoint:
                save_checkpoint(self._checkpoints, self.trainers, taken)
        return num_tokens / (time.perf_counter() - started)


class _Journal:
    """Means of losses between two lines of the log."""

    def __init__(self, run: _Run, first: int) -> None:
        self._run = run
        self._log = TrainingLog(run.path, first)
        self._pending: list[list[Losses]] = []

    def add(self, losses: list[Losses]) -> None:
        """Take the losses of a step."""
        self._pending.append(losses)

    def write(self, step: int) -> None:
        """Write the means over the steps since the last line.

        It comes before a checkpoint, so that none is of a student that has diverged.

        Raises:
            DivergedError: a loss is not finite.
        """
        if not self._pending:
            return
        students: dict[str, dict[str, float]] = {}
        for at, trainer in enumerate(self._run.trainers):
            taken = [losses[at] for losses in self._pending]
            means = {str(kind): _mean([one.parts[kind] for one in taken]) for kind in taken[0].parts}
            total = _mean([one.total for one in taken])
            if not math.isfinite(total):
                raise DivergedError(
                    f"student {trainer.shape.arch} diverged: its loss is {total} at step {step}. "
                    f"Train again with a lower --lr than {self._run.config.lr:g}, or without this --arch."
                )
            students[trainer.shape.arch] = {"loss": total, **means}
        self._pending.clear()
        rate = learning_rate(self._run.config, step - 1, self._run.identity.steps)
        self._log.write({"step": step, "lr": rate, "students": students})

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _mean(values: Sequence[torch.Tensor]) -> float:
    return float(torch.stack(list(values)).mean())
