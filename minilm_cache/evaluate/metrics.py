"""Predictions and metrics of downstream tasks, times 100 as in papers."""

import re
import string
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import needs
from minilm_cache.evaluate.examples import SpanExample
from minilm_cache.evaluate.kind import Scores
from minilm_cache.evaluate.tasks import Metric

with needs("evaluate", "eval"):
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
    from torchmetrics.functional.text import squad

_ARTICLES: Final = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",  # noqa: RUF001 - the letter
}
"""Articles that MLQA's scoring removes from answers, by language (Lewis et al. 2020, arXiv 1910.07475,
section 4)."""
_IDEOGRAPH: Final = re.compile(r"([\u4e00-\u9fa5])")


@cache
def _punctuation() -> dict[int, None]:
    """Return all signs of Unicode that are punctuation, to be removed."""
    signs = (code for code in range(sys.maxunicode) if unicodedata.category(chr(code)).startswith("P"))
    return dict.fromkeys([*signs, *map(ord, string.punctuation)])


def text_scores(
    metrics: Sequence[Metric], predictions: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]
) -> Scores:
    """Return the scores of a set.

    A correlation, also Matthews', with predictions or labels that are all the same counts as 0.

    Args:
        metrics: metrics to compute.
        predictions: predicted classes or values on a scale, `(examples,)`.
        labels: true classes or values, `(examples,)`.
    """
    return {metric: 100 * _score(metric, predictions, labels) for metric in metrics}


def _score(metric: Metric, predictions: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> float:
    match metric:
        case "accuracy":
            return float(accuracy_score(labels, predictions))
        case "f1":
            return float(f1_score(labels, predictions, zero_division=0))
        case _ if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0
        case "matthews":
            return float(matthews_corrcoef(labels, predictions))
        case "pearson" | "spearman":
            return float((pearsonr if metric == "pearson" else spearmanr)(labels, predictions)[0])


def span_scores(
    examples: Sequence[SpanExample], predictions: Mapping[str, str], language: str | None = None
) -> Scores:
    """Return exact match and F1 over words.

    If only some questions have an answer, there are also scores of those with and of those without one.

    Args:
        examples: examples of one set.
        predictions: predicted answers by identifier. An empty one means that the question has no answer.
        language: language whose rules for words, articles and punctuation apply, as in MLQA. None means
            SQuAD's rules.
    """
    with_answer = [example for example in examples if example.answers]
    without = [example for example in examples if not example.answers]
    given = _without_empty(examples) if without else {}
    scores = _squad(examples, predictions, language, given=given)
    if with_answer and without:
        for name, part in (("answerable", with_answer), ("unanswerable", without)):
            part_scores = _squad(part, predictions, language, given=given)
            scores |= {f"{name} {metric}": value for metric, value in part_scores.items()}
    return scores


def _without_empty(examples: Sequence[SpanExample]) -> dict[str, list[str]]:
    """Return the answers of each question without those that are nothing but articles and signs.

    The script of SQuAD 2.0 leaves them out, that of 1.1 does not.
    """
    return {
        example.identifier: [text for _, text in example.answers if words_of(text, "en")]
        for example in examples
    }


def _squad(
    examples: Sequence[SpanExample],
    answers: Mapping[str, str],
    language: str | None,
    *,
    given: Mapping[str, Sequence[str]],
) -> Scores:
    """Return exact match and F1; `given` replaces the answers of the questions that it names."""
    words: dict[str, str] = {}

    def normalised(text: str) -> str:
        """Replace words by numbers, which the English rules of torchmetrics leave as they are."""
        if language is None:
            return text
        return " ".join(words.setdefault(word, str(len(words))) for word in words_of(text, language))

    predictions: Any = [
        {"id": example.identifier, "prediction_text": normalised(answers[example.identifier])}
        for example in examples
    ]
    targets: Any = []
    for example in examples:
        texts = given.get(example.identifier, [text for _, text in example.answers]) or [""]
        answers_of = {"answer_start": [0] * len(texts), "text": [normalised(text) for text in texts]}
        targets.append({"id": example.identifier, "answers": answers_of})
    scores = squad(predictions, targets)
    return {"exact match": float(scores["exact_match"]), "f1": float(scores["f1"])}


def words_of(text: str, language: str) -> list[str]:
    """Return the words of an answer that MLQA's scoring compares. In Chinese each ideograph is a word."""
    plain = text.lower().translate(_punctuation())
    if language in _ARTICLES:
        plain = re.sub(_ARTICLES[language], " ", plain)
    if language == "zh":
        plain = _IDEOGRAPH.sub(r" \1 ", plain)
    return plain.split()
