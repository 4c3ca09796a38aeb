"""Files of one array and shard: against plain zarr, and as hostile input."""

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pcodec import standalone
from zarr.codecs import Crc32cCodec, ZstdCodec

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.arrays import ArraySpec, DType
from minilm_cache.store.reader import CacheReader
from tests.unit.store.support import GOLDEN, VECTORS, decoded, encoded, plain_shard

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
            rows = decoded(content, spec, reader.manifest.shard_tokens, range(shard.num_tokens))
            np.testing.assert_array_equal(rows, expected[spec.path])


DTYPES: list[DType] = ["uint8", "uint16", "uint32", "float16", "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_shape", [(), (5,), (2, 700)])
def test_any_shard_that_zarr_writes_is_read(tmp_path: Path, dtype: DType, row_shape: tuple[int, ...]) -> None:
    spec = spec_of(dtype, row_shape)
    rows = np.random.default_rng(1).integers(0, 100, (SHARD_TOKENS, *row_shape)).astype(dtype)
    read = decoded(written_by_zarr(tmp_path, spec, rows), spec, SHARD_TOKENS, range(SHARD_TOKENS))

    assert read.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read, rows)


@settings(max_examples=30, deadline=None)
@given(num_tokens=st.integers(0, SHARD_TOKENS))
def test_the_slack_is_cut_off_wherever_a_chunk_ends(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes], num_tokens: int
) -> None:
    spec, rows, content = chunked
    read = decoded(content, spec, SHARD_TOKENS, range(num_tokens))

    np.testing.assert_array_equal(read, rows[:num_tokens])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, SHARD_TOKENS), st.integers(0, SHARD_TOKENS))
def test_any_rows_are_read_on_their_own(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes], first: int, last: int
) -> None:
    spec, rows, content = chunked
    first, last = min(first, last), max(first, last)

    np.testing.assert_array_equal(decoded(content, spec, SHARD_TOKENS, range(first, last)), rows[first:last])


def test_a_chunk_that_claims_more_than_it_can_need_is_not_read(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes],
) -> None:
    spec, _, _ = chunked
    entries = np.asarray([[0, 2**20]] * 4, "<u8").tobytes()
    index = entries + int(google_crc32c.value(entries)).to_bytes(4, "little")
    with pytest.raises(CacheCorruptError, match="longer than it can be"):
        decoded(bytes(2**21) + index, spec, SHARD_TOKENS, range(1))


def test_only_the_chunks_of_the_rows_are_read(chunked: tuple[ArraySpec, npt.NDArray[Any], bytes]) -> None:
    spec, rows, content = chunked
    damaged = bytes(200) + content[200:]  # in the first of four chunks

    np.testing.assert_array_equal(decoded(damaged, spec, SHARD_TOKENS, range(64, 256)), rows[64:])
    with pytest.raises(CacheCorruptError):
        decoded(damaged, spec, SHARD_TOKENS, range(63, 256))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_shape", [(), (5,), (2, 700)])
def test_a_shard_is_written_as_zarr_writes_it(
    tmp_path: Path, dtype: DType, row_shape: tuple[int, ...]
) -> None:
    spec = spec_of(dtype, row_shape)
    rows = np.random.default_rng(1).integers(0, 100, (SHARD_TOKENS, *row_shape)).astype(dtype)

    assert encoded(rows, spec, SHARD_TOKENS) == written_by_zarr(tmp_path, spec, rows)


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(0, SHARD_TOKENS), at_once=st.integers(1, SHARD_TOKENS))
def test_a_shard_is_the_same_however_its_rows_come(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes], num_tokens: int, at_once: int
) -> None:
    spec, rows, _ = chunked
    written = encoded(rows[:num_tokens], spec, SHARD_TOKENS)

    assert encoded(rows[:num_tokens], spec, SHARD_TOKENS, at_once=at_once) == written
    whole = decoded(written, spec, SHARD_TOKENS, range(SHARD_TOKENS))
    np.testing.assert_array_equal(whole[:num_tokens], rows[:num_tokens])
    assert np.all(whole[num_tokens:] == spec.fill_value)


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
        read = decoded(bytes(changed), spec, SHARD_TOKENS, range(num_tokens))
    except CacheCorruptError:
        return
    assert num_tokens < SHARD_TOKENS
    np.testing.assert_array_equal(read, rows[:num_tokens])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_shard_that_was_cut_short_is_refused(
    chunked: tuple[ArraySpec, npt.NDArray[Any], bytes], data: st.DataObject
) -> None:
    spec, _, content = chunked
    cut = data.draw(st.integers(0, len(content) - 1))
    for part in (content[:cut], content[cut + 1 :]):
        with pytest.raises(CacheCorruptError):
            decoded(part, spec, SHARD_TOKENS, range(SHARD_TOKENS))


def test_a_chunk_that_zarr_fills_in_is_an_error_here(tmp_path: Path) -> None:
    """Plain zarr returns 255 for rows that were never written; no reader of ours may."""
    spec = spec_of("uint8", (4 * WIDE,))
    rows = np.ones((64, 4 * WIDE), np.uint8)
    content = written_by_zarr(tmp_path, spec, rows)
    filled = zarr.open_array(tmp_path, mode="r")

    assert np.all(np.asarray(filled[64:]) == 255)
    np.testing.assert_array_equal(decoded(content, spec, 256, range(64)), rows)
    with pytest.raises(CacheCorruptError):
        decoded(content, spec, 256, range(65))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.tuples(st.integers(1, 64), st.integers(1, 9)).flatmap(
        lambda shape: arrays(np.int16, shape, elements=st.integers(-(2**15) + 1, 2**15 - 1))
    )
)
def test_codes_come_back_and_their_slack_is_poison(rows: npt.NDArray[np.int16]) -> None:
    spec = spec_of("int16", rows.shape[1:], pcodec=True)
    content = encoded(rows, spec, 64)
    whole = decoded(content, spec, 64, range(64))

    np.testing.assert_array_equal(whole[: len(rows)], rows)
    assert np.all(whole[len(rows) :] == spec.fill_value)


def test_codes_of_several_chunks_come_back() -> None:
    spec = spec_of("int16", (2,), pcodec=True)
    rows = np.random.default_rng(2).integers(-99, 99, (20_000, 2)).astype(np.int16)
    content = encoded(rows, spec, 2**15)
    for num_tokens in (1, 2**13, 2**13 + 1, len(rows)):
        read = decoded(content, spec, 2**15, range(num_tokens))
        np.testing.assert_array_equal(read, rows[:num_tokens])


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
def test_zarr_reads_the_codes_that_we_write(tmp_path: Path) -> None:
    reader = CacheReader(VECTORS)
    (spec,) = (spec for spec in reader.specs if spec.compressor == "pcodec")
    size = reader.manifest.shard_tokens
    rows = np.random.default_rng(3).integers(-500, 500, (size, *spec.row_shape)).astype(np.int16)
    folder = tmp_path / spec.path
    (folder / spec.shard_path(0).removeprefix(f"{spec.path}/")).parent.mkdir(parents=True)
    (folder / "zarr.json").write_bytes((VECTORS / spec.path / "zarr.json").read_bytes())
    (tmp_path / spec.shard_path(0)).write_bytes(encoded(rows, spec, size))

    np.testing.assert_array_equal(np.asarray(zarr.open_array(folder, mode="r")[:size]), rows)


@pytest.mark.parametrize("num_values", [1, 127, 129, 2**20])
def test_codes_of_another_number_than_the_chunk_has_are_refused(num_values: int) -> None:
    spec = spec_of("int16", (2,), pcodec=True)
    values = np.zeros(num_values, np.int16)
    lying = spec_of("int16", (num_values,), pcodec=True)
    content = encoded(values[None], lying, 1)  # the index of one chunk is the same

    written = np.ones_like(values)
    assert standalone.simple_decompress_into(content, written).n_processed == num_values
    np.testing.assert_array_equal(written, values)
    with pytest.raises(CacheCorruptError):
        decoded(content, spec, 64, range(64))
