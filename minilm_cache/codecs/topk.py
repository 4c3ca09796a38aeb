"""Codec `topk`: k entries per row and relation.

`select=pps` (default) draws entries with probability proportional to size (`sampling.py`), so that the
expected stored row is the teacher's row.

`select=largest` is the literal top-k; `tail` sets what replaces the mass left out: a `uniform` share for
every other column, or nothing (`renormalise`).

Columns are stored as gaps to the entry before, low and high bytes apart, which compress a third better than
columns (benchmarks/compressors.py). Error bound of a stored weight: a factor `weight_ratio` for pps (1.03,
rounded down, unbiased with its slots), its square root for largest (1.06, nearest: 3 %).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS, Rows
from minilm_cache.codecs.rows import RowsCodec, byte_sums, has_zero_byte, seen_tokens
from minilm_cache.codecs.sampling import (
    LAST_CODE,
    PPS_RATIO,
    Entries,
    LogScale,
    SeededDraws,
    refuse_heavy_rows,
    sample_pps,
    share_remainder,
    sort_entries,
)
from minilm_cache.errors import CacheCorruptError
from minilm_cache.relations.scores import SparseRows
from minilm_cache.relations.transfer import send
from minilm_cache.storage_schema.arrays import MAX_ONE_BYTE_LENGTH
from minilm_cache.storage_schema.identity import RelationKind, TopKParameters

LARGEST_RATIO = 1.06
LEAST_TAIL = 0.01
"""Least mass of a uniform tail: rounding may carry the sum of the weights above 1."""
_BYTE = 0xFF
_CHECKED_TOKENS = 2048
"""Tokens that are checked together: few enough to fit into a processor's cache."""


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
            entries = sample_pps(probs, self.k, draws=draws, scale=self._scale)
        else:
            entries = select_largest(probs, self.k, self._scale)
        rows = {"gap": entries.gap & _BYTE, "weight": entries.code}
        if self.max_length > MAX_ONE_BYTE_LENGTH:
            rows["gap_high"] = entries.gap >> 8
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
        seen = seen_tokens(lengths) if self.is_causal else lengths
        for first in range(0, len(lengths), _CHECKED_TOKENS):
            part = slice(first, first + _CHECKED_TOKENS)
            gap, weight = rows["gap"][part].numpy(), rows["weight"][part].numpy()
            last = byte_sums(gap)
            if self.max_length > MAX_ONE_BYTE_LENGTH:
                last += byte_sums(rows["gap_high"][part].numpy()) << 8
            if (last >= seen[part].numpy()[:, None]).any() or weight.max() > LAST_CODE:
                raise CacheCorruptError(
                    f"a stored row holds an invalid weight, or a column that it does not see. {NOT_OURS}"
                )
            if self.select == "pps" and not has_zero_byte(weight).all():
                raise CacheCorruptError(f"a stored row has no slot. {NOT_OURS}")
            if self.select == "largest" and not weight.any(-1).all():
                raise CacheCorruptError(f"a stored row has no weight. {NOT_OURS}")
            refuse_heavy_rows(weight, self._scale, most=1.0 if self.is_unbiased else self._scale.ratio**0.5)

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
            return SparseRows(column, share_remainder(code, weight), None, self.is_causal)
        seen = lengths[:, None, None, None]
        if self.is_causal:
            seen = torch.minimum(seen, torch.arange(1, column.shape[2] + 1, device=seen.device)[:, None])
        return replace(
            _with_tail(column, code, weight=weight, seen=seen, uniform=self.tail == "uniform"),
            is_causal=self.is_causal,
        )


def scale_ratio(select: Literal["pps", "largest"]) -> float:
    """Return the ratio of neighbouring weights on the scale."""
    return PPS_RATIO if select == "pps" else LARGEST_RATIO


def select_largest(probs: Float[Tensor, "*rows key"], k: int, scale: LogScale) -> Entries:
    """Return the k largest entries of each row, columns ascending; code 0 for those below the scale."""
    weight, column = torch.topk(probs, min(k, probs.shape[-1]))
    code = scale.round(weight)
    # Columns that a row may not see have no weight and must not be among its entries.
    column = torch.where(code > 0, column, column[..., :1])
    missing = k - column.shape[-1]
    column = torch.cat([column, column[..., :1].expand(*column.shape[:-1], missing)], -1)
    code = torch.nn.functional.pad(code, (0, missing))
    return sort_entries(column, code)


def _with_tail(column: Tensor, code: Tensor, *, weight: Tensor, seen: Tensor, uniform: bool) -> SparseRows:
    """Make rows of the largest entries sum to 1: with a uniform tail over the other columns, or without.

    `seen` is the number of columns that each row sees, `(batch, 1, 1 or length, 1)`.
    """
    total = weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    if not uniform:
        return SparseRows(column, weight / total, None)
    num_others = seen - (code > 0).sum(-1, keepdim=True)
    tail = torch.where(num_others > 0, (1 - total).clamp(min=LEAST_TAIL), 0)
    base = tail / num_others.clamp(min=1)
    # An entry's column also has the base, so the entry's own weight is less by that much.
    part = torch.where(code > 0, weight * ((1 - tail) / total) - base, 0)
    return SparseRows(column, part, base.squeeze(-1))
