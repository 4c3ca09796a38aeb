"""The arrays of a cache and their Zarr v3 metadata, as pure functions of what the cache holds.

The metadata documents are written by us, byte for byte, and compared byte for byte before a reader hands
a cache to zarr: a stranger's cache can then name no codec, shape or fill value but these.
"""

import json
import math
from dataclasses import dataclass
from typing import Final, Literal

from minilm_cache.storage_schema.manifest import CacheIdentity, DenseParameters, RelationKind

DType = Literal["uint8", "uint16", "uint32", "float16"]
ITEM_BYTES: Final[dict[DType, int]] = {"uint8": 1, "uint16": 2, "uint32": 4, "float16": 2}

INNER_CHUNK_BYTES: Final = 2**18
"""Least decoded size of an inner chunk: zarr-python spends about 64 us on each, whatever its size."""
ZSTD_LEVEL: Final = 1
"""Measured in benchmarks/compressors.py: higher levels gain under 2 % on these arrays."""

NEVER_WRITTEN: Final = 255
"""Fill value of bytes; no finished shard has it as a weight."""
MAX_ONE_BYTE_LENGTH: Final = 2**8
"""Longest sequence whose columns fit one byte; of longer ones the high byte is an array of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array: axis 0 is one row per token, slack at the end of each shard included."""

    path: str
    """Name below the root group, `/` between groups."""
    dtype: DType
    row_shape: tuple[int, ...]
    """Shape behind axis 0."""
    dimension_names: tuple[str, ...]
    fill_value: int | str
    """Poison: never a value that a finished shard holds for a token."""
    meaning: str

    @property
    def row_bytes(self) -> int:
        """Decoded bytes of one token's row."""
        return math.prod(self.row_shape) * ITEM_BYTES[self.dtype]

    def chunk_tokens(self, shard_tokens: int) -> int:
        """Rows of an inner chunk: the least power of two that makes 256 KiB, at most the shard."""
        rows = 1
        while rows * self.row_bytes < INNER_CHUNK_BYTES and rows < shard_tokens:
            rows *= 2
        return rows

    def shard_path(self, shard: int) -> str:
        """Path of a shard's file below the cache's root."""
        return "/".join([self.path, "c", str(shard), *("0" for _ in self.row_shape)])


def token_dtype(vocab_size: int) -> DType:
    """Return the smallest dtype that holds every token id and the fill value beside them."""
    return "uint16" if vocab_size < 2**16 else "uint32"


def array_specs(identity: CacheIdentity) -> tuple[ArraySpec, ...]:
    """Return every array of a cache, in the order in which they are written."""
    tokens = token_dtype(identity.teacher.vocab_size)
    specs = [
        ArraySpec(
            path="tokens",
            dtype=tokens,
            row_shape=(),
            dimension_names=("token",),
            fill_value=2 ** (8 * ITEM_BYTES[tokens]) - 1,
            meaning="token id",
        )
    ]
    for kind in identity.relations:
        specs.extend(_relation_specs(identity, kind))
    return tuple(specs)


def _relation_specs(identity: CacheIdentity, kind: RelationKind) -> tuple[ArraySpec, ...]:
    heads = identity.relation_heads
    if isinstance(identity.codec, DenseParameters):
        return (
            ArraySpec(
                path=f"relations/{kind}/probability",
                dtype="float16",
                row_shape=(heads, identity.packing.max_length),
                dimension_names=("token", "head", "column"),
                fill_value="NaN",
                meaning="probability of each column of the token's row; 0 beyond the sequence's length",
            ),
        )
    gaps = {
        "gap": "low byte of the column of the entry minus that of the entry before; of the first its column"
    }
    if identity.packing.max_length > MAX_ONE_BYTE_LENGTH:
        gaps["gap_high"] = "high byte of the same"
    return tuple(
        ArraySpec(
            path=f"relations/{kind}/{name}",
            dtype="uint8",
            row_shape=(heads, identity.codec.k),
            dimension_names=("token", "head", "entry"),
            fill_value=NEVER_WRITTEN,
            meaning=meaning,
        )
        for name, meaning in {**gaps, "weight": "code of the entry's weight"}.items()
    )


def zarr_documents(identity: CacheIdentity, num_shards: int, shard_tokens: int) -> dict[str, bytes]:
    """Return every `zarr.json` of a cache: path below the root, exact content."""
    documents = {"zarr.json": _json(_group({"minilm_cache": {"format_version": identity.format_version}}))}
    for spec in array_specs(identity):
        parts = spec.path.split("/")
        for depth in range(1, len(parts)):
            documents["/".join([*parts[:depth], "zarr.json"])] = _json(_group({}))
        documents[f"{spec.path}/zarr.json"] = _json(_array(spec, num_shards, shard_tokens))
    return documents


def _group(attributes: dict[str, object]) -> dict[str, object]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _array(spec: ArraySpec, num_shards: int, shard_tokens: int) -> dict[str, object]:
    to_bytes: dict[str, object] = {"name": "bytes"}
    if ITEM_BYTES[spec.dtype] > 1:
        to_bytes["configuration"] = {"endian": "little"}
    inner = [
        to_bytes,
        {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}},
        {"name": "crc32c"},
    ]
    sharding = {
        "chunk_shape": [spec.chunk_tokens(shard_tokens), *spec.row_shape],
        "codecs": inner,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [num_shards * shard_tokens, *spec.row_shape],
        "data_type": spec.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [shard_tokens, *spec.row_shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": spec.fill_value,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"meaning": spec.meaning},
        "dimension_names": list(spec.dimension_names),
        "storage_transformers": [],
    }


def _json(document: dict[str, object]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()
