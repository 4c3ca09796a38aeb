"""The processes of a run, as torchrun starts them; accelerate joins them.

Without torchrun there is one process, and nothing here does anything.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minilm_cache.device import choose_device
from minilm_cache.errors import InvalidConfigError, RankLostError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes of a run, seen from one of them."""

    number: int
    """Of this process, from 0."""
    size: int
    place: Literal["data", "students"]
    """What differs between processes: the sequences of a step, or the students."""
    device: torch.device

    @classmethod
    def join(cls, place: Literal["data", "students"], device: str | None) -> "Ranks":
        """Meet the other processes that torchrun has started.

        Raises:
            InvalidConfigError: the device is not there.
        """
        chosen = choose_device(device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls.alone(chosen)
        if ":" in (device or ""):
            raise InvalidConfigError(
                f"--device {device}: under torchrun each process takes its own GPU. Leave out the number."
            )
        state = PartialState(cpu=chosen.type == "cpu")
        own = chosen if chosen.type == "cpu" else state.device
        return cls(number=state.process_index, size=state.num_processes, place=place, device=own)

    @classmethod
    def alone(cls, device: torch.device) -> "Ranks":
        """Return the one process of a run that torchrun has not started."""
        return cls(number=0, size=1, place="data", device=device)

    @property
    def is_first(self) -> bool:
        """True in the process that writes and tells what all have done together."""
        return self.number == 0

    @property
    def is_writer(self) -> bool:
        """True in a process that writes its students' files."""
        return self.is_first or self.place == "students"

    @property
    def num_data(self) -> int:
        """Processes that a step's sequences are divided among."""
        return self.size if self.place == "data" else 1

    @property
    def data_number(self) -> int:
        """This process's number among those."""
        return self.number if self.place == "data" else 0

    def mine(self, students: Sequence[Value]) -> list[Value]:
        """Return the students that this process trains."""
        return list(students[self.number :: self.size]) if self.place == "students" else list(students)

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            PartialState().wait_for_everyone()

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over all processes."""
        if self.size == 1:
            return list(numbers)
        totals = reduce(torch.tensor(numbers, dtype=torch.float64, device=self.device), reduction="sum")
        return list(totals.tolist())

    def sum_data(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over the processes that a step's sequences are divided among."""
        return self.sum(numbers) if self.place == "data" else list(numbers)

    def union(self, own: dict[str, Value]) -> dict[str, Value]:
        """Return what all processes say of their students."""
        if self.size == 1 or self.place == "data":
            return own
        merged: dict[str, Value] = {}
        for one in gather_object([own]):
            merged |= one
        return merged

    def parallel(self, model: nn.Module) -> nn.Module:
        """Return a model whose gradients are means over the processes that its data is divided among."""
        if self.num_data == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)

    def without_sync(self, model: nn.Module, *, when: bool) -> AbstractContextManager[None]:
        """Leave gradients to this process for now, where that is asked for."""
        if when and isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return nullcontext()

    def lost(self, error: RuntimeError) -> RuntimeError | RankLostError:
        """Return what an error means: that another process has gone, or what it says."""
        text = str(error)
        if self.size > 1 and (isinstance(error, dist.DistError) or "gloo" in text or "Connection" in text):
            return RankLostError(
                "another process of this run has ended: its own message says why. The last checkpoint is "
                "kept; run the same command again to go on."
            )
        return error

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1:
            PartialState().destroy_process_group()
