"""Work of a GPU as a graph: what a step launches is recorded once, and then launched again as one.

A small student's step launches hundreds of kernels that take less time than Python takes to launch them. A
graph (CUDA graphs, `torch.cuda.CUDAGraph`) reads and writes the memory that it was recorded with, so batches
of one form share a place in memory. Before a graph is trusted, its results are compared with those of the
same work done kernel by kernel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from minilm_cache.errors import first_line
from minilm_cache.objectives.check import Objective
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.ranks import Ranks

Value = TypeVar("Value")

FORMS: Final = 8
"""Padded lengths that batches are rounded up to: eighths of the greatest one."""
_MOST_PLACES: Final = 2 * FORMS
"""Places in memory for batches of a run: one for each length, padded or not."""
_EAGER_CALLS: Final = 2
"""Calls before a recording. They make what lasts, such as moments of the optimizer and constants."""
_CHECKED_CALLS: Final = 2
"""Calls of a graph whose results are compared. What was recorded as a constant shows in the second one."""
_MOST_ERROR: Final = 0.1
"""Greatest norm of the difference of two updates of all weights, as a share of the update's norm. Sums that a
GPU adds in no fixed order turn the update of weights whose true gradient is 0."""


class Recorder(Protocol):
    """Records what a device is given to compute."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a context in which work is computed that will be recorded later, or that was."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Compute work once, and return what computes it again on the same memory."""
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
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work, which is not computed meanwhile, and compute it once."""
        graph = torch.cuda.CUDAGraph()
        # Other threads pin memory for the next batches meanwhile, which a recording of all would refuse.
        mode = "thread_local"
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode),
        ):
            work()
        graph.replay()
        return graph.replay


@dataclass(kw_only=True, slots=True, eq=False)
class Graphs:
    """The graphs of a run: all are used, or from the first failure on none."""

    recorder: Recorder
    say: Callable[[str], None]
    """Shows one line to the user."""
    are_used: bool = True
    num_places: int = 0
    """Places in memory that batches of the run have."""

    def new_place(self) -> int | None:
        """Return the number of a further place for batches. None means that there are enough."""
        if self.num_places == _MOST_PLACES:
            return None
        self.num_places += 1
        return self.num_places - 1

    def give_up(self, why: str) -> None:
        """Launch kernels one by one from now on, and say so."""
        if self.are_used:
            self.say(f"steps are launched kernel by kernel, not as graphs (--no-graph): {why}")
        self.are_used = False


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
    """Work that reads the same memory in each call, and is replayed as a graph after its first calls."""

    def __init__(
        self,
        graphs: Graphs,
        work: Callable[[], Value],
        *,
        weights: Sequence[Tensor] = (),
        state: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        """Prepare to record work.

        Args:
            graphs: the graphs of the run.
            work: what is computed. A replay overwrites what it has returned.
            weights: tensors that the work updates.
            state: returns the other tensors that it changes, once they are there.
        """
        self._graphs = graphs
        self._work = work
        self._weights = weights
        self._state = state
        self._calls = 0
        self._replay: Callable[[], None] | None = None
        self._result: Value | None = None

    @property
    def is_next_replayed(self) -> bool:
        """Whether the next call returns the result of a graph, which each call after it overwrites."""
        return self._graphs.are_used and self._calls >= _EAGER_CALLS + _CHECKED_CALLS

    def __call__(self, prepare: Callable[[], object] = tuple) -> Value:
        """Compute the work.

        Args:
            prepare: called before the work, and not recorded, such as what sets the seed of random draws.
        """
        if self.is_next_replayed:
            assert self._replay is not None
            assert self._result is not None
            prepare()
            self._replay()
            return self._result
        is_eager = self._calls < _EAGER_CALLS or not self._graphs.are_used
        self._calls += 1
        return self._plainly(prepare) if is_eager else self._checked(prepare)

    def _plainly(self, prepare: Callable[[], object]) -> Value:
        with self._graphs.recorder.aside():
            prepare()
            return self._work()

    def _checked(self, prepare: Callable[[], object]) -> Value:
        """Compute the work by its graph and kernel by kernel, and compare; return the latter's result."""
        changed = [*self._weights, *self._state()]
        before = _copies(changed)
        replayed: list[Tensor] | None = None
        try:
            prepare()
            if self._replay is None:
                self._replay = self._graphs.recorder.record(self._record)
            else:
                self._replay()
            replayed = _copies([*tensors_of(self._result), *self._weights])
        except RuntimeError as error:
            self._graphs.give_up(first_line(error))
        with torch.no_grad():
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
        result = self._plainly(prepare)
        if replayed is not None:
            results = list(tensors_of(result))
            count = len(results)
            are_equal = all(map(_is_close, replayed[:count], results))
            if not (are_equal and _is_same_update(before, replayed[count:], self._weights)):
                self._graphs.give_up("a graph computed something else than the same kernels one by one")
        return result

    def _record(self) -> None:
        self._result = self._work()


def rounded_length(longest: int, most: int) -> int:
    """Return a length that batches are padded to, so that few forms of batches need a graph.

    Args:
        longest: number of tokens of the longest sequence of a batch.
        most: greatest number of tokens of any sequence.
    """
    unit = -(-most // FORMS)
    return max(longest, min(-(-longest // unit) * unit, most))


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
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-6, equal_nan=True)


def _is_same_update(before: Sequence[Tensor], one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether weights were updated in the same way; NaN equals NaN."""
    if not one:
        return True
    pairs = list(zip(before[: len(one)], one, other, strict=True))
    update = torch.stack([(after - old).norm() for old, _, after in pairs]).norm()
    error = torch.stack([(replayed - after).norm() for _, replayed, after in pairs]).norm()
    return bool((error <= _MOST_ERROR * update) | (update.isnan() & error.isnan()))
