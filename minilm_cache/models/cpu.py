"""How a CPU computes attention and dropout while it trains.

The backward pass of torch's fused attention is slow in bfloat16 on a CPU, several times as slow as in float32
(benchmarks/cpu_steps.py). So where there is no dropout, attention of bfloat16 vectors is computed in float32.
torch has no fused attention with dropout on a CPU. It is three operations here.

torch draws a CPU's random numbers one after the other, at 6 ns each where MKL does not help: a seventh of a
small student's step (benchmarks/cpu_steps.py). Here each takes 16 bits from numpy's SFC64, seeded by one
number from torch's generator, so that code that restores torch's generator (checkpointed layers, resumed
runs) restores these numbers as well.
"""

import math
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

CPUINFO: Final = Path("/proc/cpuinfo")
_LEVELS: Final = 2**16


def has_bfloat16() -> bool:
    """Return whether Linux names instructions for bfloat16 among what this CPU can do."""
    return CPUINFO.exists() and re.search(r"\b(amx|avx512)_bf16\b", CPUINFO.read_text()) is not None


def kept(shape: torch.Size, probability: float) -> Float[Tensor, "..."]:
    """Return the factors of dropout: 0 with this probability (in steps of 2**-16), otherwise 1 / (1 - it)."""
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
        """Return the input with some elements set to 0 and the others scaled; in evaluation, unchanged."""
        if not self.training or self.p == 0 or input.device.type != "cpu":
            return super().forward(input)
        return input * kept(input.shape, self.p).to(input.dtype)


def draw_faster(model: nn.Module) -> None:
    """Replace every `nn.Dropout` of a model by `CpuDropout`."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, CpuDropout(child.p))


def attention(  # noqa: PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ANN401 - differs by model family
) -> tuple[Tensor, Tensor | None]:
    """Return attention's output, `(batch, length, heads, size)`, the way that is fast on its device."""
    is_cpu = query.device.type == "cpu"
    if dropout > 0 and is_cpu and not torch.compiler.is_compiling():
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attention_with_dropout(
            query, key, value=value, mask=attention_mask, scaling=factor, probability=dropout
        ), None
    if is_cpu and value.dtype == torch.bfloat16 and torch.is_grad_enabled():
        with torch.autocast("cpu", enabled=False):
            output, _ = sdpa_attention_forward(
                module,
                query.float(),
                key.float(),
                value.float(),
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )
        return output.to(value.dtype), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def attention_with_dropout(
    query: Float[Tensor, "batch heads length size"],
    key: Float[Tensor, "batch heads length size"],
    *,
    value: Float[Tensor, "batch heads length size"],
    mask: Tensor | None,
    scaling: float,
    probability: float,
) -> Float[Tensor, "batch length heads size"]:
    """Return the output of attention with dropout; torch has no fused kernel for it on a CPU."""
    scores = torch.matmul(query * scaling, key.transpose(-1, -2))
    if mask is not None:
        scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    probs = scores.softmax(-1)
    return ((probs * kept(probs.shape, probability).to(probs.dtype)) @ value).transpose(1, 2).contiguous()
