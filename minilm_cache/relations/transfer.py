"""Copies between the CPU and a device, and how products are computed; no copy is waited for too early."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from minilm_cache.storage_schema.identity import Precision

_SHARES_MEMORY = frozenset({"cpu", "mps"})
"""Types of devices whose copies are not faster from pinned memory."""


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device; the copy is made while the CPU goes on.

    A copy from memory that is not pinned would wait for everything that the device is computing.
    """
    if values.device.type != "cpu" or device.type in _SHARES_MEMORY:
        return values.to(device)
    return pin(values, device).to(device, non_blocking=True)


def pin(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the CPU in memory from which `send` need not copy them first."""
    if device.type in _SHARES_MEMORY:
        return values
    # In any thread: pinning opens a context on the thread's current GPU, which is the first one by default.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return values.pin_memory()


class Arrival:
    """Tensors on their way from a device to the CPU."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy tensors of one device, after what the device was given to compute so far."""
        self._device = next((values.device for values in tensors.values()), torch.device("cpu"))
        # torch takes pinned memory for copies to the CPU that nothing waits for.
        self._tensors = {name: values.to("cpu", non_blocking=True) for name, values in tensors.items()}
        self._copied: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            # The current GPU of the process may be another one.
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> dict[str, Tensor]:
        """Wait for the copies, and return the tensors on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._tensors


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Let a GPU compute float32 products in TF32 or not, whatever the process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
