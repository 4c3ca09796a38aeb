"""Which device to compute on, and what makes a CPU faster."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from minilm_cache.errors import DeviceError, InvalidConfigError, first_line

CPU: Final = torch.device("cpu")


def choose_device(name: str | None) -> torch.device:
    """Return the named device. None means a GPU, or the CPU where there is none.

    A process that torchrun or SLURM started takes the GPU of its own number on its machine, unless `name` has
    a number; several processes share a GPU where there are fewer GPUs than processes.

    Raises:
        InvalidConfigError: torch does not know the device, or this machine lacks it.
    """
    if name is None:
        return _own_gpu(torch.device("cuda")) if torch.cuda.is_available() else CPU
    try:
        device = _own_gpu(torch.device(name))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        if reason.startswith("Expected one of"):  # a list of all kinds that any build of torch knows
            reason = "there is no such kind of device"
        elif not name.startswith("cuda"):  # what torch says of others is about its own source
            reason = "torch computes nothing on it here"
        known = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise InvalidConfigError(f"--device {name}: {reason}. Use {known}, or leave it out.") from error
    return device


def _own_gpu(device: torch.device) -> torch.device:
    """Return this process' own GPU, if a device is any GPU and a launcher has numbered the processes."""
    numbers = [os.environ.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID")]
    number = next((int(text) for text in numbers if text.isdecimal()), None)
    if str(device) != "cuda" or number is None:  # a device with a number is `cuda:0`
        return device
    return torch.device("cuda", number % max(1, torch.cuda.device_count()))


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory of a device that are not in use. None means that it does not say."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept  # what torch keeps of it serves it again
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch is a lack of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def is_of_compiler(error: RuntimeError) -> bool:
    """Return whether torch.compile raised an error; its modules take seconds to import."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def not_compiled(error: RuntimeError) -> DeviceError:
    """Return the error for users that explains an error of torch.compile."""
    return DeviceError(f"--compile does not work here: {first_line(error)}. Leave it out.")


@contextmanager
def enough_memory(device: torch.device, remedy: str) -> Iterator[None]:
    """Turn a lack of memory, or an error of torch.compile, into a DeviceError.

    Args:
        device: device that computes.
        remedy: what the user can do, a sentence without its full stop.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceError(f"{device} has too little memory. {remedy}.") from error
        if is_of_compiler(error):
            raise not_compiled(error) from error
        raise


CPUINFO: Final = Path("/proc/cpuinfo")
_LEVELS: Final = 2**16


def has_bfloat16() -> bool:
    """Return whether Linux names instructions for bfloat16 among what this CPU can do."""
    return (
        CPUINFO.exists()
        and re.search(r"\b(amx|avx512)_bf16\b", CPUINFO.read_text(encoding="utf-8")) is not None
    )


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed all that a model on a device draws from, as `torch.manual_seed` does.

    For a model on a CPU this seeds the CPU alone: `torch.manual_seed` formats the whole stack for each other
    kind of device that has not begun yet, which took 6 % of a step of a tiny student.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


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
    drops_here = dropout > 0 and is_cpu and not torch.compiler.is_compiling()
    if drops_here and query.shape[1] == key.shape[1] and _is_plain(module, attention_mask, kwargs):
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


def _is_plain(module: nn.Module, mask: Tensor | None, given: Mapping[str, object]) -> bool:
    """Return whether a mask of booleans, or nothing, says all of which keys a query sees, and how well."""
    is_causal = given.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    has_mask = not is_causal if mask is None else mask.dtype == torch.bool
    return has_mask and given.get("position_bias") is None


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
