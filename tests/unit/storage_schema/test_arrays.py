"""The arrays of a cache: where they lie, how large they are, and that nothing stored is their fill value."""

import math
from dataclasses import FrozenInstanceError
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from minilm_cache.storage_schema.arrays import (
    INNER_CHUNK_BYTES,
    ITEM_BYTES,
    PCODEC_ROWS,
    ArraySpec,
    DType,
    SmallArray,
    all_small_arrays,
    array_specs,
    codes_path,
    masked_paths,
    not_chosen,
    relation_arrays,
    relation_path,
    small_arrays,
    state_codes_path,
    state_small_arrays,
    token_dtype,
)
from minilm_cache.storage_schema.documents import RelativePath
from minilm_cache.storage_schema.identity import CacheIdentity, DenseParameters, RelationKind, TopKParameters
from minilm_cache.storage_schema.manifest import Calibration
from minilm_cache.storage_schema.states import SignalName, StateFamily
from tests.unit.storage_schema.test_base import Content, as_json, with_value, without
from tests.unit.storage_schema.test_identity import DENSE, FULL, LITTLE, OF_VECTORS, PPS, identity_of
from tests.unit.storage_schema.test_states import EVERYTHING, states_of

HEAD_SIZE, HEADS, WIDTH = 8, 4, 32
"""Sizes of a layer's vectors; WIDTH is the size of the teacher's hidden states."""
CALIBRATED_LAYERS = [
    {
        "layer": layer,
        "components": 5 + layer,
        "head_size": HEAD_SIZE,
        "scaling": 0.35,
        "window": None,
        "kl": {"attention": 0.01, "value": 0.02},
    }
    for layer in OF_VECTORS["layers"]
]
CALIBRATED_STATES = [
    {"family": family, "number": number, "components": 20 + number, "error": 0.1}
    for family, number in (("hidden", 0), ("hidden", 3), ("masked", 2))
]
CALIBRATION: Content = {"num_fitted": 8, "num_checked": 2, "layers": [], "states": []}
CASES: dict[str, tuple[Content, Content | None]] = {
    "pps": (LITTLE | {"codec": PPS}, None),
    "long": (with_value(LITTLE, "packing.max_length", 300), None),
    "dense": (LITTLE | {"codec": DENSE, "relations": ["value"]}, None),
    "vectors": (OF_VECTORS, CALIBRATION | {"layers": CALIBRATED_LAYERS}),
    "states": (FULL, CALIBRATION | {"states": CALIBRATED_STATES}),
    "both": (
        OF_VECTORS | {"states": EVERYTHING},
        CALIBRATION | {"layers": CALIBRATED_LAYERS, "states": CALIBRATED_STATES},
    ),
}
READINGS = ("states/masked/2/codes", "labels/read", "labels/index", "labels/weight")
RELATIONS = tuple(f"relations/{kind}/{name}" for kind in ("attention", "value") for name in ("gap", "weight"))


def calibration_of(content: Content) -> Calibration:
    return Calibration.model_validate_json(as_json(content))


def case(name: str) -> tuple[CacheIdentity, Calibration | None]:
    identity, calibration = CASES[name]
    return identity_of(identity), None if calibration is None else calibration_of(calibration)


def specs_of(name: str) -> dict[str, ArraySpec]:
    return {spec.path: spec for spec in array_specs(*case(name))}


def spec_of(
    dtype: DType = "uint16",
    row_shape: tuple[int, ...] = (3, 5),
    compressor: Literal["zstd", "pcodec"] = "zstd",
) -> ArraySpec:
    return ArraySpec(
        path="a/b",
        dtype=dtype,
        row_shape=row_shape,
        dimension_names=("token", *("axis" for _ in row_shape)),
        fill_value=1,
        meaning="",
        compressor=compressor,
    )


@pytest.mark.parametrize("dtype", get_args(DType))
def test_items_have_the_size_that_numpy_gives_them(dtype: DType) -> None:
    assert ITEM_BYTES[dtype] == np.dtype(dtype).itemsize
    assert set(ITEM_BYTES) == set(get_args(DType))


@given(st.sampled_from(get_args(DType)), st.lists(st.integers(1, 64), max_size=3))
@settings(deadline=None)
def test_rows_have_the_size_that_numpy_gives_them(dtype: DType, shape: list[int]) -> None:
    assert spec_of(dtype=dtype, row_shape=tuple(shape)).row_bytes == np.zeros(shape, dtype).nbytes


@given(st.integers(1, 2**22), st.integers(6, 26))
@settings(deadline=None)
def test_inner_chunks_are_the_least_power_of_two_of_rows_that_is_large_enough(width: int, log: int) -> None:
    spec, shard_tokens = spec_of(dtype="uint8", row_shape=(width,)), 2**log
    rows = spec.chunk_tokens(shard_tokens)

    assert rows == min(shard_tokens, 2 ** max(0, math.ceil(math.log2(INNER_CHUNK_BYTES / width))))
    assert shard_tokens % rows == 0


@pytest.mark.parametrize("log", [6, 12, 13, 14, 26])
def test_inner_chunks_of_pcodec_have_8192_rows_or_those_of_the_shard(log: int) -> None:
    for width in (1, 1000, 2**20):
        spec = spec_of(row_shape=(width,), compressor="pcodec")
        assert spec.chunk_tokens(2**log) == min(8192, 2**log)
    assert PCODEC_ROWS == 8192


@pytest.mark.parametrize(
    ("row_shape", "path"), [((), "a/b/c/7"), ((3,), "a/b/c/7/0"), ((3, 5), "a/b/c/7/0/0")], ids=str
)
def test_a_shard_is_a_chunk_of_the_first_axis(row_shape: tuple[int, ...], path: str) -> None:
    assert spec_of(row_shape=row_shape).shard_path(7) == path


def test_descriptions_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        spec_of().path = "../a"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint16"), (30522, "uint16"), (2**16 - 1, "uint16"), (2**16, "uint32"), (2**24, "uint32")],
)
def test_token_ids_fit_beside_the_fill_value(vocab_size: int, dtype: DType) -> None:
    assert token_dtype(vocab_size) == dtype
    assert vocab_size - 1 < np.iinfo(np.dtype(dtype)).max


@given(st.integers(1, 2**24) | st.integers(2**16 - 4, 2**16 + 4))
@settings(deadline=None)
def test_token_ids_and_fill_values_never_meet(vocab_size: int) -> None:
    content = with_value(with_value(FULL, "teacher.vocab_size", vocab_size), "states.masking.mask_token", 0)
    specs = {spec.path: spec for spec in array_specs(identity_of(content))}
    for path in ("tokens", "labels/index", "labels/read"):
        assert specs[path].fill_value == np.iinfo(np.dtype(specs[path].dtype)).max
        assert vocab_size - 1 < int(specs[path].fill_value)
    assert vocab_size - 1 < not_chosen(vocab_size) < int(specs["labels/read"].fill_value)
    assert specs["labels/index"].dtype == specs["tokens"].dtype


@pytest.mark.parametrize(
    ("vocab_size", "value"), [(1, 65534), (65534, 65534), (65535, 2**32 - 2), (65536, 2**32 - 2)]
)
def test_what_is_not_chosen_has_the_greatest_value_but_one(vocab_size: int, value: int) -> None:
    assert not_chosen(vocab_size) == value


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("pps", ("tokens", *RELATIONS)),
        (
            "long",
            (
                "tokens",
                *(
                    f"relations/{kind}/{array}"
                    for kind in ("attention", "value")
                    for array in ("gap", "gap_high", "weight")
                ),
            ),
        ),
        ("dense", ("tokens", "relations/value/probability")),
        ("vectors", ("tokens", "vectors/0/codes", "vectors/2/codes", "vectors/11/codes")),
        (
            "states",
            (
                "tokens",
                *RELATIONS,
                "states/hidden/0/codes",
                "states/hidden/3/codes",
                "states/masked/2/codes",
                "states/first/1",
                "states/first/4",
                "labels/read",
                "labels/index",
                "labels/weight",
                "states/logits",
                *(f"readings/{reading}/{path}" for reading in (1, 2) for path in READINGS),
            ),
        ),
    ],
)
def test_arrays_of_a_cache_in_the_order_in_which_they_are_written(name: str, paths: tuple[str, ...]) -> None:
    assert tuple(specs_of(name)) == paths


@pytest.mark.parametrize(
    ("name", "path", "dtype", "row_shape"),
    [
        ("pps", "tokens", "uint16", ()),
        ("pps", "relations/attention/gap", "uint8", (HEADS, 4)),
        ("pps", "relations/value/weight", "uint8", (HEADS, 4)),
        ("long", "relations/value/gap_high", "uint8", (HEADS, 4)),
        ("dense", "relations/value/probability", "float16", (HEADS, 16)),
        ("vectors", "vectors/0/codes", "int16", (5,)),
        ("vectors", "vectors/11/codes", "int16", (16,)),
        ("states", "states/hidden/3/codes", "int16", (23,)),
        ("states", "states/first/4", "float16", (WIDTH,)),
        ("states", "states/logits", "float32", (5,)),
        ("states", "labels/read", "uint16", ()),
        ("states", "labels/index", "uint16", (8,)),
        ("states", "labels/weight", "uint8", (8,)),
        ("states", "readings/2/labels/index", "uint16", (8,)),
        ("states", "readings/1/states/masked/2/codes", "int16", (22,)),
    ],
)
def test_types_and_shapes_are_those_of_the_specification(
    name: str, path: str, dtype: DType, row_shape: tuple[int, ...]
) -> None:
    spec = specs_of(name)[path]

    assert (spec.dtype, spec.row_shape) == (dtype, row_shape)
    assert spec.row_bytes == np.zeros(row_shape, dtype).nbytes
    assert (spec.compressor == "pcodec") == path.endswith("/codes")


@pytest.mark.parametrize("name", CASES)
def test_every_array_has_a_file_of_its_own_that_a_record_can_name(name: str) -> None:
    specs = array_specs(*case(name))
    paths = [spec.shard_path(2**20 - 1) for spec in specs]

    assert len(set(paths)) == len(paths)
    for path in paths:
        assert TypeAdapter(RelativePath).validate_python(path) == path


@pytest.mark.parametrize("name", CASES)
def test_axes_have_names_and_arrays_a_meaning(name: str) -> None:
    for spec in array_specs(*case(name)):
        assert len(spec.dimension_names) == len(spec.row_shape) + 1
        assert spec.dimension_names[0] == "token"
        assert spec.meaning
    for small in all_small_arrays(*case(name)):
        assert len(small.dimension_names) == len(small.shape)
        assert small.meaning


@pytest.mark.parametrize("name", CASES)
def test_fill_values_are_never_those_of_a_stored_token(name: str) -> None:
    """SPEC.md, sections 4, 7 and 9."""
    for spec in array_specs(*case(name)):
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            assert spec.fill_value == "NaN"
        else:
            limits = np.iinfo(dtype)
            assert spec.fill_value == (limits.min if dtype.kind == "i" else limits.max)


def test_gaps_have_a_high_byte_above_256_columns() -> None:
    codec = TopKParameters.model_validate_json(as_json(PPS))
    dense = DenseParameters()

    assert relation_arrays(codec, 4) == relation_arrays(codec, 256) == ("gap", "weight")
    assert relation_arrays(codec, 257) == relation_arrays(codec, 2**16) == ("gap", "gap_high", "weight")
    assert relation_arrays(dense, 16) == relation_arrays(dense, 2**16) == ("probability",)


@pytest.mark.parametrize("kind", RelationKind)
def test_relations_lie_below_their_kind(kind: RelationKind) -> None:
    assert relation_path(kind, "gap") == f"relations/{kind.value}/gap"


def test_codes_lie_beside_the_arrays_that_decode_them() -> None:
    assert codes_path(11) == "vectors/11/codes"
    assert state_codes_path(SignalName(StateFamily.MASKED, 2)) == "states/masked/2/codes"


@pytest.mark.parametrize(
    ("content", "paths"),
    [
        (EVERYTHING, READINGS),
        (EVERYTHING | {"masked_hidden": [0, 2]}, ("states/masked/0/codes", *READINGS)),
        (without(EVERYTHING, "labels"), READINGS[:2]),
        (EVERYTHING | {"masked_hidden": []}, READINGS[1:]),
        ({"first": [0], "num_classes": 2}, ()),
    ],
    ids=["everything", "two states", "states", "labels", "nothing"],
)
def test_each_masked_reading_has_arrays_of_its_own(content: Content, paths: tuple[str, ...]) -> None:
    assert masked_paths(states_of(content)) == set(paths)


@pytest.mark.parametrize("readings", [None, 2, 64])
def test_arrays_of_other_readings_are_those_of_the_first_elsewhere(readings: int | None) -> None:
    content = with_value(FULL, "states.masking.readings", readings)
    specs = array_specs(identity_of(content), case("states")[1])
    plain = {spec.path: spec for spec in specs if not spec.path.startswith("readings/")}
    others = [spec for spec in specs if spec.path.startswith("readings/")]

    assert len(others) == len(READINGS) * ((readings or 1) - 1)
    for spec in others:
        first = plain[spec.path.split("/", 2)[2]]
        for field in ("dtype", "row_shape", "fill_value", "dimension_names", "compressor", "meaning"):
            assert getattr(spec, field) == getattr(first, field)


def test_before_the_calibration_only_codes_are_missing() -> None:
    identity, _ = case("both")
    without_codes = [path for path in specs_of("both") if not path.endswith("/codes")]

    assert [spec.path for spec in array_specs(identity)] == without_codes


def test_small_arrays_of_a_layer() -> None:
    """Queries, keys and values of every head make 96 dimensions; layer 2 has 7 components."""
    identity, calibration = case("vectors")
    assert calibration is not None
    smalls = small_arrays(identity, calibration.of_layer(2))

    assert {small.path: (small.dtype, small.shape) for small in smalls} == {
        "vectors/2/basis": ("float16", (7, 3 * HEADS * HEAD_SIZE)),
        "vectors/2/step": ("float32", (7,)),
        "vectors/2/analysis": ("float16", (7, 3 * HEADS * HEAD_SIZE)),
        "vectors/2/gain": ("float32", (7,)),
        "vectors/2/mean": ("float32", (3 * HEADS * HEAD_SIZE,)),
    }


def test_small_arrays_of_a_state() -> None:
    identity, calibration = case("states")
    assert calibration is not None
    smalls = state_small_arrays(identity, calibration.states[1])

    assert {small.path: (small.dtype, small.shape) for small in smalls} == {
        "states/hidden/3/basis": ("float16", (23, WIDTH)),
        "states/hidden/3/step": ("float32", (23,)),
        "states/hidden/3/analysis": ("float16", (23, WIDTH)),
        "states/hidden/3/gain": ("float32", (23,)),
        "states/hidden/3/mean": ("float32", (WIDTH,)),
    }


def test_small_arrays_are_one_chunk() -> None:
    def small(shape: tuple[int, ...]) -> SmallArray:
        names = ("component", "vector")[: len(shape)]
        return SmallArray(
            folder="f", name="n", dtype="float32", shape=shape, dimension_names=names, meaning=""
        )

    assert (small((3,)).path, small((3,)).chunk_path) == ("f/n", "f/n/c/0")
    assert small((3, 4)).chunk_path == "f/n/c/0/0"


def test_every_code_has_its_small_arrays_layers_first() -> None:
    smalls = all_small_arrays(*case("both"))
    folders = list(dict.fromkeys(small.folder for small in smalls))

    assert len(smalls) == len({small.path for small in smalls}) == 5 * len(folders)
    assert [f"{folder}/codes" for folder in folders] == [
        path for path in specs_of("both") if path.endswith("/codes") and not path.startswith("readings/")
    ]
    assert all_small_arrays(*case("pps")) == ()
