"""The contract of a codec.

A codec is a frozen object: `repr` rebuilds it, `parameters` survive JSON and name it in the manifest.
`encode` and `decode` are inverse up to the error that the class states.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.relations import RowTargets
from minilm_cache.storage_schema.manifest import CodecParameters, RelationKind

Rows = Mapping[str, npt.NDArray[np.generic]]
"""Stored rows of one relation: array name (`gap`, `weight`, ...) to `(batch, length, heads, ...)`."""


@runtime_checkable
class Codec(Protocol):
    """One way to store relations."""

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
