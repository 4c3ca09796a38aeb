"""The processes of a run: torchrun starts them, and accelerate joins them into a group.

Without torchrun there is one process, and the methods here do nothing.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minilm_cache.engines.ray_cluster import check_common, common_file
from minilm_cache.errors import (
    DeviceError,
    InvalidConfigError,
    MiniLMCacheError,
    RankLostError,
    StorageError,
    first_line,
)
from minilm_cache.models.device import choose_device, is_of_compiler, is_out_of_memory, not_compiled

Value = TypeVar("Value")


def refuse_ranks(what: str, shown_by: str) -> None:
    """Raise InvalidConfigError under torchrun for work that runs in one process.

    Args:
        what: the work, as a noun for the message.
        shown_by: subject and verb that complete "the folders that ..." in the message.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InvalidConfigError(
            f"{what} runs in one process. Start it without torchrun, or its stages by `minilm-cache dump` "
            f"and `torchrun ... train` with the folders that {shown_by}; completed stages are reused."
        )


@cache
def _cpu_group(of: object) -> dist.ProcessGroup:
    """Return the group of all processes whose messages go from CPU to CPU.

    Args:
        of: the default group, which the stages of a chain share, and with it this one.
    """
    del of
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes of a run, seen from one of them."""

    number: int
    """Number of this process, counted from 0."""
    size: int
    """Number of processes."""
    place: Literal["data", "students"]
    """What the processes divide among themselves: the sequences of a step, or the students."""
    device: torch.device
    """Device of this process."""
    cpu_group: dist.ProcessGroup | None = None
    """Group of the processes whose messages go from CPU to CPU, so that no GPU is waited for.

    None means the default group, which is one on machines without GPUs.
    """
    is_outermost: bool = True
    """Whether this work joined the processes into a group; False in a stage of work that had joined them."""

    @classmethod
    def join(cls, place: Literal["data", "students"], device: str | None) -> "Ranks":
        """Join the other processes that torchrun has started.

        Raises:
            InvalidConfigError: the device does not exist, or torchrun's variables are not usable.
            RankLostError: the processes cannot connect to each other.
        """
        chosen = choose_device(device)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls.alone(chosen)
        if not all(os.environ.get(name, "").isdecimal() for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")):
            raise InvalidConfigError(
                "WORLD_SIZE is set, but not as torchrun sets it. Start this by torchrun, or unset WORLD_SIZE."
            )
        if chosen.type == "cuda" and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise InvalidConfigError(
                f"torchrun started more processes than the {torch.cuda.device_count()} GPUs of this machine. "
                "Lower --nproc-per-node."
            )
        if ":" in (device or ""):
            raise InvalidConfigError(
                f"--device {device}: under torchrun each process takes its own GPU. Leave out the number."
            )
        is_outermost = not dist.is_initialized()
        try:
            state = PartialState(cpu=chosen.type == "cpu")
            cpu_group = None if chosen.type == "cpu" else _cpu_group(dist.group.WORLD)
        except (RuntimeError, ValueError) as error:
            raise RankLostError(
                f"the processes of this run cannot connect: {first_line(error)}. Start it by torchrun again."
            ) from error
        own_device = chosen if chosen.type == "cpu" else state.device
        return cls(
            number=state.process_index,
            size=state.num_processes,
            place=place,
            device=own_device,
            cpu_group=cpu_group,
            is_outermost=is_outermost,
        )

    @classmethod
    def alone(cls, device: torch.device) -> "Ranks":
        """Return the single process of a run without torchrun."""
        return cls(number=0, size=1, place="data", device=device)

    @property
    def is_first(self) -> bool:
        """True in the process that writes and shows the results of all processes."""
        return self.number == 0

    @property
    def is_writer(self) -> bool:
        """True in a process that writes its students' files."""
        return self.is_first or self.place == "students"

    @property
    def num_data(self) -> int:
        """Number of processes that a step's sequences are divided among."""
        return self.size if self.place == "data" else 1

    @property
    def data_number(self) -> int:
        """Number of this process among those, counted from 0."""
        return self.number if self.place == "data" else 0

    def mine(self, students: Sequence[Value]) -> list[Value]:
        """Return the students that this process trains."""
        return list(students[self.number :: self.size]) if self.place == "students" else list(students)

    def barrier(self) -> None:
        """Wait until all processes have come here."""
        if self.size > 1:
            PartialState().wait_for_everyone()

    def refuse_difference(self, beginning: str) -> None:
        """Raise InvalidConfigError if `beginning` differs between processes.

        Args:
            beginning: name of the weights that students begin with.
        """
        if self.size > 1 and len(set(gather_object([beginning]))) > 1:
            raise InvalidConfigError(
                "the processes of this run differ in what students begin with: the teacher's weights are on "
                "some machines only. Give --init random, or --init-teacher with a folder that all of them "
                "have."
            )

    def check_common(self, folder: Path) -> None:
        """Raise StorageError in every process if one of them does not have a folder in common.

        Args:
            folder: folder, which is made if it is not there.
        """
        if self.size == 1:
            return
        with common_file(folder) if self.is_first else nullcontext() as file:
            names = [file.name if file else ""]
            broadcast_object_list(names)
            errors: list[str] = []
            try:
                check_common(folder / names[0])
            except StorageError as error:
                errors.append(str(error))
            if errors := gather_object(errors):
                raise StorageError(errors[0])

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the errors for users that explain torch's errors."""
        try:
            yield
        except RuntimeError as error:
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from error

    def share_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of replicas by those of the first process."""
        if self.size > 1 and self.place == "data":
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over all processes; the device is not waited for."""
        if self.size == 1:
            return list(numbers)
        totals = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(totals, group=self.cpu_group)
        return list(totals.tolist())

    def sum_data(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over the processes that a step's sequences are divided among."""
        return self.sum(numbers) if self.place == "data" else list(numbers)

    def union(self, entries: dict[str, Value]) -> dict[str, Value]:
        """Return the entries of all processes, by student.

        Args:
            entries: entries of this process's students, by shape.
        """
        if self.size == 1 or self.place == "data":
            return entries
        merged: dict[str, Value] = {}
        for gathered in gather_object([entries]):
            merged |= gathered
        return merged

    def agreed(self, entries: dict[str, Value]) -> dict[str, Value]:
        """Return the entries of all processes, by student, of replicas those of the first process.

        Replicas on unlike devices compute losses that differ in their last digits, and with them other best
        steps.

        Args:
            entries: entries of this process's students, by shape.
        """
        if self.size == 1 or self.place == "students":
            return self.union(entries)
        of_first = [entries]
        broadcast_object_list(of_first)
        return of_first[0]

    def parallel(self, model: nn.Module) -> nn.Module:
        """Return a model whose gradients are means over the processes that its data is divided among."""
        if self.num_data == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)

    def without_sync(self, model: nn.Module, *, when: bool) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this process if `when` is true."""
        if when and isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return nullcontext()

    def explain(self, error: RuntimeError) -> MiniLMCacheError | None:
        """Return the error for users that explains an error of torch. None means that none explains it."""
        text = str(error)
        if is_out_of_memory(error):
            return DeviceError(
                f"{self.device} has too little memory for a step. Take a higher --accumulate, a lower "
                "--batch-size, or --gradient-checkpointing."
            )
        if is_of_compiler(error):
            return not_compiled(error)
        if self.size > 1 and (isinstance(error, dist.DistError) or "gloo" in text or "Connection" in text):
            return RankLostError(
                f"another process of this run has ended, its own message says why ({first_line(error)}). "
                "The last checkpoint is kept; run the same command again to go on."
            )
        return None

    def leave(self) -> None:
        """Leave the group of processes, unless work around this one is still in it."""
        if self.size > 1 and self.is_outermost:
            PartialState().destroy_process_group()
            PartialState._reset_state()  # noqa: SLF001 - else this process could not start another run
