"""Segments: what of a shard is in memory at once, when it is written and when it is read.

Shards of large corpora are large, so that there are not too many of them. So a shard is cut into segments of
consecutive sequences, each about as large as a shard of a small corpus, which is a single segment. The format
knows nothing of segments: they follow from the manifest and the ranges of the shards.
"""

from dataclasses import dataclass

from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.layout import segment_tokens
from minilm_cache.store.ranges import ShardRanges


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
