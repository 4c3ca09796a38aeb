"""Dropout for training on a CPU.

torch draws a CPU's random numbers one after the other, at 6 ns each where MKL does not help: a seventh of a
small student's step (benchmarks/dropout.py). Here they are 16 bits each of numpy's SFC64, seeded by one
number of torch's generator, so that whatever restores that one (checkpointed layers, resumed runs) restores
these.
"""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

_LEVELS = 2**16


def kept(shape: torch.Size, probability: float) -> Float[Tensor, "..."]:
    """Return what dropout multiplies by: 0 with a probability (in steps of 2**-16), else its inverse."""
    threshold = round(probability * _LEVELS)
    if threshold >= _LEVELS:
        return torch.zeros(shape)
    count = math.prod(shape)
    seed = int(torch.randint(2**62, ()))
    draws = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.uint16)[:count]
    scale = np.float32(_LEVELS / (_LEVELS - threshold))
    return torch.from_numpy((draws >= threshold) * scale).view(shape)


class CpuDropout(nn.Dropout):
    """`nn.Dropout` that draws faster for tensors on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with some of its elements zero, the others scaled; in evaluation as it is."""
        if not self.training or self.p == 0 or input.device.type != "cpu":
            return super().forward(input)
        return input * kept(input.shape, self.p).to(input.dtype)


def draw_faster(model: nn.Module) -> None:
    """Replace every `nn.Dropout` of a model."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, CpuDropout(child.p))


def attention_with_dropout(
    query: Float[Tensor, "batch heads length size"],
    key: Float[Tensor, "batch heads length size"],
    *,
    value: Float[Tensor, "batch heads length size"],
    mask: Tensor | None,
    scaling: float,
    probability: float,
) -> Float[Tensor, "batch length heads size"]:
    """Return attention's output, probabilities dropped out; torch has no fused kernel for that on a CPU."""
    scores = torch.matmul(query * scaling, key.transpose(-1, -2))
    if mask is not None:
        scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    probs = scores.softmax(-1)
    return ((probs * kept(probs.shape, probability).to(probs.dtype)) @ value).transpose(1, 2).contiguous()
