"""A cache read from its URL: what is kept here, for how long, and that it is never believed unchecked."""

import shutil
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError, CacheNotFoundError, MiniLMCacheError
from minilm_cache.store.layout import shard_files
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.reader import read_manifest
from tests.unit.store.support import files_below, keep_shards, plain_shard

pytestmark = pytest.mark.slow

ALL = 2**40


def sizes_of(complete: Path) -> list[int]:
    manifest = read_manifest(complete)
    return [sum((complete / p).stat().st_size for p in shard_files(manifest, n)) for n in range(6)]


def kept_in(mirror: Path) -> set[int]:
    """Return the shards of which any file is in a mirror."""
    manifest = read_manifest(mirror)
    return {n for n in range(6) if any((mirror / path).is_file() for path in shard_files(manifest, n))}


def check(reader: MirrorReader, complete: Path, number: int) -> None:
    """Read a shard, and compare it with what plain zarr reads of the cache itself."""
    rows = reader.segment(number).rows
    for path, expected in plain_shard(complete, number).items():
        np.testing.assert_array_equal(rows[path], expected)


@settings(max_examples=12, deadline=None)
@given(
    visits=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    share=st.floats(0.1, 1.1),
    reopened_after=st.integers(0, 12),
)
def test_the_shards_used_last_are_kept_within_the_bound(
    complete: Path,
    tmp_path_factory: pytest.TempPathFactory,
    visits: list[int],
    share: float,
    reopened_after: int,
) -> None:
    """Oracle: a list in order of use, which a mirror that is opened again goes on with."""
    home, sizes = tmp_path_factory.mktemp("home"), sizes_of(complete)
    bound = int(share * sum(sizes))
    reader, used = MirrorReader(str(complete), home, bound), OrderedDict[int, None]()
    for position, number in enumerate(visits):
        if position == reopened_after:
            reader = MirrorReader(str(complete), home, bound)
        reader.segment(number)
        used[number] = None
        used.move_to_end(number)
        while sum(sizes[n] for n in used) > bound:
            used.popitem(last=False)
        assert kept_in(reader.root) == set(used)


def test_a_mirror_is_named_by_its_cache_and_begins_without_shards(complete: Path, tmp_path: Path) -> None:
    reader, manifest = MirrorReader(str(complete), tmp_path, ALL), read_manifest(complete)

    index = manifest.files["index/shards.parquet"].sha256[:12]
    assert reader.root == tmp_path / "mirrors" / f"{manifest.fingerprint}-{index}"
    assert kept_in(reader.root) == set()
    here = files_below(reader.root)
    assert here.keys() == {"manifest.json", "index/ranges.parquet", "index/shards.parquet"}
    for path in manifest.files:
        assert reader.attachment(path) == (complete / path).read_bytes()
    assert files_below(reader.root).items() <= files_below(complete).items()


def test_only_the_arrays_that_are_wanted_are_fetched(complete: Path, tmp_path: Path) -> None:
    reader = MirrorReader(str(complete), tmp_path, ALL)
    reader.segment(2, ["relations/value/gap"])
    fetched = [path for path in shard_files(reader.manifest, 2) if (reader.root / path).exists()]

    assert sorted(fetched) == ["relations/value/gap/c/2/0/0", "sequences/part-00002.parquet", "tokens/c/2"]
    check(reader, complete, 2)


def test_threads_share_a_mirror_that_keeps_almost_nothing(complete: Path, tmp_path: Path) -> None:
    reader = MirrorReader(str(complete), tmp_path, max(sizes_of(complete)))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: check(reader, complete, n), [0, 1, 2, 3, 4, 5] * 2))
    # Two threads that make room at once leave it to whoever fetches next.
    check(reader, complete, min({0, 1, 2, 3, 4, 5} - kept_in(reader.root)))

    assert len(kept_in(reader.root)) <= 1


def test_what_is_here_outlives_the_store_and_what_is_not_is_an_error(cache: Path, tmp_path: Path) -> None:
    reader = MirrorReader(str(cache), tmp_path / "home", ALL)
    expected = reader.segment(0).rows["tokens"]
    shutil.rmtree(cache)

    assert np.array_equal(reader.segment(0).rows["tokens"], expected)
    with pytest.raises(CacheNotFoundError):
        reader.segment(1)
    assert kept_in(reader.root) == {0}


@pytest.mark.parametrize(
    "path", ["tokens/c/1", "sequences/part-00001.parquet", "relations/value/gap/c/1/0/0"]
)
@pytest.mark.parametrize("damage", ["changed", "short", "missing"])
def test_a_file_that_is_damaged_here_is_fetched_again(
    complete: Path, tmp_path: Path, path: str, damage: str
) -> None:
    reader = MirrorReader(str(complete), tmp_path, ALL)
    reader.segment(1)
    content = (complete / path).read_bytes()
    (reader.root / path).unlink()
    if damage != "missing":
        (reader.root / path).write_bytes(content[:-1] + (b"?" if damage == "changed" else b""))
    check(reader, complete, 1)

    assert (reader.root / path).read_bytes() == content


@pytest.mark.parametrize("damage", [b"", b"x" * 347])
def test_what_is_damaged_in_the_store_is_neither_returned_nor_kept(
    cache: Path, tmp_path: Path, damage: bytes
) -> None:
    (cache / "tokens/c/0").write_bytes(damage)
    reader = MirrorReader(str(cache), tmp_path / "home", ALL)
    with pytest.raises(CacheCorruptError):
        reader.segment(0)

    assert not (reader.root / "tokens/c/0").exists()


def test_a_link_in_a_mirror_is_not_followed(complete: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    reader = MirrorReader(str(complete), tmp_path / "home", ALL)
    (reader.root / "tokens").mkdir()
    (reader.root / "tokens/c").symlink_to(outside)
    with pytest.raises(CacheCorruptError):
        reader.segment(0)

    assert list(outside.iterdir()) == []


def test_what_is_no_complete_cache_has_no_mirror(cache: Path, tmp_path: Path) -> None:
    keep_shards(cache, {1, 2})
    for url in (cache, tmp_path / "none"):
        with pytest.raises(MiniLMCacheError):
            MirrorReader(str(url), tmp_path / "home", ALL)
    assert not list((tmp_path / "home").rglob("manifest.json"))
