"""Which device to compute on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

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
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidConfigError(
            f"--device {name}: {first_line(error)}. Use cpu, or leave it out."
        ) from error
    return device


def _own_gpu(device: torch.device) -> torch.device:
    """Return this process' own GPU, if a device is any GPU and a launcher has numbered the processes."""
    numbers = [os.environ.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID")]
    number = next((int(text) for text in numbers if text.isdecimal()), None)
    if str(device) != "cuda" or number is None:  # a device with a number is `cuda:0`
        return device
    return torch.device("cuda", number % max(1, torch.cuda.device_count()))


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
