"""Fine-tune a model on one track of a task with transformers' Trainer, and predict the track's sets."""

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
from minilm_cache.models.classifier import PooledClassifier
from minilm_cache.models.device import choose_device
from minilm_cache.models.exported import ExportedModel
from minilm_cache.session import Session

_WARMUP = 0.1
"""Share of steps over which the learning rate grows, as for BERT (Devlin et al. 2019, arXiv 1810.04805)."""
_WEIGHT_DECAY = 0.01
"""Weight decay of AdamW, as for BERT (Devlin et al. 2019, arXiv 1810.04805, appendix A)."""
_SCORING_BATCH = 64

Predictions = npt.NDArray[np.float64] | Mapping[str, SpanAnswer]
"""A model's predictions of one set: classes or values on a scale, `(examples,)`, or answers by identifier."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A fine-tuned model and its predictions."""

    model: PreTrainedModel | PooledClassifier | ExportedModel
    predictions: dict[str, Predictions] | None
    """Predictions by set. None means that the training diverged: some logits are NaN or infinite."""
    train_s: float
    """Seconds of training, without predictions."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Shows progress, and checks whether a stop was requested."""

    session: Session
    title: str = ""
    """Title of the trial in the progress display."""

    def stop_if_requested(self) -> None:
        """Raise InterruptedRunError if a stop was requested."""
        if self.session.should_stop():
            raise InterruptedRunError(
                "interrupted: trials that have ended are kept. Run the same command again to resume."
            )


class _Callback(TrainerCallback):
    """Shows the Trainer's steps, and stops it if that was requested."""

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
        """Show a batch; the last one of a set may be smaller."""
        self._watcher.session.progress.advance(min(amount, self._left))
        self._left -= min(amount, self._left)
        self._watcher.stop_if_requested()


def check_device(name: str | None) -> torch.device:
    """Return the device that the Trainer will use.

    Args:
        name: device in torch's notation. None means that it is chosen.

    Raises:
        InvalidConfigError: the Trainer would use another device, or several GPUs.
    """
    device = choose_device(name)
    if device.type not in {"cpu", "cuda"}:
        raise InvalidConfigError(f"--device {name}: trials run on cpu or cuda. Give one of them.")
    if device.type == "cuda" and (device.index or torch.cuda.device_count() > 1):
        raise InvalidConfigError(
            f"--device {name or 'cuda'}: a trial uses one GPU, the first visible one. Make one visible: "
            "CUDA_VISIBLE_DEVICES=0; other GPUs can run other seeds or tasks into the same --out."
        )
    return device


def fine_tune(
    model: PreTrainedModel | PooledClassifier | ExportedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    task: Task,
    track: Track[Any],
    identity: TrialIdentity,
    device: torch.device,
    watcher: Watcher,
) -> Tuned:
    """Fine-tune a model on a track, and predict every dev and test set of it.

    Args:
        model: model with a head for the task. Its weights are changed.
        tokenizer: tokenizer of the model.
        task: task of the track.
        track: training set, and the sets that are predicted.
        identity: learning rate, epochs (0 leaves the model as it is), batch size, seed and precision.
        device: device from `check_device`.
        watcher: shows progress; it is called after each step and can stop the trial.

    Raises:
        InterruptedRunError: a stop was requested.
    """
    encoded_sets = {
        name: _EncodedSet.of(examples, tokenizer, task) for name, examples in track.sets().items()
    }
    features = _EncodedSet.of(track.train, tokenizer, task).features if identity.epochs else []
    num_scored = sum(len(encoded.features) for encoded in encoded_sets.values())
    total = len(features) * identity.epochs + num_scored
    watcher.session.progress.start(watcher.title, total, "sequences")
    with tempfile.TemporaryDirectory() as scratch:
        trainer: Any = Trainer(  # Any: the Trainer accepts lists, its type hints do not
            model=model,
            args=_arguments(identity, scratch, device),
            train_dataset=features,
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[_Callback(watcher, identity.batch_size, total)],
        )
        trainer.remove_callback(PrinterCallback)
        began = time.perf_counter()
        if identity.epochs:
            trainer.train()
        train_s = time.perf_counter() - began
        predictions = {
            name: _predictions(task, encoded, _logits(trainer, encoded.features))
            for name, encoded in encoded_sets.items()
        }
    finite = {name: predicted for name, predicted in predictions.items() if predicted is not None}
    return Tuned(model, finite if len(finite) == len(predictions) else None, train_s)


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
class _EncodedSet:
    """A set and the model inputs of its examples."""

    examples: Any
    """Examples of the task: all TextExample, or all SpanExample."""
    features: Features
    windows: Windows | None
    """Windows of a task of spans. None means a task of texts."""

    @classmethod
    def of(cls, examples: Any, tokenizer: PreTrainedTokenizerFast, task: Task) -> "_EncodedSet":  # noqa: ANN401
        if isinstance(task, SpanTask):
            windows = span_features(examples, tokenizer, task)
            return cls(examples, windows.features, windows)
        features = text_features(examples, tokenizer, task.max_length, regression=task.is_regression)
        return cls(examples, features, None)


def _logits(trainer: Any, features: Features) -> list[npt.NDArray[np.float32]]:  # noqa: ANN401
    """Return a model's logits of sequences, in their order.

    The model gets the sequences in the order of their lengths, so that batches need little padding.
    """
    order = np.argsort([len(feature["input_ids"]) for feature in features], kind="stable")
    output = trainer.predict([features[number] for number in order]).predictions
    return [logits[np.argsort(order)] for logits in (output if isinstance(output, tuple) else (output,))]


def _predictions(
    task: Task, encoded: _EncodedSet, logits: list[npt.NDArray[np.float32]]
) -> Predictions | None:
    """Return a model's predictions of a set. None means that some logits are NaN or infinite."""
    if not all(np.isfinite(part).all() for part in logits):
        return None
    if isinstance(task, SpanTask):
        assert encoded.windows is not None
        unanswerable = task.has_unanswerable
        starts, ends = logits
        return span_answers(
            encoded.examples, encoded.windows, starts=starts, ends=ends, has_unanswerable=unanswerable
        )
    predicted = logits[0][:, 0] if task.is_regression else logits[0].argmax(-1)
    return np.asarray(predicted, np.float64)
