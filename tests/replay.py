"""Graphs of a device without one: the operations of some work are written down, and computed again.

As with a graph of CUDA, nothing of Python runs again: a number that was read or computed outside of torch is
a constant, and results are where those of the recording were. An operation that a GPU would be waited for
raises while a graph is recorded.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.accelerator import UNKNOWN_SIZE, Counts, OnDevice

WAITS = {*UNKNOWN_SIZE, "_local_scalar_dense"}


class _Operations(TorchDispatchMode):
    """Writes operations down with what they read and what they wrote."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        on_device = any(isinstance(part, OnDevice) for part in tree_leaves((args, kwargs)))
        if on_device and name in WAITS:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        if name != "_local_scalar_dense":
            self.written.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def compute(self) -> None:
        """Compute all operations again, and write their results where they were."""
        for func, args, kwargs, result in self.written:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.numel() and _place(old) != _place(new):
                    old.detach().copy_(new)


def _place(tensor: Tensor) -> int:
    return (tensor.raw if isinstance(tensor, OnDevice) else tensor).data_ptr()


@dataclass
class Replayer:
    """Records as `CudaRecorder` does."""

    counts: Counts | None = None
    """What a pretend accelerator counts: a replay is one launch. None means that nothing counts."""
    recordings: list[_Operations] = field(default_factory=list)
    replays: int = 0
    refuses: bool = False
    """True: nothing can be recorded."""
    num_freed: int = 0
    """How often memory was given back."""

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def free(self) -> None:
        self.num_freed += 1

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        operations = _Operations()
        with operations:
            work()
        self.recordings.append(operations)

        def replay() -> None:
            self.replays += 1
            before = Counts() if self.counts is None else copy.deepcopy(self.counts)
            operations.compute()
            if self.counts is not None:
                self.counts.kernels, self.counts.waits = before.kernels, before.waits
                self.counts.kernels["graph"] += 1

        return replay
