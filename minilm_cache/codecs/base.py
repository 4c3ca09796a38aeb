"""The contracts of codecs.

A `RelationCodec` stores the rows of one relation. A `SignalCodec` stores what a teacher says of a batch: one
relation after the other, or the vectors that all relations are computed from.

A codec is a frozen object: `repr` rebuilds it, `parameters` survive JSON and name it in the manifest.
`encode` and `decode` are inverse up to the error that the class states.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.relations.rows import RowTargets
from minilm_cache.relations.scores import TeacherSignal
from minilm_cache.storage_schema.identity import CodecParameters, RelationKind

NOT_OURS = "It was not written by `minilm-cache dump`: dump the cache again, or fetch it from who made it."
"""What to do about rows that no codec writes."""
PART_ENTRIES = 2**21
"""Probabilities that are drawn from at once, 8 MiB: they stay in a processor's cache."""
Rows = Mapping[str, npt.NDArray[np.generic]]
"""Stored rows: name of an array to `(batch, length, ...)`."""


@runtime_checkable
class RelationCodec(Protocol):
    """One way to store a relation's rows."""

    @property
    def parameters(self) -> CodecParameters:
        """What the manifest says of this codec."""
        ...

    @property
    def is_unbiased(self) -> bool:
        """True where the expected stored row is the teacher's row, so that losses estimate the true KL."""
        ...

    def encode(
        self,
        probs: Float[Tensor, "batch heads query key"],
        kind: RelationKind,
        sequences: Sequence[int],
        lengths: Int[Tensor, " batch"],
    ) -> Rows:
        """Return the stored rows of one relation.

        Args:
            probs: the teacher's relation; columns beyond a sequence's length are 0.
            kind: which relation; with `sequences` it seeds what is drawn.
            sequences: numbers of the sequences in the cache.
            lengths: valid positions of each sequence.
        """
        ...

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Look at rows without decoding them.

        Args:
            rows: array name to `(tokens, ...)`.
            lengths: for each token, the tokens of its sequence.

        Raises:
            CacheCorruptError: values that `encode` never writes.
        """
        ...

    def decode(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> RowTargets:
        """Return the rows as targets, on the device that `rows` are on.

        Args:
            rows: array name to `(batch, length, heads, ...)`; whatever stands beyond a sequence's length
                is ignored.
            lengths: valid positions of each sequence.

        Raises:
            CacheCorruptError: values that `encode` never writes.
        """
        ...


@runtime_checkable
class SignalCodec(Protocol):
    """One way to store what a teacher says; names of arrays are their paths in the cache."""

    @property
    def is_unbiased(self) -> bool:
        """True where the expected stored row is the teacher's row, so that losses estimate the true KL."""
        ...

    @property
    def kinds(self) -> tuple[RelationKind, ...]:
        """Relations that can be decoded."""
        ...

    def paths(self, kinds: Sequence[RelationKind]) -> tuple[str, ...]:
        """Return the arrays that these relations are decoded from."""
        ...

    def encode(self, signal: TeacherSignal, sequences: Sequence[int]) -> Rows:
        """Return what is stored of a padded batch.

        Args:
            signal: what the teacher says.
            sequences: numbers of the sequences in the cache; they seed what is drawn.
        """
        ...

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Look at rows without decoding them.

        Args:
            rows: path of an array to `(tokens, ...)`.
            lengths: for each token, the tokens of its sequence.

        Raises:
            CacheCorruptError: values that `encode` never writes.
        """
        ...

    def decode(
        self,
        rows: Mapping[str, Tensor],
        kinds: Sequence[RelationKind],
        lengths: Int[Tensor, " batch"],
        relation_heads: int | None = None,
    ) -> dict[RelationKind, RowTargets]:
        """Return relations as targets, on the device that `rows` are on.

        Args:
            rows: path of an array to `(batch, length, ...)`; whatever stands beyond a sequence's length is
                ignored.
            kinds: relations wanted.
            lengths: valid positions of each sequence.
            relation_heads: heads to split vectors into; none: those of the teacher's attention.

        Raises:
            CacheCorruptError: values that `encode` never writes.
        """
        ...
