"""The forms that a teacher's rows come in: every probability, sparse entries, or the vectors behind them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.relations.scores import (
    Vectors,
    key_mask,
    relation_probs,
    relation_scores,
    row_mask,
    softmax_and_lse,
)
from minilm_cache.storage_schema.identity import RelationKind


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
    """Probability that every valid column has in addition to its entries. None means 0."""


@dataclass(frozen=True, slots=True)
class VectorRows:
    """Teacher rows as the vectors that they are computed from."""

    vectors: Vectors
    kind: RelationKind


RowTargets = DenseRows | SparseRows | VectorRows


class WantedRelations(NamedTuple):
    """A request for relations of one layer."""

    kinds: tuple[RelationKind, ...]
    """Relations to decode; may be empty."""
    heads: int | None = None
    """Heads to split vectors into. None means the heads of the teacher's attention."""


class Targets(NamedTuple):
    """The teacher's rows for one relation of a batch."""

    rows: RowTargets
    entropy: Float[Tensor, " batch"] | None
    """Mean entropy of each sequence's target rows, over heads and valid rows, nats. None means not
    computed."""


def densify(rows: VectorRows, lengths: Int[Tensor, " batch"]) -> tuple[DenseRows, Float[Tensor, " batch"]]:
    """Return rows with every probability, and their mean entropy, nats; ignore rows beyond a length."""
    mask = row_mask(rows.vectors, rows.kind, lengths)
    with torch.autocast(mask.device.type, enabled=False):
        scores = relation_scores(rows.vectors, rows.kind, mask)
        probs, lse = softmax_and_lse(scores)
        # H(P) = LSE(S) - sum_j P_j S_j: one product instead of as many logarithms.
        entropy = (lse - torch.einsum("...k,...k->...", probs, scores)).mean(1)
    valid = key_mask(lengths, entropy.shape[-1])
    return DenseRows(probs), (entropy * valid).sum(-1) / lengths


def to_dense(
    rows: RowTargets, lengths: Int[Tensor, " batch"], size: int
) -> Float[Tensor, "batch heads query key"]:
    """Return target rows with every column; rows and columns beyond a sequence's length are zero."""
    valid = key_mask(lengths, size)
    if isinstance(rows, VectorRows):
        dense = relation_probs(rows.vectors, rows.kind, lengths)
    elif isinstance(rows, DenseRows):
        dense = rows.probs
    else:
        shape = (*rows.index.shape[:-1], size)
        dense = torch.zeros(shape, dtype=rows.weight.dtype, device=rows.weight.device)
        dense.scatter_add_(-1, rows.index, rows.weight)
        if rows.base is not None:
            dense += rows.base[..., None]
    return dense * (valid[:, None, None, :] & valid[:, None, :, None])
