"""Paths of a cache and arithmetic of its shards, against plain loops and against files on disk."""

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.identity import CacheIdentity, DenseParameters, TopKParameters
from minilm_cache.storage_schema.manifest import PREVIEW, Labels
from minilm_cache.store.layout import (
    below,
    cache_name,
    commit_path,
    decoded_bytes,
    default_shard_tokens,
    lock_path,
    segment_tokens,
    sequences_path,
    shard_files,
)
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import CacheReader, read_manifest
from tests.unit.store.support import GOLDEN, VECTORS, plain_row_bytes


class Lengths:
    """Sequences of known lengths, in a list."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.num_sequences = lengths, len(lengths)

    def tokens_before(self, number: int) -> int:
        return sum(self.lengths[:number])

    def sequences_within(self, num_tokens: int) -> int:
        counts = range(len(self.lengths) + 1)
        return max(count for count in counts if self.tokens_before(count) <= num_tokens)


LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=200)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.sampled_from([64, 128, 256]))
def test_shards_are_filled_with_whole_sequences_in_order(lengths: list[int], shard_tokens: int) -> None:
    """Oracle: put each sequence into the last shard, or into a new one if it does not fit."""
    expected: list[list[int]] = [[]]
    for length in lengths:
        if sum(expected[-1]) + length > shard_tokens:
            expected.append([])
        expected[-1].append(length)
    ranges = ShardRanges.split(Lengths(lengths), shard_tokens)

    assert [(r.num_sequences, r.num_tokens) for r in ranges] == [(len(e), sum(e)) for e in expected]
    assert [r.first_sequence for r in ranges] == [sum(map(len, expected[:n])) for n in range(len(expected))]


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_every_sequence_is_in_the_shard_that_is_named_for_it(lengths: list[int]) -> None:
    ranges = ShardRanges.split(Lengths(lengths), 64)
    expected = [number for number, r in enumerate(ranges) for _ in range(r.num_sequences)]

    assert [ranges.shard_of(sequence) for sequence in range(len(lengths))] == expected


def test_no_sequences_make_no_shards() -> None:
    assert len(ShardRanges.split(Lengths([]), 64)) == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 99_999), min_size=2, max_size=20, unique=True))
def test_names_sort_as_the_shards_do(shards: list[int]) -> None:
    for path_of in (commit_path, sequences_path, lock_path):
        paths = [path_of(shard) for shard in sorted(shards)]
        assert paths == sorted(set(paths))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**20))
def test_paths_of_a_shard_hold_its_number_and_stay_below_the_root(shard: int) -> None:
    for path_of in (commit_path, sequences_path, lock_path):
        path = PurePosixPath(path_of(shard))
        digits = path.stem.removeprefix("part-")
        assert int(digits) == shard
        assert len(digits) >= 5
        assert len(path.parts) == 2


@pytest.mark.parametrize("name", ["v1", "v1-vectors", "v1-states", "v2"])
def test_the_layout_names_every_file_of_a_cache_and_no_other(name: str) -> None:
    root = GOLDEN / name
    manifest = read_manifest(root)
    shards = range(len(CacheReader(root).ranges))
    expected = {path for shard in shards for path in (*shard_files(manifest, shard), commit_path(shard))}
    expected |= {"manifest.json", "README.md", PREVIEW, *manifest.files}  # these name no preview yet
    on_disk = {file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()}

    assert {path for path in on_disk if not path.startswith("locks/")} == expected


@pytest.mark.parametrize("name", ["v1", "v1-vectors", "v1-states"])
def test_a_shard_takes_in_memory_what_the_metadata_says(name: str) -> None:
    manifest = read_manifest(GOLDEN / name)
    decoded = decoded_bytes(manifest.identity, manifest.calibration, manifest.shard_tokens)

    assert decoded == manifest.shard_tokens * plain_row_bytes(GOLDEN / name)


def identity_of(k: int | None, heads: int, max_length: int) -> CacheIdentity:
    """Return an identity whose rows have the size that is asked for; k=None: dense."""
    identity = read_manifest(GOLDEN / "v1").identity
    assert isinstance(identity.codec, TopKParameters)
    codec = DenseParameters() if k is None else identity.codec.model_copy(update={"k": k})
    packing = identity.packing.model_copy(update={"max_length": max_length})
    return identity.model_copy(update={"codec": codec, "packing": packing, "relation_heads": heads})


@settings(max_examples=50, deadline=None)
@given(
    st.one_of(st.none(), st.integers(1, 4096)),
    st.integers(1, 64),
    st.sampled_from([4, 31, 32, 128, 512, 4096, 8192]),
)
def test_segments_are_as_large_as_the_memory_bound_allows(k: int | None, heads: int, max_length: int) -> None:
    identity = identity_of(k, heads, max_length)
    tokens = segment_tokens(identity, None)
    bound = 2**28

    assert tokens & (tokens - 1) == 0
    assert max_length <= tokens <= 2**18
    if tokens < 2**18:
        assert decoded_bytes(identity, None, 2 * tokens) > bound
    if tokens >= 2 * max_length:
        assert decoded_bytes(identity, None, tokens) <= bound


def test_a_cache_of_many_layers_keeps_its_writer_below_two_gibibytes() -> None:
    manifest = read_manifest(VECTORS)
    assert manifest.calibration is not None
    (fitted,) = manifest.calibration.layers
    layers = tuple(range(64))
    many = [fitted.model_copy(update={"layer": layer, "components": 768}) for layer in layers]
    identity = manifest.identity.model_copy(update={"layers": layers})
    calibration = manifest.calibration.model_copy(update={"layers": tuple(many)})
    tokens = segment_tokens(identity, calibration)

    assert tokens * (2 + 64 * 768 * 2) <= 2**31 < 2 * tokens * (2 + 64 * 768 * 2)


@pytest.mark.parametrize("k", [None, 8])
def test_large_corpora_have_large_shards(k: int | None) -> None:
    identity = identity_of(k, 12, 128)
    smallest = segment_tokens(identity, None)
    row_bytes = decoded_bytes(identity, None, 1)

    assert default_shard_tokens(identity, None, 20_000 * smallest) == smallest
    assert default_shard_tokens(identity, None, 20_000 * smallest + 1) == 2 * smallest
    tokens = default_shard_tokens(identity, None, 3 * 10**12)
    assert tokens * row_bytes / 2 < 2 * 2**31  # one of two relations at least, so half of a row
    assert tokens > smallest


LABEL = st.text(
    st.characters(codec="utf-8", min_codepoint=32, exclude_characters="\x7f"), min_size=1, max_size=150
)


@settings(max_examples=50, deadline=None)
@given(LABEL, LABEL)
def test_a_cache_has_a_name_of_one_part_that_ends_with_its_fingerprint(teacher: str, corpus: str) -> None:
    identity = identity_of(6, 4, 32)
    name = cache_name(Labels(teacher=teacher, corpus=corpus, created_by="test"), identity)

    assert PurePosixPath(name).parts == (name,)
    assert set(":?#").isdisjoint(name)  # a URL's path would end there
    assert name.endswith(f"-topk-{identity.fingerprint()[:12]}")
    arriving = f".{name}.{identity.fingerprint()[:12]}.arriving"  # the longest name that is made of it
    assert len(arriving.encode()) <= 255  # bytes, in file systems


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abc._-0", min_size=1).filter(lambda part: set(part) != {"."}), min_size=1))
def test_paths_are_joined_as_pathlib_does(parts: list[str]) -> None:
    root = Path("/nowhere/cache")

    assert below(root, "/".join(parts)) == root.joinpath(*parts)


@pytest.mark.parametrize("link", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_any_part_of_a_path_is_refused(tmp_path: Path, link: str, dangling: bool) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / link).parent.mkdir(parents=True)
    if not dangling:
        (outside / "b/c").mkdir(parents=True)
    (root / link).symlink_to(outside)
    with pytest.raises(CacheCorruptError):
        below(root, "a/b/c")


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")

    assert below(tmp_path / "here", "a/b") == tmp_path / "here/a/b"
