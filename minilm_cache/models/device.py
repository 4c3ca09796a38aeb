"""Which device to compute on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from minilm_cache.errors import DeviceError, InvalidConfigError, first_line

CPU: Final = torch.device("cpu")


def choose_device(name: str | None) -> torch.device:
    """Return the named device. None means the first GPU, or the CPU where there is none.

    Raises:
        InvalidConfigError: torch does not know the device, or this machine lacks it.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidConfigError(
            f"--device {name}: {first_line(error)}. Use cpu, or leave it out."
        ) from error
    return device


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch is a lack of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def enough_memory(device: torch.device, remedy: str) -> Iterator[None]:
    """Turn a lack of memory into a DeviceError.

    Args:
        device: device that computes.
        remedy: what the user can do, a sentence without its full stop.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceError(f"{device} has too little memory. {remedy}.") from error
        raise
