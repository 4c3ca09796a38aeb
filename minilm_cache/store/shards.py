"""Decode the file of one array and shard, read as hostile input.

The layout is Zarr v3's sharding codec, and any Zarr library opens it. But zarr-python fills in inner chunks
that a shard leaves out, and decompresses without a bound; here a chunk that is missing is an error, and one
that decodes to more than its size is refused before the memory is taken.
"""

from typing import Final

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.arrays import ArraySpec

_CRC_BYTES: Final = 4
_ENTRY_BYTES: Final = 16
"""Of the index at the end of a shard: offset and size of an inner chunk, uint64 each."""


def decode_shard(
    content: bytes, spec: ArraySpec, shard_tokens: int, num_tokens: int
) -> npt.NDArray[np.generic]:
    """Return a shard's rows without its slack, `(num_tokens, ...)`.

    Args:
        content: the whole file.
        spec: the array.
        shard_tokens: rows of a shard.
        num_tokens: rows wanted, from the first on.

    Raises:
        CacheCorruptError: a chunk is missing, fails its checksum, or is not of its size.
    """
    chunk_rows = spec.chunk_tokens(shard_tokens)
    index = _read_index(content, shard_tokens // chunk_rows)
    codec = pa.Codec("zstd")
    rows = np.empty((num_tokens, *spec.row_shape), dtype=np.dtype(spec.dtype).newbyteorder("<"))
    for number, first in enumerate(range(0, num_tokens, chunk_rows)):
        part = _checked(_slice(content, *index[number]))
        try:
            decoded = codec.decompress(part, chunk_rows * spec.row_bytes, asbytes=True)
        except OSError as error:
            raise CacheCorruptError(f"an inner chunk cannot be decompressed: {error}") from error
        wanted = min(chunk_rows, num_tokens - first)
        rows[first : first + wanted] = np.frombuffer(decoded, rows.dtype).reshape(-1, *spec.row_shape)[
            :wanted
        ]
    return rows


def _read_index(content: bytes, num_chunks: int) -> list[tuple[int, int]]:
    """Return offset and size of every inner chunk."""
    size = num_chunks * _ENTRY_BYTES + _CRC_BYTES
    if len(content) < size:
        raise CacheCorruptError("the index of its chunks is missing")
    entries = np.frombuffer(_checked(memoryview(content)[-size:]), "<u8").reshape(num_chunks, 2)
    return [(int(offset), int(length)) for offset, length in entries]


def _slice(content: bytes, offset: int, size: int) -> memoryview:
    if offset + size > len(content):  # a missing chunk has the greatest offset there is
        raise CacheCorruptError("an inner chunk is missing")
    return memoryview(content)[offset : offset + size]


def _checked(part: memoryview) -> memoryview:
    """Return bytes without the crc32c behind them."""
    body, stored = part[:-_CRC_BYTES], part[-_CRC_BYTES:]
    if len(stored) < _CRC_BYTES or google_crc32c.value(bytes(body)) != int.from_bytes(stored, "little"):
        raise CacheCorruptError("an inner chunk does not match its crc32c")
    return body
