"""The KL of a relation as fused kernels: exact in value and gradient, without a matrix of length x length.

Memory holds no more than vectors, and three numbers for each row of the relation. The kernels are those of
`relations/kernels.py`. Triton compiles them for a GPU at their first call. Without a GPU they run in its
interpreter, if `TRITON_INTERPRET=1` is set before this module is imported.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from triton import cdiv, next_power_of_2

from minilm_cache.relations.kernels import gradients_of_vectors, losses_of_rows
from minilm_cache.relations.scores import SparseRows, VectorRows, Vectors, narrow_sides, row_mask
from minilm_cache.relations.trust import MOST_SIZE
from minilm_cache.storage_schema.identity import RelationKind

_LEAST_SIZE: Final = 16
"""Least width of the tiles that a GPU multiplies."""
_BLOCK: Final = 32
"""Rows, and columns, of a tile. With more, kernels for heads of 64 numbers would not fit into registers."""
_DTYPES: Final = (torch.float32, torch.bfloat16)


def serves(vectors: Vectors, kind: RelationKind, rows: SparseRows | VectorRows) -> bool:
    """Return whether there are kernels for a relation: heads of up to 128 numbers, and no bias.

    Args:
        vectors: vectors of the student.
        kind: which relation.
        rows: the teacher's rows.
    """
    both = [vectors, rows.vectors] if isinstance(rows, VectorRows) else [vectors]
    if kind is RelationKind.ATTENTION and any(each.bias is not None for each in both):
        return False
    heads = [narrow_sides(each, kind)[0] for each in both]
    return all(head.shape[-1] <= MOST_SIZE and head.dtype in _DTYPES for head in heads)


def form_of(vectors: Vectors, kind: RelationKind, rows: SparseRows | VectorRows) -> tuple[object, ...]:
    """Return what kernels are compiled for. Relations of one form have the same kernels."""
    left, _, _ = narrow_sides(vectors, kind)
    read: list[Tensor | None]
    if isinstance(rows, SparseRows):
        read = [rows.index, rows.weight, rows.base]
    else:
        first, second, _ = narrow_sides(rows.vectors, kind)
        read = [first, second, rows.vectors.mask if kind is RelationKind.ATTENTION else None]
    kinds = [None if part is None else (part.dtype, part.shape[-1]) for part in [left, *read[:2]]]
    third = read[2] is not None
    return type(rows), kind, rows.is_causal, third, left.shape[2] % _LEAST_SIZE == 0, *kinds


def cross_entropy(
    vectors: Vectors, kind: RelationKind, *, rows: SparseRows | VectorRows, lengths: Int[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Return what a relation's KL is but for the entropy of sparse rows, nats, with its gradient.

    It is the mean over heads and valid rows of the KL where rows are vectors, and of the cross entropy where
    they are sparse.

    Args:
        vectors: vectors of the student, float32 or bfloat16.
        kind: which relation.
        rows: the teacher's rows. There must be kernels for them (`serves`).
        lengths: valid positions of each sequence.
    """
    left, right, scaling = narrow_sides(vectors, kind)
    teacher = _of_vectors(rows, lengths) if isinstance(rows, VectorRows) else _of_entries(rows)
    found: Tensor = _FusedKl.apply(left, right, scaling, teacher, lengths)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Teacher:
    """A teacher's rows as kernels read them."""

    first: Tensor
    """`(batch, length, heads, size)`: left-hand vectors, or columns of entries."""
    second: Tensor
    """The same of right-hand vectors, or weights of entries."""
    scaling: float = 1.0
    base: Tensor | None = None
    """`(batch, length, heads)`: what each column has in addition to its entries. None means nothing."""
    mask: Tensor | None = None
    """`(batch, heads, length, length)`: True where rows see a column. None means all that are not padding."""
    is_sparse: bool = False
    is_causal: bool = False

    @property
    def read(self) -> tuple[Tensor | None, ...]:
        """What kernels read of it, in their order."""
        return self.first, self.second, self.base, self.mask


def _of_vectors(rows: VectorRows, lengths: Tensor) -> _Teacher:
    left, right, scaling = narrow_sides(rows.vectors, rows.kind)
    mask = None
    if rows.kind is RelationKind.ATTENTION and rows.vectors.mask is not None:
        mask = row_mask(rows.vectors, rows.kind, lengths).expand(*left.shape[:3], left.shape[2])
    first, second = _sides(left, right)
    return _Teacher(first=first, second=second, scaling=scaling, mask=mask, is_causal=rows.is_causal)


def _of_entries(rows: SparseRows) -> _Teacher:
    base = None if rows.base is None else _by_position(rows.base)
    index, weight = _by_position(rows.index.to(torch.int32)), _by_position(rows.weight)
    return _Teacher(first=index, second=weight, base=base, is_sparse=True, is_causal=rows.is_causal)


def _sides(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sides as `(batch, length, heads, size)`, with as many numbers from position to position.

    They are not copied if a token's heads are side by side in memory, as models and codecs have them.
    """
    views = left.detach().transpose(1, 2), right.detach().transpose(1, 2)
    (_, length, _, size), steps = views[0].shape, {view.stride(1) for view in views}
    expected = (length * views[0].stride(1), views[0].stride(1), size, 1)
    if len(steps) == 1 and all(view.stride() == expected for view in views):
        return views
    if left is right:
        copied = views[0].contiguous()
        return copied, copied
    return views[0].contiguous(), views[1].contiguous()


def _by_position(part: Tensor) -> Tensor:
    """Return `(batch, heads, length, ...)` as `(batch, length, heads, ...)` in one piece of memory."""
    return part.detach().transpose(1, 2).contiguous()


class _FusedKl(torch.autograd.Function):
    """The mean over rows; its gradient is that of the student's two sides."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch's interface
        ctx: Any,  # noqa: ANN401
        left: Tensor,
        right: Tensor,
        scaling: float,
        teacher: _Teacher,
        lengths: Tensor,
    ) -> Tensor:
        student, other = _sides(left, right)
        read = (student, other, *teacher.read, lengths)
        losses, *sums = (student.new_zeros(student.shape[:3], dtype=torch.float32) for _ in range(3))
        ctx.sizes = _sizes(student, scaling, teacher)
        with torch.cuda.device_of(student):
            losses_of_rows[_grid(student)](*read, losses, *sums, **ctx.sizes)
        num_rows = lengths.sum() * left.shape[1]
        ctx.save_for_backward(num_rows, *sums, *read)
        return losses.sum() / num_rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        num_rows, of_student, of_teacher, *read = ctx.saved_tensors
        factor = grads[0] * ctx.sizes["scaling"] / num_rows
        gradients = []
        for side, by_columns in zip(read[:2], (False, True), strict=True):
            gradient = torch.zeros_like(side, memory_format=torch.contiguous_format)
            written = gradient, of_student, of_teacher, factor
            with torch.cuda.device_of(side):
                gradients_of_vectors[_grid(side)](*read, *written, BY_COLUMNS=by_columns, **ctx.sizes)
            gradients.append(gradient.transpose(1, 2))
        return *gradients, None, None, None


def _grid(student: Tensor) -> tuple[int]:
    """Return the number of programs for vectors `(batch, length, heads, size)`: one for a block of a head."""
    batch, length, heads, _ = student.shape
    return (batch * heads * cdiv(length, _BLOCK),)


def _sizes(student: Tensor, scaling: float, teacher: _Teacher) -> dict[str, Any]:
    """Return the numbers that kernels take, for vectors of a student `(batch, length, heads, size)`."""
    _, length, heads, size = student.shape
    strides = (0, 0, 0, 0) if teacher.mask is None else teacher.mask.stride()
    teacher_size = teacher.first.shape[-1]
    return {
        "scaling": scaling,
        "teacher_scaling": teacher.scaling,
        "size": length,
        "step": student.stride(1),
        "teacher_step": teacher.first.stride(1),
        **dict(zip(("of_batch", "of_head", "of_row", "of_column"), strides, strict=True)),
        "HEADS": heads,
        "WIDTH": size,
        "PADDED": max(_LEAST_SIZE, next_power_of_2(size)),
        "TEACHER_WIDTH": teacher_size,
        "TEACHER_PADDED": max(_LEAST_SIZE, next_power_of_2(teacher_size)),
        "IS_SPARSE": teacher.is_sparse,
        "HAS_BASE": teacher.base is not None,
        "HAS_MASK": teacher.mask is not None,
        "IS_CAUSAL": teacher.is_causal,
        "IS_HALF": student.dtype == torch.bfloat16,
        "BLOCK": _BLOCK,
        "num_warps": 4,
        "num_stages": 2,
    }
