"""What each kind of task owns: its data, its model, its features, its predictions and its scores.

The rest of an evaluation (trials, seeds, settings, cards) knows nothing else of a task.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.examples import Track
from minilm_cache.evaluate.files import Source
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.evaluate.tasks import Generation, SpanTask, Task, TextTask

AnyTask = TypeVar("AnyTask", bound=Task)
AnyExample = TypeVar("AnyExample")
AnyKind = TypeVar("AnyKind", bound="Kind[Any, Any]")
_NO_ANSWERS = ["hidden_states", "attentions", "past_key_values", "mems"]
"""What a model may return beside its logits, by its configuration."""
Features = list[dict[str, Any]]
"""Model inputs by name, one dictionary a sequence."""
Predictions = Any
"""A model's predictions of one set, as its kind makes and scores them."""
Scores = dict[str, float]
"""Scores by metric, times 100."""


@dataclass(frozen=True, slots=True)
class EncodedSet(Generic[AnyExample]):
    """A set, and the model inputs of its examples."""

    examples: Sequence[AnyExample]
    features: Features
    num_cut: int = field(default=0, kw_only=True)
    """Examples whose texts are longer than what the model reads."""
    num_learned_cut: int | None = field(default=None, kw_only=True)
    """The same where the model learns from the set. None means as many."""


@dataclass(frozen=True, slots=True)
class Kind(ABC, Generic[AnyTask, AnyExample]):
    """A task, and all that differs between kinds of tasks."""

    task: AnyTask

    def longest_learned(self, max_length: int) -> str:
        """Return the greatest length of texts that a model learns whole, in words."""
        return f"{max_length} tokens"

    def configured(self: AnyKind, config: EvaluateConfig) -> AnyKind:
        """Return the kind with the task's lengths and other settings as they were given.

        Raises:
            InvalidConfigError: a setting is about another kind of task.
        """
        return self if config.max_length is None else self.of(self.task.cut(config.max_length))

    def of(self: AnyKind, task: Any) -> AnyKind:  # noqa: ANN401 - of the same kind
        """Return the kind with another task."""
        return replace(self, task=task)

    @property
    def generation(self) -> Generation | None:
        """How texts are generated. None means that none are."""
        return None

    def own_settings(self) -> list[object]:
        """Return what the identity of a task of one's own holds beside its data."""
        return []

    @abstractmethod
    def read(self, source: Source) -> list[Track[AnyExample]]:
        """Return the tracks of the task.

        Raises:
            CorpusError: a file is missing, empty or damaged.
        """

    @abstractmethod
    def load(self, model: Evaluated, seed: int) -> nn.Module:
        """Return a model with a head for the task; weights that its folder lacks are drawn by the seed.

        Raises:
            TeacherError: the folder has no model that can be loaded.
            InvalidConfigError: the model cannot do the task.
        """

    def as_tuned(self: AnyKind, model: Evaluated, config: EvaluateConfig) -> AnyKind:
        """Return the kind with the settings of a model's own fine-tuning, before any model is scored.

        Args:
            model: a model that is scored as it is.
            config: what was given.

        Raises:
            TeacherError: the model has none.
            InvalidConfigError: it has no head for the task, or the kind has no models that are scored so.
        """
        raise self._without_answers(model)

    def load_as_is(self, model: Evaluated) -> nn.Module:
        """Return a model with the head that it has.

        Raises:
            TeacherError: the folder has no model that can be loaded.
            InvalidConfigError: same as for `as_tuned`.
        """
        raise self._without_answers(model)

    def _without_answers(self, model: Evaluated) -> InvalidConfigError:
        return InvalidConfigError(
            f"--as-is scores classes, values and generated texts, not {self.task.title}: {model.name} must "
            "be fine-tuned. Leave it out."
        )

    @property
    def must_read(self) -> int:
        """Tokens that a model must have positions for."""
        return self.task.max_length

    def check(self, model: Evaluated, tokenizer: PreTrainedTokenizerFast) -> str:
        """Raise an error for a model that cannot do the task, before any model is fine-tuned.

        Returns:
            what users should know about the model. Empty means nothing.

        Raises:
            TeacherError: its family cannot do it.
            InvalidConfigError: it has too few positions.
        """
        return ""

    def save(
        self,
        model: Any,  # noqa: ANN401 - of `load`
        tokenizer: PreTrainedTokenizerFast,
        *,
        track: Track[AnyExample],
        folder: Path,
    ) -> None:
        """Write a fine-tuned model and its tokenizer to a folder.

        Args:
            model: model from `load`, fine-tuned.
            tokenizer: its tokenizer.
            track: what it was fine-tuned on.
            folder: folder to write to.

        Raises:
            OSError: the file system refused.
        """
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def predicts(self, track: Track[AnyExample]) -> bool:
        """Return whether a track has sets that are read only where predictions are asked for."""
        return bool(track.unlabelled())

    @abstractmethod
    def encode(
        self, examples: Sequence[AnyExample], tokenizer: PreTrainedTokenizerFast
    ) -> EncodedSet[AnyExample]:
        """Return the model inputs of a set."""

    def collator(self, tokenizer: PreTrainedTokenizerFast) -> Callable[[Features], dict[str, Any]]:
        """Return what makes a batch of model inputs."""
        return DataCollatorWithPadding(tokenizer)

    @abstractmethod
    def predict(
        self,
        trainer: Any,  # noqa: ANN401 - the Trainer takes lists, its type hints do not
        encoded: EncodedSet[AnyExample],
        advance: Callable[[int], None],
    ) -> Predictions | None:
        """Return a model's predictions of a set. None means that the training diverged.

        Args:
            trainer: transformers' Trainer with the model; its own predictions show their progress themselves.
            encoded: the set.
            advance: shows the number of sequences that were done otherwise.
        """

    @abstractmethod
    def scores(self, name: str, examples: Sequence[AnyExample], predicted: Predictions) -> Scores:
        """Return the scores of a set by its name and a model's predictions."""

    def headline(self, scores: Mapping[str, Scores]) -> float:
        """Return the score that settings are chosen by: the mean of all metrics of all dev sets."""
        return mean(mean(scores[name].values()) for name in scores)

    def by_chance(self, track: Track[AnyExample]) -> dict[str, float]:
        """Return the accuracy, between 0 and 1, of the commonest answer of the training set, by dev set.

        It is empty where there is no such answer, or accuracy is not measured.
        """
        return {}

    @abstractmethod
    def file(self, set_name: str) -> str:
        """Return the name of the file for the predictions of a set."""

    @abstractmethod
    def write(
        self, folder: Path, set_name: str, *, examples: Sequence[AnyExample], predicted: Predictions
    ) -> None:
        """Write a model's predictions of a set.

        Args:
            folder: existing folder to write to.
            set_name: name of the set.
            examples: its examples.
            predicted: predictions of them.
        """


def logits_of(trainer: Any, features: Features) -> list[npt.NDArray[np.float32]]:  # noqa: ANN401 - as above
    """Return a model's logits of sequences, in their order.

    The model gets the sequences in the order of their lengths, so that batches need little padding.
    """
    order = np.argsort([len(feature["input_ids"]) for feature in features], kind="stable")
    # A model may have a loss for other labels than the task's, which is not asked for.
    unlabelled = [{name: value for name, value in each.items() if name != "labels"} for each in features]
    output = trainer.predict([unlabelled[number] for number in order], ignore_keys=_NO_ANSWERS).predictions
    return [logits[np.argsort(order)] for logits in (output if isinstance(output, tuple) else (output,))]


def are_finite(logits: Sequence[npt.NDArray[np.float32]]) -> bool:
    """Return whether all logits are numbers; those of a training that diverged are not."""
    return all(bool(np.isfinite(part).all()) for part in logits)


def kind_of(task: Task) -> Kind[Any, Any]:
    """Return what a task's kind owns. Only that kind's libraries load: all of them take a second."""
    if isinstance(task, TextTask):
        from minilm_cache.evaluate.texts import TextKind  # noqa: PLC0415 - see above

        return TextKind(task)
    if isinstance(task, SpanTask):
        from minilm_cache.evaluate.spans import SpanKind  # noqa: PLC0415

        return SpanKind(task)
    from minilm_cache.evaluate.generation import GenerationKind  # noqa: PLC0415

    return GenerationKind(task)
