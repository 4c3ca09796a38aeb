"""Zarr v3 metadata of a cache's arrays, as a pure function of what the cache holds.

This project writes the documents byte for byte, and compares them byte for byte before a reader hands a cache
to zarr. So an untrusted cache cannot name any other codec, shape or fill value.
"""

import json
from collections.abc import Sequence
from typing import Final

from minilm_cache.storage_schema.arrays import (
    ITEM_BYTES,
    ArraySpec,
    DType,
    SmallArray,
    all_small_arrays,
    array_specs,
)
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import Calibration

PCODEC_LEVEL: Final = 8
ZSTD_LEVEL: Final = 1
"""Measured in benchmarks/compressors.py: higher levels gain under 2 % on these arrays."""


def zarr_documents(
    identity: CacheIdentity, calibration: Calibration | None, *, num_shards: int, shard_tokens: int
) -> dict[str, bytes]:
    """Return every `zarr.json` of a cache: path below the root to exact content."""
    documents = {"zarr.json": _json(_group({"minilm_cache": {"format_version": identity.format_version}}))}
    for small in all_small_arrays(identity, calibration):
        documents[f"{small.path}/zarr.json"] = _json(
            _array(small, small.shape, small.shape, codec=_to_bytes(small.dtype), fill_value="NaN")
        )
    for spec in array_specs(identity, calibration):
        parts = spec.path.split("/")
        for depth in range(1, len(parts)):
            documents["/".join([*parts[:depth], "zarr.json"])] = _json(_group({}))
        documents[f"{spec.path}/zarr.json"] = _json(_large_array(spec, num_shards, shard_tokens))
    return documents


def _group(attributes: dict[str, object]) -> dict[str, object]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _large_array(spec: ArraySpec, num_shards: int, shard_tokens: int) -> dict[str, object]:
    if spec.compressor == "pcodec":
        inner: list[dict[str, object]] = [
            {"name": "transpose", "configuration": {"order": [1, 0]}},
            {"name": "numcodecs.pcodec", "configuration": {"level": PCODEC_LEVEL}},
            {"name": "crc32c"},
        ]
    else:
        inner = [
            _to_bytes(spec.dtype),
            {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}},
            {"name": "crc32c"},
        ]
    sharding = {
        "chunk_shape": [spec.chunk_tokens(shard_tokens), *spec.row_shape],
        "codecs": inner,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    codec: dict[str, object] = {"name": "sharding_indexed", "configuration": sharding}
    shape, chunk = ([tokens, *spec.row_shape] for tokens in (num_shards * shard_tokens, shard_tokens))
    return _array(spec, shape, chunk, codec=codec, fill_value=spec.fill_value)


def _array(
    array: ArraySpec | SmallArray,
    shape: Sequence[int],
    chunk: Sequence[int],
    *,
    codec: dict[str, object],
    fill_value: int | str,
) -> dict[str, object]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": [codec],
        "attributes": {"meaning": array.meaning},
        "dimension_names": list(array.dimension_names),
        "storage_transformers": [],
    }


def _to_bytes(dtype: DType) -> dict[str, object]:
    if ITEM_BYTES[dtype] == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _json(document: dict[str, object]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()
