"""Fit the code of a hidden state: principal components, and the coarsest step within the allowed error."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.codecs.transform import GAIN_ROWS, TransformCode, fit_code
from minilm_cache.errors import InvalidConfigError

MARGIN = 0.97
"""Share of the allowed error that a fit aims at: the error differs by a few per cent between sequences."""
_STEP_ROUNDS = 12


def fit_state(
    fit: Float[Tensor, "rows width"], check: Float[Tensor, "others width"], max_error: float
) -> tuple[TransformCode, float]:
    """Return the coarsest code whose relative error on `check` is at most `max_error`, and that error.

    Args:
        fit: hidden states that the principal components are computed from.
        check: other hidden states, which the step is chosen on.
        max_error: greatest relative error, the root of squared error over variance.

    Raises:
        InvalidConfigError: no step reaches `max_error`.
    """
    mean = fit.mean(0)
    centred = (fit - mean).double()
    variances, vectors = torch.linalg.eigh(centred.T @ centred / len(fit))
    basis = vectors.flip(-1).T
    sample = fit[:GAIN_ROWS] - mean
    # Rounding adds an error of step**2 / 12 to a component, or of all its variance where that is less.
    guess = max_error * math.sqrt(12 * float(variances.clamp(min=0).sum()) / len(variances))
    low, high = guess / 64, guess * 64
    best: tuple[TransformCode, float] | None = None
    for _ in range(_STEP_ROUNDS):
        step = math.sqrt(low * high)
        code = fit_code(sample, mean, analysis=basis / step, synthesis=basis * step)
        error = relative_error(check, code.rows(code.codes(check)), mean)
        if error <= max_error * MARGIN:
            best, low = (code, error), step
        else:
            high = step
    if best is None:
        raise InvalidConfigError(
            f"--max-error {max_error:g} cannot be reached with this teacher and text. Give a greater one."
        )
    return best


def relative_error(teacher: Tensor, stored: Tensor, mean: Tensor) -> float:
    """Return the root of squared error over variance, both summed over rows and dimensions."""
    variance = (teacher - mean.to(teacher.device)).double().square().sum()
    return float(((stored - teacher).double().square().sum() / variance.clamp(min=1e-30)).sqrt())
