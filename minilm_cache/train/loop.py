"""The steps of a run: all students on each batch, with their log, their checkpoints, their held-out KL."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from minilm_cache.cache import Cache
from minilm_cache.errors import DivergedError, InterruptedRunError
from minilm_cache.objectives.base import Losses
from minilm_cache.objectives.batch import UNITS, StudentBatch
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.checkpoint import BestStudent, RunState, drop_superseded, save_best, save_checkpoint
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import RunFolder
from minilm_cache.train.heldout import HeldOutLosses
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.record import TrainingLog
from minilm_cache.train.sampler import StepPlan
from minilm_cache.train.tracking import Tracker
from minilm_cache.train.trainer import StudentTrainer, learning_rate

LOG_STEPS = 10
"""Steps between lines of the log, and between looks at whether losses are finite."""
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sitting:
    """One go at a run, from its beginning or from a checkpoint on."""

    before_s: float
    """Seconds of steps in earlier ones."""
    before_bytes: int
    """Bytes read in earlier ones."""
    started: float

    @classmethod
    def begin(cls, state: RunState) -> "_Sitting":
        """Begin where a run is."""
        return cls(before_s=state.train_s, before_bytes=state.bytes_read, started=time.perf_counter())

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """What it takes to go through the steps of a run."""

    config: TrainConfig
    steps: int
    cache: Cache
    folder: RunFolder
    ranks: Ranks
    trainers: list[StudentTrainer]
    """Students of this process; those that diverge leave it."""
    state: RunState
    evaluate: Callable[[Sequence[StudentTrainer]], list[HeldOutLosses] | list[None]]
    tracker: Tracker
    progress: Progress

    def run(self, reader: BatchReader, plan: StepPlan, should_stop: ShouldStop) -> float | None:
        """Take the steps that are left, and return the tokens per second, those of all processes.

        Raises:
            InterruptedRunError: it was asked to stop, or its hours are over; the state is kept.
            DivergedError: no student is left.
            StorageError: the file system refused; the last checkpoint is kept.
        """
        first = self.state.step
        if first:
            self.progress.note(f"going on after step {first}")
        if first == self.steps:
            return None
        manifest = self.cache.manifest
        mean_tokens = manifest.num_tokens / manifest.num_sequences * self.config.batch_size
        self.progress.start("train", round((self.steps - first) * mean_tokens), "tokens")
        stream = reader.train_batches(plan, first)
        with closing(stream), closing(_Journal(self)) as journal:
            sitting = _Sitting.begin(self.state)
            num_tokens = 0
            while self.state.step < self.steps:
                num_tokens += self._step(stream, journal, should_stop=should_stop, sitting=sitting)
            return num_tokens / sitting.seconds

    def _step(
        self,
        stream: Iterator[StudentBatch],
        journal: "_Journal",
        *,
        should_stop: ShouldStop,
        sitting: _Sitting,
    ) -> int:
        """Take a step, and what is due after it; returns its tokens."""
        hours = sitting.seconds / _SECONDS_PER_HOUR
        is_over = self.config.max_hours is not None and hours >= self.config.max_hours
        batch = next(stream)
        asked = [float(should_stop()), float(is_over), *(float(batch.step_counts[unit]) for unit in UNITS)]
        stop, over, *sums = self.ranks.sum(asked)
        if stop or over:
            self._interrupt(journal, sitting, "interrupted" if stop else "the hours of --max-hours are over")
        once = self.ranks.num_data / self.ranks.size
        totals = {unit: round(count * once) for unit, count in zip(UNITS, sums, strict=True)}
        num_tokens = totals["tokens"]
        step = self.state.step
        for trainer in self.trainers:
            trainer.begin(step)
        while True:
            shares = {unit: batch.counts[unit] / max(totals[unit], 1) for unit in UNITS}
            for trainer in self.trainers:
                trainer.learn(batch, step, shares)
            if batch.ends_step:
                break
            batch = next(stream)
        journal.add([trainer.update() for trainer in self.trainers])
        self.state.step = taken = step + 1
        self.progress.advance(num_tokens)
        at_checkpoint = taken % self.config.checkpoint_steps == 0 or taken == self.steps
        every = self.config.eval_steps
        at_evaluation = every is not None and (taken % every == 0 or taken == self.steps)
        if at_checkpoint or at_evaluation or taken % LOG_STEPS == 0:
            journal.write(thoroughly=at_checkpoint or at_evaluation)
        if at_evaluation:
            journal.evaluate()
        if at_checkpoint:
            self._save(sitting)
        return num_tokens

    def _save(self, sitting: _Sitting) -> None:
        self.state.train_s = sitting.before_s + sitting.seconds
        (read,) = self.ranks.sum([float(self.cache.reader.bytes_read)])
        self.state.bytes_read = sitting.before_bytes + round(read)
        keep = max(1, self.config.keep_checkpoints)
        save_checkpoint(self.folder.checkpoints, self.trainers, state=self.state, ranks=self.ranks, keep=keep)
        if self.ranks.is_writer:
            drop_superseded(self.folder.best, self.trainers, self.state)

    def _interrupt(self, journal: "_Journal", sitting: _Sitting, reason: str) -> None:
        journal.write(thoroughly=True)
        self._save(sitting)
        raise InterruptedRunError(
            f"{reason}: the state after step {self.state.step} of {self.steps} is kept in "
            f"{self.folder.path}. Run the same command again to go on."
        )


class _Journal:
    """Means of losses between two lines of the log, and what they tell."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._log = TrainingLog(loop.folder, loop.state.step) if loop.ranks.is_first else None
        self._pending: list[list[Losses]] = []

    def add(self, losses: list[Losses]) -> None:
        """Take the losses of a step."""
        self._pending.append(losses)

    def write(self, *, thoroughly: bool) -> None:
        """Write the means over the steps since the last line, and stop students that have diverged.

        It comes before a checkpoint, so that none is of a student that has diverged.

        Args:
            thoroughly: look at weights, too: the last step may have spoilt them.

        Raises:
            DivergedError: no student is left.
        """
        if not self._pending:
            return
        loop, step = self._loop, self._loop.state.step
        own = {}
        for at, trainer in enumerate(loop.trainers):
            taken = [losses[at] for losses in self._pending]
            kinds = list(taken[0].parts)
            means = [_mean([one.total for one in taken])]
            means += [_mean([one.parts[kind] for one in taken]) for kind in kinds]
            shares = loop.ranks.sum_data(means)
            own[trainer.shape.arch] = dict(zip(("loss", *map(str, kinds)), shares, strict=True))
        self._pending.clear()
        students = loop.ranks.union(own)
        rate = learning_rate(loop.config, step - 1, loop.steps)
        self._tell("students", students, {"lr": rate})
        diverged = {arch for arch, means in students.items() if not math.isfinite(means["loss"])}
        if thoroughly:
            sound = loop.ranks.union({one.shape.arch: one.is_finite() for one in loop.trainers})
            diverged |= {arch for arch, is_sound in sound.items() if not is_sound}
        self._stop_diverged(diverged)

    def _stop_diverged(self, diverged: set[str]) -> None:
        loop, state = self._loop, self._loop.state
        remedy = f"Train it again with a lower --lr than {loop.config.lr:g}."
        for arch in sorted(diverged):
            state.diverged[arch] = state.step
            loop.progress.note(f"student {arch} diverged and is stopped at step {state.step}. {remedy}")
        loop.trainers[:] = [one for one in loop.trainers if one.shape.arch not in diverged]
        if len(state.diverged) == len(loop.config.arch):
            listed = ", ".join(loop.config.arch)
            raise DivergedError(
                f"student {listed} diverged: its loss is not finite at step {state.step}. {remedy}"
            )

    def evaluate(self) -> None:
        """Look at the held-out KL, and keep weights that are better than any before."""
        loop, state = self._loop, self._loop.state
        own: dict[str, dict[str, float]] = {}
        best: dict[str, BestStudent] = {}
        for trainer, found in zip(loop.trainers, loop.evaluate(loop.trainers), strict=True):
            arch = trainer.shape.arch
            assert found is not None
            objective = trainer.learner.objective
            before, total = state.best.get(arch), objective.total_of(found)
            own[arch] = {"loss": total, **{str(kind): value for kind, value in found.items()}}
            if math.isfinite(total) and (before is None or total < objective.total_of(before.held_out)):
                best[arch] = BestStudent(step=state.step, held_out=found)
                if loop.ranks.is_writer:
                    save_best(loop.folder.best, trainer, state.step)
        state.best.update(loop.ranks.union(best))
        students = loop.ranks.union(own)
        self._tell("held_out", students, {})
        self._stop_diverged({arch for arch, kls in students.items() if not math.isfinite(sum(kls.values()))})

    def _tell(
        self,
        what: str,
        students: dict[str, dict[str, float]],
        others: dict[str, float],
    ) -> None:
        if self._log is None:
            return
        step = self._loop.state.step
        ordered = {arch: students[arch] for arch in self._loop.config.arch if arch in students}
        self._log.write({"step": step, **others, what: ordered})
        flat = {
            f"{arch}/{what}/{name}": value for arch, means in ordered.items() for name, value in means.items()
        }
        self._loop.tracker.log({**others, **flat}, step=step)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def _mean(values: Sequence[torch.Tensor]) -> float:
    return float(torch.stack(list(values)).mean())
