"""The arrays and sequence tables of a cache, as pure functions of what it holds."""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from minilm_cache.storage_schema.documents import ShardRange
from minilm_cache.storage_schema.identity import CacheIdentity, DenseParameters, RelationKind, TopKParameters
from minilm_cache.storage_schema.manifest import Calibration, LayerCalibration, StateCalibration, layer_folder
from minilm_cache.storage_schema.states import (
    INDEX_PATH,
    LOGITS_PATH,
    POOLED,
    READ_PATH,
    WEIGHT_PATH,
    SignalName,
    StateFamily,
    StatesIdentity,
    reading_path,
)

DType = Literal["uint8", "uint16", "uint32", "int16", "float16", "float32"]
ITEM_BYTES: Final[dict[DType, int]] = {
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "int16": 2,
    "float16": 2,
    "float32": 4,
}

INNER_CHUNK_BYTES: Final = 2**18
"""Least decoded size of an inner chunk: zarr-python spends about 64 us on each, whatever its size."""
PCODEC_ROWS: Final = 2**13
"""Rows of an inner chunk with `pcodec`, unless the shard has fewer."""

NEVER_WRITTEN: Final = 255
"""Fill value of uint8 arrays; no finished shard holds it as the code of a weight."""
MAX_ONE_BYTE_LENGTH: Final = 2**8
"""Longest sequence whose columns fit one byte; for longer ones the high byte is stored in a second array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array. Axis 0 has a row per token or sequence, and includes the slack at the end of each shard."""

    path: str
    """Name below the root group, `/` between groups."""
    dtype: DType
    row_shape: tuple[int, ...]
    """Shape of one row: all axes but axis 0."""
    dimension_names: tuple[str, ...]
    fill_value: int | str
    """Marks rows that were never written: no finished shard holds this value for a token."""
    meaning: str
    compressor: Literal["zstd", "pcodec"] = "zstd"
    """`pcodec` compresses a chunk component by component."""
    by_sequence: bool = False
    """True: a shard's first rows belong to its sequences, one row each, and the rest is slack."""

    @property
    def row_bytes(self) -> int:
        """Decoded bytes of one row."""
        return math.prod(self.row_shape) * ITEM_BYTES[self.dtype]

    def chunk_tokens(self, shard_tokens: int) -> int:
        """Return the rows of an inner chunk: a power of two, at most `shard_tokens`.

        With zstd it is the smallest number that makes 256 KiB. With pcodec it is 8192, so many that each
        component is compressed separately.
        """
        if self.compressor == "pcodec":
            return min(PCODEC_ROWS, shard_tokens)
        rows = 1
        while rows * self.row_bytes < INNER_CHUNK_BYTES and rows < shard_tokens:
            rows *= 2
        return rows

    def num_rows(self, shard: ShardRange) -> int:
        """Return the number of a shard's rows, without slack."""
        return shard.num_sequences if self.by_sequence else shard.num_tokens

    def shard_path(self, shard: int) -> str:
        """Return the path of a shard's file below the cache's root."""
        return "/".join([self.path, "c", str(shard), *("0" for _ in self.row_shape)])


def token_dtype(vocab_size: int) -> DType:
    """Return the smallest dtype that holds every token id and a fill value that is not a token id."""
    return "uint16" if vocab_size < 2**16 else "uint32"


def not_chosen(vocab_size: int) -> int:
    """Return what `labels/read` holds for an unchosen token: neither a token id nor the fill value."""
    greatest: int = 2 ** (8 * ITEM_BYTES[_read_dtype(vocab_size)]) - 1
    return greatest - 1


def _read_dtype(vocab_size: int) -> DType:
    return token_dtype(vocab_size + 1)


def array_specs(identity: CacheIdentity, calibration: Calibration | None = None) -> tuple[ArraySpec, ...]:
    """Return every array of a cache with a row per token, in writing order.

    `calibration` None leaves out the arrays of codes.
    """
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
    specs.extend(
        _codes_spec(codes_path(fitted.layer), fitted.components, "queries, keys and values are")
        for fitted in (calibration.layers if calibration is not None else ())
    )
    for kind in identity.relations:
        specs.extend(_relation_specs(identity, kind))
    if identity.states is not None:
        specs.extend(_state_specs(identity, identity.states, calibration))
    return tuple(specs)


def _codes_spec(path: str, components: int, what: str) -> ArraySpec:
    return ArraySpec(
        path=path,
        dtype="int16",
        row_shape=(components,),
        dimension_names=("token", "component"),
        fill_value=-(2**15),
        meaning=f"the token's {what} mean + (codes * step) @ basis",
        compressor="pcodec",
    )


def _state_codes_spec(fitted: StateCalibration) -> ArraySpec:
    path = state_codes_path(fitted.name)
    if fitted.name != POOLED:
        return _codes_spec(path, fitted.components, "hidden state is")
    return replace(
        _codes_spec(path, fitted.components, ""),
        dimension_names=("sequence", "component"),
        meaning="a shard's n-th row is its n-th sequence's pooled vector: mean + (codes * step) @ basis",
        by_sequence=True,
    )


def _state_specs(
    identity: CacheIdentity, states: StatesIdentity, calibration: Calibration | None
) -> list[ArraySpec]:
    vocab_size, width = identity.teacher.vocab_size, identity.teacher.hidden_size
    of_first = "of the sequence's first token; 0 at every other"
    specs = [_state_codes_spec(fitted) for fitted in (calibration.states if calibration is not None else ())]
    specs += [
        ArraySpec(
            path=SignalName(StateFamily.FIRST, number).folder,
            dtype="float16",
            row_shape=(width,),
            dimension_names=("token", "hidden"),
            fill_value="NaN",
            meaning=f"hidden state {of_first}",
        )
        for number in states.first
    ]
    if states.masking is not None:
        read = _read_dtype(vocab_size)
        meaning = "token id that a chosen token was read as; the greatest but one of its dtype: not chosen"
        specs.append(_label_array(READ_PATH, read, entries=None, meaning=meaning))
    if states.labels is not None:
        tokens, k = token_dtype(vocab_size), states.labels.k
        none = "" if states.labels.tokens == "all" else "; 0 where not chosen"
        specs.append(_label_array(INDEX_PATH, tokens, entries=k, meaning=f"token id of the entry{none}"))
        specs.append(
            _label_array(WEIGHT_PATH, "uint8", entries=k, meaning=f"code of the entry's weight{none}")
        )
    if states.num_classes is not None:
        specs.append(
            ArraySpec(
                path=LOGITS_PATH,
                dtype="float32",
                row_shape=(states.num_classes,),
                dimension_names=("token", "class"),
                fill_value="NaN",
                meaning=f"logits of the sequence, at the row {of_first}",
            )
        )
    specs += [
        ArraySpec(
            path=other.as_name.folder,
            dtype=other.dtype,
            row_shape=(other.width,),
            dimension_names=(other.axis, "number"),
            fill_value="NaN",
            meaning=f"signal {other.name} of each {other.axis}",
            by_sequence=other.axis == "sequence",
        )
        for other in states.others
    ]
    masked = [spec for spec in specs if spec.path in masked_paths(states)]
    return specs + [
        replace(spec, path=reading_path(spec.path, reading))
        for reading in range(1, states.num_readings)
        for spec in masked
    ]


def masked_paths(states: StatesIdentity) -> frozenset[str]:
    """Return the paths of the first masked reading's arrays; every further reading has arrays of its own."""
    labels = (INDEX_PATH, WEIGHT_PATH) if states.labels is not None else ()
    read = (READ_PATH,) if states.masking is not None else ()
    hidden = (state_codes_path(SignalName(StateFamily.MASKED, number)) for number in states.masked_hidden)
    return frozenset([*read, *labels, *hidden])


def _label_array(path: str, dtype: DType, *, entries: int | None, meaning: str) -> ArraySpec:
    return ArraySpec(
        path=path,
        dtype=dtype,
        row_shape=() if entries is None else (entries,),
        dimension_names=("token",) if entries is None else ("token", "entry"),
        fill_value=2 ** (8 * ITEM_BYTES[dtype]) - 1,
        meaning=meaning,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallArray:
    """An array of a single uncompressed chunk, which applies to all tokens."""

    folder: str
    """Path of the group that contains it."""
    name: str
    dtype: DType
    shape: tuple[int, ...]
    dimension_names: tuple[str, ...]
    meaning: str

    @property
    def path(self) -> str:
        """Path below the root group."""
        return f"{self.folder}/{self.name}"

    @property
    def chunk_path(self) -> str:
        """Path of its single chunk below the cache's root."""
        return "/".join([self.path, "c", *("0" for _ in self.shape)])


def codes_path(layer: int) -> str:
    """Return the path of a layer's codes (codec `vectors`)."""
    return f"{layer_folder(layer)}/codes"


def state_codes_path(name: SignalName) -> str:
    """Return the path of the codes of a hidden state of every token."""
    return f"{name.folder}/codes"


def small_arrays(identity: CacheIdentity, fitted: LayerCalibration) -> tuple[SmallArray, ...]:
    """Return the arrays with which codec `vectors` encodes and decodes a layer."""
    width = 3 * identity.relation_heads * fitted.head_size
    what = "queries, keys and values, head by head"
    return _code_arrays(layer_folder(fitted.layer), fitted.components, width=width, what=what)


def state_small_arrays(identity: CacheIdentity, fitted: StateCalibration) -> tuple[SmallArray, ...]:
    """Return the arrays with which a hidden state of every token is encoded and decoded."""
    width, what = identity.teacher.hidden_size, "hidden states"
    if fitted.name == POOLED and identity.states is not None and identity.states.pooled:
        width, what = identity.states.pooled.width, "pooled vectors"
    return _code_arrays(fitted.name.folder, fitted.components, width=width, what=what)


def all_small_arrays(identity: CacheIdentity, calibration: Calibration | None) -> tuple[SmallArray, ...]:
    """Return every array that applies to all tokens; empty if `calibration` is None."""
    if calibration is None:
        return ()
    arrays = [small for fitted in calibration.layers for small in small_arrays(identity, fitted)]
    arrays += [small for fitted in calibration.states for small in state_small_arrays(identity, fitted)]
    return tuple(arrays)


def _code_arrays(folder: str, components: int, *, width: int, what: str) -> tuple[SmallArray, ...]:
    names, shape = ("component", "vector"), (components, width)
    table: tuple[tuple[str, DType, tuple[str, ...], tuple[int, ...], str], ...] = (
        ("basis", "float16", names, shape, "direction of each component, greatest entry 1"),
        ("step", "float32", names[:1], shape[:1], "length of one step along each direction"),
        (
            "analysis",
            "float16",
            names,
            shape,
            "for writers: a token's components, in steps, are gain * (analysis @ (vectors - mean))",
        ),
        ("gain", "float32", names[:1], shape[:1], "for writers: see analysis"),
        ("mean", "float32", names[1:], shape[1:], f"mean of {what}"),
    )
    return tuple(
        SmallArray(folder=folder, name=name, dtype=dtype, shape=size, dimension_names=axes, meaning=meaning)
        for name, dtype, axes, size, meaning in table
    )


def relation_path(kind: RelationKind, name: str) -> str:
    """Return the path of one array of a relation."""
    return f"relations/{kind}/{name}"


def relation_arrays(codec: TopKParameters | DenseParameters, max_length: int) -> tuple[str, ...]:
    """Return the names of a relation's arrays."""
    if isinstance(codec, DenseParameters):
        return ("probability",)
    high = ("gap_high",) if max_length > MAX_ONE_BYTE_LENGTH else ()
    return ("gap", *high, "weight")


_MEANINGS: Final = {
    "gap": "low byte of the column of the entry minus that of the entry before; of the first its column",
    "gap_high": "high byte of the same",
    "weight": "code of the entry's weight",
    "probability": "probability of each column of the token's row; 0 beyond the sequence's length",
}


def _relation_specs(identity: CacheIdentity, kind: RelationKind) -> list[ArraySpec]:
    codec, heads = identity.codec, identity.relation_heads
    assert isinstance(codec, TopKParameters | DenseParameters)
    dense = isinstance(codec, DenseParameters)
    return [
        ArraySpec(
            path=relation_path(kind, name),
            dtype="float16" if dense else "uint8",
            row_shape=(heads, identity.packing.max_length if isinstance(codec, DenseParameters) else codec.k),
            dimension_names=("token", "head", "column" if dense else "entry"),
            fill_value="NaN" if dense else NEVER_WRITTEN,
            meaning=_MEANINGS[name],
        )
        for name in relation_arrays(codec, identity.packing.max_length)
    ]


ColumnType = Literal["int64", "int32", "float32"]

SEQUENCE_COLUMNS: Final[dict[str, tuple[ColumnType, str]]] = {
    "sequence": ("int64", "number of the sequence in the cache, counted from 0"),
    "offset": ("int64", "row of its first token in every array"),
    "length": ("int32", "tokens, special tokens counted"),
    "document": ("int64", "number in the corpus of the document that its first token is from"),
}


def entropy_column(kind: RelationKind) -> str:
    """Return the name of the float32 column with the teacher's mean row entropy, in nats."""
    return f"entropy_{kind}"


def sequence_columns(relations: tuple[RelationKind, ...]) -> dict[str, ColumnType]:
    """Return the table's columns and their types, in order."""
    columns = {name: kind for name, (kind, _) in SEQUENCE_COLUMNS.items()}
    return columns | {entropy_column(kind): "float32" for kind in relations}
