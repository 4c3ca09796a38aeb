"""Transform coding of rows: principal components, a uniform quantiser, entropy coding by the store.

Rounding goes towards zero more often than to the nearest (`ROUNDING`), which saves bytes at the same error.
The basis corrects the average shrinkage.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Float16, Int16
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS
from minilm_cache.errors import CacheCorruptError

ROUNDING = 0.33
"""A component of n + 1 - ROUNDING steps or more has code n + 1; rounding to the nearest would be 0.5."""
MAX_CODE = 2**15 - 1
GAIN_ROWS = 2**13
"""Rows that decide which components are stored, and how much the basis corrects them."""


def quantise(components: Float[Tensor, "*rows components"]) -> Float[Tensor, "*rows components"]:
    """Return the codes of components, which are in steps; codes are whole numbers, still as floats."""
    codes = components.abs().add_(ROUNDING).floor_().clamp_(max=MAX_CODE)
    return codes.copysign_(components)


def refuse_codes(codes: Tensor) -> None:
    """Raise CacheCorruptError for codes that no codec writes, such as the fill value of an array."""
    if codes.numel() and int(codes.amin()) < -MAX_CODE:
        raise CacheCorruptError(f"a stored token has no codes. {NOT_OURS}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransformCode:
    """Rows as whole numbers of steps along directions: row = mean + (codes * step) @ basis."""

    mean: Float[Tensor, " width"]
    basis: Float16[Tensor, "components width"]
    step: Float[Tensor, " components"]
    analysis: Float16[Tensor, "components width"]
    gain: Float[Tensor, " components"]

    def codes(self, rows: Float[Tensor, "*rows width"]) -> Int16[Tensor, "*rows components"]:
        """Return the codes of rows, which are on the device of this code."""
        centred = rows.float() - self.mean
        return quantise(centred @ self.analysis.float().T * self.gain).to(torch.int16)

    def rows(self, codes: Int16[Tensor, "rows components"]) -> Float[Tensor, "rows width"]:
        """Return the rows that codes stand for, float32; the codes are on the device of this code."""
        return torch.addmm(self.mean, codes.float(), self.basis.float() * self.step[:, None])

    def to(self, device: torch.device) -> "TransformCode":
        """Return the same code on a device."""
        return TransformCode(**{part.name: getattr(self, part.name).to(device) for part in fields(self)})


def fit_code(
    sample: Float[Tensor, "rows width"],
    mean: Float[Tensor, " width"],
    *,
    analysis: Float[Tensor, "components width"],
    synthesis: Float[Tensor, "components width"],
    keeps_all: bool = False,
) -> TransformCode:
    """Return the code, with the components that any sample needs, and a basis that corrects for rounding.

    Args:
        sample: rows less their mean, which decide components and corrections.
        mean: mean of the rows.
        analysis: matrix from rows less their mean to components in steps, float64.
        synthesis: matrix from components in steps to rows less their mean, float64.
        keeps_all: keep components that the sample does not need, too: other rows may need them.
    """
    components = sample @ analysis.float().T
    codes = quantise(components)
    power = codes.square().sum(0)
    used = (power > 0) | keeps_all
    if not bool(used.any()):
        used[0] = True
    shrunk = torch.where(power > 0, (codes * components).sum(0) / power.clamp(min=1), 1.0)
    basis, lengths = _as_directions((shrunk[:, None] * synthesis)[used].cpu())
    forward, gains = _as_directions(analysis[used].cpu())
    return TransformCode(mean=mean.cpu(), basis=basis, step=lengths, analysis=forward, gain=gains)


def _as_directions(
    matrix: Tensor,
) -> tuple[Float16[Tensor, "components width"], Float[Tensor, " components"]]:
    """Return rows scaled to a greatest entry of 1, float16, and the factors that restore them, float32."""
    length = matrix.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix / length[:, None]).half(), length.float()
