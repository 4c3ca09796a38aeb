"""Metadata of the arrays: plain zarr, which knows nothing of this project, opens what it describes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from minilm_cache.storage_schema.arrays import all_small_arrays, array_specs
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.storage_schema.metadata import PCODEC_LEVEL, ZSTD_LEVEL, zarr_documents
from tests.unit.storage_schema.test_arrays import CASES, case
from tests.unit.storage_schema.test_documents import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")  # of pcodec's name
SHARDS, TOKENS = 3, 64


def documents_of(name: str, *, num_shards: int = SHARDS, shard_tokens: int = TOKENS) -> dict[str, bytes]:
    return zarr_documents(*case(name), num_shards=num_shards, shard_tokens=shard_tokens)


def opened(folder: Path, name: str, mode: Any = "r") -> zarr.Group:
    for path, content in documents_of(name).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return zarr.open_group(folder, mode=mode, zarr_format=3)


def array_of(group: zarr.Group, path: str) -> zarr.Array[Any]:
    array = group[path]
    assert isinstance(array, zarr.Array)
    return array


def arrays_below(group: zarr.Group) -> set[str]:
    return {path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}


@pytest.mark.parametrize("name", CASES)
def test_zarr_opens_every_array_with_a_row_per_token(name: str, tmp_path: Path) -> None:
    group = opened(tmp_path, name)
    for spec in array_specs(*case(name)):
        array = array_of(group, spec.path)

        assert array.shape == (SHARDS * TOKENS, *spec.row_shape)
        assert array.dtype == np.dtype(spec.dtype)
        assert array.shards == (TOKENS, *spec.row_shape)
        assert array.chunks == (spec.chunk_tokens(TOKENS), *spec.row_shape)
        assert str(array.fill_value).lower() == str(spec.fill_value).lower()
        assert array.attrs.asdict() == {"meaning": spec.meaning}


@pytest.mark.parametrize("name", ["vectors", "states", "both"])
def test_zarr_opens_every_small_array(name: str, tmp_path: Path) -> None:
    group = opened(tmp_path, name)
    for small in all_small_arrays(*case(name)):
        array = array_of(group, small.path)

        assert (array.shape, array.chunks, array.shards) == (small.shape, small.shape, None)
        assert array.dtype == np.dtype(small.dtype)
        assert np.isnan(array.fill_value)
        assert array.attrs.asdict() == {"meaning": small.meaning}


@pytest.mark.parametrize("name", CASES)
def test_zarr_finds_these_arrays_and_no_others(name: str, tmp_path: Path) -> None:
    """It finds an array only if each group above it has a document of its own."""
    expected = {spec.path for spec in array_specs(*case(name))}
    expected |= {small.path for small in all_small_arrays(*case(name))}

    assert arrays_below(opened(tmp_path, name)) == expected


@pytest.mark.parametrize("name", CASES)
def test_zarr_reads_the_documents_as_what_they_say(name: str, tmp_path: Path) -> None:
    """Nothing is left to a default, and nothing is said that zarr does not know."""
    group = opened(tmp_path, name)
    for path in arrays_below(group):
        written = json.loads((tmp_path / path / "zarr.json").read_bytes())
        read = json.loads(json.dumps(array_of(group, path).metadata.to_dict()))

        assert {field: read.get(field) for field in written} == written


def test_the_root_says_which_format_it_is(tmp_path: Path) -> None:
    assert opened(tmp_path, "pps").attrs.asdict() == {"minilm_cache": {"format_version": 1}}


def test_other_groups_say_nothing() -> None:
    groups = {
        path: json.loads(content)
        for path, content in documents_of("both").items()
        if json.loads(content)["node_type"] == "group" and path != "zarr.json"
    }

    assert {"vectors/zarr.json", "vectors/11/zarr.json", "readings/1/labels/zarr.json"} < set(groups)
    for document in groups.values():
        assert document == {"zarr_format": 3, "node_type": "group", "attributes": {}}


@pytest.mark.parametrize("name", CASES)
def test_inner_chunks_are_coded_as_the_specification_says(name: str) -> None:
    documents = documents_of(name)
    for spec in array_specs(*case(name)):
        (outer,) = json.loads(documents[f"{spec.path}/zarr.json"])["codecs"]
        inner = [codec["name"] for codec in outer["configuration"]["codecs"]]
        index = [codec["name"] for codec in outer["configuration"]["index_codecs"]]

        assert outer["name"] == "sharding_indexed"
        assert outer["configuration"]["index_location"] == "end"
        assert index == ["bytes", "crc32c"]
        if spec.path.endswith("/codes"):
            assert inner == ["transpose", "numcodecs.pcodec", "crc32c"]
        else:
            assert inner == ["bytes", "zstd", "crc32c"]


def test_levels_of_the_compressors_are_part_of_the_format() -> None:
    text = b"".join(documents_of("both").values()).decode()

    assert (ZSTD_LEVEL, PCODEC_LEVEL) == (1, 8)
    levels = [line.split(":")[1].strip(" ,") for line in text.splitlines() if '"level"' in line]
    assert set(levels) == {"1", "8"}


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_several_bytes_are_little_endian(name: str) -> None:
    documents = documents_of(name)
    for spec in array_specs(*case(name)):
        (outer,) = json.loads(documents[f"{spec.path}/zarr.json"])["codecs"]
        first = outer["configuration"]["codecs"][0]
        if first["name"] == "bytes":
            has_order = np.dtype(spec.dtype).itemsize > 1
            assert first.get("configuration") == ({"endian": "little"} if has_order else None)


@pytest.mark.parametrize("name", CASES)
def test_zarr_writes_a_shard_to_the_file_that_a_record_names(name: str, tmp_path: Path) -> None:
    group, random = opened(tmp_path, name, "r+"), np.random.default_rng(0)
    for spec in array_specs(*case(name)):
        array = array_of(group, spec.path)
        rows = random.integers(0, 100, (TOKENS, *spec.row_shape)).astype(spec.dtype)
        if spec.compressor == "pcodec":
            rows[...] = 17  # zarr-python forgets the transposition when it writes, not when it reads
        array[TOKENS : 2 * TOKENS] = rows

        files = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / spec.path / "c").rglob("*")}
        assert {path for path in files if (tmp_path / path).is_file()} == {spec.shard_path(1)}
        again = array_of(zarr.open_group(tmp_path, mode="r"), spec.path)
        np.testing.assert_array_equal(np.asarray(again[TOKENS : 2 * TOKENS]), rows)
        np.testing.assert_array_equal(np.asarray(again[:TOKENS]), np.full_like(rows, array.fill_value))


@pytest.mark.parametrize("name", ["vectors", "states"])
def test_small_arrays_are_files_of_plain_little_endian_numbers(name: str, tmp_path: Path) -> None:
    group, random = opened(tmp_path, name), np.random.default_rng(0)
    for small in all_small_arrays(*case(name)):
        values = random.normal(size=small.shape).astype(small.dtype)
        file = tmp_path / small.chunk_path
        file.parent.mkdir(parents=True)
        file.write_bytes(values.astype(values.dtype.newbyteorder("<")).tobytes())

        np.testing.assert_array_equal(np.asarray(array_of(group, small.path)[:]), values)


@pytest.mark.parametrize("name", ["v1", "v1-states", "v1-vectors"])
def test_documents_of_released_caches_are_made_again_byte_by_byte(name: str) -> None:
    folder = ROOT / "tests/golden" / name
    manifest = CacheManifest.model_validate_json((folder / "manifest.json").read_bytes())
    documents = zarr_documents(
        manifest.identity,
        manifest.calibration,
        num_shards=len(manifest.shards),
        shard_tokens=manifest.shard_tokens,
    )

    assert set(documents) == {file.relative_to(folder).as_posix() for file in folder.rglob("zarr.json")}
    assert set(documents) <= set(manifest.files)
    for path, content in documents.items():
        assert (folder / path).read_bytes() == content
        assert manifest.files[path].size == len(content)


@pytest.mark.parametrize("name", CASES)
def test_documents_are_the_same_every_time(name: str) -> None:
    assert list(documents_of(name).items()) == list(documents_of(name).items())


@pytest.mark.parametrize(("num_shards", "shard_tokens"), [(1, 64), (7, 128), (2**20, 2**26)])
def test_only_arrays_with_a_row_per_token_depend_on_the_shards(num_shards: int, shard_tokens: int) -> None:
    documents = documents_of("both", num_shards=num_shards, shard_tokens=shard_tokens)
    before = documents_of("both")
    specs = {f"{spec.path}/zarr.json": spec for spec in array_specs(*case("both"))}

    assert {path for path in before if documents[path] != before[path]} == set(specs)
    for path, spec in specs.items():
        document = json.loads(documents[path])
        assert document["shape"] == [num_shards * shard_tokens, *spec.row_shape]
        assert document["chunk_grid"]["configuration"]["chunk_shape"] == [shard_tokens, *spec.row_shape]


@pytest.mark.parametrize("name", CASES)
def test_documents_are_ascii_and_end_with_one_line_feed(name: str) -> None:
    for content in documents_of(name).values():
        assert content.isascii()
        assert content.endswith(b"}\n")
        assert content == (json.dumps(json.loads(content), indent=1) + "\n").encode()
