"""Relations and losses against plain torch, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from minilm_cache.relations.loss import relation_kl
from minilm_cache.relations.scores import (
    DenseRows,
    RowTargets,
    SparseRows,
    Targets,
    VectorRows,
    Vectors,
    densify,
    key_mask,
    mean_row_entropy,
    relation_probs,
    relation_scores,
    to_dense,
)
from minilm_cache.storage_schema.identity import RelationKind

LENGTHS = torch.tensor([12, 7, 1])
SIZE = 12


def random_rows(seed: int = 0, sharpness: float = 2.0) -> Tensor:
    """Teacher rows, `(3, 2, 12, 12)`, zero beyond each sequence's length."""
    generator = torch.Generator().manual_seed(seed)
    valid = key_mask(LENGTHS, SIZE)
    scores = torch.randn(3, 2, SIZE, SIZE, generator=generator) * sharpness
    return scores.masked_fill(~valid[:, None, None, :], -torch.inf).softmax(-1)


def random_scores(seed: int = 1) -> Tensor:
    valid = key_mask(LENGTHS, SIZE)[:, None, None, :]
    scores = torch.randn(3, 2, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(~valid, torch.finfo(torch.float32).min).requires_grad_()


def as_sparse(rows: Tensor) -> SparseRows:
    """Every column as an entry."""
    return SparseRows(torch.arange(SIZE).expand_as(rows).contiguous(), rows, None)


def kl_by_torch(scores: Tensor, rows: Tensor) -> Tensor:
    """Mean over heads and valid rows of F.kl_div, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for at, length in enumerate(LENGTHS.tolist()):
        log_student = scores[at, :, :length, :length].double().log_softmax(-1)
        teacher = rows[at, :, :length, :length].double()
        total = total + functional.kl_div(log_student, teacher, reduction="sum")
    return total / (LENGTHS.sum() * rows.shape[1])


@pytest.mark.parametrize("make_rows", [DenseRows, as_sparse], ids=["dense", "sparse"])
def test_kl_and_its_gradient_are_those_of_plain_torch(make_rows: type[DenseRows]) -> None:
    rows, scores = random_rows(), random_scores()
    targets = Targets(make_rows(rows), mean_row_entropy(rows, LENGTHS))
    found = relation_kl(scores, targets, LENGTHS)
    (gradient,) = torch.autograd.grad(found, scores)
    expected = kl_by_torch(scores, rows)
    (expected_gradient,) = torch.autograd.grad(expected, scores)

    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-7, rtol=1e-4)


def test_kl_of_rows_with_a_uniform_base_is_that_of_the_same_rows_dense() -> None:
    """Codec `topk` with select=largest and tail=uniform stores such rows."""
    valid = key_mask(LENGTHS, SIZE)
    base = (0.3 / LENGTHS)[:, None, None].expand(3, 2, SIZE)
    sparse = SparseRows(torch.zeros(3, 2, SIZE, 1, dtype=torch.int64), torch.full((3, 2, SIZE, 1), 0.7), base)
    dense = to_dense(sparse, LENGTHS, SIZE)

    torch.testing.assert_close(dense.sum(-1), valid[:, None, :].expand(3, 2, SIZE).float())
    losses, gradients = [], []
    for rows in (sparse, DenseRows(dense)):
        scores = random_scores()
        loss = relation_kl(scores, Targets(rows, mean_row_entropy(dense, LENGTHS)), LENGTHS)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(scores.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_entries_on_one_column_add_up() -> None:
    rows = SparseRows(torch.tensor([[[[2, 2, 5]]]]), torch.tensor([[[[0.25, 0.5, 0.25]]]]), None)
    dense = to_dense(rows, torch.tensor([1]), 6)

    assert dense[0, 0, 0].tolist() == [0.0] * 6  # columns beyond the length are nobody's
    assert to_dense(rows, torch.tensor([6]), 6)[0, 0, 0].tolist() == [0, 0, 0.75, 0, 0, 0.25]


def test_padding_changes_neither_loss_nor_gradient() -> None:
    rows, scores = random_rows(), random_scores()
    noise = torch.randn(3, 2, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    beyond = ~key_mask(LENGTHS, SIZE)[:, None, :, None].expand_as(rows)
    other = torch.where(beyond, noise, scores.detach()).requires_grad_()
    valid = key_mask(LENGTHS, SIZE)[:, None, None, :]
    other = other.detach().masked_fill(~valid, torch.finfo(torch.float32).min).requires_grad_()
    targets = Targets(DenseRows(rows), mean_row_entropy(rows, LENGTHS))
    found = [relation_kl(one, targets, LENGTHS) for one in (scores, other)]
    for loss in found:
        loss.backward()

    torch.testing.assert_close(found[0], found[1])
    assert other.grad is not None
    assert torch.count_nonzero(other.grad[beyond]) == 0
    torch.testing.assert_close(scores.grad, other.grad)


def test_a_student_that_equals_the_teacher_has_no_loss() -> None:
    rows = random_rows()
    targets = Targets(DenseRows(rows), mean_row_entropy(rows, LENGTHS))
    scores = rows.clamp(min=1e-38).log()

    assert abs(float(relation_kl(scores, targets, LENGTHS))) < 1e-6


def test_entropy_is_that_of_torch_distributions() -> None:
    rows = random_rows()
    for at, length in enumerate(LENGTHS.tolist()):
        expected = torch.distributions.Categorical(probs=rows[at, :, :length, :length]).entropy().mean()
        torch.testing.assert_close(mean_row_entropy(rows, LENGTHS)[at], expected)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kind", list(RelationKind))
def test_rows_of_vectors_have_the_entropy_of_their_probabilities(
    kind: RelationKind, window: int | None
) -> None:
    mask = (
        None if window is None else torch.ones(1, 1, SIZE, SIZE, dtype=torch.bool).tril(window).triu(-window)
    )
    query, key, value = torch.randn(3, 3, 2, SIZE, 8, generator=torch.Generator().manual_seed(4))
    vectors = Vectors(query, key, value, mask, 8**-0.5)
    rows, entropy = densify(VectorRows(vectors, kind), LENGTHS)
    probs = relation_probs(vectors, kind, LENGTHS)
    assert torch.equal(rows.probs, probs)
    for at, length in enumerate(LENGTHS.tolist()):
        own = probs[at, :, :length, :length].clamp(min=1e-30)
        expected = torch.distributions.Categorical(probs=own).entropy().mean()
        torch.testing.assert_close(entropy[at], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", list(RelationKind))
def test_scores_are_float32_under_autocast(kind: RelationKind) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.bfloat16)
    vectors = Vectors(query, key, value, mask=None, scaling=8**-0.5)
    with torch.autocast("cpu", torch.bfloat16):
        scores = relation_scores(vectors, kind, torch.ones(1, 1, 1, 5, dtype=torch.bool))

    assert scores.dtype == torch.float32


@pytest.mark.parametrize("make_rows", [DenseRows, as_sparse], ids=["dense", "sparse"])
def test_the_kl_of_padded_rows_is_the_same_under_autocast(make_rows: type[DenseRows]) -> None:
    rows, scores = random_rows(), random_scores()
    targets = Targets(make_rows(rows), mean_row_entropy(rows, LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        found = relation_kl(scores, targets, LENGTHS)

    torch.testing.assert_close(found, relation_kl(scores, targets, LENGTHS))


def test_the_models_own_mask_hides_columns_of_attention_but_not_of_values() -> None:
    window = torch.ones(5, 5, dtype=torch.bool).tril(1).triu(-1)[None, None]
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    vectors = Vectors(query, key, value, mask=window, scaling=8**-0.5)
    attention = relation_probs(vectors, RelationKind.ATTENTION, torch.tensor([5]))
    value = relation_probs(vectors, RelationKind.VALUE, torch.tensor([5]))

    assert torch.equal(attention > 0, window.expand_as(attention))
    assert bool((value > 0).all())


def test_sparse_gradient_is_the_dense_one_in_expectation() -> None:
    """Rows drawn one column at a time with the teacher's probabilities: the simplest unbiased rows."""
    rows, scores = random_rows(sharpness=0.5), random_scores()
    entropy = mean_row_entropy(rows, LENGTHS)

    def gradient(target: RowTargets) -> Tensor:
        loss = relation_kl(scores, Targets(target, entropy), LENGTHS)
        return torch.autograd.grad(loss, scores)[0]

    num_draws = 4000
    generator = torch.Generator().manual_seed(5)
    flat = rows.reshape(-1, SIZE)
    drawn = torch.multinomial(flat, num_draws, replacement=True, generator=generator).reshape(3, 2, SIZE, -1)
    found = torch.stack(
        [
            gradient(SparseRows(part, torch.full(part.shape, 1 / part.shape[-1]), None))
            for part in drawn.split(100, dim=-1)
        ]
    )
    row_weight = key_mask(LENGTHS, SIZE)[:, None, :, None] / (LENGTHS.sum() * 2)
    error = (rows * (1 - rows) / num_draws).sqrt() * row_weight

    assert bool(((found.mean(0) - gradient(DenseRows(rows))).abs() <= 5 * error + 1e-7).all())
