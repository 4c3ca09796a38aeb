"""Scores as papers give them, between 0 and 100: scikit-learn's, scipy's, torchmetrics'."""

import re
import string
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.examples import SpanExample
from minilm_cache.evaluate.tasks import Metric

try:
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
    from torchmetrics.functional.text import squad
except ModuleNotFoundError as error:
    raise InvalidConfigError(
        f"evaluate needs {error.name}, which is not installed: pip install 'minilm-cache[eval]'."
    ) from error

Scores = dict[str, float]

_PUNCTUATION: Final = dict.fromkeys(
    code
    for code in range(sys.maxunicode)
    if chr(code) in string.punctuation or unicodedata.category(chr(code)).startswith("P")
)
_ARTICLES: Final = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",  # noqa: RUF001 - the letter
}
"""What MLQA's scoring leaves out of answers (Lewis et al. 2020, arXiv 1910.07475, section 4)."""
_IDEOGRAPH: Final = re.compile(r"([\u4e00-\u9fa5])")


def text_scores(
    metrics: Sequence[Metric], told: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]
) -> Scores:
    """Return the scores of a set.

    A correlation with predictions that are all the same is not defined; it counts as 0, as Matthews' does.

    Args:
        metrics: which.
        told: `(examples,)`, classes or numbers on a scale.
        labels: `(examples,)`.
    """
    return {metric: 100 * _score(metric, told, labels) for metric in metrics}


def _score(metric: Metric, told: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> float:
    match metric:
        case "accuracy":
            return float(accuracy_score(labels, told))
        case "f1":
            return float(f1_score(labels, told, zero_division=0))
        case "matthews":
            return float(matthews_corrcoef(labels, told))
        case "pearson" | "spearman":
            if np.ptp(told) == 0 or np.ptp(labels) == 0:
                return 0.0
            return float((pearsonr if metric == "pearson" else spearmanr)(labels, told)[0])


def span_scores(
    examples: Sequence[SpanExample], told: Mapping[str, str], language: str | None = None
) -> Scores:
    """Return exact match and F1 over words, and where some questions have no answer both of each kind.

    Args:
        examples: of a set.
        told: answers by identifier; an empty one says that there is none.
        language: whose words, articles and punctuation count (MLQA); none: as SQuAD has it.
    """
    found = _squad(examples, told, language)
    with_answer = [example for example in examples if example.answers]
    without = [example for example in examples if not example.answers]
    if with_answer and without:
        for name, some in (("answerable", with_answer), ("unanswerable", without)):
            found |= {f"{name} {metric}": value for metric, value in _squad(some, told, language).items()}
    return found


def _squad(examples: Sequence[SpanExample], told: Mapping[str, str], language: str | None) -> Scores:
    words: dict[str, str] = {}

    def read(text: str) -> str:
        """Number a language's words: torchmetrics normalises as English, and finds nothing to change."""
        if language is None:
            return text
        return " ".join(words.setdefault(word, str(len(words))) for word in words_of(text, language))

    predictions: Any = [
        {"id": example.identifier, "prediction_text": read(told[example.identifier])} for example in examples
    ]
    targets: Any = [
        {
            "id": example.identifier,
            "answers": {
                "answer_start": [start for start, _ in example.answers] or [0],
                "text": [read(text) for _, text in example.answers] or [""],
            },
        }
        for example in examples
    ]
    found = squad(predictions, targets)
    return {"exact match": float(found["exact_match"]), "f1": float(found["f1"])}


def words_of(text: str, language: str) -> list[str]:
    """Return the words of an answer that MLQA's scoring compares: Chinese by ideograph, others by spaces."""
    plain = text.lower().translate(_PUNCTUATION)
    if language in _ARTICLES:
        plain = re.sub(_ARTICLES[language], " ", plain)
    if language == "zh":
        plain = _IDEOGRAPH.sub(r" \1 ", plain)
    return plain.split()


def headline(scores: Mapping[str, Mapping[str, float]]) -> float:
    """Return the one figure that settings are chosen by: the mean over sets of the mean of their metrics.

    Of spans, F1 alone.
    """
    return mean(
        scores[name]["f1"] if "exact match" in scores[name] else mean(scores[name].values())
        for name in scores
    )
