"""Fit the code of a state: principal components, and the coarsest step within the allowed error."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minilm_cache.codecs.transform import GAIN_ROWS, TransformCode, fit_code
from minilm_cache.errors import InvalidConfigError

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
        in_words=f"--max-error {max_error:g}",
    )


def cosine_bound(min_cosine: float) -> Bound:
    """Return the bound of pooled vectors: a mean cosine with the teacher's."""
    limit = 1 - min_cosine
    return Bound(
        limit=limit,
        error_of=cosine_error,
        relative_error=math.sqrt(2 * limit),
        in_words=f"--min-cosine {min_cosine:g}",
        margin=_COSINE_MARGIN,
        shrinks=True,
    )


def fit_state(
    fit: Float[Tensor, "rows width"],
    check: Float[Tensor, "others width"],
    bound: Bound,
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
    return max(0.0, 1.0 - cosine)  # rounding may bring the cosine of equal rows above 1
