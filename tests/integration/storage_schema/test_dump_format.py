"""What a dump leaves on disk, read by SPEC.md alone: plain zarr, plain numpy, none of our readers."""

import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

from minilm_cache import open_cache
from minilm_cache.storage_schema.arrays import array_specs
from minilm_cache.store.reader import CacheReader
from tests.integration.dump.test_dump import manifest_of
from tests.support import World


@pytest.mark.parametrize("codec", [{"k": 6}, {"select": "largest"}, {"codec": "dense"}], ids=str)
def test_every_array_opens_with_plain_zarr_and_is_what_the_spec_says(
    world: World, codec: dict[str, Any]
) -> None:
    """storage_schema/SPEC.md, read without this project's reader."""
    path = world.dump(**codec).path
    manifest = json.loads((path / "manifest.json").read_text())
    group = zarr.open_group(path, mode="r", zarr_format=3)
    tables = [pq.read_table(file) for file in sorted((path / "sequences").iterdir())]
    rows = len(pq.read_table(path / "index/ranges.parquet")) * manifest["shard_tokens"]
    heads = manifest["identity"]["relation_heads"]
    if codec.get("codec") == "dense":
        expected = {"probability": ("float16", (rows, heads, 32))}
    else:
        expected = {"gap": ("uint8", (rows, heads, 6)), "weight": ("uint8", (rows, heads, 6))}
    for kind in ("attention", "value"):
        for name, (dtype, shape) in expected.items():
            array = group[f"relations/{kind}/{name}"]
            assert isinstance(array, zarr.Array)
            assert (array.dtype, array.shape) == (np.dtype(dtype), shape)
    tokens = group["tokens"]
    assert isinstance(tokens, zarr.Array)
    assert (tokens.dtype, tokens.shape) == (np.dtype("uint16"), (rows,))

    ids = np.asarray(tokens[:])
    for table in tables:
        for row in table.to_pylist():
            sequence = ids[row["offset"] : row["offset"] + row["length"]]
            assert (sequence[0], sequence[-1]) == (2, 3)  # [CLS] ... [SEP]
            assert not set(sequence[1:-1].tolist()) & {0, 2}
            if codec.get("codec") != "dense":
                gaps = group["relations/attention/gap"]
                assert isinstance(gaps, zarr.Array)
                columns = np.asarray(gaps[row["offset"] : row["offset"] + row["length"]]).cumsum(-1)
                assert columns.max() < row["length"]
    assert sum(len(table) for table in tables) == manifest["num_sequences"]
    assert sum(table["length"].to_numpy().sum() for table in tables) == manifest["num_tokens"]


@pytest.mark.parametrize("tail", ["uniform", "renormalise"])
def test_largest_entries_by_the_specification_alone(world: World, tail: str) -> None:
    """SPEC.md section 5, select=largest, in plain numpy over plain zarr."""
    path = world.dump(select="largest", tail=tail).path
    group, cache = zarr.open_group(path, mode="r", zarr_format=3), open_cache(path)
    for row in pq.read_table(path / "sequences/part-00001.parquet").to_pylist():
        rows, length = slice(row["offset"], row["offset"] + row["length"]), row["length"]
        for kind in ("attention", "value"):
            gap, weight = group[f"relations/{kind}/gap"], group[f"relations/{kind}/weight"]
            assert isinstance(gap, zarr.Array)
            assert isinstance(weight, zarr.Array)
            columns = np.cumsum(np.asarray(gap[rows]).astype(int), -1)
            codes = np.asarray(weight[rows]).astype(int)
            found = cache[row["sequence"]].relation(kind).numpy()
            for token, head in np.ndindex(columns.shape[:2]):
                used = codes[token, head] > 0
                weights = 1.06 ** -(codes[token, head][used] - 1.0)
                others = length - int(used.sum())
                left = max(1 - weights.sum(), 0.01) if tail == "uniform" and others else 0.0
                expected = np.full(length, left / max(others, 1))
                expected[columns[token, head][used]] = (1 - left) * weights / weights.sum()

                np.testing.assert_allclose(found[head, token], expected, atol=1e-6)


def test_dense_rows_by_the_specification_alone(world: World) -> None:
    path = world.dump(codec="dense").path
    stored = zarr.open_group(path, mode="r", zarr_format=3)["relations/value/probability"]
    assert isinstance(stored, zarr.Array)
    row = pq.read_table(path / "sequences/part-00001.parquet").to_pylist()[0]
    probability = np.asarray(stored[row["offset"] : row["offset"] + row["length"]])
    found = open_cache(path)[row["sequence"]].relation("value").numpy()

    assert np.array_equal(found, probability[..., : row["length"]].transpose(1, 0, 2).astype(np.float32))
    assert not probability[..., row["length"] :].any()


def test_arrays_have_poison_where_nothing_was_written(shared_world: World) -> None:
    path = shared_world.root / "cache"
    manifest = manifest_of(path)
    group = zarr.open_group(path, mode="r", zarr_format=3)
    for spec in array_specs(manifest.identity):
        array = group[spec.path]
        assert isinstance(array, zarr.Array)
        slack = np.asarray(array[CacheReader(path).ranges[0].num_tokens : manifest.shard_tokens])

        assert (slack == array.fill_value).all()
