"""Work of a GPU as a graph: what a step launches is recorded once, and then launched again as one.

A small student's step launches hundreds of kernels that take less time than Python takes to launch them. A
graph (CUDA graphs, `torch.cuda.CUDAGraph`) reads and writes the memory that it was recorded with, so batches
of one form share a place in memory. Before a graph is trusted, its results are compared with those of the
same work done kernel by kernel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor

from minilm_cache.errors import first_line
from minilm_cache.objectives.check import Objective
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.ranks import Ranks

Value = TypeVar("Value")

_MOST_PLACES: Final = 24
"""Places in memory for batches of a run, one for each form. Batches of further forms have none."""
_SHORTEST: Final = 16
"""Padded length up to which batches are not told apart."""
_EAGER_CALLS: Final = 2
"""Calls before a recording. They make what lasts, such as moments of the optimizer and constants."""
_CHECKED_CALLS: Final = 2
"""Calls of a graph whose results are compared. What was recorded as a constant shows in the second one."""
_MOST_ERROR: Final = 0.1
"""Greatest norm of the difference of two updates of all weights, as a share of the update's norm. Sums that a
GPU adds in no fixed order turn the update of weights whose true gradient is 0."""


@runtime_checkable
class Recorder(Protocol):
    """Records what a device is given to compute."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a context in which work is computed that will be recorded later, or that was."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Compute work once, and return what computes it again on the same memory."""
        ...

    def free(self) -> None:
        """Give back the memory of recordings that are no longer there."""
        ...


class CudaRecorder:
    """Records CUDA graphs. Their temporary memory is shared, since they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        """Record for a device."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Compute on the stream that graphs are recorded on, after all before it and before all after it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work, which is not computed meanwhile, and compute it once."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            self._capture(graph, work)
        except BaseException:
            # Torch may leave the stream as it was in the middle of the recording, and random numbers, too,
            # until another recording ends (https://github.com/pytorch/pytorch/issues/171263).
            torch.cuda.set_stream(current)
            # Where CUDA refuses to end the recording, torch before 2.14 goes on to take memory for it.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)  # noqa: SLF001
            with suppress(RuntimeError):
                self._capture(torch.cuda.CUDAGraph(), lambda: torch.zeros(1, device=self._device).add_(1))
            torch.cuda.set_stream(current)
            raise
        graph.replay()
        return graph.replay

    def free(self) -> None:
        """Give memory back to the device, unless a recording that failed stands in the way."""
        with torch.cuda.device(self._device), suppress(RuntimeError):
            torch.cuda.empty_cache()

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
        # Other threads pin memory for the next batches meanwhile, which a recording of all would refuse.
        mode = "thread_local"
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode),
        ):
            work()


@dataclass(kw_only=True, slots=True, eq=False)
class Graphs:
    """The graphs of a run: all are used, or from the first failure on none."""

    recorder: Recorder
    say: Callable[[str], None]
    """Shows one line to the user."""
    are_used: bool = True
    num_places: int = 0
    """Places in memory that batches of the run have."""
    _recorded: WeakSet["Replayed[Any]"] = field(default_factory=WeakSet)

    def new_place(self) -> int | None:
        """Return the number of a further place for batches. None means that there are enough."""
        if self.num_places == _MOST_PLACES:
            return None
        self.num_places += 1
        return self.num_places - 1

    def add(self, replayed: "Replayed[Any]") -> None:
        """Take note of work that has been recorded."""
        self._recorded.add(replayed)

    def with_memory(self, work: Callable[[], Value]) -> Value:
        """Return what work returns; where memory is short, give graphs up, and begin the work anew."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            if not self.are_used:
                raise
            self.give_up(first_line(error))
        return work()

    def give_up(self, why: str) -> None:
        """Launch kernels one by one from now on, and say so; free the memory of all graphs."""
        if self.are_used:
            self.say(f"steps are launched kernel by kernel, not as graphs (--no-graph): {why}")
        self.are_used = False
        for replayed in self._recorded:
            replayed.forget()
        self._recorded.clear()
        self.recorder.free()


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records graphs of a device. None means that it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None


def graphs_of(
    config: TrainConfig, objective: Objective, ranks: Ranks, *, say: Callable[[str], None]
) -> Graphs | None:
    """Return the graphs of a run that is about to begin; say why there are none where a GPU could have some.

    Args:
        config: settings of the run.
        objective: the objective of the run.
        ranks: the processes of the run.
        say: shows one line to the user.
    """
    recorder = recorder_for(ranks.device) if config.graph else None
    if recorder is None:
        return None
    graphs = Graphs(recorder=recorder, say=say)
    of = f"--objective {config.objective}"
    reasons = {
        "--accumulate: a step has several parts": config.accumulate > 1,
        "processes add their gradients": ranks.num_data > 1,
        "--gradient-checkpointing": config.gradient_checkpointing,
        f"{of} is about masked tokens, whose number varies": objective.head == "tokens",
        f"{of} is about queries, whose number varies": objective.wanted.queries,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        graphs.give_up(reason)
    return graphs if graphs.are_used else None


class Replayed(Generic[Value]):
    """Work that reads the same memory in each call, and is replayed as a graph after its first calls.

    It keeps no work, so that nothing that the work refers to is kept in memory by it.
    """

    def __init__(self, graphs: Graphs) -> None:
        """Prepare to record work by the graphs of a run."""
        self._graphs = graphs
        self._calls = 0
        self._replay: Callable[[], None] | None = None
        self._result: Value | None = None

    @property
    def is_next_replayed(self) -> bool:
        """Whether the next call returns the result of a graph, which each call after it overwrites."""
        return self._graphs.are_used and self._calls >= _EAGER_CALLS + _CHECKED_CALLS

    def __call__(
        self,
        work: Callable[[], Value],
        *,
        prepare: Callable[[], object] = tuple,
        weights: Callable[[], Sequence[Tensor]] = tuple,
        state: Callable[[], Sequence[Tensor]] = tuple,
    ) -> Value:
        """Compute the work.

        Args:
            work: what is computed, the same in all calls. It begins anew if it was interrupted.
            prepare: called before the work, and not recorded, such as what sets the seed of random draws.
            weights: returns the tensors that the work updates; asked where results are compared.
            state: returns the other tensors that it changes.
        """
        if self.is_next_replayed:
            assert self._replay is not None
            assert self._result is not None
            prepare()
            self._replay()
            return self._result
        is_eager = self._calls < _EAGER_CALLS or not self._graphs.are_used
        self._calls += 1
        if is_eager:
            return self._plainly(work, prepare)
        return self._checked(work, prepare, weights=weights(), state=state())

    def forget(self) -> None:
        """Free the graph, and the memory that it has results in."""
        self._replay = self._result = None

    def _plainly(self, work: Callable[[], Value], prepare: Callable[[], object]) -> Value:
        """Compute the work kernel by kernel."""

        def compute() -> Value:
            with self._graphs.recorder.aside():
                prepare()
                return work()

        return self._graphs.with_memory(compute)

    def _checked(
        self,
        work: Callable[[], Value],
        prepare: Callable[[], object],
        *,
        weights: Sequence[Tensor],
        state: Sequence[Tensor],
    ) -> Value:
        """Compute the work by its graph and kernel by kernel, and compare; return the latter's result."""
        changed, replayed = [*weights, *state], None
        try:
            before = _copies(changed)
        except torch.OutOfMemoryError as error:
            self._graphs.give_up(first_line(error))
            return self._plainly(work, prepare)
        try:
            prepare()
            if self._replay is None:
                self._graphs.add(self)
                self._replay = self._graphs.recorder.record(lambda: self._record(work))
            else:
                self._replay()
            replayed = _copies([*tensors_of(self._result), *weights])
        except Exception as error:  # noqa: BLE001 - what is wrong with the work itself shows when it begins anew
            self._graphs.give_up(first_line(error))
        with torch.no_grad():
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
        result = self._plainly(work, prepare)
        try:
            if replayed is not None and not _is_same(replayed, result, weights, before=before):
                self._graphs.give_up("a graph computed something else than the same kernels one by one")
        except torch.OutOfMemoryError as error:
            self._graphs.give_up(first_line(error))
        return result

    def _record(self, work: Callable[[], Value]) -> None:
        self._result = work()


def rounded_length(longest: int, most: int) -> int:
    """Return a length that batches are padded to, so that few forms of batches need a graph.

    It is 16, or a number of quarters of a power of two, such as 20, 24, 28, 32, 40, ..., 512.

    Args:
        longest: number of tokens of the longest sequence of a batch.
        most: greatest number of tokens of any sequence.
    """
    unit = max(_SHORTEST, 1 << (longest - 1).bit_length()) // 8
    return min(max(_SHORTEST, -(-longest // unit) * unit), max(most, longest))


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors that a value consists of, in a fixed order.

    Raises:
        TypeError: what it consists of is unknown.
    """
    if isinstance(value, Tensor):
        yield value
    elif value is None or isinstance(value, str | int | float | Enum):
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors_of(getattr(value, part.name))
    else:
        raise TypeError(f"no tensors are known of {type(value).__name__}")


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are of one kind, and nearly equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-6, equal_nan=True)


def _is_same(
    replayed: Sequence[Tensor], result: object, weights: Sequence[Tensor], *, before: Sequence[Tensor]
) -> bool:
    """Return whether a graph had the same result and the same weights; NaN equals NaN.

    Args:
        replayed: tensors of its result, then its weights.
        result: what the kernels have computed one by one.
        weights: the weights after that.
        before: the weights before both.
    """
    results = list(tensors_of(result))
    if not all(map(_is_close, replayed[: len(results)], results)):
        return False
    if not weights:
        return True
    triples = list(zip(before, replayed[len(results) :], weights, strict=False))
    update = torch.stack([(after - old).norm() for old, _, after in triples]).norm()
    error = torch.stack([(other - after).norm() for _, other, after in triples]).norm()
    return bool((error <= _MOST_ERROR * update) | (update.isnan() & error.isnan()))
