"""Whether kernels are used: where they compute what plain torch does, and are not slower.

Each form of kernels is tried at its first use, on sequences of the batch at hand, before a graph is recorded.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Final, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from minilm_cache.errors import first_line
from minilm_cache.relations.scores import DenseRows, SparseRows, Targets, VectorRows, Vectors
from minilm_cache.storage_schema.identity import RelationKind

Method = Literal["dense", "sdpa", "fused"]
"""Form of the relation loss (relations/loss.py)."""
MOST_SIZE: Final = 128
"""Greatest size of a head that has kernels. Tiles of larger ones would not fit into a GPU's fast memory."""
_MOST_ERROR: Final = 0.05
"""Greatest difference of a loss, or of the gradient of some tokens, as a share of its norm."""
_TILE: Final = 32
"""Tokens of a head whose gradients are compared together."""
_LEAST_LOSS: Final = 1e-3
"""Loss, nats, that smaller ones count as: they are differences of greater numbers."""
_LEAST_SHARE: Final = 0.1
"""Share of the mean norm of gradients that smaller ones count as."""
_LEAST_CHANGE: Final = 1e-5
"""Difference of two softmaxes that smaller ones count as in gradients."""
_STRETCHED: Final = 1.25
"""Factor of the student's vectors in a comparison: those that equal the teacher's would have no gradient."""
_COMPARED: Final = 2**24
"""Scores that are computed for a comparison, so that a GPU computes for longer than it takes to launch."""
_LONGEST: Final = 512
"""Greatest number of tokens of a sequence in a comparison."""
_MOST_TOKENS: Final = 2**16
"""Greatest number of tokens in a comparison."""
_TIMED: Final = 4
"""Passes of each form, forward and backward, that are timed, in turns."""
_TINY: Final = 1e-30


@runtime_checkable
class Loss(Protocol):
    """Returns the loss of a relation in a form."""

    def __call__(
        self,
        vectors: Vectors,
        kind: RelationKind,
        *,
        targets: Targets,
        lengths: Int[Tensor, " batch"],
        method: Method,
    ) -> Tensor:
        """Return the loss, nats."""
        ...


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether a device has kernels: a GPU of NVIDIA, where Triton is installed."""
    return device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None


def _nobody(_: str) -> None:
    """Say nothing."""


@dataclass(kw_only=True, slots=True)
class Kernels:
    """The kernels of a process, of which each form is tried at its first use."""

    are_used: bool = True
    _say: Callable[[str], None] = _nobody
    _tried: dict[tuple[object, ...], bool] = field(default_factory=dict)
    """Whether a form of kernels is used."""
    _told: set[str] = field(default_factory=set)
    """Why some are not, as far as it was said."""

    def begin(self, *, are_used: bool, say: Callable[[str], None]) -> None:
        """Begin a run.

        Args:
            are_used: whether kernels are used at all.
            say: shows one line to the user.
        """
        self.are_used, self._say, self._tried, self._told = are_used, say, {}, set()

    def read_vectors(self, rows: VectorRows, device: torch.device, length: int) -> bool:
        """Return whether a batch may leave vectors as they are, since kernels read them or are to be tried.

        Args:
            rows: rows of a teacher.
            device: device that the batch is on.
            length: tokens of its longest sequence.
        """
        is_biased = rows.kind is RelationKind.ATTENTION and rows.vectors.bias is not None
        if is_biased or rows.vectors.query.shape[-1] > MOST_SIZE:
            return False
        tried = [
            used
            for form, used in self._tried.items()
            if VectorRows in form and form[-1] == length.bit_length()
        ]
        return self.are_used and has_kernels(device) and (any(tried) or not tried)

    def serve(
        self,
        vectors: Vectors,
        kind: RelationKind,
        *,
        targets: Targets,
        lengths: Int[Tensor, " batch"],
        loss: Loss,
        otherwise: Method,
    ) -> bool:
        """Return whether kernels are used for a relation.

        Args:
            vectors: vectors of the student.
            kind: which relation.
            targets: the same relation of the teacher.
            lengths: valid positions of each sequence.
            loss: the loss in any form.
            otherwise: form that is taken without kernels.
        """
        rows = targets.rows
        if not (self.are_used and has_kernels(lengths.device)) or isinstance(rows, DenseRows):
            return False
        if isinstance(rows, SparseRows) and targets.entropy is None:
            return False
        form: tuple[object, ...] | None = None
        try:
            from minilm_cache.relations import fused  # noqa: PLC0415 - needs Triton, which GPUs alone do

            if not fused.serves(vectors, kind, rows):
                return False
            length = vectors.query.shape[2]
            form = (*fused.form_of(vectors, kind, rows), otherwise, length.bit_length())
            if form not in self._tried:
                if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
                    return False  # a comparison waits for its result, which a recording does not let it do
                self._tried[form] = False  # what cannot be compared stays so: graphs may have been recorded
                some = _some(vectors, targets, lengths)
                if not _are_same(*some, kind=kind, loss=loss):
                    del self._tried[form]  # the loss of plain torch is not finite: the next batch may tell
                    return False
                self._tried[form] = _is_faster(*some, kind=kind, loss=loss, otherwise=otherwise)
            return self._tried[form]
        except torch.OutOfMemoryError:
            return False
        except Exception as error:  # noqa: BLE001 - compilers raise what they like
            self.are_used = form is not None  # another form may do
            if (why := first_line(error)) not in self._told:
                self._told.add(why)
                self._say(f"some relations are compared without fused kernels (--no-kernels): {why}")
            return False


def _some(vectors: Vectors, targets: Targets, lengths: Tensor) -> tuple[Vectors, Targets, Tensor]:
    """Return the beginning of some sequences of a batch, which is repeated if it is small."""
    batch, heads, length, _ = vectors.query.shape
    longest = min(length, _LONGEST)
    most = min(_COMPARED // (heads * longest**2), _MOST_TOKENS // longest)
    numbers = torch.arange(max(1, most), device=lengths.device) % batch

    def cut(part: Tensor) -> Tensor:
        return part.detach()[numbers, :, :longest]

    def cut_vectors(whole: Vectors) -> Vectors:
        query, key, value = map(cut, whole[:3])
        mask = whole.mask
        if mask is not None:
            mask = (mask if len(mask) == 1 else mask[numbers])[..., :longest, :longest]
        return whole._replace(query=query, key=key, value=value, mask=mask)

    rows, entropy = targets.rows, targets.entropy
    if isinstance(rows, VectorRows):
        rows = VectorRows(cut_vectors(rows.vectors), rows.kind)
    elif isinstance(rows, SparseRows):
        base = None if rows.base is None else cut(rows.base)
        rows = SparseRows(cut(rows.index) % longest, cut(rows.weight), base, rows.is_causal)
    of_some = Targets(rows, None if entropy is None else entropy[numbers])
    return cut_vectors(vectors._replace(mask=None)), of_some, lengths[numbers].clamp(max=longest)


def _are_same(vectors: Vectors, targets: Targets, lengths: Tensor, *, kind: RelationKind, loss: Loss) -> bool:
    """Return whether kernels compute what form `dense` does, or False where that is not finite.

    Raises:
        ArithmeticError: they compute something else.
    """
    found, expected = (
        _with_gradients(vectors, kind, targets=targets, lengths=lengths, loss=loss, method=method)
        for method in ("fused", "dense")
    )
    if not all(bool(part.isfinite().all()) for part in expected):
        return False
    num_rows = float(lengths.sum()) * vectors.query.shape[1]
    errors = [(found[0] - expected[0]).abs() / expected[0].abs().clamp(min=_LEAST_LOSS)]
    for one, other, part in zip(found[1:], expected[1:], vectors[:3], strict=True):
        norms = _norms(other)
        least = _LEAST_SHARE * norms.square().mean().sqrt() + _LEAST_CHANGE * _norms(part).mean() / num_rows
        errors.append((_norms(one - other) / norms.clamp(min=float(least) + _TINY)).max())
    error = float(torch.stack(errors).max())
    if not error <= _MOST_ERROR:
        raise ArithmeticError(f"they differ from plain torch by {error:.1%}")
    return True


def _norms(part: Tensor) -> Tensor:
    """Return the norm of each tile of tokens of a head, `(batch, heads, tiles)`."""
    squares = part.detach().float().square().sum(-1)
    tiles: Tensor = F.pad(squares, (0, -squares.shape[-1] % _TILE)).unflatten(-1, (-1, _TILE))
    return tiles.sum(-1).sqrt()


def _is_faster(
    vectors: Vectors, targets: Targets, lengths: Tensor, *, kind: RelationKind, loss: Loss, otherwise: Method
) -> bool:
    """Return whether kernels are faster than another form; a CPU, where tests run, is not asked."""
    if lengths.device.type == "cpu":
        return True

    seconds: dict[Method, float] = {"fused": 0.0, otherwise: 0.0}
    for turn in range(1 + _TIMED):
        for method in seconds:
            torch.cuda.synchronize(lengths.device)
            began = time.perf_counter()
            _with_gradients(vectors, kind, targets=targets, lengths=lengths, loss=loss, method=method)
            torch.cuda.synchronize(lengths.device)
            seconds[method] += (time.perf_counter() - began) * (turn > 0)  # the first turn warms up
    return seconds["fused"] < seconds[otherwise]


def _with_gradients(
    vectors: Vectors, kind: RelationKind, *, targets: Targets, lengths: Tensor, loss: Loss, method: Method
) -> list[Tensor]:
    """Return a loss and its gradients, float32."""
    parts = [(_STRETCHED * part).requires_grad_() for part in vectors[:3]]
    with torch.enable_grad():
        stretched = vectors._replace(query=parts[0], key=parts[1], value=parts[2])
        total = loss(stretched, kind, targets=targets, lengths=lengths, method=method)
        gradients = torch.autograd.grad(total, parts, materialize_grads=True)
    return [total.detach(), *(each.float() for each in gradients)]
