"""Fine-tune a model on one track of a task with transformers' Trainer, and predict the track's sets."""

import tempfile
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.examples import Track
from minilm_cache.evaluate.kind import EncodedSet, Kind, Predictions
from minilm_cache.evaluate.settings import TrialIdentity
from minilm_cache.models.device import choose_device
from minilm_cache.session import Session

_WARMUP = 0.1
"""Share of steps over which the learning rate grows, as for BERT (Devlin et al. 2019, arXiv 1810.04805)."""
_WEIGHT_DECAY = 0.01
"""Weight decay of AdamW, as for BERT (Devlin et al. 2019, arXiv 1810.04805, appendix A)."""
_SCORING_BATCH = 64


@dataclass(frozen=True, slots=True)
class Tuned:
    """A fine-tuned model and its predictions."""

    model: nn.Module
    predictions: dict[str, Predictions] | None
    """Predictions by set. None means that the training diverged."""
    train_s: float
    """Seconds of training, without predictions."""
    num_cut: dict[str, int]
    """Examples of each set, and of `train`, whose texts were cut."""


TRAIN: Final = "train"
"""Name of the training set."""
TRIALS_KEPT: Final = "interrupted: trials that have ended are kept. Run the same command again to resume."


class _Callback(TrainerCallback):
    """Shows the Trainer's steps, and stops it if that was requested."""

    def __init__(self, session: Session, batch_size: int, total: int) -> None:
        self._session = session
        self._batch_size = batch_size
        self._left = total

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.advance(self._batch_size)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.advance(_SCORING_BATCH)

    def advance(self, amount: int) -> None:
        """Show a batch; the last one of a set may be smaller."""
        self._session.progress.advance(min(amount, self._left))
        self._left -= min(amount, self._left)
        self._session.stop_if_asked(TRIALS_KEPT)


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
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    *,
    kind: Kind[Any, Any],
    track: Track[Any],
    identity: TrialIdentity,
    device: torch.device,
    session: Session,
    title: str,
) -> Tuned:
    """Fine-tune a model on a track, and predict every dev and test set of it.

    Args:
        model: model with a head for the task. Its weights are changed.
        tokenizer: tokenizer of the model.
        kind: kind of the track's task.
        track: training set, and the sets that are predicted.
        identity: learning rate, epochs (0 leaves the model as it is), batch size, seed and precision.
        device: device from `check_device`.
        session: its progress shows sequences. Its `should_stop` is called after each step; True stops the
            trial.
        title: title of the trial in the progress display.

    Raises:
        InterruptedRunError: a stop was requested.
    """
    encoded_sets = {name: kind.encode(examples, tokenizer) for name, examples in track.sets().items()}
    learned = kind.encode(track.train, tokenizer) if identity.epochs else EncodedSet([], [])
    features = learned.features
    num_scored = sum(len(encoded.features) for encoded in encoded_sets.values())
    total = len(features) * identity.epochs + num_scored
    session.progress.start(title, total, "sequences")
    with tempfile.TemporaryDirectory() as scratch:
        callback = _Callback(session, identity.batch_size, total)
        trainer: Any = Trainer(  # Any: the Trainer accepts lists, its type hints do not
            model=model,
            args=_arguments(identity, scratch, device),
            train_dataset=features,
            data_collator=kind.collator(tokenizer),
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        began = time.perf_counter()
        if identity.epochs:
            trainer.train()
        train_s = time.perf_counter() - began
        predictions = {
            name: kind.predict(trainer, encoded, callback.advance) for name, encoded in encoded_sets.items()
        }
    finite = {name: predicted for name, predicted in predictions.items() if predicted is not None}
    num_cut = {name: encoded.num_cut for name, encoded in encoded_sets.items()}
    num_cut[TRAIN] = learned.num_cut if learned.num_learned_cut is None else learned.num_learned_cut
    return Tuned(model, finite if len(finite) == len(predictions) else None, train_s, num_cut)


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
        remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda",
    )
