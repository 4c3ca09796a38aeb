"""Decode the file of one array and shard as untrusted input, and encode it where zarr-python is wrong.

The layout is that of Zarr v3's sharding codec, which any Zarr library opens. But zarr-python fills in inner
chunks that a shard leaves out, and decompresses without a bound. Here a missing chunk is an error, and a
chunk that decodes to more than its size is refused before the memory is allocated.
"""

import io
import math
from typing import Final, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pcodec import ChunkConfig, standalone

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.arrays import ArraySpec
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.metadata import PCODEC_LEVEL
from minilm_cache.storage_schema.sequences import sequence_columns

_CRC_BYTES: Final = 4
_ENTRY_BYTES: Final = 16
"""Bytes of an entry in the index at the end of a shard: offset and size of an inner chunk, uint64 each."""


def encode_table(table: pa.Table, relations: tuple[RelationKind, ...]) -> bytes:
    """Return the file of a shard's sequence table, in the columns and types of the format."""
    fields = sequence_columns(relations).items()
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in fields])
    buffer = io.BytesIO()
    pq.write_table(table.cast(schema), buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def decode_shard(
    content: bytes, spec: ArraySpec, *, shard_tokens: int, num_rows: int
) -> npt.NDArray[np.generic]:
    """Return a shard's rows without its slack, `(num_rows, ...)`, in the memory order of their coding.

    Args:
        content: bytes of the whole file.
        spec: description of the array.
        shard_tokens: rows of a shard, slack included.
        num_rows: number of rows to return, from the first on.

    Raises:
        CacheCorruptError: a chunk is missing, fails its checksum, or has the wrong size.
    """
    chunk_rows = spec.chunk_tokens(shard_tokens)
    index = _read_index(content, shard_tokens // chunk_rows)
    decode = _decode_pcodec if spec.compressor == "pcodec" else _decode_zstd
    # Components that are coded one after the other stay in that order: transposing them here would take as
    # long as decompressing them, and most readers need only a few rows.
    order: Literal["C", "F"] = "F" if spec.compressor == "pcodec" else "C"
    rows = np.empty((num_rows, *spec.row_shape), np.dtype(spec.dtype).newbyteorder("<"), order=order)
    for number, first in enumerate(range(0, num_rows, chunk_rows)):
        part = _checked(_slice(content, *index[number]))
        size = min(chunk_rows, num_rows - first)
        try:
            rows[first : first + size] = decode(part, spec, chunk_rows)[:size]
        except (OSError, RuntimeError, ValueError) as error:
            raise CacheCorruptError(f"an inner chunk cannot be decompressed: {error}") from error
    return rows


def _decode_zstd(part: memoryview, spec: ArraySpec, chunk_rows: int) -> npt.NDArray[np.generic]:
    decoded = pa.Codec("zstd").decompress(part, chunk_rows * spec.row_bytes)
    return np.frombuffer(decoded, np.dtype(spec.dtype).newbyteorder("<")).reshape(-1, *spec.row_shape)


def _decode_pcodec(part: memoryview, spec: ArraySpec, chunk_rows: int) -> npt.NDArray[np.generic]:
    """Decode a chunk whose components are coded one after the other."""
    values = np.empty(chunk_rows * math.prod(spec.row_shape), np.dtype(spec.dtype))
    progress = standalone.simple_decompress_into(bytes(part), values)
    if progress.n_processed != values.size or not progress.finished:
        raise ValueError("it does not decompress to its size")
    return values.reshape(*spec.row_shape, chunk_rows).T


def encode_pcodec_shard(rows: npt.NDArray[np.generic], spec: ArraySpec, shard_tokens: int) -> bytes:
    """Return the file of a shard that is coded component by component; its slack holds the fill value.

    zarr-python 3.1.6 writes such arrays wrongly: numcodecs reads a transposed chunk in memory order, which
    undoes the transposition. It reads them correctly.
    """
    chunk_rows = spec.chunk_tokens(shard_tokens)
    config = ChunkConfig(compression_level=PCODEC_LEVEL)
    body, entries = bytearray(), []
    for first in range(0, shard_tokens, chunk_rows):
        chunk = np.full((chunk_rows, *spec.row_shape), spec.fill_value, dtype=spec.dtype)
        part = rows[first : first + chunk_rows]
        chunk[: len(part)] = part
        coded = _with_checksum(standalone.simple_compress(np.ascontiguousarray(chunk.T).ravel(), config))
        entries.append((len(body), len(coded)))
        body += coded
    return bytes(body) + _with_checksum(np.asarray(entries, "<u8").tobytes())


def _with_checksum(content: bytes) -> bytes:
    return content + int(google_crc32c.value(content)).to_bytes(_CRC_BYTES, "little")


def _read_index(content: bytes, num_chunks: int) -> list[tuple[int, int]]:
    """Return the offset and size, in bytes, of every inner chunk."""
    size = num_chunks * _ENTRY_BYTES + _CRC_BYTES
    if len(content) < size:
        raise CacheCorruptError("the index of its chunks is missing")
    entries = np.frombuffer(_checked(memoryview(content)[-size:]), "<u8").reshape(num_chunks, 2)
    return [(int(offset), int(length)) for offset, length in entries]


def _slice(content: bytes, offset: int, size: int) -> memoryview:
    if offset + size > len(content):  # the index gives a missing chunk the greatest uint64 as offset
        raise CacheCorruptError("an inner chunk is missing")
    return memoryview(content)[offset : offset + size]


def _checked(part: memoryview) -> memoryview:
    """Check the crc32c at the end of `part`, and return the bytes before it."""
    body, stored = part[:-_CRC_BYTES], part[-_CRC_BYTES:]
    if len(stored) < _CRC_BYTES or google_crc32c.value(bytes(body)) != int.from_bytes(stored, "little"):
        raise CacheCorruptError("an inner chunk does not match its crc32c")
    return body
