"""Whether kernels are used: until one of them fails, or computes something else than plain torch does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.errors import first_line
from minilm_cache.relations.scores import DenseRows, SparseRows, Targets, VectorRows, Vectors
from minilm_cache.storage_schema.identity import RelationKind

_MOST_ERROR: Final = 0.05
"""Greatest difference of a loss, or a gradient, as a share of its norm. Gradients of bfloat16 have 8 bits."""
_LEAST_LOSS: Final = 1e-3
"""Loss, nats, that smaller ones count as: they are differences of greater numbers."""
_LEAST_CHANGE: Final = 1e-5
"""Difference of two softmaxes that smaller ones count as in gradients."""
_STRETCHED: Final = 1.25
"""Factor of the student's vectors in a comparison: those that equal the teacher's would have no gradient."""
_MOST_COMPARED: Final = 2**26
"""Greatest number of scores that are computed for a comparison."""

Loss = Callable[[Vectors, RelationKind, Targets, Tensor], Tensor]
"""Returns the loss of a relation, from vectors of the student, the teacher's targets, and lengths."""


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether a device has kernels: a GPU of NVIDIA or AMD, where Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


@dataclass(kw_only=True, slots=True)
class Kernels:
    """The kernels of a process. The first result of each form is compared with plain torch."""

    are_used: bool = True
    _trusted: set[tuple[object, ...]] = field(default_factory=set)
    _unsaid: str | None = None

    def problem(self) -> str | None:
        """Return once what to say of kernels that were given up. None means nothing."""
        said, self._unsaid = self._unsaid, None
        return said

    def serve(
        self,
        vectors: Vectors,
        kind: RelationKind,
        *,
        targets: Targets,
        lengths: Int[Tensor, " batch"],
        losses: tuple[Loss, Loss],
    ) -> bool:
        """Return whether kernels are used for a relation.

        Args:
            vectors: vectors of the student.
            kind: which relation.
            targets: the same relation of the teacher.
            lengths: valid positions of each sequence.
            losses: the loss by kernels, and by plain torch.
        """
        rows = targets.rows
        if not (self.are_used and has_kernels(lengths.device)):
            return False
        if isinstance(rows, SparseRows) and targets.entropy is None:
            return False
        try:
            from minilm_cache.relations import fused  # noqa: PLC0415 - needs Triton, which GPUs alone do

            if isinstance(rows, DenseRows) or not fused.serves(vectors, kind, rows):
                return False
            form = fused.form_of(vectors, kind, rows)
            if form not in self._trusted:
                _compare(vectors, kind, targets=targets, lengths=lengths, losses=losses)
                self._trusted.add(form)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers raise what they like
            self.are_used = False
            self._unsaid = f"relations are compared without fused kernels: {first_line(error)}"
        return self.are_used


def _compare(
    vectors: Vectors, kind: RelationKind, *, targets: Targets, lengths: Tensor, losses: tuple[Loss, Loss]
) -> None:
    """Raise ArithmeticError where two losses of the first sequences of a batch differ, or their gradients."""
    batch, heads, length, _ = vectors.query.shape
    some = min(batch, max(1, _MOST_COMPARED // (heads * length**2)))
    found, expected = (
        _with_gradients(loss, vectors, kind, targets=_first_of(targets, some), lengths=lengths[:some])
        for loss in losses
    )
    num_rows = float(lengths[:some].sum()) * heads
    least = [_LEAST_LOSS, *(_LEAST_CHANGE * float(part.detach().norm()) / num_rows for part in vectors[:3])]
    for one, other, norm in zip(found, expected, least, strict=True):
        error = float((one - other).norm() / other.norm().clamp(min=norm))
        if not error <= _MOST_ERROR and bool(other.isfinite().all()):
            raise ArithmeticError(f"they differ from plain torch by {error:.1%}")


def _with_gradients(
    loss: Loss, vectors: Vectors, kind: RelationKind, *, targets: Targets, lengths: Tensor
) -> list[Tensor]:
    """Return a loss of as many sequences as there are lengths, and its gradients, float32."""
    query, key, value = (
        (_STRETCHED * part.detach()[: len(lengths)]).requires_grad_() for part in vectors[:3]
    )
    with torch.enable_grad():
        total = loss(vectors._replace(query=query, key=key, value=value, mask=None), kind, targets, lengths)
        gradients = torch.autograd.grad(total, (query, key, value), materialize_grads=True)
    return [total.detach(), *(each.float() for each in gradients)]


def _first_of(targets: Targets, number: int) -> Targets:
    """Return the targets of the first sequences of a batch."""
    rows, entropy = targets.rows, targets.entropy
    if isinstance(rows, VectorRows):
        parts = {name: getattr(rows.vectors, name)[:number] for name in ("query", "key", "value")}
        mask = rows.vectors.mask
        rows = VectorRows(
            rows.vectors._replace(**parts, mask=mask if mask is None else mask[:number]), rows.kind
        )
    elif isinstance(rows, SparseRows):
        base = rows.base if rows.base is None else rows.base[:number]
        rows = SparseRows(rows.index[:number], rows.weight[:number], base, rows.is_causal)
    return Targets(rows, entropy if entropy is None else entropy[:number])
