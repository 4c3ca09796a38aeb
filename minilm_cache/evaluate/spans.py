"""Tasks whose answers are spans of a context: windows, heads, predictions and scores."""

import json
import re
import string
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import nn
from transformers import PreTrainedTokenizerFast

from minilm_cache.errors import needs
from minilm_cache.evaluate.examples import SpanExample, Track
from minilm_cache.evaluate.files import Source
from minilm_cache.evaluate.kind import EncodedSet, Features, Kind, Scores, are_finite, logits_of
from minilm_cache.evaluate.models import Evaluated, load_with_head
from minilm_cache.evaluate.squad import read_span_task
from minilm_cache.evaluate.tasks import SpanTask

with needs("evaluate", "eval"):
    from torchmetrics.functional.text import squad

_MAX_QUESTION: Final = 64
_MAX_ANSWER: Final = 30
_BEST: Final = 20
"""Number of start and end tokens that are considered per window; like the longest question and answer, in
tokens, as in BERT's code."""
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


@dataclass(frozen=True, slots=True)
class _EncodedSpans(EncodedSet[SpanExample]):
    """Questions, and the windows over their contexts."""

    windows: "Windows"


class SpanKind(Kind[SpanTask, SpanExample]):
    """Questions about a context. Predictions are answers by identifier."""

    def read(self, source: Source) -> list[Track[SpanExample]]:
        """Return the one track of the task; see `Kind.read`."""
        return read_span_task(self.task, source)

    def load(self, model: Evaluated, seed: int) -> nn.Module:
        """Return a model that scores each token as the start and the end of an answer; see `Kind.load`."""
        return load_with_head(model, "spans", seed)

    def encode(
        self, examples: Sequence[SpanExample], tokenizer: PreTrainedTokenizerFast
    ) -> EncodedSet[SpanExample]:
        """Return the windows of a set."""
        windows = span_features(examples, tokenizer, self.task)
        return _EncodedSpans(examples, windows.features, windows)

    def predict(
        self,
        trainer: Any,  # noqa: ANN401 - see `Kind`
        encoded: EncodedSet[SpanExample],
        advance: Callable[[int], None],
    ) -> "Mapping[str, SpanAnswer] | None":
        """Return the answer to each question, by identifier; see `Kind.predict`."""
        assert isinstance(encoded, _EncodedSpans)
        logits = logits_of(trainer, encoded.features)
        if not are_finite(logits):
            return None
        starts, ends = logits
        unanswerable = self.task.has_unanswerable
        return span_answers(
            encoded.examples, encoded.windows, starts=starts, ends=ends, has_unanswerable=unanswerable
        )

    def scores(
        self, name: str, examples: Sequence[SpanExample], predicted: "Mapping[str, SpanAnswer]"
    ) -> Scores:
        """Return exact match and F1 of a set, by the rules of its language."""
        language = name.partition("-")[2] if self.task.by_language else None
        return span_scores(examples, {key: answer.text for key, answer in predicted.items()}, language)

    def headline(self, scores: Mapping[str, Scores]) -> float:
        """Return the mean of F1 over dev sets."""
        return mean(scores[name]["f1"] for name in scores)

    def file(self, set_name: str) -> str:
        """Return the name of the file for the predictions of a set."""
        return f"{set_name}.json"

    def write(
        self,
        folder: Path,
        set_name: str,
        *,
        examples: Sequence[SpanExample],
        predicted: "Mapping[str, SpanAnswer]",
    ) -> None:
        """Write answers by identifier, as a JSON object.

        Where questions may have no answer, a second file has the probability of that, for `evaluate-v2.0.py
        --na-prob-file`.
        """
        _write_json(folder / self.file(set_name), {key: answer.text for key, answer in predicted.items()})
        if self.task.has_unanswerable:
            no_answer = {key: answer.no_answer for key, answer in predicted.items()}
            _write_json(folder / f"{set_name}.na_prob.json", no_answer)


def _write_json(file: Path, document: Mapping[str, object]) -> None:
    file.write_text(json.dumps(document, ensure_ascii=False, indent=0), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Model inputs of questions: sliding windows over their contexts."""

    features: Features
    """Model inputs with `start_positions` and `end_positions`, in tokens. In a window without the whole
    answer both are the position of [CLS]."""
    example: list[int]
    """Number of the example that each window belongs to."""
    offsets: list[list[tuple[int, int] | None]]
    """Span of each token in the context, in characters. None means that the token is not part of it."""
    first: list[int]
    """Position of [CLS] in each window."""


def span_features(
    examples: Sequence[SpanExample], tokenizer: PreTrainedTokenizerFast, task: SpanTask
) -> Windows:
    """Return the windows of questions with their contexts; the target is a question's first answer."""
    longest = min(_MAX_QUESTION, task.max_length // 3)
    questions = [_cut(example.question, tokenizer, longest) for example in examples]
    encoded = tokenizer(
        questions,
        [example.context for example in examples],
        truncation="only_second",
        max_length=task.max_length,
        stride=task.stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    numbers = encoded.pop("overflow_to_sample_mapping")
    mapped = encoded.pop("offset_mapping")
    windows = Windows(features=[], example=numbers, offsets=[], first=[])
    for window, number in enumerate(numbers):
        in_context = [part == 1 for part in encoded.sequence_ids(window)]
        offsets = [
            tuple(span) if inside else None for span, inside in zip(mapped[window], in_context, strict=True)
        ]
        feature = {name: values[window] for name, values in encoded.items()}
        first = feature["input_ids"].index(tokenizer.cls_token_id)
        start, end = _target(examples[number], offsets) or (first, first)
        windows.features.append(feature | {"start_positions": start, "end_positions": end})
        windows.offsets.append(offsets)
        windows.first.append(first)
    return windows


def _cut(question: str, tokenizer: PreTrainedTokenizerFast, longest: int) -> str:
    text = question.strip()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text if len(offsets) <= longest else text[: offsets[longest - 1][1]]


def _target(example: SpanExample, offsets: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the first and last token of the first answer, if a window holds all of it."""
    if not example.answers:
        return None
    start, text = example.answers[0]
    end = start + len(text)
    touched = [at for at, span in enumerate(offsets) if span and span[1] > start and span[0] < end]
    if not touched:
        return None
    first, last = offsets[touched[0]], offsets[touched[-1]]
    holds_all = first is not None and last is not None and first[0] <= start and last[1] >= end
    return (touched[0], touched[-1]) if holds_all else None


@dataclass(frozen=True, slots=True)
class SpanAnswer:
    """A model's answer to a question."""

    text: str
    """Text of the best span. Empty if no span scores above having no answer."""
    no_answer: float
    """Probability that there is no answer, the sigmoid of the difference of both scores."""


def span_answers(
    examples: Sequence[SpanExample],
    windows: Windows,
    *,
    starts: npt.NDArray[np.float32],
    ends: npt.NDArray[np.float32],
    has_unanswerable: bool,
) -> Mapping[str, SpanAnswer]:
    """Return the answer to each question, by identifier.

    Args:
        examples: examples of one set.
        windows: windows of these examples.
        starts: logits of start positions, `(windows, length)`.
        ends: logits of end positions, `(windows, length)`.
        has_unanswerable: whether a question may have no answer. That is predicted where the score of [CLS],
            its lowest over the question's windows, is higher than that of any span (Devlin et al. 2019, arXiv
            1810.04805, section 4.3).
    """
    best: dict[int, tuple[float, str]] = {}
    no_answer: dict[int, float] = {}
    for window, number in enumerate(windows.example):
        at = windows.first[window]
        score = float(starts[window, at] + ends[window, at])
        no_answer[number] = min(no_answer.get(number, score), score)
        offsets = windows.offsets[window]
        span = _best_span(starts[window, : len(offsets)], ends[window, : len(offsets)], offsets)
        if span is not None and (number not in best or span[0] > best[number][0]):
            first, last = span[1]
            best[number] = (span[0], examples[number].context[first:last])
    answers = {}
    for number, example in enumerate(examples):
        score, text = best.get(number, (-np.inf, ""))
        margin = no_answer[number] - score
        is_none = has_unanswerable and margin > 0
        answers[example.identifier] = SpanAnswer(
            "" if is_none else text, float(1 / (1 + np.exp(-np.clip(margin, -50, 50))))
        )
    return answers


def _best_span(
    starts: npt.NDArray[np.float32], ends: npt.NDArray[np.float32], offsets: Sequence[tuple[int, int] | None]
) -> tuple[float, tuple[int, int]] | None:
    """Return the score of the best span of a window, and its first and last character in the context.

    None means that the window has no allowed span.
    """
    inside = np.array([span is not None for span in offsets])
    if not inside.any():
        return None
    likely = [
        np.argsort(-np.where(inside, logits, -np.inf), kind="stable")[: min(_BEST, inside.sum())]
        for logits in (starts, ends)
    ]
    first, last = likely[0][:, None], likely[1][None, :]
    allowed = (last >= first) & (last - first < _MAX_ANSWER)
    if not allowed.any():
        return None
    scores = np.where(allowed, starts[first] + ends[last], -np.inf)
    row, column = np.unravel_index(int(scores.argmax()), scores.shape)
    begin, end = offsets[int(first[row, 0])], offsets[int(last[0, column])]
    assert begin is not None
    assert end is not None
    return float(scores[row, column]), (begin[0], end[1])


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
    return {example.identifier: [text for _, text in example.answers if _words(text)] for example in examples}


def _words(text: str) -> list[str]:
    """Return the words of an answer by SQuAD's script, which takes the signs of ASCII alone for signs."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(_ARTICLES["en"], " ", plain).split()


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


@cache
def _punctuation() -> dict[int, None]:
    """Return all signs of Unicode that are punctuation, to be removed."""
    signs = (code for code in range(sys.maxunicode) if unicodedata.category(chr(code)).startswith("P"))
    return dict.fromkeys([*signs, *map(ord, string.punctuation)])


def words_of(text: str, language: str) -> list[str]:
    """Return the words of an answer that MLQA's scoring compares. In Chinese each ideograph is a word."""
    plain = text.lower().translate(_punctuation())
    if language in _ARTICLES:
        plain = re.sub(_ARTICLES[language], " ", plain)
    if language == "zh":
        plain = _IDEOGRAPH.sub(r" \1 ", plain)
    return plain.split()
