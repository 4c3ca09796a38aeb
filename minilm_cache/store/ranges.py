"""Which sequences each shard and each segment of a cache holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from minilm_cache.storage_schema.documents import ShardRange
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.layout import segment_tokens


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


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a cache: segment `i` of shard `s` has the number `s * per_shard + i`."""

    ranges: ShardRanges
    """Sequences of each shard."""
    per_shard: int
    """Segments of a shard. Their numbers of sequences differ by one at most, and may be 0."""

    @classmethod
    def of(cls, manifest: CacheManifest, ranges: ShardRanges) -> "Segments":
        """Return the segments of a cache."""
        tokens = segment_tokens(manifest.identity, manifest.calibration)
        return cls(ranges, -(-manifest.shard_tokens // tokens))

    def of_shard(self, shard: int) -> range:
        """Return the numbers of a shard's segments."""
        return range(shard * self.per_shard, (shard + 1) * self.per_shard)

    def shard_of(self, number: int) -> int:
        """Return the number of the shard that a segment is cut from."""
        return number // self.per_shard

    def sequences(self, number: int) -> range:
        """Return the numbers of a segment's sequences."""
        shard, place = divmod(number, self.per_shard)
        first, count = int(self.ranges.first_sequences[shard]), int(self.ranges.num_sequences[shard])
        return range(first + count * place // self.per_shard, first + count * (place + 1) // self.per_shard)

    def segment_of(self, sequence: int) -> int:
        """Return the number of the segment that holds a sequence."""
        shard = self.ranges.shard_of(sequence)
        place = sequence - int(self.ranges.first_sequences[shard])
        count = int(self.ranges.num_sequences[shard])
        # The greatest segment whose first sequence, count * segment // per_shard, is at most `place`.
        return shard * self.per_shard + ((place + 1) * self.per_shard - 1) // count

    def mean_tokens(self, number: int) -> int:
        """Return the tokens that segments of the same shard have on average."""
        return max(1, int(self.ranges.num_tokens[self.shard_of(number)]) // self.per_shard)
