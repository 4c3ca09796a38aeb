"""Windows over contexts, and answers out of logits, against what was put in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.evaluate.examples import SpanExample, TextExample
from minilm_cache.evaluate.spans import span_answers, span_features
from minilm_cache.evaluate.tasks import SpanTask
from minilm_cache.evaluate.texts import text_features
from tests.support import WORDS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TASK = SpanTask(name="s", title="S", train="", dev="", has_unanswerable=True, max_length=24, stride=8)


def _question(words: list[str], first: int, last: int) -> SpanExample:
    context = " ".join(words)
    start = len(" ".join(words[:first])) + (first > 0)
    text = " ".join(words[first : last + 1])
    return SpanExample(identifier="q", question="ba be", context=context, answers=((start, text),))


def _logits(width: int, peaks: list[int]) -> np.ndarray:
    found = np.zeros((len(peaks), width), np.float32)
    found[np.arange(len(peaks)), peaks] = 9
    return found


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=60), st.data())
def test_a_model_that_knows_the_targets_tells_the_answers(words: list[str], data: st.DataObject) -> None:
    """However many windows; where no window holds all of the answer it tells none."""
    first = data.draw(st.integers(0, len(words) - 1))
    last = min(len(words) - 1, first + data.draw(st.integers(0, 6)))
    example = _question(words, first, last)
    windows = span_features([example], TOKENIZER, TASK)
    width = max(len(one["input_ids"]) for one in windows.features)
    starts, ends = (
        _logits(width, [one[name] for one in windows.features])
        for name in ("start_positions", "end_positions")
    )
    assert all(len(one["input_ids"]) <= TASK.max_length for one in windows.features)
    # [CLS] of windows without the answer must not outscore it: its lowest score over windows counts.
    found = span_answers([example], windows, starts=starts, ends=ends, has_unanswerable=True)["q"]
    assert found.text == example.answers[0][1]
    assert found.no_answer < 0.5


def test_windows_overlap_and_cover_the_context() -> None:
    example = _question([WORDS[number % len(WORDS)] for number in range(50)], 0, 0)
    windows = span_features([example], TOKENIZER, TASK)
    covered = {one for offsets in windows.offsets for one in offsets if one is not None}
    assert len(covered) == 50
    shared = [one for one in windows.offsets[0] if one is not None and one in windows.offsets[1]]
    assert len(shared) == TASK.stride


def test_questions_without_answer_point_at_cls() -> None:
    example = SpanExample(identifier="q", question="ba", context="be bi", answers=())
    windows = span_features([example], TOKENIZER, TASK)
    feature = windows.features[0]
    assert (feature["start_positions"], feature["end_positions"]) == (0, 0)
    peak = _logits(len(feature["input_ids"]), [0])
    unanswered = span_answers([example], windows, starts=peak, ends=peak, has_unanswerable=True)["q"]
    assert unanswered.text == ""
    assert unanswered.no_answer > 0.5
    assert span_answers([example], windows, starts=peak, ends=peak, has_unanswerable=False)["q"].text != ""


def test_an_answer_ends_after_it_begins_and_is_short() -> None:
    example = _question([WORDS[number] for number in range(18)], 0, 0)
    windows = span_features([example], TOKENIZER, TASK)
    width = len(windows.features[0]["input_ids"])
    starts, ends = _logits(width, [10]), _logits(width, [6])
    ends[0, 12] = 5
    found = span_answers([example], windows, starts=starts, ends=ends, has_unanswerable=False)["q"].text
    begin, end = windows.offsets[0][10], windows.offsets[0][12]
    assert begin is not None
    assert end is not None
    assert found == example.context[begin[0] : end[1]]


def test_long_questions_are_cut_to_64_tokens() -> None:
    question = " ".join(WORDS[number % len(WORDS)] for number in range(200))
    example = SpanExample(identifier="q", question=question, context="ba be", answers=((0, "ba"),))
    wide = SpanTask(name="s", title="S", train="", dev="", max_length=384)
    feature = span_features([example], TOKENIZER, wide).features[0]
    assert feature["input_ids"].index(TOKENIZER.sep_token_id) == 65


@pytest.mark.parametrize("regression", [True, False])
def test_texts_are_pairs_with_labels(*, regression: bool) -> None:
    examples = [
        TextExample(("ba be bi", "bo"), 1.0, "0"),
        TextExample(("ba be", "be"), None, "1"),
    ]  # the second has 6 tokens
    encoded = text_features(examples, TOKENIZER, 6, regression=regression)
    found = encoded.features
    assert encoded.num_cut == 1
    words = TOKENIZER.convert_ids_to_tokens(found[0]["input_ids"])
    assert words == ["[CLS]", "ba", "be", "[SEP]", "bo", "[SEP]"]  # the longer text is cut first
    assert found[0]["labels"] == 1
    assert isinstance(found[0]["labels"], float if regression else int)
    assert "labels" not in found[1]
