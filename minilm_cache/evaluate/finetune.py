"""One trial: a model fine-tuned on one track of a task by transformers' Trainer, and scored on its sets."""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.evaluate.examples import Track
from minilm_cache.evaluate.features import (
    Features,
    SpanAnswer,
    Windows,
    span_answers,
    span_features,
    text_features,
)
from minilm_cache.evaluate.settings import TrialIdentity
from minilm_cache.evaluate.tasks import SpanTask, Task
from minilm_cache.models.device import choose_device
from minilm_cache.progress import Progress, ShouldStop

_WARMUP = 0.1
_WEIGHT_DECAY = 0.01
"""Share of steps, and decay, of fine-tuning BERT (Devlin et al. 2019, arXiv 1810.04805, appendix A)."""
_SCORING_BATCH = 64

Told = npt.NDArray[np.float64] | Mapping[str, SpanAnswer]
"""What a model tells of a set: classes or numbers `(examples,)`, or answers by identifier."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A fine-tuned model and what it tells of each set; nothing where its loss was no number in the end."""

    model: PreTrainedModel
    told: dict[str, Told] | None
    train_s: float


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told of progress, and who is asked whether to stop."""

    progress: Progress
    should_stop: ShouldStop
    doing: str = ""
    """What is done, in words."""

    def stop_if_asked(self) -> None:
        """Raise InterruptedRunError if it is to stop."""
        if self.should_stop():
            raise InterruptedRunError(
                "interrupted: trials that have ended are kept. Run the same command again to go on."
            )


class _Callback(TrainerCallback):
    """Hands the Trainer's steps to our progress."""

    def __init__(self, watcher: Watcher, batch_size: int, total: int) -> None:
        self._watcher = watcher
        self._batch_size = batch_size
        self._left = total

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._advance(self._batch_size)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._advance(_SCORING_BATCH)

    def _advance(self, amount: int) -> None:
        """Tell of a batch; the last one of a set may be smaller."""
        self._watcher.progress.advance(min(amount, self._left))
        self._left -= min(amount, self._left)
        self._watcher.stop_if_asked()


def check_device(name: str | None) -> torch.device:
    """Return the device that the Trainer will take.

    Raises:
        InvalidConfigError: it would take another one, or several.
    """
    device = choose_device(name)
    if device.type not in {"cpu", "cuda"}:
        raise InvalidConfigError(f"--device {name}: trials run on cpu or cuda. Give one of them.")
    if device.type == "cuda" and (device.index or torch.cuda.device_count() > 1):
        raise InvalidConfigError(
            f"--device {name or 'cuda'}: a trial takes one GPU, the first that it sees. Show it one: "
            "CUDA_VISIBLE_DEVICES=0; other GPUs can do other seeds or tasks into the same --out."
        )
    return device


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    task: Task,
    track: Track[Any],
    identity: TrialIdentity,
    device: torch.device,
    watcher: Watcher,
) -> Tuned:
    """Fine-tune a model and ask it about every set of a track.

    Args:
        model: with a head for the task.
        tokenizer: of it.
        task: which.
        track: what it learns from and is asked about.
        identity: learning rate, epochs, seed.
        device: from `check_device`.
        watcher: who looks on.

    Raises:
        InterruptedRunError: it was asked to stop.
    """
    read = {name: _Reading.of(some, tokenizer, task) for name, some in track.sets().items()}
    features = _Reading.of(track.train, tokenizer, task).features
    total = len(features) * identity.epochs + sum(len(one.features) for one in read.values())
    watcher.progress.start(watcher.doing, total, "sequences")
    with tempfile.TemporaryDirectory() as scratch:
        trainer: Any = Trainer(  # of lists, which it takes, and its types do not
            model=model,
            args=_arguments(identity, scratch, device),
            train_dataset=features,
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[_Callback(watcher, identity.batch_size, total)],
        )
        trainer.remove_callback(PrinterCallback)
        began = time.perf_counter()
        trainer.train()
        train_s = time.perf_counter() - began
        told = {name: _told(task, one, _logits(trainer, one.features)) for name, one in read.items()}
    is_finite = all(one is not None for one in told.values())
    kept = {name: one for name, one in told.items() if one is not None}
    return Tuned(model, kept if is_finite else None, train_s)


def _arguments(identity: TrialIdentity, scratch: str, device: torch.device) -> TrainingArguments:
    return TrainingArguments(
        output_dir=scratch,
        per_device_train_batch_size=identity.batch_size,
        per_device_eval_batch_size=_SCORING_BATCH,
        learning_rate=identity.lr,
        num_train_epochs=identity.epochs,
        warmup_steps=_WARMUP,
        weight_decay=_WEIGHT_DECAY,
        seed=identity.seed,
        bf16=identity.precision == "bfloat16",
        use_cpu=device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=device.type == "cuda",
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """A set as a model reads it."""

    examples: Any
    """Of the task's kind."""
    features: Features
    windows: Windows | None
    """Of spans."""

    @classmethod
    def of(cls, examples: Any, tokenizer: PreTrainedTokenizerFast, task: Task) -> "_Reading":  # noqa: ANN401
        if isinstance(task, SpanTask):
            windows = span_features(examples, tokenizer, task)
            return cls(examples, windows.features, windows)
        features = text_features(examples, tokenizer, task.max_length, regression=task.is_regression)
        return cls(examples, features, None)


def _logits(trainer: Any, features: Features) -> list[npt.NDArray[np.float32]]:  # noqa: ANN401
    """Return what a model says of sequences, in their order; asked in the order of their lengths."""
    order = np.argsort([len(one["input_ids"]) for one in features], kind="stable")
    said = trainer.predict([features[number] for number in order]).predictions
    return [part[np.argsort(order)] for part in (said if isinstance(said, tuple) else (said,))]


def _told(task: Task, reading: _Reading, logits: list[npt.NDArray[np.float32]]) -> Told | None:
    """Return what a model tells of a set; none: it tells no numbers."""
    if not all(np.isfinite(part).all() for part in logits):
        return None
    if isinstance(task, SpanTask):
        assert reading.windows is not None
        unanswerable = task.has_unanswerable
        starts, ends = logits
        return span_answers(
            reading.examples, reading.windows, starts=starts, ends=ends, has_unanswerable=unanswerable
        )
    told = logits[0][:, 0] if task.is_regression else logits[0].argmax(-1)
    return np.asarray(told, np.float64)
