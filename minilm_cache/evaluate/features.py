"""Tokenize examples into model inputs, and turn logits of spans back into answer texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from minilm_cache.evaluate.examples import SpanExample, TextExample
from minilm_cache.evaluate.tasks import SpanTask

Features = list[dict[str, Any]]

_MAX_QUESTION: Final = 64
_MAX_ANSWER: Final = 30
_BEST: Final = 20
"""Number of start and end tokens that are considered per window; like the longest question and answer, in
tokens, as in BERT's code."""


def text_features(
    examples: Sequence[TextExample], tokenizer: PreTrainedTokenizerFast, max_length: int, *, regression: bool
) -> Features:
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
    return [
        {name: values[number] for name, values in encoded.items()}
        | ({} if example.label is None else {"labels": kind(example.label)})
        for number, example in enumerate(examples)
    ]


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
    starts: npt.NDArray[np.float32],
    ends: npt.NDArray[np.float32],
    offsets: Sequence[tuple[int, int] | None],
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
