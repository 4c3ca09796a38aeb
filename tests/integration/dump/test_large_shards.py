"""Shards of several segments: written and read a part at a time, with the same content as in one part."""

from collections import Counter
from typing import Any

import pytest

from minilm_cache.cache import open_cache
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.session import Session
from minilm_cache.store import layout, object_store, ranges
from minilm_cache.store import pull as pull_module
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.pull import Fetcher
from minilm_cache.store.shards import ShardWriter
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of
from tests.integration.train.test_train import assert_same, settings, stop_after, weights
from tests.support import World, pushed

SHARD, SEGMENT = 1024, 256


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let segments have a quarter of the tokens of the shards here."""
    monkeypatch.setattr(ranges, "segment_tokens", lambda *_: SEGMENT)


@pytest.mark.parametrize("codec", ["topk", "vectors"])
def test_shards_that_are_written_in_segments_are_the_same(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    whole = world.dump("whole", codec=codec, shard_tokens=SHARD).path
    monkeypatch.setattr(ranges, "segment_tokens", lambda *_: SEGMENT)
    appended: Counter[int] = Counter()
    real = ShardWriter.append

    def counting(self: ShardWriter, *segment: Any, threads: Any) -> None:
        appended[self.shard] += 1
        real(self, *segment, threads=threads)

    monkeypatch.setattr(ShardWriter, "append", counting)
    path = world.dump("cut", codec=codec, shard_tokens=SHARD).path

    assert len(appended) > 1
    assert set(appended.values()) == {SHARD // SEGMENT}
    assert arrays_of(path) == arrays_of(whole)
    assert command("verify", "--full", path)[0] == 0
    assert [sequence.input_ids.tolist() for sequence in open_cache(path)] == [
        sequence.input_ids.tolist() for sequence in open_cache(whole)
    ]


@pytest.mark.usefixtures("small_segments")
def test_a_training_that_is_interrupted_within_a_shard_goes_on_as_if_it_were_not(world: World) -> None:
    cache = world.dump(shard_tokens=SHARD).path
    config = settings(buffer_shards=1, streams=2, accumulate=2, checkpoint_steps=1)
    expected = train_students(config, cache, out=world.root / "whole", session=Session(world.home))
    with pytest.raises(Exception, match="interrupted"):
        train_students(
            config, cache, out=world.root / "run", session=Session(world.home, should_stop=stop_after(5))
        )
    result = train_students(config, cache, out=world.root / "run", session=Session(world.home))

    for arch, expected_weights in weights(expected).items():
        assert_same(weights(result)[arch], expected_weights)


def test_an_epoch_from_a_store_fetches_a_shard_once_though_not_all_are_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "segment_tokens", lambda *_: SHARD // 16)
    path = world.dump(shard_tokens=SHARD // 4).path
    url = f"file://{pushed(world, str(world.root / 'store'))}"
    fetched: Counter[str] = Counter()
    real = Fetcher.fetch_all

    def counting(self: Fetcher, files: dict[str, object], requests: object) -> None:
        fetched.update(list(files))
        real(self, files, requests)  # type: ignore[arg-type]

    monkeypatch.setattr(Fetcher, "fetch_all", counting)
    # Several threads would read from more shards than are kept here: a shard has only four segments.
    monkeypatch.setattr(MirrorReader, "reads_at_once", 1)
    monkeypatch.setattr(MirrorReader, "bytes_ahead", 0)
    opened = open_cache(path)
    kept = sum(opened.reader.records.bytes_by_name().values()) // 2
    steps = opened.manifest.num_train // 4
    config = settings(steps=steps, buffer_shards=1, local_bytes=kept)
    train_students(config, url, out=world.root / "run", session=Session(world.home))
    times = {count for file, count in fetched.items() if file.startswith("relations/")}

    assert len({file.split("/c/")[1] for file in fetched if file.startswith("tokens/c/")}) > 1
    assert max(times) <= 2  # the next epoch has begun, and held-out sequences are read before


def test_large_files_are_sent_and_fetched_in_parts(
    world: World, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(pull_module, "_LARGE_PART_BYTES", 100)
    monkeypatch.setattr(pull_module, "_PART_BYTES", 100)
    monkeypatch.setattr(pull_module, "_PARTS_AHEAD", 3)
    expected = arrays_of(world.dump().path)
    for url in (pushed(world, store), pushed(world, f"file://{world.root}/store")):
        place = url if "://" in url else f"file://{url}"
        out = world.root / f"pulled-{len(place)}"
        pull_module.pull(place, out, session=Session())
        assert arrays_of(out) == expected
        numbers = [sequence.input_ids.tolist() for sequence in open_cache(place, home=world.home)]
        assert numbers == [sequence.input_ids.tolist() for sequence in open_cache(out)]


def test_shards_whose_files_no_store_could_copy_are_refused(world: World) -> None:
    with pytest.raises(InvalidConfigError, match=r"files of shards could exceed 4 GiB"):
        world.dump(shard_tokens=2**26, codec="dense")


def test_the_default_of_a_large_corpus_is_large_shards(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GOOD_NUM_SHARDS", 3)
    monkeypatch.setattr(layout, "segment_tokens", lambda *_: SEGMENT)
    monkeypatch.setattr(ranges, "segment_tokens", lambda *_: SEGMENT)
    manifest = world.dump(shard_tokens=None).manifest

    assert manifest.shard_tokens > SEGMENT
    assert manifest.num_tokens / manifest.shard_tokens <= 3


def test_a_dump_of_another_default_goes_on_with_the_shards_that_it_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InterruptedRunError):
        dump_cache(
            world.config(), out=world.root / "cache", session=Session(world.home, should_stop=stop_after(3))
        )
    manifest = world.dump(shard_tokens=None).manifest

    assert (manifest.complete, manifest.shard_tokens) == (True, 256)
