"""Attention distributions, value relations and their KL: pure torch, for teacher and student alike.

Letters in names: B batch, H relation heads, Q query rows, K key columns (both the padded length L),
D head size, E stored entries per row.
Scores, softmax and losses are float32 whatever the model's dtype. Padding is masked as key columns of
both relations and left out as rows (the MiniLM authors' answer to unilm issue 198).
Losses are in nats.

The gradient is written by hand: with S the scores, d KL(P || softmax S) / dS = softmax(S) - P, so the
backward pass needs one matrix. On 2 cores at batch 16, length 128 it takes a fraction of what
`F.kl_div` does (benchmarks/relation_loss.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minilm_cache.storage_schema.identity import RelationKind


class Vectors(NamedTuple):
    """Queries, keys and values of one layer, split into heads, as its attention receives them."""

    query: Float[Tensor, "batch heads length size"]
    key: Float[Tensor, "batch heads length size"]
    value: Float[Tensor, "batch heads length size"]
    mask: Bool[Tensor, "batch _ _ length"] | None
    """The model's own attention mask, True where a key may be seen; none: nothing is masked."""
    scaling: float
    """Factor on query-key products, 1/sqrt(d_k)."""


def split_heads(vectors: Vectors, num_heads: int) -> Vectors:
    """Return queries, keys and values split into another number of heads (MiniLMv2, section 3.1).

    `scaling` becomes 1/sqrt of the new head size; attention distributions are those of the old heads only.
    """

    def split(part: Tensor) -> Tensor:
        batch, _, length, _ = part.shape
        return part.transpose(1, 2).reshape(batch, length, num_heads, -1).transpose(1, 2)

    query = split(vectors.query)
    scaling = query.shape[-1] ** -0.5
    return Vectors(query, split(vectors.key), split(vectors.value), vectors.mask, scaling)


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Teacher rows with every probability."""

    probs: Float[Tensor, "batch heads query key"]


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Teacher rows as entries on a uniform base: P_j = base + sum of the weights of the entries at j."""

    index: Int[Tensor, "batch heads query entries"]
    """Column of each entry; a column may come more than once."""
    weight: Float[Tensor, "batch heads query entries"]
    base: Float[Tensor, "batch heads query"] | None
    """Probability that every valid column has beside its entries; none: zero."""


RowTargets = DenseRows | SparseRows


class TeacherSignal:
    """What a layer of a teacher says of a padded batch: its vectors, and relations when asked for."""

    def __init__(self, vectors: Vectors, lengths: Int[Tensor, " batch"]) -> None:
        """Wrap a layer's vectors."""
        self.vectors = vectors
        self.lengths = lengths
        self._probs: dict[RelationKind, Tensor] = {}

    def probs(self, kind: RelationKind) -> Float[Tensor, "batch heads query key"]:
        """Return a relation, computed once."""
        if kind not in self._probs:
            self._probs[kind] = relation_probs(self.vectors, kind, self.lengths)
        return self._probs[kind]


class Targets(NamedTuple):
    """What the teacher says about one relation of a batch."""

    rows: RowTargets
    entropy: Float[Tensor, " batch"]
    """Mean entropy of each sequence's target rows, over heads and valid rows, nats."""


def key_mask(lengths: Int[Tensor, " batch"], size: int) -> Bool[Tensor, "batch size"]:
    """Return True at the first `lengths` positions of each sequence."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _scores(
    left_BHLD: Tensor, right_BHLD: Tensor, scaling: float, mask: Bool[Tensor, "batch _ _ length"]
) -> Float[Tensor, "batch heads query key"]:
    with torch.autocast(left_BHLD.device.type, enabled=False):
        scores = torch.matmul(left_BHLD.float() * scaling, right_BHLD.float().transpose(-1, -2))
    # Finite, so that a row without any valid column is uniform instead of NaN.
    return scores.masked_fill_(~mask, torch.finfo(torch.float32).min)


def relation_scores(
    vectors: Vectors, kind: RelationKind, mask: Bool[Tensor, "batch _ _ length"]
) -> Float[Tensor, "batch heads query key"]:
    """Return a relation's scores, the input of its softmax.

    `attention`: Q K^T / sqrt(d_k) (MiniLM, arXiv 2002.10957, eq. 3); `value`: V V^T / sqrt(d_k) (eq. 7);
    `query` and `key` likewise (MiniLMv2, arXiv 2012.15828).
    Columns where `mask` is False have the least float32.
    """
    if kind is RelationKind.ATTENTION:
        return _scores(vectors.query, vectors.key, vectors.scaling, mask)
    same = {
        RelationKind.VALUE: vectors.value,
        RelationKind.QUERY: vectors.query,
        RelationKind.KEY: vectors.key,
    }[kind]
    return _scores(same, same, same.shape[-1] ** -0.5, mask)


def relation_probs(
    vectors: Vectors, kind: RelationKind, lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch heads query key"]:
    """Return the teacher's relation: each row sums to 1 over the columns it may see.

    The attention distribution is the model's own, so its own mask (sliding windows, too) applies beside
    padding; the value relation sees every column that is not padding.
    """
    mask = key_mask(lengths, vectors.key.shape[-2])[:, None, None, :]
    if kind is RelationKind.ATTENTION and vectors.mask is not None:
        mask = mask & vectors.mask
    return relation_scores(vectors, kind, mask).softmax(-1)


def mean_row_entropy(
    probs: Float[Tensor, "batch heads query key"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return each sequence's mean row entropy over heads and valid rows, nats."""
    # In place: half the time of torch.special.entr, a fifth of what fresh memory for each step takes.
    terms = probs.clamp(min=torch.finfo(probs.dtype).tiny).log_().mul_(probs)
    rows: Tensor = -terms.sum(-1).mean(1)
    return (rows * key_mask(lengths, rows.shape[-1])).sum(-1) / lengths


def to_dense(
    rows: RowTargets, lengths: Int[Tensor, " batch"], size: int
) -> Float[Tensor, "batch heads query key"]:
    """Return target rows with every column; rows and columns beyond a sequence's length are zero."""
    valid = key_mask(lengths, size)
    if isinstance(rows, DenseRows):
        dense = rows.probs
    else:
        shape = (*rows.index.shape[:-1], size)
        dense = torch.zeros(shape, dtype=rows.weight.dtype, device=rows.weight.device)
        dense.scatter_add_(-1, rows.index, rows.weight)
        if rows.base is not None:
            dense += rows.base[..., None]
    return dense * (valid[:, None, None, :] & valid[:, None, :, None])


def relation_kl(
    scores: Float[Tensor, "batch heads query key"], targets: Targets, lengths: Int[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Return KL(teacher || student) of one relation, nats, with its gradient in the student's scores.

    The mean over relation heads and valid rows of
    KL(P || softmax S) = -H(P) - sum_j P_j S_j + LSE(S) (MiniLM, eqs. 6 and 9). With sparse unbiased rows
    it is an unbiased estimate. -H(P) has no gradient; it makes the value a true KL.

    Args:
        scores: of the student, from `relation_scores`, padded columns masked.
        targets: of the teacher.
        lengths: valid positions of each sequence.
    """
    valid = key_mask(lengths, scores.shape[-1])
    row_weight = valid[:, None, :] / (lengths.sum() * scores.shape[1])
    rows = targets.rows
    with torch.autocast(scores.device.type, enabled=False):
        return (
            _cross_entropy(scores, rows, valid, row_weight)
            - (targets.entropy * lengths).sum() / lengths.sum()
        )


def _cross_entropy(
    scores: Tensor, rows: RowTargets, valid: Bool[Tensor, "batch size"], row_weight: Tensor
) -> Tensor:
    if isinstance(rows, DenseRows):
        crossed: Tensor = _DenseCrossEntropy.apply(scores, rows.probs, row_weight)  # type: ignore[no-untyped-call]
    else:
        crossed = _SparseCrossEntropy.apply(  # type: ignore[no-untyped-call]
            scores, rows.index, rows.weight, rows.base, valid, row_weight
        )
    return crossed


def _softmax_and_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    probs = scores.softmax(-1)
    # The greatest probability is exp(0) over the sum, so the sum need not be computed again.
    return probs, scores.amax(-1) - probs.amax(-1).log()


class _DenseCrossEntropy(torch.autograd.Function):
    """Sum over rows of row_weight * (LSE(S) - P . S); dS = row_weight * (softmax(S) - P)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, row_weight: Tensor) -> Tensor:  # noqa: ANN401
        probs, lse = _softmax_and_lse(scores)
        ctx.save_for_backward(probs, target, row_weight)
        expected = torch.einsum("...k,...k->...", target, scores)
        return ((lse - expected) * row_weight).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        probs, target, row_weight = ctx.saved_tensors
        # In place: autograd refuses a second backward pass through what has been changed.
        return probs.sub_(target).mul_((row_weight * grads[0])[..., None]), None, None


class _SparseCrossEntropy(torch.autograd.Function):
    """As `_DenseCrossEntropy`, for P = base on valid columns plus the weights of the entries."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd functions take their inputs by position
        ctx: Any,  # noqa: ANN401
        scores: Tensor,
        index: Tensor,
        weight: Tensor,
        base: Tensor | None,
        valid: Tensor,
        row_weight: Tensor,
    ) -> Tensor:
        probs, lse = _softmax_and_lse(scores)
        expected = (scores.gather(-1, index) * weight).sum(-1)
        if base is not None:
            expected += base * torch.einsum("bhqk,bk->bhq", scores, valid.to(scores.dtype))
        ctx.save_for_backward(probs, index, weight, base, valid, row_weight)
        return ((lse - expected) * row_weight).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        probs, index, weight, base, valid, row_weight = ctx.saved_tensors
        scale = (row_weight * grads[0])[..., None]
        gradient = probs.mul_(scale)
        gradient.scatter_add_(-1, index, -weight * scale)
        if base is not None:
            gradient -= (base[..., None] * scale) * valid[:, None, None, :]
        return gradient, None, None, None, None, None
