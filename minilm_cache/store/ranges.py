"""Which sequences each shard holds, as arrays, since a large cache has many shards."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from minilm_cache.storage_schema.documents import ShardRange


@runtime_checkable
class SequenceEnds(Protocol):
    """Sequences in order, and where each ends; nothing is held for each one, since they may be milliards."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        ...

    def tokens_before(self, number: int) -> int:
        """Return the number of tokens of the first `number` sequences."""
        ...

    def sequences_within(self, num_tokens: int) -> int:
        """Return the greatest number of first sequences that have at most `num_tokens` tokens together."""
        ...


class ShardRanges:
    """Sequences and tokens of every shard, by number. Shards follow each other without gap or overlap."""

    def __init__(self, num_sequences: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]) -> None:
        """Wrap the numbers of sequences and tokens of each shard, both `(shards,)`."""
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.first_sequences: npt.NDArray[np.int64] = np.cumsum(num_sequences) - num_sequences
        """Number in the cache of each shard's first sequence, `(shards,)`."""

    @classmethod
    def split(cls, sequences: SequenceEnds, shard_tokens: int) -> "ShardRanges":
        """Split sequences into shards: each shard is filled with whole sequences, in order.

        Args:
            sequences: sequences, of at most `shard_tokens` tokens each.
            shard_tokens: rows of a shard.
        """
        lasts, ends = [0], [0]
        while lasts[-1] < sequences.num_sequences:
            lasts.append(sequences.sequences_within(ends[-1] + shard_tokens))
            ends.append(sequences.tokens_before(lasts[-1]))
        bounds = np.asarray([lasts, ends], dtype=np.int64)
        return cls(*(bounds[:, 1:] - bounds[:, :-1]))

    def __len__(self) -> int:
        """Return the number of shards, committed or not."""
        return len(self.num_sequences)

    def __getitem__(self, shard: int) -> ShardRange:
        """Return the range of a shard."""
        return ShardRange(
            first_sequence=int(self.first_sequences[shard]),
            num_sequences=int(self.num_sequences[shard]),
            num_tokens=int(self.num_tokens[shard]),
        )

    def __iter__(self) -> Iterator[ShardRange]:
        """Yield the range of every shard, in order."""
        return (self[shard] for shard in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether the same sequences are in the same shards."""
        return (
            isinstance(other, ShardRanges)
            and np.array_equal(self.num_sequences, other.num_sequences)
            and np.array_equal(self.num_tokens, other.num_tokens)
        )

    __hash__ = None  # type: ignore[assignment]

    def shard_of(self, sequence: int) -> int:
        """Return the number of the shard that holds a sequence."""
        return int(np.searchsorted(self.first_sequences, sequence, side="right")) - 1
