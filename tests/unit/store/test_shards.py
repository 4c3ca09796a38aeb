"""Files of one array and shard: against plain zarr, and as hostile input."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pcodec import ChunkConfig, standalone
from zarr.codecs import Crc32cCodec, ZstdCodec

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.arrays import ArraySpec, DType
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.shards import decode_shard, encode_pcodec_shard
from tests.unit.store.support import GOLDEN, VECTORS, plain_shard

SHARD_TOKENS = 256
WIDE = 1024
"""Bytes of 256 rows make one inner chunk; of 1,024-byte rows."""


def spec_of(dtype: DType, row_shape: tuple[int, ...], *, pcodec: bool = False) -> ArraySpec:
    names = ("token", "component", "third")[: 1 + len(row_shape)]
    return ArraySpec(
        path="rows",
        dtype=dtype,
        row_shape=row_shape,
        dimension_names=names,
        fill_value=-(2**15) if pcodec else 255,
        meaning="test",
        compressor="pcodec" if pcodec else "zstd",
    )


def written_by_zarr(folder: Path, spec: ArraySpec, rows: npt.NDArray[Any]) -> bytes:
    """Return a shard as plain zarr writes it: chunks that hold nothing but fill values are left out."""
    array = zarr.create_array(
        folder,
        shape=(SHARD_TOKENS, *spec.row_shape),
        chunks=(spec.chunk_tokens(SHARD_TOKENS), *spec.row_shape),
        shards=(SHARD_TOKENS, *spec.row_shape),
        dtype=spec.dtype,
        fill_value=255,
        compressors=[ZstdCodec(level=1, checksum=False), Crc32cCodec()],
        zarr_format=3,
    )
    array[: len(rows)] = rows
    return (folder / ArraySpec.shard_path(spec, 0).removeprefix("rows/")).read_bytes()


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> tuple[ArraySpec, npt.NDArray[Any], bytes]:
    """Return an array, its rows, and its shard of four inner chunks of 64 rows."""
    spec = spec_of("float16", (4, WIDE // 2))
    rows = np.random.default_rng(0).integers(0, 9, (SHARD_TOKENS, *spec.row_shape)).astype(np.float16)
    assert spec.chunk_tokens(SHARD_TOKENS) == 64
    return spec, rows, written_by_zarr(tmp_path_factory.mktemp("zarr"), spec, rows)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
@pytest.mark.parametrize("name", ["v1", "v1-vectors", "v1-states"])
def test_every_array_of_a_cache_decodes_to_what_zarr_reads(name: str) -> None:
    reader = CacheReader(GOLDEN / name)
    for number, shard in enumerate(reader.ranges):
        expected = plain_shard(GOLDEN / name, number)
        for spec in reader.specs:
            content = (GOLDEN / name / spec.shard_path(number)).read_bytes()
            rows = decode_shard(
                content, spec, shard_tokens=reader.manifest.shard_tokens, num_rows=shard.num_tokens
            )
            np.testing.assert_array_equal(rows, expected[spec.path])


DTYPES: list[DType] = ["uint8", "uint16", "uint32", "float16", "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_shape", [(), (5,), (2, 700)])
def test_any_shard_that_zarr_writes_is_read(tmp_path: Path, dtype: DType, row_shape: tuple[int, ...]) -> None:
    spec = spec_of(dtype, row_shape)
    rows = np.random.default_rng(1).integers(0, 100, (SHARD_TOKENS, *row_shape)).astype(dtype)
    decoded = decode_shard(
        written_by_zarr(tmp_path, spec, rows), spec, shard_tokens=SHARD_TOKENS, num_rows=SHARD_TOKENS
    )

    assert decoded.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(decoded, rows)


@settings(max_examples=30, deadline=None)
@given(num_tokens=st.integers(0, SHARD_TOKENS))
def test_the_slack_is_cut_off_wherever_a_chunk_ends(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes], num_tokens: int
) -> None:
    spec, rows, content = chunked
    decoded = decode_shard(content, spec, shard_tokens=SHARD_TOKENS, num_rows=num_tokens)

    np.testing.assert_array_equal(decoded, rows[:num_tokens])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_changed_bit_is_refused_or_lies_in_a_chunk_that_nobody_asked_for(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes], data: st.DataObject
) -> None:
    spec, rows, content = chunked
    at = data.draw(st.integers(0, 8 * len(content) - 1), label="bit")
    num_tokens = data.draw(st.sampled_from([1, 64, 65, 128, SHARD_TOKENS]), label="num_tokens")
    changed = bytearray(content)
    changed[at // 8] ^= 1 << at % 8
    try:
        decoded = decode_shard(bytes(changed), spec, shard_tokens=SHARD_TOKENS, num_rows=num_tokens)
    except CacheCorruptError:
        return
    assert num_tokens < SHARD_TOKENS
    np.testing.assert_array_equal(decoded, rows[:num_tokens])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_shard_that_was_cut_short_is_refused(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes], data: st.DataObject
) -> None:
    spec, _, content = chunked
    cut = data.draw(st.integers(0, len(content) - 1))
    for part in (content[:cut], content[cut + 1 :]):
        with pytest.raises(CacheCorruptError):
            decode_shard(part, spec, shard_tokens=SHARD_TOKENS, num_rows=SHARD_TOKENS)


def test_a_chunk_that_zarr_fills_in_is_an_error_here(tmp_path: Path) -> None:
    """Plain zarr returns 255 for rows that were never written; no reader of ours may."""
    spec = spec_of("uint8", (4 * WIDE,))
    rows = np.ones((64, 4 * WIDE), np.uint8)
    content = written_by_zarr(tmp_path, spec, rows)
    filled = zarr.open_array(tmp_path, mode="r")

    assert np.all(np.asarray(filled[64:]) == 255)
    np.testing.assert_array_equal(decode_shard(content, spec, shard_tokens=256, num_rows=64), rows)
    with pytest.raises(CacheCorruptError):
        decode_shard(content, spec, shard_tokens=256, num_rows=65)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.tuples(st.integers(1, 64), st.integers(1, 9)).flatmap(
        lambda shape: arrays(np.int16, shape, elements=st.integers(-(2**15) + 1, 2**15 - 1))
    )
)
def test_codes_come_back_and_their_slack_is_poison(rows: npt.NDArray[np.int16]) -> None:
    spec = spec_of("int16", rows.shape[1:], pcodec=True)
    content = encode_pcodec_shard(rows, spec, 64)
    whole = decode_shard(content, spec, shard_tokens=64, num_rows=64)

    np.testing.assert_array_equal(whole[: len(rows)], rows)
    assert np.all(whole[len(rows) :] == spec.fill_value)


def test_codes_of_several_chunks_come_back() -> None:
    spec = spec_of("int16", (2,), pcodec=True)
    rows = np.random.default_rng(2).integers(-99, 99, (20_000, 2)).astype(np.int16)
    content = encode_pcodec_shard(rows, spec, 2**15)
    for num_tokens in (1, 2**13, 2**13 + 1, len(rows)):
        decoded = decode_shard(content, spec, shard_tokens=2**15, num_rows=num_tokens)
        np.testing.assert_array_equal(decoded, rows[:num_tokens])


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
def test_zarr_reads_the_codes_that_we_write(tmp_path: Path) -> None:
    reader = CacheReader(VECTORS)
    (spec,) = (spec for spec in reader.specs if spec.compressor == "pcodec")
    size = reader.manifest.shard_tokens
    rows = np.random.default_rng(3).integers(-500, 500, (size, *spec.row_shape)).astype(np.int16)
    folder = tmp_path / spec.path
    (folder / spec.shard_path(0).removeprefix(f"{spec.path}/")).parent.mkdir(parents=True)
    (folder / "zarr.json").write_bytes((VECTORS / spec.path / "zarr.json").read_bytes())
    (tmp_path / spec.shard_path(0)).write_bytes(encode_pcodec_shard(rows, spec, size))

    np.testing.assert_array_equal(np.asarray(zarr.open_array(folder, mode="r")[:size]), rows)


@pytest.mark.parametrize("num_values", [1, 127, 129, 2**20])
def test_codes_of_another_number_than_the_chunk_has_are_refused(num_values: int) -> None:
    spec = spec_of("int16", (2,), pcodec=True)
    values = np.zeros(num_values, np.int16)
    lying = spec_of("int16", (num_values,), pcodec=True)
    content = encode_pcodec_shard(values[None], lying, 1)  # the index of one chunk is the same

    assert standalone.simple_compress(values, ChunkConfig(compression_level=8)) in content
    with pytest.raises(CacheCorruptError):
        decode_shard(content, spec, shard_tokens=64, num_rows=64)
