"""The KL of relations with its gradient in the student's vectors, in three forms that agree.

Losses are in nats. With S the student's scores and P the teacher's row,
KL(P || softmax S) = -H(P) - sum_j P_j S_j + LSE(S), and its gradient in S is softmax(S) - P.

- `dense`: scores as a matrix, and that gradient written by hand, so that the backward pass needs one
  matrix; a fraction of the time that `F.kl_div` takes (benchmarks/relation_loss.py).
- `sdpa`: no matrix of length x length. With sg the stop of gradients, q and K the student's two sides of
  the scores, the gradient of
      sum over rows r of w_r / sqrt(d) * q_r . [SDPA(sg q, sg K, K)_r - (P K)_r]
  is exactly that of sum over r of w_r KL(P_r || softmax S_r), by the product rule. P K is another SDPA
  where the teacher's vectors are stored, a gather where its rows are sparse, a product where they are
  dense. The value of this sum is not the KL, so the KL is computed on some of the rows.
- `fused`: kernels for GPUs, which need no such matrix either and compute the value, too (relations/fused.py).
  They are used where they agree with `dense`, and are faster than the other forms (relations/trust.py).
"""

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minilm_cache.relations.scores import (
    DenseRows,
    RowTargets,
    SparseRows,
    Targets,
    VectorRows,
    Vectors,
    column_mask,
    densify,
    key_mask,
    mean_row_entropy,
    relation_scores,
    row_mask,
    sides,
    softmax_and_lse,
    to_dense,
)
from minilm_cache.relations.trust import Kernels
from minilm_cache.relations.trust import Method as Method  # noqa: PLC0414 - objectives ask for it here
from minilm_cache.storage_schema.identity import RelationKind


class _Limits(NamedTuple):
    """Where form `sdpa` begins on a kind of device."""

    length: int
    """Tokens of a sequence from which it is the faster form."""
    scores_bytes: int
    """Greatest size of one relation's scores for a batch, float32; above it, no such matrix is made."""


CPU_LIMITS: Final = _Limits(384, 2**28)
"""Measured by benchmarks/relation_loss.py."""
GPU_LIMITS: Final = _Limits(512, 2**31)
"""Measured by benchmarks/gpu on an H200, with dense targets: at 512 tokens, `dense` is 1.1 times as fast, and
takes matrices that `sdpa` does without."""
KERNELS: Final = Kernels()
"""The kernels of this process."""
_SAMPLED_ROWS: Final = 32
"""Rows of each sequence whose KL is computed in form `sdpa`, where the gradient does not need it."""


def choose_method(batch: int, heads: int, length: int, *, device: torch.device) -> Method:
    """Return the form that suits a relation of this size on a device where kernels do not serve it."""
    limits = CPU_LIMITS if device.type == "cpu" else GPU_LIMITS
    fits = scores_bytes(batch, heads, length) <= limits.scores_bytes
    return "dense" if length < limits.length and fits else "sdpa"


def scores_bytes(batch: int, heads: int, length: int) -> int:
    """Return the bytes of one relation's scores, float32."""
    return 4 * batch * heads * length**2


def relation_loss(
    vectors: Vectors,
    kind: RelationKind,
    *,
    targets: Targets,
    lengths: Int[Tensor, " batch"],
    method: Method | None = None,
) -> Float[Tensor, ""]:
    """Return KL(teacher || student) of one relation, nats, with its gradient in the student's vectors.

    It is the mean over relation heads and valid rows (MiniLM, arXiv 2002.10957, eqs. 6 and 9). The gradient
    is exact in all forms. So is the value, except in form `sdpa`, where it is the mean over up to 32 rows of
    each sequence. Sparse rows only estimate the teacher's, so their own entropy is of no use: for them the
    value is the cross entropy of those rows less the mean entropy of all rows.

    Args:
        vectors: vectors of the student, split into relation heads.
        kind: which relation.
        targets: the same relation of the teacher.
        lengths: valid positions of each sequence.
        method: form of the computation. None means `fused` where there are kernels for it, or else the form
            that suits the size (`choose_method`). Where the student adds a bias to its scores, it is `dense`,
            and where it attends to a window, it is not `fused`.
    """
    batch, heads, length, _ = vectors.query.shape
    columns = _student_columns(vectors, kind, rows=targets.rows, lengths=lengths)
    suited = choose_method(batch, heads, length, device=lengths.device)
    form = suited if method is None or (method == "fused" and columns is not None) else method
    if kind is RelationKind.ATTENTION and vectors.bias is not None:
        form = "dense"
    if form == "fused" or (
        method is None
        and columns is None
        and KERNELS.serve(vectors, kind, targets=targets, lengths=lengths, loss=relation_loss, otherwise=form)
    ):
        return _fused(vectors, kind, targets=targets, lengths=lengths)
    if columns is None:
        columns = column_mask(lengths, length, is_causal=targets.rows.is_causal)
    if form == "dense":
        return relation_kl(relation_scores(vectors, kind, columns), targets, lengths)
    with torch.autocast(vectors.query.device.type, enabled=False):
        surrogate = _surrogate(vectors, kind, rows=targets.rows, lengths=lengths, columns=columns)
        with torch.no_grad():
            value = _sampled_kl(vectors, kind, targets=targets, lengths=lengths, columns=columns)
        loss: Tensor = surrogate - surrogate.detach() + value
        return loss


def _student_columns(
    vectors: Vectors, kind: RelationKind, *, rows: RowTargets, lengths: Tensor
) -> Bool[Tensor, "batch _ length length"] | None:
    """Return True at columns that rows of a student with a sliding window are compared on.

    These are the columns in its window, and those where the teacher's rows have mass: a window that is
    narrower than the teacher's is compared as one that is not. None means all columns, as for students
    without a window, and where the teacher's rows have mass everywhere.
    """
    if kind is not RelationKind.ATTENTION or not vectors.is_windowed:
        return None
    length = vectors.query.shape[-2]
    own = row_mask(vectors, kind, lengths)
    if isinstance(rows, VectorRows):
        theirs = row_mask(rows.vectors, rows.kind, lengths)
    elif isinstance(rows, DenseRows):
        theirs = rows.probs > 0
    elif rows.base is not None:
        return None
    else:
        shape = (*rows.index.shape[:-1], length)
        theirs = torch.zeros(shape, dtype=torch.bool, device=lengths.device).scatter_(-1, rows.index, True)
    return (own | theirs) & column_mask(lengths, length, is_causal=rows.is_causal)


def _fused(vectors: Vectors, kind: RelationKind, *, targets: Targets, lengths: Tensor) -> Tensor:
    from minilm_cache.relations.fused import cross_entropy  # noqa: PLC0415 - needs Triton, which GPUs alone do

    rows, entropy = targets.rows, targets.entropy
    assert not isinstance(rows, DenseRows)
    crossed = cross_entropy(vectors, kind, rows=rows, lengths=lengths)
    if isinstance(rows, VectorRows):
        return crossed
    assert entropy is not None
    return crossed - (entropy * lengths).sum() / lengths.sum()


def _surrogate(
    vectors: Vectors, kind: RelationKind, *, rows: RowTargets, lengths: Tensor, columns: Tensor
) -> Tensor:
    """Return a sum that has the gradient of the KL, but another value (`sdpa`, module docstring)."""
    left, right, scaling = sides(vectors, kind)
    valid = key_mask(lengths, left.shape[-2])
    student = _attend(left.detach(), right.detach(), values=right, mask=columns, scaling=scaling)
    weight = valid[:, None, :, None].to(left.dtype) * scaling / (lengths.sum() * left.shape[1])
    teacher = _expected(rows, right, valid=valid, lengths=lengths)
    return (weight * left * (student - teacher)).sum()


def _attend(left: Tensor, right: Tensor, *, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Return softmax(left right^T * scaling) values.

    Fused kernels need one head size, a multiple of 8. Padding with zeros changes neither products nor the
    columns that are returned.
    """
    size = values.shape[-1]
    common = -(-max(left.shape[-1], size) // 8) * 8
    left, right, values = (F.pad(part, (0, common - part.shape[-1])) for part in (left, right, values))
    return F.scaled_dot_product_attention(left, right, values, attn_mask=mask, scale=scaling)[..., :size]


def _expected(
    rows: RowTargets, right: Tensor, *, valid: Bool[Tensor, "batch length"], lengths: Tensor
) -> Float[Tensor, "batch heads length size"]:
    """Return P K: for each row, the student's right-hand vectors weighted by the teacher's row."""
    if isinstance(rows, DenseRows):
        return rows.probs.to(right.dtype) @ right
    if isinstance(rows, VectorRows):
        teacher_left, teacher_right, scaling = sides(rows.vectors, rows.kind)
        mask = row_mask(rows.vectors, rows.kind, lengths)
        return _attend(teacher_left, teacher_right, values=right, mask=mask, scaling=scaling)
    batch, heads, length, size = right.shape
    first = torch.arange(batch * heads, device=right.device).view(batch, heads, 1, 1) * length
    table = right.reshape(-1, size)
    index = (rows.index + first).flatten(0, 2)
    weights = rows.weight.to(right.dtype).flatten(0, 2)
    weighted = F.embedding_bag(index, table, mode="sum", per_sample_weights=weights).view(right.shape)
    if rows.base is None:
        return weighted
    columns = right * valid[:, None, :, None]
    total = columns.cumsum(-2) if rows.is_causal else columns.sum(-2, keepdim=True)
    return weighted + rows.base[..., None].to(right.dtype) * total


def _sampled_kl(
    vectors: Vectors, kind: RelationKind, *, targets: Targets, lengths: Tensor, columns: Tensor
) -> Tensor:
    """Return the mean KL over some rows of each sequence."""
    left, right, scaling = sides(vectors, kind)
    length = left.shape[-2]
    sampled = torch.arange(0, length, -(-length // _SAMPLED_ROWS), device=left.device)
    valid = key_mask(lengths, length)
    shown = _rows_of(columns, sampled)
    scores = (left[:, :, sampled] * scaling) @ right.transpose(-1, -2)
    log_student = scores.masked_fill(~shown, torch.finfo(scores.dtype).min).log_softmax(-1)
    probs = _sampled_rows(targets.rows, sampled, lengths=lengths, length=length)
    crossed = -(probs * log_student).sum(-1)
    weight = valid[:, None, sampled] / (valid[:, sampled].sum() * left.shape[1])
    entropy: Tensor
    if targets.entropy is None or not isinstance(targets.rows, SparseRows):
        entropy = (torch.special.entr(probs).sum(-1) * weight).sum()
    else:
        entropy = (targets.entropy * lengths).sum() / lengths.sum()
    kl: Tensor = (crossed * weight).sum() - entropy
    return kl


def _rows_of(mask: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a mask, which may have one row for all."""
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]


def _sampled_rows(
    rows: RowTargets, sampled: Tensor, *, lengths: Tensor, length: int
) -> Float[Tensor, "batch heads sampled length"]:
    """Return some of the teacher's rows, dense; `sampled` are their positions."""
    if isinstance(rows, VectorRows):
        left, right, scaling = sides(rows.vectors, rows.kind)
        mask = _rows_of(row_mask(rows.vectors, rows.kind, lengths), sampled)
        scores = (left[:, :, sampled] * scaling) @ right.transpose(-1, -2)
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    columns = _rows_of(column_mask(lengths, length, is_causal=rows.is_causal), sampled)
    if isinstance(rows, DenseRows):
        return rows.probs[:, :, sampled] * columns
    weight = rows.weight[:, :, sampled]
    probs = torch.zeros((*weight.shape[:-1], length), dtype=weight.dtype, device=weight.device)
    probs.scatter_add_(-1, rows.index[:, :, sampled], weight)
    return probs if rows.base is None else probs + rows.base[:, :, sampled, None] * columns


def relation_kl(
    scores: Float[Tensor, "batch heads query key"], targets: Targets, lengths: Int[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Return KL(teacher || student) of one relation, nats, with its gradient in the student's scores.

    It is the mean over relation heads and valid rows of
    KL(P || softmax S) = -H(P) - sum_j P_j S_j + LSE(S) (MiniLM, eqs. 6 and 9). With sparse unbiased rows
    it is an unbiased estimate. -H(P) has no gradient; it makes the value a true KL.

    Args:
        scores: scores of the student, from `relation_scores`, with padded columns masked.
        targets: the same relation of the teacher.
        lengths: valid positions of each sequence.
    """
    valid = key_mask(lengths, scores.shape[-1])
    row_weight = valid[:, None, :] / (lengths.sum() * scores.shape[1])
    rows, entropy = targets.rows, targets.entropy
    columns = valid[:, None, None, :]
    if rows.is_causal:
        columns = column_mask(lengths, scores.shape[-1], is_causal=True)
    if isinstance(rows, VectorRows):
        rows, entropy = densify(rows, lengths)
    if entropy is None:
        entropy = mean_row_entropy(to_dense(rows, lengths, scores.shape[-1]), lengths)
    with torch.autocast(scores.device.type, enabled=False):
        return (
            _cross_entropy(scores, rows, columns=columns, row_weight=row_weight)
            - (entropy * lengths).sum() / lengths.sum()
        )


def _cross_entropy(
    scores: Tensor, rows: DenseRows | SparseRows, *, columns: Tensor, row_weight: Tensor
) -> Tensor:
    if isinstance(rows, DenseRows):
        crossed: Tensor = _DenseCrossEntropy.apply(scores, rows.probs, row_weight)  # type: ignore[no-untyped-call]
    else:
        crossed = _SparseCrossEntropy.apply(  # type: ignore[no-untyped-call]
            scores, rows.index, rows.weight, rows.base, columns, row_weight
        )
    return crossed


class _DenseCrossEntropy(torch.autograd.Function):
    """Sum over rows of row_weight * (LSE(S) - P . S); dS = row_weight * (softmax(S) - P)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, row_weight: Tensor) -> Tensor:  # noqa: ANN401, PLR0917 - torch's interface
        probs, lse = softmax_and_lse(scores)
        ctx.save_for_backward(probs, target, row_weight)
        expected = torch.einsum("...k,...k->...", target, scores)
        return ((lse - expected) * row_weight).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        probs, target, row_weight = ctx.saved_tensors
        # In place is safe: autograd refuses a second backward pass through a changed tensor.
        return probs.sub_(target).mul_((row_weight * grads[0])[..., None]), None, None


class _SparseCrossEntropy(torch.autograd.Function):
    """Same as `_DenseCrossEntropy`, for P = base on the columns that a row sees plus the entries."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch's interface
        ctx: Any,  # noqa: ANN401
        scores: Tensor,
        index: Tensor,
        weight: Tensor,
        base: Tensor | None,
        columns: Tensor,
        row_weight: Tensor,
    ) -> Tensor:
        probs, lse = softmax_and_lse(scores)
        expected = (scores.gather(-1, index) * weight).sum(-1)
        if base is not None:
            if columns.shape[-2] == 1:  # the same columns for all rows: one product
                of_columns = torch.einsum("bhqk,bk->bhq", scores, columns[:, 0, 0].to(scores.dtype))
            else:
                of_columns = scores.masked_fill(~columns, 0).sum(-1)
            expected += base * of_columns
        ctx.save_for_backward(probs, index, weight, base, columns, row_weight)
        return ((lse - expected) * row_weight).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        probs, index, weight, base, columns, row_weight = ctx.saved_tensors
        scale = (row_weight * grads[0])[..., None]
        gradient = probs.mul_(scale)
        gradient.scatter_add_(-1, index, -weight * scale)
        if base is not None:
            gradient -= (base[..., None] * scale) * columns
        return gradient, None, None, None, None, None
