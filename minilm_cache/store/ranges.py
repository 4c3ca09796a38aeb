"""Which sequences each shard holds: a table of its own, since a large cache has many shards."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.documents import MAX_SHARDS, ShardRange
from minilm_cache.storage_schema.manifest import RANGES, CacheManifest
from minilm_cache.store.checked import READ_REMEDY, not_a_table, open_table, read_checked

_COLUMNS = {"num_sequences": pa.int64(), "num_tokens": pa.int64()}


class ShardRanges:
    """Sequences and tokens of every shard, by number. Shards follow each other without gap or overlap."""

    def __init__(self, num_sequences: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]) -> None:
        """Wrap the numbers of sequences and tokens of each shard, both `(shards,)`."""
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.first_sequences: npt.NDArray[np.int64] = np.cumsum(num_sequences) - num_sequences
        """Number in the cache of each shard's first sequence, `(shards,)`."""

    @classmethod
    def split(cls, lengths: npt.NDArray[np.int64], shard_tokens: int) -> "ShardRanges":
        """Split sequences into shards: each shard is filled with whole sequences, in order.

        Args:
            lengths: tokens of each sequence, `(sequences,)`, each at most `shard_tokens`.
            shard_tokens: rows of a shard.
        """
        ends = np.cumsum(lengths)
        firsts, tokens = [0], []
        taken = 0
        while firsts[-1] < len(lengths):
            last = int(np.searchsorted(ends, taken + shard_tokens, side="right"))
            tokens.append(int(ends[last - 1]) - taken)
            firsts.append(last)
            taken = int(ends[last - 1])
        ends_at = np.asarray(firsts, dtype=np.int64)
        return cls(ends_at[1:] - ends_at[:-1], np.asarray(tokens, dtype=np.int64))

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

    def to_parquet(self) -> bytes:
        """Return the table as it is stored: a row per shard, in order."""
        table = pa.table({name: getattr(self, name) for name in _COLUMNS}, schema=pa.schema(_COLUMNS.items()))
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        return buffer.getvalue()


def read_ranges(root: Path, manifest: CacheManifest) -> ShardRanges:
    """Read which sequences each shard of a cache holds.

    Raises:
        CacheCorruptError: the table is damaged, or its shards are not those of the manifest.
    """
    if manifest.shards:
        sequences = np.asarray([shard.num_sequences for shard in manifest.shards], dtype=np.int64)
        tokens = np.asarray([shard.num_tokens for shard in manifest.shards], dtype=np.int64)
        return ShardRanges(sequences, tokens)
    content = read_checked(root, RANGES, manifest.files.get(RANGES))
    allowed = range(1, min(manifest.num_sequences, MAX_SHARDS) + 1)
    file = open_table(content, _COLUMNS, num_rows=allowed, where=root / RANGES)
    try:
        table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise not_a_table(root / RANGES, error) from error
    if any(column.null_count for column in table.columns):
        raise CacheCorruptError(f"{root / RANGES} leaves out numbers. {READ_REMEDY}")
    ranges = ShardRanges(*(column.to_numpy() for column in table.columns))
    _check(ranges, manifest, root / RANGES)
    return ranges


def _check(ranges: ShardRanges, manifest: CacheManifest, where: Path) -> None:
    sequences, tokens = ranges.num_sequences, ranges.num_tokens
    fits = (
        bool((sequences >= 1).all() and (sequences <= tokens).all())
        and int(tokens.max()) <= manifest.shard_tokens
        # Neither sum can overflow: tokens are at most 2**26 in each of at most 2**24 shards.
        and int(sequences.sum()) == manifest.num_sequences
        and int(tokens.sum()) == manifest.num_tokens
    )
    if not fits:
        raise CacheCorruptError(f"{where} does not describe the shards of the manifest. {READ_REMEDY}")
