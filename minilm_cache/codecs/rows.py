"""Relations stored row by row: what codecs `topk` and `dense` have in common, and codec `dense`."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS, Rows
from minilm_cache.errors import CacheCorruptError
from minilm_cache.relations.scores import DenseRows, LayerRelations, RowTargets, WantedRelations
from minilm_cache.storage_schema.arrays import relation_arrays, relation_path
from minilm_cache.storage_schema.identity import DenseParameters, RelationKind, TopKParameters

ROW_RELATIONS = (RelationKind.ATTENTION, RelationKind.VALUE)
"""Relations that codecs of rows store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCodec(ABC):
    """A codec that stores the rows of each relation by themselves, all in the same way."""

    max_length: int
    """Greatest number of tokens in a sequence."""
    kinds: tuple[RelationKind, ...] = ROW_RELATIONS
    """The relations that are stored."""
    is_causal: bool = False
    """Whether a row sees columns up to its own alone."""

    _names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Names of a relation's arrays, which every batch needs."""

    def __post_init__(self) -> None:
        """Look the names of arrays up once."""
        object.__setattr__(self, "_names", relation_arrays(self.parameters, self.max_length))

    @property
    @abstractmethod
    def parameters(self) -> TopKParameters | DenseParameters:
        """The parameters of this codec in the manifest."""

    @property
    @abstractmethod
    def is_unbiased(self) -> bool:
        """Whether the expected stored row is the teacher's row, so that losses estimate the true KL."""

    @abstractmethod
    def encode_relation(
        self,
        probs: Float[Tensor, "batch heads query key"],
        kind: RelationKind,
        *,
        sequences: Sequence[int],
        lengths: Int[Tensor, " batch"],
    ) -> Rows:
        """Encode one relation.

        Args:
            probs: the teacher's relation; columns beyond a sequence's length are 0.
            kind: which relation it is; with `sequences` it seeds the random draws.
            sequences: numbers of the sequences in the cache.
            lengths: valid positions of each sequence, on the CPU.

        Returns:
            Name of each array of the relation to its rows, `(batch, length, ...)`.
        """

    @abstractmethod
    def check_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Check one relation, as `Codec.check`; `rows` maps the names of its arrays to values."""

    @abstractmethod
    def decode_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> RowTargets:
        """Decode one relation, as `Codec.decode`; `rows` maps the names of its arrays to values."""

    @property
    def everything(self) -> WantedRelations:
        """A request for all relations that are stored."""
        return WantedRelations(self.kinds)

    def paths(self, wanted: WantedRelations) -> tuple[str, ...]:
        """Return the paths of the arrays of these relations."""
        return tuple(path for kind in wanted.kinds for path in self._arrays(kind).values())

    def _arrays(self, kind: RelationKind) -> dict[str, str]:
        """Return the name of each array of a relation to its path."""
        return {name: relation_path(kind, name) for name in self._names}

    def encode(
        self, content: LayerRelations, sequences: Sequence[int], *, lengths: Int[Tensor, " batch"]
    ) -> Rows:
        """Encode every relation (`Codec.encode`)."""
        return {
            relation_path(kind, name): values
            for kind in self.kinds
            for name, values in self.encode_relation(
                content.probs(kind), kind, sequences=sequences, lengths=lengths
            ).items()
        }

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for values that `encode` never writes."""
        for arrays in map(self._arrays, self.kinds):
            if rows.keys() >= set(arrays.values()):
                self.check_relation({name: rows[path] for name, path in arrays.items()}, lengths)

    def decode(
        self, rows: Mapping[str, Tensor], wanted: WantedRelations, *, lengths: Int[Tensor, " batch"]
    ) -> dict[RelationKind, RowTargets]:
        """Return relations as targets, with the relation heads that they were stored with."""
        assert wanted.heads is None, "stored rows cannot be split into other heads"
        return {
            kind: self.decode_relation(
                {name: rows[path] for name, path in self._arrays(kind).items()}, lengths
            )
            for kind in wanted.kinds
        }

    def to(self, device: torch.device) -> "RowsCodec":
        """Return this codec: its constants are a table that each device keeps."""
        del device
        return self


def seen_tokens(lengths: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Return how many tokens of its sequence each token sees in a causal model: 1 for the first, and so on.

    Args:
        lengths: for each token of whole sequences, the number of tokens of its sequence.
    """
    starts, place, sizes = torch.zeros_like(lengths), 0, lengths.tolist()
    while place < len(sizes):
        starts[place : place + sizes[place]] = place
        place += sizes[place]
    return torch.arange(1, len(lengths) + 1) - starts


_Bytes = npt.NDArray[np.uint8]
_WORD = 8
_EVEN_BYTES = np.uint64(0x00FF_00FF_00FF_00FF)
_ONES_16 = np.uint64(0x0001_0001_0001_0001)
_ONES_8 = np.uint64(0x0101_0101_0101_0101)
_HIGH_BITS = np.uint64(0x8080_8080_8080_8080)


def byte_sums(rows: _Bytes) -> npt.NDArray[np.int64]:
    """Return the sum of each row: `(..., k)` uint8 to `(...)` int64."""
    words = _words(rows, fill=0)
    pairs = (words & _EVEN_BYTES) + (words >> np.uint64(8) & _EVEN_BYTES)
    pairs *= _ONES_16  # the highest 16 bits are the sum of all four
    pairs >>= np.uint64(48)
    return _reduce_words(np.add, pairs).view(np.int64)


def has_zero_byte(rows: _Bytes) -> npt.NDArray[np.bool_]:
    """Return whether each row holds a zero: `(..., k)` uint8 to `(...)` bool."""
    words = _words(rows, fill=1)
    zeros = words - _ONES_8  # borrows into the high bit of a byte that is 0
    zeros &= ~words
    zeros &= _HIGH_BITS
    return np.not_equal(_reduce_words(np.bitwise_or, zeros), 0)


def _reduce_words(operation: np.ufunc, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Reduce each row to one word; numpy's own reduction is slow on rows of a few words."""
    return functools.reduce(operation, np.moveaxis(words, -1, 0))


def _words(rows: _Bytes, *, fill: int) -> npt.NDArray[np.uint64]:
    """Return rows as words, `(..., words)`, filled up to a multiple of eight bytes with `fill`."""
    missing = -rows.shape[-1] % _WORD
    if missing:
        rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)], constant_values=fill)
    return np.ascontiguousarray(rows).view(np.uint64)


_CHECKED_ROWS: Final = 4096
"""Tokens whose rows are summed at once, to save memory."""
_ROUNDED: Final = 0.02
"""How far a row's sum may be from 1, having been rounded to float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCodec(RowsCodec):
    """Every column of every row; rows are padded to `max_length` columns."""

    @property
    def parameters(self) -> DenseParameters:
        """The parameters of this codec in the manifest."""
        return DenseParameters()

    @property
    def is_unbiased(self) -> bool:
        """True: the stored row is the teacher's row, up to rounding."""
        return True

    def encode_relation(
        self,
        probs: Float[Tensor, "batch heads query key"],
        kind: RelationKind,
        *,
        sequences: Sequence[int],
        lengths: Int[Tensor, " batch"],
    ) -> Rows:
        """Return `probability`, `(batch, length, heads, max_length)` float16; nothing is drawn."""
        del kind, sequences, lengths
        padded = torch.nn.functional.pad(probs.half(), (0, self.max_length - probs.shape[-1]))
        return {"probability": padded.transpose(1, 2)}

    def check_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for values that are no probabilities, or rows that do not sum to 1."""
        least, greatest = rows["probability"].aminmax()
        if not (float(least) >= 0 and float(greatest) <= 1):  # so that NaN fails, too
            raise CacheCorruptError(f"a stored row holds a value that is not a probability. {NOT_OURS}")
        seen = seen_tokens(lengths) if self.is_causal else lengths
        columns = torch.arange(self.max_length)
        for part, most in zip(
            rows["probability"].split(_CHECKED_ROWS), seen.split(_CHECKED_ROWS), strict=True
        ):
            shown = part.float().masked_fill(columns >= most[:, None, None], 0)
            if float((shown.sum(-1) - 1).abs().max()) > _ROUNDED:
                raise CacheCorruptError(f"a stored row of probabilities does not sum to 1. {NOT_OURS}")

    def decode_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> DenseRows:
        """Return the rows as float32, cut to the batch's padded length."""
        probability = rows["probability"][..., : rows["probability"].shape[1]].transpose(1, 2).float()
        valid = torch.arange(probability.shape[-1], device=lengths.device) < lengths[:, None]
        probability = probability.where(valid[:, None, :, None], 0)
        # A student has no score where a causal row sees nothing, so a stranger's row must hold nothing there.
        return DenseRows(probability.tril() if self.is_causal else probability, self.is_causal)
