"""Relations stored one after the other, row by row: what codecs `topk` and `dense` have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.codecs.base import Rows
from minilm_cache.relations.rows import RowTargets, WantedRelations
from minilm_cache.relations.scores import LayerRelations
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
