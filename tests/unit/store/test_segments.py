"""Segments of shards: every sequence in one of them, and read as the whole shard is."""

from io import BufferedIOBase
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.cache import Cache
from minilm_cache.store import checked
from minilm_cache.store import ranges as segments_module
from minilm_cache.store.checked import xxh3_file
from minilm_cache.store.ranges import Segments, ShardRanges
from minilm_cache.store.reader import CacheReader
from tests.unit.store.support import GOLDEN, plain_shard

pytestmark = pytest.mark.slow


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 16))
def test_every_sequence_is_in_one_segment(sizes: list[int], per_shard: int) -> None:
    ranges = ShardRanges(np.asarray(sizes), np.asarray(sizes))
    segments = Segments(ranges, per_shard)
    listed = [
        (sequence, number, shard)
        for shard in range(len(sizes))
        for number in segments.of_shard(shard)
        for sequence in segments.sequences(number)
    ]

    assert [sequence for sequence, _, _ in listed] == list(range(sum(sizes)))
    assert all(segments.segment_of(sequence) == number for sequence, number, _ in listed)
    assert all(
        segments.shard_of(number) == shard == ranges.shard_of(sequence) for sequence, number, shard in listed
    )
    for shard, size in enumerate(sizes):
        counts = [len(segments.sequences(number)) for number in segments.of_shard(shard)]
        assert (sum(counts), len(counts)) == (size, per_shard)
        assert max(counts) - min(counts) <= 1


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
@pytest.mark.parametrize("name", ["v1", "v1-vectors", "v1-states"])
@pytest.mark.parametrize("tokens", [32, 64])
def test_segments_hold_the_rows_that_zarr_reads(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int
) -> None:
    whole = Cache(CacheReader(GOLDEN / name))
    monkeypatch.setattr(segments_module, "segment_tokens", lambda *_: tokens)
    reader = CacheReader(GOLDEN / name)
    cut = Cache(reader)

    assert reader.segments.per_shard == reader.manifest.shard_tokens // tokens
    for shard in range(len(reader.ranges)):
        expected = plain_shard(GOLDEN / name, shard)
        read = list(reader.segments_of(shard))
        assert len(read) > 1
        for spec in reader.specs:
            rows = np.concatenate([segment.rows[spec.path] for segment in read])
            np.testing.assert_array_equal(rows, expected[spec.path][: len(rows)])
            assert len(rows) == spec.num_rows(reader.ranges[shard])
    for number in range(len(whole)):
        assert cut[number].input_ids.tolist() == whole[number].input_ids.tolist()


def test_a_file_is_compared_as_a_whole_once_and_again_after_a_change(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(segments_module, "segment_tokens", lambda *_: 64)
    reader, compared = CacheReader(cache), list[str]()

    def comparing(file: BufferedIOBase) -> str:
        compared.append(xxh3_file(file))
        return compared[-1]

    monkeypatch.setattr(checked, "xxh3_file", comparing)
    for _ in range(2):
        list(reader.segments_of(1))
    assert len(compared) == len(reader.specs)
    (cache / "tokens/c/1").touch()
    list(reader.segments_of(1))
    assert len(compared) == len(reader.specs) + 1


def test_segments_have_a_token_at_least() -> None:
    """Else those who read some bytes ahead would never have enough of them."""
    assert Segments(ShardRanges(np.asarray([3]), np.asarray([40])), 256).mean_tokens(7) == 1
