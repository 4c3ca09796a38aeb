"""Losses of scores: sentence-transformers' own classes and plain loops are the oracles."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder, util
from sentence_transformers.cross_encoder.losses import LambdaLoss, MarginMSELoss, NoWeightingScheme
from sentence_transformers.sentence_transformer import losses as of_vectors

from minilm_cache.objectives.scores import Scores, listwise, margin_mse, ranknet

TWIN: Any = {"rtol": 1e-5, "atol": 1e-6}


def scores(sizes: list[int], seed: int = 0) -> Scores:
    """Return scores of groups of these sizes, whose members are mixed."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    drawn = torch.randn((2, len(queries)), generator=generator)
    order = torch.randperm(len(queries), generator=generator)
    return Scores(drawn[0].requires_grad_(), 3 * drawn[1], queries[order])


def groups(found: Scores) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the scores of each group, a student's and the teacher's."""
    every = range(int(found.queries.max()) + 1)
    return [(found.student[found.queries == n], found.teacher[found.queries == n]) for n in every]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_losses_are_those_of_plain_loops(sizes: list[int], seed: int) -> None:
    """A group's loss is a mean, and counts as often as it has pairs; a group of one pair adds nothing."""
    found = scores(sizes, seed)
    zero = found.student.sum() * 0
    margins, lists, orders = [zero], [zero], [zero]
    for student, teacher in groups(found):
        size = len(student)
        if size > 1:
            errors = [((student[0] - student[at]) - (teacher[0] - teacher[at])) ** 2 for at in range(1, size)]
            margins.append(size * torch.stack(errors).mean())
            better = [
                F.softplus(student[other] - student[one])
                for one in range(size)
                for other in range(size)
                if teacher[one] > teacher[other]
            ]
            orders.append(size * torch.stack(better).mean())
        target, own = (teacher / 2).softmax(0), (student / 0.5).log_softmax(0)
        lists.append(size * 0.25 * (target * (target.log() - own)).sum())
    for loss, parts in (
        (margin_mse(found), margins),
        (listwise(found, 0.5, 2.0), lists),
        (ranknet(found), orders),
    ):
        expected = torch.stack(parts).sum() / len(found.student)
        torch.testing.assert_close(loss, expected, **TWIN)
        gradients = [
            torch.autograd.grad(value, found.student, retain_graph=True)[0] for value in (loss, expected)
        ]
        torch.testing.assert_close(*gradients, **TWIN)
        assert gradients[0].isfinite().all()


def test_losses_of_vectors_are_those_of_sentence_transformers() -> None:
    """Bi-encoders: the dot products of four queries with three documents each."""
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn((4, width, 8), generator=generator) for width in (1, 3))
    teacher = torch.randn((4, 3), generator=generator)
    student = (queries * documents).sum(-1)
    found = Scores(student.flatten(), teacher.flatten(), torch.arange(4).repeat_interleave(3))
    columns = [queries[:, 0], *documents.unbind(1)]
    no_model: Any = SimpleNamespace()
    margin: Any = of_vectors.MarginMSELoss(no_model, similarity_fct=util.pairwise_dot_score)
    expected = margin.compute_loss_from_embeddings(columns, teacher)
    torch.testing.assert_close(margin_mse(found), expected, **TWIN)
    kl: Any = of_vectors.DistillKLDivLoss(
        no_model, similarity_fct=util.pairwise_dot_score, student_temperature=0.5, teacher_temperature=2.0
    )
    expected = kl.compute_loss_from_embeddings(columns, teacher)
    torch.testing.assert_close(listwise(found, 0.5, 2.0), expected, **TWIN)


class Given(CrossEncoder):
    """A cross-encoder of sentence-transformers whose scores are given."""

    num_labels = 1
    device = torch.device("cpu")

    def __init__(self, known: dict[tuple[str, str], float]) -> None:
        torch.nn.Module.__init__(self)
        self.known = known

    def preprocess(self, inputs: Any, prompt: str | None = None, **_: Any) -> dict[str, Any]:
        del prompt
        return {"scores": torch.tensor([[self.known[pair]] for pair in inputs])}

    def forward(self, input: dict[str, Any], **_: Any) -> dict[str, Any]:
        return input


def test_losses_of_cross_encoders_are_those_of_sentence_transformers() -> None:
    queries, documents = ["q0", "q1"], [["a", "b", "c"], ["d", "e", "f"]]
    found = scores([3, 3])
    found = found._replace(queries=torch.tensor([0, 0, 0, 1, 1, 1]))
    student, teacher = found.student.detach(), found.teacher
    pairs = [(query, document) for query, row in zip(queries, documents, strict=True) for document in row]
    model: Any = Given(dict(zip(pairs, student.tolist(), strict=True)))
    ranked = LambdaLoss(model, NoWeightingScheme(), reduction_log="natural")
    expected = ranked([queries, documents], list(teacher.reshape(2, 3)))
    torch.testing.assert_close(ranknet(found).detach(), expected, **TWIN)
    margins = MarginMSELoss(model)
    columns = [queries, *(list(column) for column in zip(*documents, strict=True))]
    expected = margins(columns, teacher.reshape(2, 3))
    torch.testing.assert_close(margin_mse(found).detach(), expected, **TWIN)


def test_a_teacher_that_cannot_tell_pairs_apart_teaches_no_order() -> None:
    found = Scores(torch.randn(4), torch.ones(4), torch.tensor([0, 0, 1, 1]))
    assert float(ranknet(found)) == 0
    equal = found._replace(student=found.teacher)
    assert float(listwise(equal, 1.0, 1.0)) == pytest.approx(0, abs=1e-7)
    assert math.isclose(float(margin_mse(equal)), 0)
