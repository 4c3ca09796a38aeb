"""The table of which sequences each shard holds, `index/ranges.parquet`."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.documents import MAX_SHARDS
from minilm_cache.storage_schema.manifest import RANGES, CacheManifest
from minilm_cache.store.checked import READ_REMEDY, open_table, read_checked
from minilm_cache.store.ranges import ShardRanges

_COLUMNS = {"num_sequences": pa.int64(), "num_tokens": pa.int64()}


def encode_ranges(ranges: ShardRanges) -> bytes:
    """Return the table as it is stored: a row per shard, in order."""
    table = pa.table({name: getattr(ranges, name) for name in _COLUMNS}, schema=pa.schema(_COLUMNS.items()))
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
    table = file.read()
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
