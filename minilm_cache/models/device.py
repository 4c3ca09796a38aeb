"""Which device to compute on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minilm_cache.errors import DeviceError, InvalidConfigError, first_line


def choose_device(name: str | None) -> torch.device:
    """Return the device named, or the first GPU, or the CPU.

    Raises:
        InvalidConfigError: torch does not know the device, or it is not there.
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
    """Return whether an error of torch says that memory is lacking."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def enough_memory(device: torch.device, remedy: str) -> Iterator[None]:
    """Turn a lack of memory into a DeviceError that names a remedy."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceError(f"{device} has too little memory. {remedy}.") from error
        raise
