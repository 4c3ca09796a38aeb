"""Tasks of one or two texts and a label: features, heads, predictions and scores."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput

from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.examples import TextExample, Track
from minilm_cache.evaluate.files import Source
from minilm_cache.evaluate.glue import read_text_task
from minilm_cache.evaluate.kind import EncodedSet, Kind, Scores, are_finite, logits_of
from minilm_cache.evaluate.metrics import text_scores
from minilm_cache.evaluate.models import Evaluated, load_with_head
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.evaluate.tasks import TASKS, TextTask
from minilm_cache.models.classifier import PooledClassifier, load_pooled_head
from minilm_cache.models.exported import load_to_run
from minilm_cache.models.load import is_classifier, read_config
from minilm_cache.models.pooling import SentenceEncoder

_DRAWN_NAME: Final = re.compile(r"LABEL_\d+")
_Values = npt.NDArray[np.float64]


class TextKind(Kind[TextTask, TextExample]):
    """Classes, or values on a scale, of single texts or of pairs. Predictions are `(examples,)`."""

    def read(self, source: Source) -> list[Track[TextExample]]:
        """Return the tracks of the task, several of one in several languages; see `Kind.read`."""
        return list(read_text_task(self.task, source))

    def own_settings(self) -> list[object]:
        """Return the classes and the metrics, which are settings where a task is one's own."""
        return [self.task.labels, self.task.metrics]

    def load(self, model: Evaluated, seed: int) -> nn.Module:
        """Return a model with a head for the task; see `Kind.load`.

        The head reads the vector that the folder pools, or else what the model's family reads, which mostly
        is the first token.
        """
        if not model.pools:
            return load_with_head(model, "sequences", seed, labels=self.task.labels)
        set_seed(seed)
        return PooledClassifier.begin(
            model.folder, self.task.labels, max_length=self.task.max_length, untrained=model.untrained
        )

    def as_tuned(self, model: Evaluated, config: EvaluateConfig) -> "TextKind":
        """Return the kind as it is, for a model that answers with the task's classes; see `Kind.as_tuned`."""
        self._own_order(model)
        return self

    def load_as_is(self, model: Evaluated) -> nn.Module:
        """Return a classifier with its own head, with classes in the order of the task's; see `Kind`."""
        loaded = (
            load_to_run(model.folder, "sequences")
            if load_pooled_head(model.folder) is None
            else PooledClassifier(SentenceEncoder.load(model.folder), self.task.max_length)
        )
        _reorder(loaded, self._own_order(model))
        return loaded

    def _own_order(self, model: Evaluated) -> list[int]:
        """Return the number of a model's class for each label of the task.

        Raises:
            InvalidConfigError: the model is no classifier, or one of other classes.
        """
        config = read_config(model.folder)
        names = classes_of(config)
        if load_pooled_head(model.folder) is None and not is_classifier(config):
            raise InvalidConfigError(
                f"{model.name} is no classifier ({', '.join(config.architectures or ('unknown',))}), so it "
                "has no answers of its own. Fine-tune it on the task first (`minilm-cache evaluate` with "
                "--keep-models, without --as-is)."
            )
        if getattr(config, "problem_type", None) == "multi_label_classification":
            raise InvalidConfigError(
                f"{model.name} gives several labels to a text (problem_type in its config.json), and "
                f"{self.task.title} has one of each. Take a model that was fine-tuned on it."
            )
        order = class_order(names, self.task.labels)
        if order is not None and self._is_order_guessed(names):
            raise InvalidConfigError(
                f"{model.name} names its classes {', '.join(names)}, so which of them are "
                f"{', '.join(self.task.labels)} is not known. Name them in its config.json (id2label)."
            )
        if order is None:
            wanted = ", ".join(self.task.labels) or "one value"
            raise InvalidConfigError(
                f"{model.name} answers with {', '.join(names)}, and {self.task.title} is about {wanted}. "
                f"{self._remedy(names)}"
            )
        return order

    def _remedy(self, names: Sequence[str]) -> str:
        """Return what to do where a model's classes are not those of the task."""
        is_own = self.task.name not in TASKS
        if not self.task.labels:
            return "Take a model with one output, or labels that are classes (--label-column)."
        if is_own and set(self.task.labels) < set(names):
            return "Give --task a file that has all of these classes, and this one as --dev."
        if is_own and len(names) == 1 and all(label.isdecimal() for label in self.task.labels):
            return (
                "If it answers with a value on the scale of these labels, give --metric pearson or spearman."
            )
        return (
            "Take a model that was fine-tuned on it, or give its classes these names in its config.json "
            "(id2label)."
        )

    def _is_order_guessed(self, names: Sequence[str]) -> bool:
        """Return whether a model's classes have no names, and nothing else says which is which.

        Labels of benchmarks, and numbers, have an order that models of them have, too.
        """
        has_order = self.task.name in TASKS or all(label.isdecimal() for label in self.task.labels)
        is_named = set(names) == set(self.task.labels)
        return not (has_order or is_named) and all(_DRAWN_NAME.fullmatch(name) for name in names)

    def encode(
        self, examples: Sequence[TextExample], tokenizer: PreTrainedTokenizerFast
    ) -> EncodedSet[TextExample]:
        """Return the model inputs of a set, with labels where they are published."""
        return text_features(examples, tokenizer, self.task.max_length, regression=self.task.is_regression)

    def predict(
        self,
        trainer: Any,  # noqa: ANN401 - see `Kind`
        encoded: EncodedSet[TextExample],
        advance: Callable[[int], None],
    ) -> _Values | None:
        """Return predicted classes or values, `(examples,)`; see `Kind.predict`."""
        logits = logits_of(trainer, encoded.features)
        if not are_finite(logits):
            return None
        predicted = logits[0][:, 0] if self.task.is_regression else logits[0].argmax(-1)
        return np.asarray(predicted, np.float64)

    def scores(self, name: str, examples: Sequence[TextExample], predicted: _Values) -> Scores:
        """Return the scores of a set by the task's metrics."""
        labels = np.asarray([example.label for example in examples], np.float64)
        return text_scores(self.task.metrics, predicted, labels)

    def by_chance(self, track: Track[TextExample]) -> dict[str, float]:
        """Return the accuracy of the commonest class by dev set; see `Kind.by_chance`."""
        counts = Counter(example.label for example in track.train)
        if self.task.is_regression or not counts or "accuracy" not in self.task.metrics:
            return {}
        label = counts.most_common(1)[0][0]
        return {
            name: sum(example.label == label for example in examples) / len(examples)
            for name, examples in track.dev.items()
        }

    def file(self, set_name: str) -> str:
        """Return the name of the file for the predictions of a set."""
        return self.task.submission(set_name)

    def write(
        self, folder: Path, set_name: str, *, examples: Sequence[TextExample], predicted: _Values
    ) -> None:
        """Write the predictions of a set.

        GLUE: `index` and `prediction`, tab-separated, in files with the server's names, also for dev sets.
        XNLI: one label a line (XTREME).
        """
        words = self._words(predicted)
        if self.task.languages == "one":
            pairs = zip(examples, words, strict=True)
            words = ["index\tprediction", *(f"{example.index}\t{word}" for example, word in pairs)]
        (folder / self.file(set_name)).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")

    def _words(self, predicted: _Values) -> list[str]:
        """Return predictions as text: names of classes, or values within the scale."""
        if self.task.is_regression:
            least, most = self.task.scale or (-np.inf, np.inf)
            return [f"{value:.3f}" for value in np.clip(predicted, least, most)]
        return [self.task.labels[int(value)] for value in predicted]


def text_features(
    examples: Sequence[TextExample], tokenizer: PreTrainedTokenizerFast, max_length: int, *, regression: bool
) -> EncodedSet[TextExample]:
    """Return the model inputs of single texts or pairs, with labels where they are published.

    Args:
        examples: examples of one set.
        tokenizer: tokenizer of the model.
        max_length: most tokens of an example; the longer text of a pair is truncated first.
        regression: whether labels are values on a scale instead of classes.
    """
    columns = list(zip(*(example.texts for example in examples), strict=True))
    encoded = tokenizer(*map(list, columns), truncation=True, max_length=max_length)
    kind = float if regression else int
    features = [
        {name: values[number] for name, values in encoded.items()}
        | ({} if example.label is None else {"labels": kind(example.label)})
        for number, example in enumerate(examples)
    ]
    num_cut = sum(bool(each.overflowing) for each in encoded.encodings or ())
    return EncodedSet(examples, features, num_cut=num_cut)


def classes_of(config: PreTrainedConfig) -> list[str]:
    """Return the names of a classifier's classes, in the order of its answers."""
    named = {str(number): str(name) for number, name in (config.id2label or {}).items()}
    return [named.get(str(number), "unknown") for number in range(config.num_labels or 1)]


def class_order(names: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Return the number of a model's class for each label of a task. None means that they do not agree.

    Classes without names of their own, as transformers names them, are in the order of the task's.
    """
    if len(names) != max(1, len(labels)):
        return None
    if labels and set(names) == set(labels):
        return [names.index(label) for label in labels]
    is_drawn = not labels or all(_DRAWN_NAME.fullmatch(name) for name in names)
    return list(range(len(names))) if is_drawn else None


def _reorder(model: nn.Module, order: Sequence[int]) -> None:
    """Put the answers of a classifier into another order, by a hook on what it returns."""

    def ordered(_: nn.Module, __: object, output: SequenceClassifierOutput) -> SequenceClassifierOutput:
        assert output.logits is not None
        output.logits = output.logits[:, list(order)]
        return output

    if list(order) != sorted(order):
        model.register_forward_hook(ordered)
