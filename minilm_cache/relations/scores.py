"""Attention distributions, value relations, and the forms that a teacher's rows come in: pure torch.

Scores and softmax are float32 (or wider) whatever the model's dtype. Padding is masked as key columns of
both relations and left out as rows (the MiniLM authors' answer to unilm issue 198).
"""

from dataclasses import dataclass
from typing import NamedTuple

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
    """The model's own attention mask, True where a key may be seen. None means that nothing is masked."""
    scaling: float
    """Factor on query-key products, 1/sqrt(d_k)."""
    bias: Float[Tensor, "_ heads length length"] | None = None
    """What the model adds to its attention's scores for each pair of positions. None means nothing."""
    is_causal: bool = False
    """Whether a token sees itself and the tokens before it alone, so that rows of all relations do, too."""
    is_windowed: bool = False
    """Whether `mask` hides more than padding: the layer attends to a sliding window."""


def split_heads(vectors: Vectors, num_heads: int) -> Vectors:
    """Return queries, keys and values split into another number of heads (MiniLMv2, section 3.1).

    `scaling` becomes 1/sqrt of the new head size; attention distributions are those of the old heads only.
    """

    def split(part: Tensor) -> Tensor:
        batch, _, length, _ = part.shape
        return part.transpose(1, 2).reshape(batch, length, num_heads, -1).transpose(1, 2)

    query = split(vectors.query)
    scaling = query.shape[-1] ** -0.5
    key, value = split(vectors.key), split(vectors.value)
    return Vectors(query, key, value, vectors.mask, scaling, is_causal=vectors.is_causal)


class LayerRelations:
    """One teacher layer's vectors for a padded batch; its relations are computed on first use."""

    def __init__(self, vectors: Vectors, lengths: Int[Tensor, " batch"]) -> None:
        """Wrap a layer's vectors."""
        self.vectors = vectors
        self.lengths = lengths
        self._probs: dict[RelationKind, Tensor] = {}

    def probs(self, kind: RelationKind) -> Float[Tensor, "batch heads query key"]:
        """Return a relation; it is computed on the first call and kept."""
        if kind not in self._probs:
            self._probs[kind] = relation_probs(self.vectors, kind, self.lengths)
        return self._probs[kind]


_CACHED_ENTRIES = 2**19
"""Numbers of float32 that stay in a CPU's cache, 2 MiB."""


def key_mask(lengths: Int[Tensor, " batch"], size: int) -> Bool[Tensor, "batch size"]:
    """Return True at the first `lengths` positions of each sequence."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def column_mask(
    lengths: Int[Tensor, " batch"], size: int, *, is_causal: bool
) -> Bool[Tensor, "batch 1 _ size"]:
    """Return True at columns that rows see: those that are not padding, up to the row's own where causal."""
    valid = key_mask(lengths, size)[:, None, None, :]
    if not is_causal:
        return valid
    return valid & torch.ones((size, size), dtype=torch.bool, device=lengths.device).tril_()


def sides(vectors: Vectors, kind: RelationKind) -> tuple[Tensor, Tensor, float]:
    """Return the two sides of a relation's scores, `(batch, heads, length, size)` each, and their factor.

    `attention`: Q, K and 1/sqrt(d_k) (MiniLM, arXiv 2002.10957, eq. 3); `value`: V twice (eq. 7); `query`
    and `key`: Q or K twice (MiniLMv2, arXiv 2012.15828).
    """
    left, right, scaling = narrow_sides(vectors, kind)
    return widened(left), widened(right), scaling


def narrow_sides(vectors: Vectors, kind: RelationKind) -> tuple[Tensor, Tensor, float]:
    """Return the same as `sides` in the dtype of the vectors."""
    if kind is RelationKind.ATTENTION:
        return vectors.query, vectors.key, vectors.scaling
    same = {
        RelationKind.VALUE: vectors.value,
        RelationKind.QUERY: vectors.query,
        RelationKind.KEY: vectors.key,
    }[kind]
    return same, same, same.shape[-1] ** -0.5


def widened(part: Tensor) -> Tensor:
    """Return a tensor as float32, or unchanged where its dtype is wider."""
    return part.to(torch.promote_types(part.dtype, torch.float32))


def relation_scores(
    vectors: Vectors, kind: RelationKind, mask: Bool[Tensor, "batch _ _ length"]
) -> Float[Tensor, "batch heads query key"]:
    """Return a relation's scores, the input of its softmax.

    Columns where `mask` is False have the least number of the scores' dtype.
    """
    left, right, scaling = sides(vectors, kind)
    with torch.autocast(left.device.type, enabled=False):
        scores = torch.matmul(left * scaling, right.transpose(-1, -2))
    if kind is RelationKind.ATTENTION and vectors.bias is not None:
        scores = scores + widened(vectors.bias)
    if mask.device.type == "cpu" and bool(mask.all()):
        return scores  # This saves a pass over memory. On a GPU, the question itself would cost a wait.
    # Finite, so that a row without any valid column is uniform instead of NaN.
    return scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)


def row_mask(
    vectors: Vectors, kind: RelationKind, lengths: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch _ _ length"]:
    """Return True at columns that a teacher's rows see.

    The attention distribution is the model's own, so its own mask applies in addition to padding, sliding
    windows included; the other relations see every column that is not padding, or in a causal model every
    column up to the row's own.
    """
    valid = key_mask(lengths, vectors.key.shape[-2])
    mask = column_mask(lengths, vectors.key.shape[-2], is_causal=vectors.is_causal)
    if kind is RelationKind.ATTENTION and vectors.mask is not None:
        mask = mask & vectors.mask
        if mask.shape[-2] > 1:
            # A padding row beyond every window would see no column: its scores would all be the least
            # number of their dtype, and sums of them overflow. Padding rows have no weight, so they see all.
            mask = mask | ~valid[:, None, :, None]
    return mask


def relation_probs(
    vectors: Vectors, kind: RelationKind, lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch heads query key"]:
    """Return the teacher's relation: each row sums to 1 over the columns it may see (`row_mask`).

    Vectors must not require a gradient.
    """
    scores = relation_scores(vectors, kind, row_mask(vectors, kind, lengths))
    return torch.softmax(scores, -1, out=scores)  # on a CPU, new memory would take as long as the softmax


def softmax_and_lse(
    scores: Float[Tensor, "batch heads query key"],
) -> tuple[Float[Tensor, "batch heads query key"], Float[Tensor, "batch heads query"]]:
    """Return the softmax of each row, and the logarithm of its sum of exponentials."""
    probs = scores.softmax(-1)
    # The greatest probability is exp(0) over the sum, so the sum need not be computed again.
    return probs, scores.amax(-1) - probs.amax(-1).log()


def mean_row_entropy(
    probs: Float[Tensor, "batch heads query key"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return each sequence's mean row entropy over heads and valid rows, nats."""
    # In place and, on a CPU, a few sequences at a time, which stay in its cache: a third of the time of
    # torch.special.entr, and a seventh of what fresh memory for each step takes.
    at_once = max(1, _CACHED_ENTRIES // probs[0].numel()) if probs.device.type == "cpu" else len(probs)
    least, terms = torch.finfo(probs.dtype).tiny, torch.empty_like(probs[:at_once])
    rows = torch.cat(
        [
            torch.clamp(part, min=least, out=terms[: len(part)]).log_().mul_(part).sum(-1).mean(1)
            for part in probs.split(at_once)
        ]
    )
    return -(rows * key_mask(lengths, rows.shape[-1])).sum(-1) / lengths


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Teacher rows with every probability."""

    probs: Float[Tensor, "batch heads query key"]
    is_causal: bool = False
    """Whether a row has columns up to its own alone."""


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Teacher rows as entries on a uniform base: P_j = base + sum of the weights of the entries at j."""

    index: Int[Tensor, "batch heads query entries"]
    """Column of each entry; a column may come more than once."""
    weight: Float[Tensor, "batch heads query entries"]
    base: Float[Tensor, "batch heads query"] | None
    """Probability that every column that the row sees has in addition to its entries. None means 0."""
    is_causal: bool = False
    """Whether a row sees columns up to its own alone."""


@dataclass(frozen=True, slots=True)
class VectorRows:
    """Teacher rows as the vectors that they are computed from."""

    vectors: Vectors
    kind: RelationKind

    @property
    def is_causal(self) -> bool:
        """Whether a row sees columns up to its own alone."""
        return self.vectors.is_causal


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
    return DenseRows(probs, rows.is_causal), (entropy * valid).sum(-1) / lengths


def to_dense(
    rows: RowTargets, lengths: Int[Tensor, " batch"], size: int
) -> Float[Tensor, "batch heads query key"]:
    """Return target rows with every column; rows and columns beyond a sequence's length are zero."""
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
    valid = key_mask(lengths, size)
    columns = column_mask(lengths, size, is_causal=True) if rows.is_causal else valid[:, None, None, :]
    return dense * (columns & valid[:, None, :, None])
