"""Codec `topk`: k entries per row and relation.

`select=pps` (default) is systematic sampling with probability proportional to size. In the textbook, tau
solves sum_j min(1, p_j / tau) = k; entries with p_j >= tau are kept with their own weight, the other slots
are drawn systematically, in the order of columns, with equal weight. Three things differ. The threshold is
one step towards tau, which needs no sorting (`_least_kept`). Kept weights are rounded down to one byte, and
what rounding leaves of them stays in the pool that the equal slots are drawn from. So the draw is exactly
unbiased: every row has k entries, its weights sum to 1, and its expectation is the teacher's row, as decoded
from bytes. The price is that a slot may fall on a kept column, which then comes more than once (in one row of
eight at length 128).
Prior work: priority sampling (Duffield, Lund, Thorup 2007) and Sparse Logit Sampling (ACL 2025,
arXiv 2503.16870), which draws with replacement.

`select=largest` is the literal top-k; `tail` sets what replaces the mass left out: a `uniform` share for
every other column, or nothing (`renormalise`).

Columns are stored as gaps to the entry before, low and high bytes apart, which compress a third better than
columns (benchmarks/compressors.py). Error bound of a stored weight: a factor `weight_ratio` for pps (1.03,
rounded down, unbiased with its slots), its square root for largest (1.06, nearest: 3 %).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS, Rows, rows_at_once
from minilm_cache.codecs.draws import SeededDraws
from minilm_cache.codecs.packed_bytes import byte_sums, has_zero_byte
from minilm_cache.codecs.quantize import LAST_CODE, LogScale
from minilm_cache.codecs.rows import RowsCodec
from minilm_cache.errors import CacheCorruptError
from minilm_cache.relations.rows import SparseRows
from minilm_cache.relations.transfer import send
from minilm_cache.storage_schema.arrays import MAX_ONE_BYTE_LENGTH
from minilm_cache.storage_schema.identity import RelationKind, TopKParameters

PPS_RATIO = 1.03
LARGEST_RATIO = 1.06
LEAST_TAIL = 0.01
"""Least mass of a uniform tail: rounding may carry the sum of the weights above 1."""
_ROUNDING = 1e-5
"""A bound above the rounding error of a row's sum."""
_BYTE = 0xFF
_CHECKED_TOKENS = 2048
"""Tokens that are checked together: few enough to fit into a processor's cache."""
_CODE_BITS = 8
_CODE_RANGE = 2**_CODE_BITS
"""Entries are sorted by column * 256 + code: columns ascend and codes stay with their columns."""


class Entries(NamedTuple):
    """Entries of each row, sorted by column."""

    column: Int[Tensor, "*rows entries"]
    code: Int[Tensor, "*rows entries"]
    """0 for an equal slot, otherwise the code of the kept weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKCodec(RowsCodec):
    """k entries per row; see the module's docstring."""

    k: int = 16
    select: Literal["pps", "largest"] = "pps"
    tail: Literal["uniform", "renormalise"] | None = None
    seed: int = 0

    @property
    def parameters(self) -> TopKParameters:
        """The parameters of this codec in the manifest."""
        ratio = self._scale.ratio
        return TopKParameters(
            k=self.k, select=self.select, tail=self.tail, weight_ratio=ratio, seed=self.seed
        )

    @property
    def is_unbiased(self) -> bool:
        """True for `pps`: only sampled rows have the teacher's rows as their expectation."""
        return self.select == "pps"

    @property
    def _scale(self) -> LogScale:
        return LogScale(ratio=scale_ratio(self.select))

    def encode_relation(
        self,
        probs: Float[Tensor, "batch heads query key"],
        kind: RelationKind,
        *,
        sequences: Sequence[int],
        lengths: Int[Tensor, " batch"],
    ) -> Rows:
        """Return `gap`, `weight` and, above length 256, `gap_high`: uint8, `(batch, length, heads, k)`."""
        if self.select == "pps":
            draws = send(self._draws(kind, sequences, lengths=lengths, shape=probs.shape), probs.device)
            part = rows_at_once(probs)
            parts = zip(probs.split(part), draws.split(part), strict=True)
            sampled = [sample_pps(rows, self.k, draws=numbers, scale=self._scale) for rows, numbers in parts]
            entries = Entries(*(torch.cat(pieces) for pieces in zip(*sampled, strict=True)))
        else:
            entries = select_largest(probs, self.k, self._scale)
        gap = torch.diff(entries.column, dim=-1, prepend=torch.zeros_like(entries.column[..., :1]))
        rows = {"gap": gap & _BYTE, "weight": entries.code}
        if self.max_length > MAX_ONE_BYTE_LENGTH:
            rows["gap_high"] = gap >> 8
        return {name: row.to(torch.uint8).transpose(1, 2) for name, row in rows.items()}

    def _draws(
        self, kind: RelationKind, sequences: Sequence[int], *, lengths: Tensor, shape: torch.Size
    ) -> Float[Tensor, "batch heads query 1"]:
        """Return one uniform number per row, a pure function of seed, relation, sequence, head and row."""
        numbers = np.zeros((shape[0], shape[2], shape[1]), dtype=np.float32)
        draws, stream = SeededDraws(self.seed), list(RelationKind).index(kind)
        for of_sequence, sequence, length in zip(numbers, sequences, lengths.tolist(), strict=True):
            draws.fill(of_sequence[:length], [0, 0, stream, sequence])
        return torch.from_numpy(numbers).transpose(1, 2)[..., None]

    def check_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for the rows that `decode_relation` refuses, several times as fast."""
        for first in range(0, len(lengths), _CHECKED_TOKENS):
            part = slice(first, first + _CHECKED_TOKENS)
            gap, weight = rows["gap"][part].numpy(), rows["weight"][part].numpy()
            last = byte_sums(gap)
            if self.max_length > MAX_ONE_BYTE_LENGTH:
                last += byte_sums(rows["gap_high"][part].numpy()) << 8
            if (last >= lengths[part].numpy()[:, None]).any() or weight.max() > LAST_CODE:
                raise CacheCorruptError(
                    f"a stored row holds a column beyond its sequence or an invalid weight. {NOT_OURS}"
                )
            if self.select == "pps" and not has_zero_byte(weight).all():
                raise CacheCorruptError(f"a stored row has no slot. {NOT_OURS}")

    def decode_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> SparseRows:
        """Return entries as `(batch, heads, length, k)`: int64 columns, float32 weights."""
        gap = rows["gap"].transpose(1, 2).to(torch.int64)
        if self.max_length > MAX_ONE_BYTE_LENGTH:
            gap += rows["gap_high"].transpose(1, 2).to(torch.int64) << 8
        column = gap.cumsum(-1)
        code = rows["weight"].transpose(1, 2).to(torch.int64)
        valid = (torch.arange(column.shape[2], device=column.device) < lengths[:, None])[:, None, :, None]
        column, code = column * valid, code * valid
        weight = self._scale.value(code)
        if self.select == "pps":
            return SparseRows(column, share_remainder(code, weight), None)
        return _with_tail(column, code, weight=weight, lengths=lengths, uniform=self.tail == "uniform")


def scale_ratio(select: Literal["pps", "largest"]) -> float:
    """Return the ratio of neighbouring weights on the scale."""
    return PPS_RATIO if select == "pps" else LARGEST_RATIO


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
        Columns ascending, and codes: 0 for an equal slot, otherwise the code of the kept weight.
    """
    shape = (*probs.shape[:-1], k)
    probs, draws = probs.flatten(0, -2), draws.flatten(0, -2)
    kept = (_list_kept if probs.device.type == "cpu" else _place_kept)(probs, k, scale)
    slot = torch.arange(k, device=probs.device).expand(len(probs), k)
    num_slots = k - kept.number[:, None]
    drawn = _draw_slots(kept.pool, slot, num_slots=num_slots, draws=draws) * _CODE_RANGE
    # Kept entries take the places behind their row's slots.
    merged = torch.where(slot < num_slots, drawn, kept.merged).sort(-1).values.view(shape)
    return Entries(merged >> _CODE_BITS, merged & _BYTE)


class _Kept(NamedTuple):
    """The entries that are kept with their own weight."""

    number: Int[Tensor, " rows"]
    """Number of each row's kept entries, less than k."""
    merged: Int[Tensor, "rows k"]
    """Each kept entry's column * 256 + code, at the end of its row; other places hold anything."""
    pool: Float[Tensor, "rows key"]
    """What the kept entries leave of each row."""


def _list_kept(probs: Float[Tensor, "rows key"], k: int, scale: LogScale) -> _Kept:
    """Return the kept entries. Only they are worked on, which suits a CPU; a GPU's are of unknown number."""
    # numpy compares several times as fast as torch, and skips what is False.
    rows = probs.numpy()
    values, size = rows.ravel(), probs.shape[-1]
    above = np.flatnonzero(values > np.float32(1 / k + _ROUNDING))
    row = above // size
    total = np.bincount(row, values[above], minlength=len(probs)).astype(np.float32)
    count = np.bincount(row, minlength=len(probs))
    least = _least_kept(torch.from_numpy(total), torch.from_numpy(count), k=k, scale=scale)

    kept = np.flatnonzero(rows > least.numpy()[:, None])
    row, column = np.divmod(kept, size)
    weight = torch.from_numpy(values[kept])
    code = scale.round_down(weight)
    pool = probs.clone(memory_format=torch.contiguous_format)
    pool.view(-1)[torch.from_numpy(kept)] = (weight - scale.value(code)).clamp_(min=0)
    count = np.bincount(row, minlength=len(probs))
    place = k - (count.cumsum())[row] + np.arange(len(row))
    merged = np.zeros((len(probs), k), np.int32)
    merged[row, place] = column * _CODE_RANGE + code.numpy()
    return _Kept(torch.from_numpy(count), torch.from_numpy(merged), pool)


def _place_kept(probs: Float[Tensor, "rows key"], k: int, scale: LogScale) -> _Kept:
    """Return the same entries by operations of fixed shapes, which a GPU never has to be waited for."""
    above = torch.where(probs > 1 / k + _ROUNDING, probs, 0)
    least = _least_kept(above.sum(-1), above.count_nonzero(-1), k=k, scale=scale)
    is_kept = probs > least[:, None]
    code = scale.round_down(probs)
    pool = torch.where(is_kept, (probs - scale.value(code)).clamp_(min=0), probs)
    count = is_kept.sum(-1)
    place = torch.where(is_kept, is_kept.cumsum(-1) - 1 + k - count[:, None], k)  # others: an extra column
    column = torch.arange(probs.shape[-1], device=probs.device)
    merged = torch.zeros((len(probs), k + 1), dtype=torch.int32, device=probs.device)
    merged.scatter_(-1, place, (column * _CODE_RANGE + code).int())
    return _Kept(count, merged[:, :k], pool)


def _least_kept(
    total: Float[Tensor, " rows"], count: Int[Tensor, " rows"], *, k: int, scale: LogScale
) -> Float[Tensor, " rows"]:
    """Return the weight that an entry must exceed to be kept: tau, or a little more.

    tau solves sum_j min(1, p_j / tau) = k: what the kept entries leave of 1, over the slots they leave of k.
    Any choice leaves the draw unbiased, and one step towards tau, from 1/k, comes within 0.01 % of its
    variance at k = 16 (1.2 % at k = 64 of 128). Fewer than k entries exceed what is returned, because it is
    never below tau.

    Args:
        total: sum of each row's entries above 1/k.
        count: their number.
        k: entries per row that are stored.
        scale: scale of kept weights.
    """
    return ((1 - total) / (k - count) + _ROUNDING).clamp_(min=scale.smallest)


def _draw_slots(
    pool: Float[Tensor, "rows key"],
    slot: Int[Tensor, "rows k"],
    *,
    num_slots: Int[Tensor, "rows 1"],
    draws: Float[Tensor, "rows 1"],
) -> Int[Tensor, "rows k"]:
    """Return the column of each slot, systematically drawn; ignore values after a row's last slot."""
    cumulative = pool.cumsum(-1)
    total = cumulative[:, -1:]
    # Below the total, so that rounding never moves a slot past the last column that has any weight.
    position = torch.minimum((slot + draws) * (total / num_slots), total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, position, right=True, out_int32=True)
    # With nothing left to draw from, the slots have no weight, so any column of the row is right.
    return torch.where(total > 0, drawn, 0)


def select_largest(probs: Float[Tensor, "*rows key"], k: int, scale: LogScale) -> Entries:
    """Return the k largest entries of each row, columns ascending; code 0 for those below the scale."""
    weight, column = torch.topk(probs, min(k, probs.shape[-1]))
    code = scale.round(weight)
    # Columns that a row may not see have no weight and must not be among its entries.
    column = torch.where(code > 0, column, column[..., :1])
    missing = k - column.shape[-1]
    column = torch.cat([column, column[..., :1].expand(*column.shape[:-1], missing)], -1)
    code = torch.nn.functional.pad(code, (0, missing))
    merged = (column * _CODE_RANGE + code).sort(-1).values
    return Entries(merged >> _CODE_BITS, merged & _BYTE)


def share_remainder(
    code: Int[Tensor, "*rows entries"], weight: Float[Tensor, "*rows entries"]
) -> Float[Tensor, "*rows entries"]:
    """Return weights, with the rest of 1 that the kept entries leave shared equally among the slots."""
    slot = code == 0
    num_slots = slot.sum(-1, keepdim=True)
    share = (1 - weight.sum(-1, keepdim=True)).clamp(min=0) / num_slots
    return torch.where(slot, share, weight)


def _with_tail(column: Tensor, code: Tensor, *, weight: Tensor, lengths: Tensor, uniform: bool) -> SparseRows:
    """Make rows of the largest entries sum to 1: with a uniform tail over the other columns, or without."""
    total = weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    if not uniform:
        return SparseRows(column, weight / total, None)
    num_others = lengths[:, None, None, None] - (code > 0).sum(-1, keepdim=True)
    tail = torch.where(num_others > 0, (1 - total).clamp(min=LEAST_TAIL), 0)
    base = tail / num_others.clamp(min=1)
    # An entry's column also has the base, so the entry's own weight is less by that much.
    part = torch.where(code > 0, weight * ((1 - tail) / total) - base, 0)
    return SparseRows(column, part, base.squeeze(-1))
