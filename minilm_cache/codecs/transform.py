"""Transform coding of rows, and its fit: principal components and a uniform quantiser.

Rounding goes towards zero more often than to the nearest (`ROUNDING`), which saves bytes at the same error.
The basis corrects the average shrinkage.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float16, Int16
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS
from minilm_cache.errors import CacheCorruptError, InvalidConfigError
from minilm_cache.relations.transfer import products_in
from minilm_cache.storage_schema.manifest import MAX_SCALING

ROUNDING = 0.33
"""A component of n + 1 - ROUNDING steps or more has code n + 1; rounding to the nearest would be 0.5."""
MAX_CODE = 2**15 - 1
LOST = -MAX_CODE - 1
"""Code of every component of a row with NaN or infinity. No cache holds it."""
GAIN_ROWS = 2**13
"""Rows that decide which components are stored, and how much the basis corrects them."""


def quantise(components: Float[Tensor, "*rows components"]) -> Float[Tensor, "*rows components"]:
    """Return the codes of components, which are in steps; codes are whole numbers, still as floats.

    Rows with NaN or infinity get the code `LOST`, which no cache holds.
    """
    codes = components.abs().add_(ROUNDING).floor_().clamp_(max=MAX_CODE).copysign_(components)
    lost = ~components.sum(-1, keepdim=True).isfinite()
    if codes.device.type == "cpu" and not lost.any():  # another device would wait for the answer
        return codes
    return codes.masked_fill_(lost, LOST)


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
        """Return the rows that codes stand for, float32; the codes are on the device of this code.

        An NVIDIA GPU multiplies in TF32, whose 11 bits hold codes up to 2048. What is rounded is
        `basis * step`, by a share of 2^-11 at most, which is far below the rounding of the codes.
        """
        with products_in("tf32") if codes.device.type == "cuda" else nullcontext():
            return torch.addmm(self.mean, codes.float(), self.basis.float() * self.step[:, None])

    @property
    def is_sound(self) -> bool:
        """Whether codes stand for rows of finite scores; a stranger's steps may be of any size.

        A score is a sum of products of entries of two rows, times a scaling.
        """
        reach = (MAX_CODE * self.step.double()[:, None] * self.basis.double().abs()).sum(0)
        greatest = float((self.mean.double().abs() + reach).max()) if self.mean.numel() else 0.0
        most = torch.finfo(torch.float32).max / max(1, self.mean.numel()) / MAX_SCALING
        return bool((self.step > 0).all()) and greatest < most**0.5

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


MARGIN = 0.97
"""Share of the allowed error that a fit aims at: the error differs by a few per cent between sequences."""
_STEP_ROUNDS = 12


_COSINE_MARGIN = 0.9
"""The same for pooled vectors, of which there is one for each sequence: their error differs more."""
_FEW_ROWS = 8
"""Rows for each dimension below which a sample of pooled vectors is small: its covariance is shrunk, and
components that it does not need are kept, since other vectors may need them."""
_SHRINKAGE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How closely a state is stored."""

    limit: float
    """Greatest error."""
    error_of: Callable[[Tensor, Tensor, Tensor], float]
    """Measures the error of stored rows: a function of the teacher's rows, the stored rows and the mean."""
    relative_error: float
    """Relative error at about which `limit` is reached."""
    in_words: str
    """The option that sets the limit, with its value."""
    margin: float = MARGIN
    """Share of `limit` that a fit aims at."""
    shrinks: bool = False
    """Whether rows may be few for their width (`_FEW_ROWS`)."""


def relative_bound(max_error: float) -> Bound:
    """Return the bound of hidden states: a relative error, the root of squared error over variance."""
    return Bound(
        limit=max_error,
        error_of=relative_error,
        relative_error=max_error,
        in_words=f"--max-error {max_error}",
    )


def cosine_bound(min_cosine: float) -> Bound:
    """Return the bound of pooled vectors: a mean cosine with the teacher's."""
    limit = 1 - min_cosine
    return Bound(
        limit=limit,
        error_of=cosine_error,
        relative_error=math.sqrt(2 * limit),
        in_words=f"--min-cosine {min_cosine}",
        margin=_COSINE_MARGIN,
        shrinks=True,
    )


def fit_state(
    fit: Float[Tensor, "rows width"], check: Float[Tensor, "others width"], bound: Bound
) -> tuple[TransformCode, float]:
    """Return the coarsest code whose error on `check` keeps to a bound, and that error.

    Args:
        fit: states that the principal components are computed from.
        check: other states, which the step is chosen on.
        bound: how closely states are stored.

    Raises:
        InvalidConfigError: no step keeps to the bound.
    """
    mean = fit.mean(0)
    centred = (fit - mean).double()
    covariance = centred.T @ centred / len(fit)
    is_small = bound.shrinks and len(fit) < _FEW_ROWS * fit.shape[-1]
    if is_small:
        shared = _SHRINKAGE * covariance.diagonal().mean().clamp(min=1e-12)
        covariance = covariance + shared * torch.eye(len(covariance), dtype=covariance.dtype)
    variances, vectors = torch.linalg.eigh(covariance)
    basis = vectors.flip(-1).T
    sample = fit[:GAIN_ROWS] - mean
    # Rounding adds an error of step**2 / 12 to a component, or of all its variance where that is less.
    guess = bound.relative_error * math.sqrt(12 * float(variances.clamp(min=0).sum()) / len(variances))
    guess = max(guess, bound.relative_error * float(mean.abs().max().clamp(min=1e-6)) * 1e-3)
    low, high = guess / 64, guess * 64
    best: tuple[TransformCode, float] | None = None
    for _ in range(_STEP_ROUNDS):
        step = math.sqrt(low * high)
        code = fit_code(sample, mean, analysis=basis / step, synthesis=basis * step, keeps_all=is_small)
        error = bound.error_of(check, code.rows(code.codes(check)), mean)
        if error <= bound.limit * bound.margin:
            best, low = (code, error), step
        else:
            high = step
    if best is None:
        raise InvalidConfigError(
            f"{bound.in_words} cannot be reached with this teacher and text. Give a less strict one."
        )
    return best


def relative_error(teacher: Tensor, stored: Tensor, mean: Tensor) -> float:
    """Return the root of squared error over variance, both summed over rows and dimensions."""
    variance = (teacher - mean.to(teacher.device)).double().square().sum()
    return float(((stored - teacher).double().square().sum() / variance.clamp(min=1e-30)).sqrt())


def cosine_error(teacher: Tensor, stored: Tensor, mean: Tensor) -> float:
    """Return 1 less the mean cosine of stored rows with the teacher's; the mean of rows does not matter."""
    del mean
    cosine = float(F.cosine_similarity(stored.double(), teacher.double(), dim=-1).mean())
    return 1.0 - min(cosine, 1.0)  # rounding may bring the cosine of equal rows above 1
