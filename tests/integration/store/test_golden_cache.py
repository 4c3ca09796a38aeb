"""A cache of each released format opens for ever, with this reader and with plain zarr."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

from minilm_cache import open_cache
from minilm_cache.cache import row_checker
from minilm_cache.session import Session
from minilm_cache.storage_schema.versions import READABLE_VERSIONS
from minilm_cache.store.verify import verify
from tests.golden.regenerate import states_of

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with np.load(GOLDEN / "v1.npz", allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def test_version_1_reads_as_it_was_written(expected: dict[str, Any]) -> None:
    cache = open_cache(GOLDEN / "v1")

    assert len(cache) == sum(name.startswith("ids_") for name in expected)
    for number in range(len(cache)):
        sequence = cache[number]
        assert np.array_equal(sequence.input_ids.numpy(), expected[f"ids_{number}"])
        for kind in ("attention", "value"):
            np.testing.assert_allclose(
                sequence.relation(kind).numpy(), expected[f"{kind}_{number}"], rtol=1e-6
            )


@pytest.mark.parametrize("name", ["v1", "v1-vectors", "v1-states"])
def test_version_1_is_undamaged(name: str) -> None:
    verdict = verify(GOLDEN / name, full=True, num_threads=2, check_rows=row_checker, session=Session())

    assert verdict.damage == ()


def test_version_1_vectors_read_as_they_were_written() -> None:
    cache = open_cache(GOLDEN / "v1-vectors")
    with np.load(GOLDEN / "v1-vectors.npz", allow_pickle=False) as stored:
        for number in range(len(cache)):
            sequence = cache[number]
            assert np.array_equal(sequence.input_ids.numpy(), stored[f"ids_{number}"])
            for kind in ("attention", "value", "query", "key"):
                found = sequence.relation(kind).numpy()
                np.testing.assert_allclose(found, stored[f"{kind}_{number}"], rtol=1e-4, atol=1e-6)


def test_version_1_states_read_as_they_were_written() -> None:
    cache = open_cache(GOLDEN / "v1-states")
    with np.load(GOLDEN / "v1-states.npz", allow_pickle=False) as stored:
        for number in range(len(cache)):
            found = states_of(cache[number])
            assert {name.rsplit("_", 1)[0] for name in stored.files} >= found.keys()
            for name, values in found.items():
                np.testing.assert_allclose(values, stored[f"{name}_{number}"], rtol=1e-4, atol=1e-5)


def test_version_1_by_the_specification_alone(expected: dict[str, Any]) -> None:
    """SPEC.md section 5, select=pps, in plain numpy over plain zarr."""
    group = zarr.open_group(GOLDEN / "v1", mode="r", zarr_format=3)
    tables = [pq.read_table(file) for file in sorted((GOLDEN / "v1/sequences").iterdir())]
    for row in [row for table in tables for row in table.to_pylist()]:
        rows = slice(row["offset"], row["offset"] + row["length"])
        for kind in ("attention", "value"):
            gap, weight = group[f"relations/{kind}/gap"], group[f"relations/{kind}/weight"]
            assert isinstance(gap, zarr.Array)
            assert isinstance(weight, zarr.Array)
            columns = np.cumsum(np.asarray(gap[rows]).astype(int), -1)
            codes = np.asarray(weight[rows]).astype(int)
            kept = np.where(codes > 0, 1.03 ** -(codes - 1.0), 0.0)
            share = (1 - kept.sum(-1, keepdims=True)) / (codes == 0).sum(-1, keepdims=True)
            weights = np.where(codes > 0, kept, share)
            dense = np.zeros((*columns.shape[:2], row["length"]))
            for token, head, entry in np.ndindex(columns.shape):
                dense[token, head, columns[token, head, entry]] += weights[token, head, entry]
            stored = expected[f"{kind}_{row['sequence']}"]

            np.testing.assert_allclose(dense.transpose(1, 0, 2), stored, atol=1e-6)


def test_every_version_has_a_golden_cache() -> None:
    found = {int(match[1]) for path in GOLDEN.iterdir() if (match := re.fullmatch(r"v(\d+)", path.name))}

    assert found == READABLE_VERSIONS
