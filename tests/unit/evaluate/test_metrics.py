"""Scores against implementations that are not ours and not the libraries': counting by hand."""

import re
import string
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.evaluate.examples import SpanExample
from minilm_cache.evaluate.kind import kind_of
from minilm_cache.evaluate.metrics import text_scores
from minilm_cache.evaluate.spans import span_scores, words_of
from minilm_cache.evaluate.tasks import TASKS, Metric

TOLD = np.array([1, 0, 1, 1, 0, 1, 0, 1, 1, 1], np.float64)
LABELS = np.array([1, 0, 0, 1, 1, 1, 0, 0, 1, 1], np.float64)


def test_classes_by_counting() -> None:
    found = text_scores(("accuracy", "f1", "matthews"), TOLD, LABELS)
    tp, tn, fp, fn = 5, 2, 2, 1
    matthews = (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    expected = {"accuracy": 70, "f1": 100 * 2 * tp / (2 * tp + fp + fn), "matthews": 100 * matthews}
    assert found == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), min_size=3, max_size=40))
def test_correlations_by_definition(pairs: list[tuple[int, int]]) -> None:
    told, labels = np.array(pairs, np.float64).T / 4
    found = text_scores(("pearson", "spearman"), told, labels)
    if np.ptp(told) == 0 or np.ptp(labels) == 0:
        assert found == {"pearson": 0, "spearman": 0}
        return
    assert found["pearson"] == pytest.approx(100 * np.corrcoef(told, labels)[0, 1], abs=1e-6)
    ranks = [[np.mean(np.flatnonzero(np.sort(side) == one)) for one in side] for side in (told, labels)]
    assert found["spearman"] == pytest.approx(100 * np.corrcoef(np.array(ranks))[0, 1], abs=1e-6)


@pytest.mark.parametrize("metric", ["f1", "matthews"])
def test_a_model_that_always_says_no_scores_nothing(metric: Metric) -> None:
    assert text_scores((metric,), np.zeros(4), np.array([0, 1, 0, 1.0])) == {metric: 0}


QUESTIONS = [
    SpanExample(identifier="a", question="?", context="The cat sat, down.", answers=((0, "The cat"),)),
    SpanExample(
        identifier="b", question="?", context="in 1990 or 1991", answers=((3, "1990"), (3, "1990 or 1991"))
    ),
    SpanExample(identifier="c", question="?", context="nothing here", answers=()),
    SpanExample(identifier="d", question="?", context="nothing there", answers=()),
    SpanExample(identifier="e", question="?", context="by a river bank", answers=((5, "river bank"),)),
]
TOLD_SPANS = {"a": "cat!", "b": "or 1991", "c": "", "d": "there", "e": "a river"}


def _tokens(text: str) -> list[str]:
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _pair(told: str, answer: str) -> tuple[float, float]:
    said, expected = _tokens(told), _tokens(answer)
    if not said or not expected:
        return float(said == expected), float(said == expected)
    both = sum((Counter(said) & Counter(expected)).values())
    f1 = 2 * both / (len(said) + len(expected)) if both else 0.0
    return float(said == expected), f1


def test_spans_as_squads_script_scores_them() -> None:
    found = span_scores(QUESTIONS, TOLD_SPANS)
    best = {
        one.identifier: np.max(
            [_pair(TOLD_SPANS[one.identifier], text) for _, text in one.answers or ((0, ""),)], axis=0
        )
        for one in QUESTIONS
    }
    exact, f1 = np.mean(list(best.values()), axis=0) * 100
    assert (found["exact match"], found["f1"]) == pytest.approx((exact, f1))
    assert (found["exact match"], round(found["f1"], 1)) == (40.0, 69.3)
    answered = np.mean([best[key] for key in "abe"], axis=0) * 100
    assert (found["answerable exact match"], found["answerable f1"]) == pytest.approx(tuple(answered))
    assert (found["unanswerable exact match"], found["unanswerable f1"]) == (50.0, 50.0)


def test_signs_that_are_no_ascii_are_an_answer() -> None:
    """SQuAD's script takes the signs of ASCII alone for signs, so that this question has an answer."""
    questions = [replace(QUESTIONS[0], identifier="x", answers=((0, "\u2014"),)), QUESTIONS[-2]]
    assert span_scores(questions, {"x": "", questions[1].identifier: ""})["answerable exact match"] == 0


def test_without_unanswerable_questions_there_are_no_scores_of_them() -> None:
    assert set(span_scores(QUESTIONS[:2], TOLD_SPANS)) == {"exact match", "f1"}


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "The U.S. Army, a unit", ["us", "army", "unit"]),
        ("de", "Der König und die Königin", ["könig", "und", "königin"]),
        ("es", "«los Ángeles» a la una", ["ángeles", "a"]),
        ("hi", "भारत का।", ["भारत", "का"]),
        ("vi", "những ngôi nhà của tôi", ["ngôi", "nhà", "tôi"]),
        ("zh", "在1998年、北京ABC", ["在", "1998", "年", "北", "京", "abc"]),
        ("ar", "في البيت", ["في", "بيت"]),
    ],
)
def test_words_of_mlqas_languages(language: str, text: str, expected: list[str]) -> None:
    assert words_of(text, language) == expected


def test_spans_of_a_language_are_scored_by_its_words() -> None:
    """English articles are words of Spanish, and what is not English is not dropped."""
    example = SpanExample(identifier="x", question="?", context="voy a casa", answers=((4, "a casa"),))
    assert span_scores([example], {"x": "casa"})["f1"] == 100
    assert span_scores([example], {"x": "casa"}, "es")["f1"] == pytest.approx(100 * 2 / 3)
    chinese = SpanExample(identifier="x", question="?", context="北京市", answers=((0, "北京"),))
    assert span_scores([chinese], {"x": "北京市"}, "zh")["f1"] == pytest.approx(80)


def test_headline_is_the_mean_over_sets_and_metrics() -> None:
    assert kind_of(TASKS["mrpc"]).headline({"dev": {"accuracy": 80.0, "f1": 90.0}}) == 85
    assert kind_of(TASKS["mnli"]).headline({"dev-m": {"accuracy": 80.0}, "dev-mm": {"accuracy": 82.0}}) == 81
    assert (
        kind_of(TASKS["squad2"]).headline({"dev": {"exact match": 50.0, "f1": 60.0, "answerable f1": 1.0}})
        == 60
    )
