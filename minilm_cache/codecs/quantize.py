"""Weights in one byte: a logarithmic scale from 1 downwards.

Code c in 1..254 stands for ratio**-(c - 1); codes 0 and 255 mean what the codec defines (see SPEC.md).
"""

import functools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

FIRST_CODE = 1
LAST_CODE = 254


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScale:
    """A scale of 254 values, each `ratio` times the next.

    Rounding down is off by at most a factor `ratio`, rounding to the nearest by its square root, for
    weights of at least `smallest`.
    """

    ratio: float

    @property
    def smallest(self) -> float:
        """The least weight on the scale."""
        return self.ratio ** (FIRST_CODE - LAST_CODE)

    def round_down(self, weight: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """Return the code of the greatest scale value that is at most `weight`; 0 below the scale."""
        return self._code(torch.ceil(self._steps(weight)))

    def round(self, weight: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """Return the code of the nearest scale value (by ratio); 0 below the scale."""
        return self._code(torch.round(self._steps(weight)))

    def value(self, code: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
        """Return the weights of codes, float32; 0 for code 0."""
        return _table(self.ratio, code.device)[code]

    def _steps(self, weight: Tensor) -> Tensor:
        return weight.clamp(min=torch.finfo(torch.float32).tiny).log() / -math.log(self.ratio)

    @staticmethod
    def _code(steps: Tensor) -> Tensor:
        code = steps.clamp(min=0, max=LAST_CODE).to(torch.int64) + FIRST_CODE
        return code * (code <= LAST_CODE)


@functools.cache
def _table(ratio: float, device: torch.device) -> Tensor:
    """Return the weights of all codes; it is made once for each device, since a copy to a GPU waits."""
    exponents = torch.arange(LAST_CODE - FIRST_CODE + 1, dtype=torch.float64)
    values = torch.zeros(LAST_CODE + 1, dtype=torch.float32)
    values[FIRST_CODE:] = torch.tensor(ratio, dtype=torch.float64) ** -exponents
    return values.to(device)
