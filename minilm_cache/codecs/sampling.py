"""Sampling of a row's entries in proportion to size (`select=pps`): seeded draws, and the scale of weights.

In the textbook, tau solves sum_j min(1, p_j / tau) = k; entries with p_j >= tau are kept with their own
weight, the other slots are drawn systematically, in the order of columns, with equal weight. Three things
differ. The threshold is one step towards tau, which needs no sorting (`_least_kept`). Kept weights are
rounded down to one byte, and what rounding leaves of them stays in the pool that the equal slots are drawn
from. So the draw is unbiased: every row has k entries, its weights sum to 1, and its expectation is the
teacher's row, as decoded from bytes. The price is that a slot may fall on a kept column, which then comes
more than once (in one row of eight at length 128).

Prior work: priority sampling (Duffield, Lund, Thorup 2007) and Sparse Logit Sampling (ACL 2025,
arXiv 2503.16870), which draws with replacement.
"""

import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS
from minilm_cache.errors import CacheCorruptError
from minilm_cache.relations.transfer import products_in

FIRST_CODE = 1
LAST_CODE = 254


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScale:
    """A scale of 254 values, each `ratio` times the next.

    Rounding down is off by at most a factor `ratio`, rounding to the nearest by its square root, for
    weights of at least `smallest`.
    """

    ratio: float

    @property
    def smallest(self) -> float:
        """The least weight on the scale."""
        return self.ratio ** (FIRST_CODE - LAST_CODE)

    def round_down(self, weight: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """Return the code of the greatest scale value that is at most `weight`; 0 below the scale."""
        return self._code(torch.ceil(self._steps(weight)))

    def round(self, weight: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """Return the code of the nearest scale value (by ratio); 0 below the scale."""
        return self._code(torch.round(self._steps(weight)))

    def value(self, code: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
        """Return the weights of codes, float32; 0 for code 0."""
        return _table(self.ratio, code.device)[code]

    def sums(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the sum of the weights of each row's codes: `(..., k)` uint8 to `(...)` float32.

        Two codes are looked up at once, which takes a quarter of the time.
        """
        if codes.shape[-1] % 2:
            codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)])
        pairs = np.take(_pair_table(self.ratio), np.ascontiguousarray(codes).view(np.uint16))
        of_rows = pairs.reshape(-1, pairs.shape[-1])  # numpy multiplies two dimensions much faster than three
        sums: npt.NDArray[np.float32] = of_rows @ np.ones(pairs.shape[-1], np.float32)
        return sums.reshape(codes.shape[:-1])

    def _steps(self, weight: Tensor) -> Tensor:
        return weight.clamp(min=torch.finfo(torch.float32).tiny).log() / -math.log(self.ratio)

    @staticmethod
    def _code(steps: Tensor) -> Tensor:
        code = steps.clamp(min=0, max=LAST_CODE).to(torch.int64) + FIRST_CODE
        return code * (code <= LAST_CODE)


@functools.cache
def _table(ratio: float, device: torch.device) -> Tensor:
    """Return the weights of all codes; it is made once for each device, since a copy to a GPU waits."""
    exponents = torch.arange(LAST_CODE - FIRST_CODE + 1, dtype=torch.float64)
    values = torch.zeros(LAST_CODE + 1, dtype=torch.float32)
    values[FIRST_CODE:] = torch.tensor(ratio, dtype=torch.float64) ** -exponents
    return values.to(device)


@functools.cache
def _pair_table(ratio: float) -> npt.NDArray[np.float32]:
    """Return the sum of the weights of two codes, `(65536,)`, at the first code plus 256 times the second."""
    weights = np.pad(_table(ratio, torch.device("cpu")).numpy(), (0, 1))
    sums: npt.NDArray[np.float32] = np.add.outer(weights, weights)
    return sums.ravel()


PPS_RATIO = 1.03
_CPU_ENTRIES = 2**20
"""Probabilities that a thread of a CPU samples from in one step: 4 MiB, which fits into its cache."""
_DEVICE_ENTRIES = 2**26
"""Probabilities that a device samples from in one step; intermediate values take up to 3 GiB."""
_MOST_MULTIPLIED = 512
"""Columns up to which a device computes running sums as a product; its operations grow with their square."""
_ROUNDING = 1e-5
"""A bound above the rounding error of a row's sum, and above the relative one of a scale's least weight."""
_ROUNDING_OF_SUMS = 1e-3
"""A bound above what float32 adds to the sum of a row's stored weights."""
_ROUNDING_OF_SLOTS = 1e-6
"""A bound above the relative rounding error of a slot's position: no slot is lost or added."""
_NO_WEIGHT = 1e-30
"""A pool of at most this weight is empty; it is far above what float32 can divide by."""
_CODE_BITS = 8
_CODE_RANGE = 2**_CODE_BITS
"""Entries are sorted by column * 256 + code: columns ascend and codes stay with their columns."""


class Entries(NamedTuple):
    """Entries of each row, sorted by column, and by code within a column."""

    gap: Int[Tensor, "*rows entries"]
    """An entry's column less that of the entry before it; of a row's first entry, its column."""
    code: Int[Tensor, "*rows entries"]
    """0 for an equal slot, otherwise the code of the kept weight."""

    @property
    def column(self) -> Int[Tensor, "*rows entries"]:
        """The column of each entry, int64."""
        return self.gap.cumsum(-1)


def sort_entries(column: Int[Tensor, "*rows entries"], code: Int[Tensor, "*rows entries"]) -> Entries:
    """Return entries sorted by column, and by code within a column."""
    return _split((column * _CODE_RANGE + code).sort(-1).values)


def _split(merged: Tensor) -> Entries:
    column = merged >> _CODE_BITS
    return Entries(column.diff(dim=-1, prepend=torch.zeros_like(column[..., :1])), merged & _CODE_RANGE - 1)


def sample_pps(
    probs: Float[Tensor, "*rows key"], k: int, *, draws: Float[Tensor, "*rows 1"], scale: LogScale
) -> Entries:
    """Draw k entries of each row so that their expectation is the row (module docstring).

    Args:
        probs: rows that sum to 1.
        k: entries per row.
        draws: one uniform number in [0, 1) per row.
        scale: scale that kept weights are rounded down to.

    Returns:
        Gaps and codes, whole numbers of any type that holds them.
    """
    flat, draws = probs.flatten(0, -2), draws.flatten(0, -2)
    on_cpu = probs.device.type == "cpu"
    threads, most = (torch.get_num_threads(), _CPU_ENTRIES) if on_cpu else (1, _DEVICE_ENTRIES)
    at_once = max(1, min(most // probs.shape[-1], math.ceil(len(flat) / threads)))
    sample = functools.partial(_sample_listed if on_cpu else _sample_placed, k=k, scale=scale)
    parts = (flat.split(at_once), draws.split(at_once))
    run = _threads(os.getpid(), threads).map if on_cpu else map
    sampled = list(run(sample, *parts))
    return Entries(*(torch.cat(pieces).view(*probs.shape[:-1], k) for pieces in zip(*sampled, strict=True)))


@functools.cache
def _threads(process: int, number: int) -> ThreadPoolExecutor:
    """Return threads that sample; numpy computes without the interpreter's lock.

    A process keeps them, because starting new ones would take a tenth of the time. A process that was forked
    from it starts its own. Each computes on one core. If PyTorch used more in each, there would be more
    threads than cores, and OpenMP would then let all of them sleep while they wait, the teacher's too.

    Args:
        process: number of this process.
        number: number of threads.
    """
    del process
    begun = Barrier(number + 1)

    def compute_alone() -> None:
        torch.get_num_threads()  # PyTorch prepares a thread on its first call
        torch.set_num_threads(1)
        begun.wait()

    threads = ThreadPoolExecutor(number, thread_name_prefix="sampling")
    try:
        for _ in range(number):
            threads.submit(compute_alone)
        begun.wait()
    except BaseException:
        begun.abort()  # threads that wait for it would keep the process from ending
        threads.shutdown(wait=False)
        raise
    finally:
        # The workers set it to 1 for threads that begin later, too.
        torch.set_num_threads(number)
    return threads


def _sample_listed(
    probs: Float[Tensor, "rows key"], draws: Float[Tensor, "rows 1"], *, k: int, scale: LogScale
) -> Entries:
    """Draw entries by listing the columns that have any, so that a CPU works on nothing else."""
    rows, size = probs.numpy(), probs.shape[-1]
    kept, weight = _list_kept(rows, k, scale)
    code = scale.round_down(weight)
    pool = rows.copy()
    pool.ravel()[kept] = (weight - scale.value(code)).clamp_(min=0)
    num_slots = k - np.bincount(kept // size, minlength=len(rows))
    slots = _slots_so_far(
        torch.from_numpy(pool), k, num_slots=torch.from_numpy(num_slots)[:, None], draws=draws
    ).numpy()

    has_entry, codes = np.empty(rows.size, np.bool_), np.zeros(rows.size, np.uint8)
    np.not_equal(slots.ravel()[1:], slots.ravel()[:-1], out=has_entry[1:])
    has_entry[::size] = slots[:, 0] > 0
    has_entry[kept], codes[kept] = True, code
    filled = np.flatnonzero(has_entry)
    row, kept_codes = filled // size, codes[filled]
    # Where each column's entries end among the entries of all rows: its slots come first, then what is kept.
    slots_before = (num_slots.cumsum() - num_slots).astype(np.int32)
    end = torch.from_numpy(slots_before[row] + slots.ravel()[filled].astype(np.int32))
    # numpy would hold the interpreter's lock for this sum.
    end += torch.from_numpy(kept_codes > 0).cumsum(0, dtype=torch.int32)
    gaps, sampled = np.zeros((len(rows), k), np.int32), np.zeros((len(rows), k), np.uint8)
    gaps.ravel()[end.numpy()[:-1]] = filled[1:] - filled[:-1]  # a column's entries begin where others end
    gaps[:, 0] = has_entry.reshape(rows.shape).argmax(1)
    sampled.ravel()[end.numpy() - 1] = kept_codes
    return Entries(torch.from_numpy(gaps), torch.from_numpy(sampled))


def _list_kept(
    rows: npt.NDArray[np.float32], k: int, scale: LogScale
) -> tuple[npt.NDArray[np.int64], Float[Tensor, " kept"]]:
    """Return the places of the kept entries of all rows, ascending, and their weights."""
    values, size = rows.ravel(), rows.shape[-1]
    above = np.flatnonzero(values > np.float32(1 / k + _ROUNDING))
    total = np.bincount(above // size, values[above], minlength=len(rows)).astype(np.float32)
    count = np.bincount(above // size, minlength=len(rows))
    least = _least_kept(torch.from_numpy(total), torch.from_numpy(count), k=k, scale=scale)
    kept = np.flatnonzero(rows > least.numpy()[:, None])
    return kept, torch.from_numpy(values[kept])


def _sample_placed(
    probs: Float[Tensor, "rows key"], draws: Float[Tensor, "rows 1"], *, k: int, scale: LogScale
) -> Entries:
    """Draw the same entries by operations of fixed shapes: the CPU never has to wait for a GPU's results."""
    above = torch.where(probs > 1 / k + _ROUNDING, probs, 0)
    least = _least_kept(above.sum(-1), above.count_nonzero(-1), k=k, scale=scale)
    is_kept = probs > least[:, None]
    num_slots = k - is_kept.sum(-1, keepdim=True)
    # Kept entries take the places behind their row's slots, where there are few columns to compute on. All
    # others share one more place, which is not looked at.
    place = torch.where(is_kept, _running_sums(is_kept.to(probs.dtype)) + (num_slots - 1), k).to(torch.int64)
    weight = probs.new_zeros((len(probs), k + 1)).scatter_(-1, place, probs)
    column = torch.arange(probs.shape[-1], dtype=torch.int32, device=probs.device).expand_as(probs)
    kept = torch.zeros_like(weight, dtype=torch.int32).scatter_(-1, place, column)
    code = scale.round_down(weight)
    rest = (weight - scale.value(code)).clamp_(min=0)
    pool = torch.where(is_kept, rest.gather(-1, place), probs)

    slot = torch.arange(k, dtype=probs.dtype, device=probs.device).expand(len(probs), k)
    slots = _slots_so_far(pool, k, num_slots=num_slots, draws=draws)
    drawn = torch.searchsorted(slots, slot.contiguous(), right=True, out_int32=True) * _CODE_RANGE
    entries = torch.where(slot < num_slots, drawn, (kept * _CODE_RANGE + code)[:, :k].int())
    return _split(entries.sort(-1).values)


def _running_sums(rows: Float[Tensor, "rows key"]) -> Float[Tensor, "rows key"]:
    """Return the sum of each row's values up to and including each column.

    An H200 takes 3.0 ms to scan 2**26 values in rows of 128 columns, and 0.5 ms for this product. All columns
    add the same values in the same order, or zeros instead, so their sums never decrease.
    """
    size = rows.shape[-1]
    if rows.device.type == "cpu" or size > _MOST_MULTIPLIED:
        return rows.cumsum(-1)
    up_to = torch.ones((size, size), dtype=rows.dtype, device=rows.device).triu_()
    with products_in("float32"):
        return rows @ up_to


def _least_kept(
    total: Float[Tensor, " rows"], count: Int[Tensor, " rows"], *, k: int, scale: LogScale
) -> Float[Tensor, " rows"]:
    """Return the weight that an entry must exceed to be kept: tau, or a little more.

    tau solves sum_j min(1, p_j / tau) = k: what the kept entries leave of 1, over the slots they leave of k.
    Any choice leaves the draw unbiased, and one step towards tau, from 1/k, comes within 0.01 % of its
    variance at k = 16 (1.2 % at k = 64 of 128). Fewer than k entries exceed what is returned, because it is
    never below tau, and each that does has a code on the scale.

    Args:
        total: sum of each row's entries above 1/k.
        count: their number.
        k: entries per row that are stored.
        scale: scale of kept weights.
    """
    return ((1 - total) / (k - count) + _ROUNDING).clamp_(min=scale.smallest * (1 + _ROUNDING))


def _slots_so_far(
    pool: Float[Tensor, "rows key"],
    k: int,
    *,
    num_slots: Int[Tensor, "rows 1"],
    draws: Float[Tensor, "rows 1"],
) -> Float[Tensor, "rows key"]:
    """Return how many of a row's slots fall on each column and those before it, systematically drawn.

    Slot s lies at s + draw, where the whole pool is as long as there are slots. A column without weight
    never has a slot; with nothing left to draw from, all slots are on column 0.
    """
    so_far = _running_sums(pool)
    total = so_far[:, -1:]
    has_weight = total > _NO_WEIGHT
    slots_per_weight = torch.where(has_weight, num_slots * (1 + _ROUNDING_OF_SLOTS) / total, 0)
    # The first slot begins late enough for the last column to have exactly as many as there are.
    first = torch.where(has_weight, draws.clamp(min=2 * _ROUNDING_OF_SLOTS * k), -num_slots)
    return so_far.mul_(slots_per_weight).sub_(first).ceil_()


def refuse_heavy_rows(codes: npt.NDArray[np.uint8], scale: LogScale, *, most: float = 1.0) -> None:
    """Raise CacheCorruptError for a row whose kept weights sum to more than a distribution has.

    Args:
        codes: `(..., k)`, at most LAST_CODE; 0 is a slot, or no weight.
        scale: scale of the weights.
        most: greatest sum that `encode` writes: 1 where weights are rounded down.
    """
    if codes.size and not float(scale.sums(codes).max()) <= most + _ROUNDING_OF_SUMS:
        raise CacheCorruptError(f"the weights of a stored row sum to more than 1. {NOT_OURS}")


def share_remainder(
    code: Int[Tensor, "*rows entries"], weight: Float[Tensor, "*rows entries"]
) -> Float[Tensor, "*rows entries"]:
    """Return weights, with the rest of 1 that the kept entries leave shared equally among the slots."""
    slot = code == 0
    num_slots = slot.sum(-1, keepdim=True)
    share = (1 - weight.sum(-1, keepdim=True)).clamp(min=0) / num_slots
    return torch.where(slot, share, weight)


class SeededDraws:
    """Uniform numbers in [0, 1), float32.

    Philox is counter-based, so a sequence's numbers do not depend on the batch that it is encoded in. They
    are those of `numpy.random.Generator(numpy.random.Philox(key=seed, counter=counter)).random`; setting the
    counter of one generator takes half the time of making one for each sequence.
    """

    def __init__(self, seed: int) -> None:
        """Prepare to draw from a seed."""
        self._bits = np.random.Philox(key=seed)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def fill(self, numbers: npt.NDArray[np.float32], counter: Sequence[int]) -> None:
        """Fill a contiguous array with the numbers of a counter: four whole numbers, each at most 2**44."""
        self._state["state"]["counter"][:] = counter
        self._bits.state = self._state
        self._generator.random(dtype=np.float32, out=numbers)
