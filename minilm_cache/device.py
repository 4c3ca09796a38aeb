"""Which device to compute on."""

import torch

from minilm_cache.errors import InvalidConfigError, first_line


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
