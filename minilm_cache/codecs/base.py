"""The contract of all codecs.

A codec stores one part of a teacher's output for a batch of sequences: the relations of a layer, or the
states of a cache. It is a frozen object that `build.py` makes from a manifest and fitted codes.

1. `paths(everything)` returns the paths of the arrays that `encode` writes, each `(batch, length, ...)`.
2. The encoding of a sequence does not depend on its batch: random draws depend on its number alone.
3. `decode` is the inverse of `encode` up to the error that the class documents, and ignores positions beyond
   a sequence's length.
4. `check` refuses rows that `encode` never writes. `decode` relies on it: whoever reads rows checks them
   first, on the CPU, where no device has to be waited for.
5. `encode` and `decode` never wait for the device that they compute on.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.relations.scores import LayerRelations, RowTargets, WantedRelations
from minilm_cache.storage_schema.identity import RelationKind

NOT_OURS = "It was not written by `minilm-cache dump`: dump the cache again, or get it again from its author."
"""What a user can do about rows that no codec writes: the end of error messages."""
Rows = Mapping[str, Tensor]
"""Encoded rows, on the device of the content: the path of each array, and its values `(batch, length, ...)`,
or `(batch, 1, ...)` where a sequence has one row."""
Content_contra = TypeVar("Content_contra", contravariant=True)
Wanted = TypeVar("Wanted")
Decoded_co = TypeVar("Decoded_co", covariant=True)


@runtime_checkable
class Codec(Protocol[Content_contra, Wanted, Decoded_co]):
    """One way to store a part of a teacher's output. See the rules at the top of this module."""

    @property
    def everything(self) -> Wanted:
        """A request for everything that is stored."""
        ...

    def paths(self, wanted: Wanted) -> tuple[str, ...]:
        """Return the paths of the arrays that `wanted` is decoded from."""
        ...

    def encode(
        self, content: Content_contra, sequences: Sequence[int], *, lengths: Int[Tensor, " batch"]
    ) -> Rows:
        """Encode a padded batch.

        Args:
            content: the teacher's output for the batch.
            sequences: numbers of the sequences in the cache; they seed the random draws.
            lengths: valid positions of each sequence, on the CPU.

        Returns:
            Path of each array to its rows, on the device of `content`.
        """
        ...

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Check rows without decoding them.

        Args:
            rows: path of an array to `(tokens, ...)`, on the CPU, for all that is stored or some of it.
            lengths: for each token, the number of tokens of its sequence; sequences are whole.

        Raises:
            CacheCorruptError: values that `encode` never writes.
        """
        ...

    def decode(
        self, rows: Mapping[str, Tensor], wanted: Wanted, *, lengths: Int[Tensor, " batch"]
    ) -> Decoded_co:
        """Decode the requested part of rows that have been checked, on their device.

        Args:
            rows: path of an array to `(batch, length, ...)`; positions beyond a sequence's length are
                ignored.
            wanted: what to decode.
            lengths: valid positions of each sequence, on the same device.
        """
        ...

    def to(self, device: torch.device) -> "Codec[Content_contra, Wanted, Decoded_co]":
        """Return the same codec with its constants on a device."""
        ...


@runtime_checkable
class RelationCodec(Codec[LayerRelations, WantedRelations, dict[RelationKind, RowTargets]], Protocol):
    """A codec of the relations of one layer."""

    def to(self, device: torch.device) -> "RelationCodec":
        """Return the same codec with its constants on a device."""
        ...

    @property
    def is_unbiased(self) -> bool:
        """Whether the expected stored row is the teacher's row, so that losses estimate the true KL."""
        ...
