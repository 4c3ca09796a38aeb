"""The steps of a run: trains all students on each batch, and writes log, checkpoints and held-out losses."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn

import torch

from minilm_cache.cache import Cache
from minilm_cache.errors import DivergedError, InterruptedRunError
from minilm_cache.objectives.base import Losses
from minilm_cache.objectives.batch import UNITS, StudentBatch, Unit
from minilm_cache.session import Session
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
"""Steps between lines of the log, and between checks whether losses are finite."""
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sitting:
    """One sitting of a run, from its beginning or from a checkpoint on."""

    before_s: float
    """Seconds spent on steps in earlier sittings."""
    before_bytes: int
    """Bytes of shard files read in earlier sittings."""
    started: float
    """Value of `time.perf_counter` when this sitting began, seconds."""

    @classmethod
    def begin(cls, state: RunState) -> "_Sitting":
        """Begin a sitting at the state of a run."""
        return cls(before_s=state.train_s, before_bytes=state.bytes_read, started=time.perf_counter())

    @property
    def seconds(self) -> float:
        """Seconds since this sitting began."""
        return time.perf_counter() - self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """Takes the steps of a run."""

    config: TrainConfig
    steps: int
    """Steps of the whole run."""
    cache: Cache
    folder: RunFolder
    ranks: Ranks
    trainers: list[StudentTrainer]
    """Students of this process; students that diverge are removed."""
    state: RunState
    evaluate: Callable[[Sequence[StudentTrainer]], list[HeldOutLosses] | list[None]]
    """Returns the held-out losses of students; None for each where the cache has no held-out sequences."""
    tracker: Tracker
    session: Session

    def run(self, reader: BatchReader, plan: StepPlan) -> float | None:
        """Take the steps that are left.

        Args:
            reader: makes batches.
            plan: parts of a step, and which of them this process takes.

        Returns:
            Tokens per second, summed over all processes. None means that no step was left.

        Raises:
            InterruptedRunError: a stop was requested, or the hours are over; the state is kept.
            DivergedError: all students diverged.
            StorageError: the file system refused; the last checkpoint is kept.
        """
        first = self.state.step
        if first:
            self.session.progress.note(f"resuming after step {first}")
        if first == self.steps:
            return None
        manifest = self.cache.manifest
        mean_tokens = manifest.num_tokens / manifest.num_sequences * self.config.batch_size
        expected = round((self.steps - first) * mean_tokens)
        self.session.progress.start("train", expected, "tokens")
        stream = reader.train_batches(plan, first)
        with closing(stream), closing(_Journal(self)) as journal:
            sitting = _Sitting.begin(self.state)
            num_tokens = 0
            while self.state.step < self.steps:
                num_tokens += self._step(stream, journal, sitting)
            self.session.progress.advance(
                expected - num_tokens, journal.losses_in_words
            )  # lengths differ: now it is 100 %
            return num_tokens / sitting.seconds

    def _step(self, stream: Iterator[StudentBatch], journal: "_Journal", sitting: _Sitting) -> int:
        """Take a step, then log, evaluate and save where that is due; return the tokens of the step."""
        hours = sitting.seconds / _SECONDS_PER_HOUR
        is_over = self.config.max_hours is not None and hours >= self.config.max_hours
        batch = self._next(stream, journal, sitting)
        numbers = [
            float(self.session.should_stop()),
            float(is_over),
            *(float(batch.step_counts[unit]) for unit in UNITS),
        ]
        stop, over, *sums = self.ranks.sum(numbers)
        if stop or over:
            self._interrupt(journal, sitting, "interrupted" if stop else "the hours of --max-hours are over")
        # With students divided among processes, all of them count the same sequences.
        share = self.ranks.num_data / self.ranks.size
        totals = {unit: round(count * share) for unit, count in zip(UNITS, sums, strict=True)}
        num_tokens = totals["tokens"]
        step = self.state.step
        if batch.place is None:
            journal.add(self._learn(batch, stream, totals=totals))
        else:
            journal.add([trainer.step(batch, step) for trainer in self.trainers])
        self.state.step = taken = step + 1
        self.session.progress.advance(num_tokens, journal.losses_in_words)
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

    def _learn(
        self, batch: StudentBatch, stream: Iterator[StudentBatch], *, totals: Mapping[Unit, int]
    ) -> list[Losses]:
        """Take a step from its first part on; return the losses of each student."""
        step = self.state.step
        for trainer in self.trainers:
            trainer.begin(step)
        losses: list[Losses] = []
        while True:
            shares = {unit: batch.counts[unit] / max(totals[unit], 1) for unit in UNITS}
            for trainer in self.trainers:
                trainer.learn(batch, step, shares)
                if batch.ends_step:  # a student's gradients are used and freed before the next has its own
                    losses.append(trainer.update())
            if batch.ends_step:
                return losses
            batch = next(stream)

    def _next(self, stream: Iterator[StudentBatch], journal: "_Journal", sitting: _Sitting) -> StudentBatch:
        """Return the next batch; a stop while its segment is fetched keeps the state.

        Other processes wait for this one's numbers, so with several the read has to end.
        """
        try:
            return next(stream)
        except InterruptedRunError:
            if self.ranks.size > 1:
                raise
            self._interrupt(journal, sitting, "interrupted")

    def _save(self, sitting: _Sitting) -> None:
        self.state.train_s = sitting.before_s + sitting.seconds
        (bytes_read,) = self.ranks.sum([float(self.cache.reader.bytes_read)])
        self.state.bytes_read = sitting.before_bytes + round(bytes_read)
        keep = max(1, self.config.keep_checkpoints or 0)
        save_checkpoint(self.folder.checkpoints, self.trainers, state=self.state, ranks=self.ranks, keep=keep)
        if self.ranks.is_writer:
            drop_superseded(self.folder.best, self.trainers, self.state)

    def _interrupt(self, journal: "_Journal", sitting: _Sitting, reason: str) -> NoReturn:
        journal.write(thoroughly=True)
        self._save(sitting)
        raise InterruptedRunError(
            f"{reason}: the state after step {self.state.step} of {self.steps} is kept in "
            f"{self.folder.path}. Run the same command again to go on."
        )


class _Journal:
    """Writes means of losses to the log and the tracker, and stops students that diverge."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._log = TrainingLog(loop.folder, loop.state.step) if loop.ranks.is_first else None
        self._pending: list[list[Losses]] = []
        self.losses_in_words = ""
        """The losses that were written last, for progress displays."""

    def add(self, losses: list[Losses]) -> None:
        """Add the losses of a step, one for each student of this process."""
        self._pending.append(losses)

    def write(self, *, thoroughly: bool) -> None:
        """Write the means over the steps since the last line, and stop students that have diverged.

        It is called before a checkpoint, so that no checkpoint holds a student that has diverged.

        Args:
            thoroughly: also check that all weights are finite; the last step may have made them NaN.

        Raises:
            DivergedError: all students have diverged.
        """
        if not self._pending:
            return
        loop, step = self._loop, self._loop.state.step
        means_of = {}
        for trainer, (kinds, means) in zip(loop.trainers, _means(self._pending), strict=True):
            sums = loop.ranks.sum_data(means)  # each process has its share of the loss
            means_of[trainer.shape.arch] = dict(zip(("loss", *kinds), sums, strict=True))
        self._pending.clear()
        students = loop.ranks.union(means_of)
        rate = learning_rate(loop.config, step - 1, loop.steps)
        self._report("students", students, {"lr": rate})
        losses = sorted(means["loss"] for means in students.values())
        self.losses_in_words = f"loss {losses[0]:.4g}" + (f" to {losses[-1]:.4g}" if losses[1:] else "")
        diverged = {arch for arch, means in students.items() if not math.isfinite(means["loss"])}
        if thoroughly:
            finite = loop.ranks.union({trainer.shape.arch: trainer.is_finite() for trainer in loop.trainers})
            diverged |= {arch for arch, is_finite in finite.items() if not is_finite}
        self._stop_diverged(diverged)

    def _stop_diverged(self, diverged: set[str]) -> None:
        loop, state = self._loop, self._loop.state
        remedy = f"Train it again with a lower --lr than {loop.config.lr:g}."
        for arch in sorted(diverged):
            state.diverged[arch] = state.step
            loop.session.progress.note(
                f"student {arch} diverged and is stopped at step {state.step}. {remedy}"
            )
        loop.trainers[:] = [trainer for trainer in loop.trainers if trainer.shape.arch not in diverged]
        if len(state.diverged) == len(loop.config.arch):
            listed = ", ".join(loop.config.arch)
            raise DivergedError(
                f"student {listed} diverged: its loss is not finite at step {state.step}. {remedy}"
            )

    def evaluate(self) -> None:
        """Compute the held-out losses, and save weights that are better than any before.

        Raises:
            DivergedError: all students have diverged.
        """
        loop, state = self._loop, self._loop.state
        figures: dict[str, dict[str, float]] = {}
        best: dict[str, BestStudent] = {}
        for trainer, held_out in zip(loop.trainers, loop.evaluate(loop.trainers), strict=True):
            arch = trainer.shape.arch
            assert held_out is not None
            objective = trainer.learner.objective
            before, total = state.best.get(arch), objective.total_of(held_out)
            figures[arch] = {"loss": total, **{str(kind): value for kind, value in held_out.items()}}
            if math.isfinite(total) and (before is None or total < objective.total_of(before.held_out)):
                file = None
                if loop.ranks.is_writer:
                    file = save_best(loop.folder.best, trainer, state.step)
                best[arch] = BestStudent(step=state.step, held_out=held_out, file=file)
        state.best.update(loop.ranks.agreed(best))
        students = loop.ranks.agreed(figures)
        self._report("held_out", students, {})
        self._stop_diverged(
            {arch for arch, parts in students.items() if not math.isfinite(sum(parts.values()))}
        )

    def _report(self, what: str, students: dict[str, dict[str, float]], others: dict[str, float]) -> None:
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


def _means(steps: Sequence[Sequence[Losses]]) -> list[tuple[list[str], list[float]]]:
    """Return, for each student, the names of its losses' parts, and the means of the loss and of each part.

    A device is waited for once for all of them.
    """
    kinds = [list(losses.parts) for losses in steps[0]]
    means = [
        torch.stack([torch.stack(values).mean() for values in zip(*rows, strict=True)])
        for rows in (
            [[losses[at].total, *(losses[at].parts[kind] for kind in names)] for losses in steps]
            for at, names in enumerate(kinds)
        )
    ]
    sizes = [len(values) for values in means]
    parts = torch.cat(means).tolist() if means else []
    return [
        ([str(kind) for kind in names], parts[sum(sizes[:at]) : sum(sizes[: at + 1])])
        for at, names in enumerate(kinds)
    ]
