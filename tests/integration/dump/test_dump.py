"""A dump: what is written, whole and resumed, and what a stranger's Zarr library sees of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from minilm_cache import open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    IdentityMismatchError,
    InterruptedRunError,
    InvalidConfigError,
    ShardBusyError,
    StorageError,
)
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.leases import forget_ranks
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.writer import CacheWriter
from tests.support import World, save_teacher, write_corpus


def arrays_of(path: Path) -> dict[str, bytes]:
    """Every file that must not depend on when or in how many parts a cache was written."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.relative_to(path).parts[0] not in {"commits", "locks"}
    }


def manifest_of(path: Path) -> CacheManifest:
    return CacheManifest.model_validate_json((path / "manifest.json").read_bytes())


def test_a_dump_is_repeated_whatever_its_tokenizer_has_been_called_with(world: World) -> None:
    """The first dump calls the tokenizer; the others read the tokens that it has left in the home."""
    file = world.teacher / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    backend.enable_truncation(16)
    backend.enable_padding()
    backend.save(str(file))
    first = world.dump()
    again = world.dump()

    assert (first.shards_written, again.shards_written) == (first.num_shards, 0)
    stored = json.loads((first.path / "teacher/tokenizer.json").read_bytes())
    assert (stored["truncation"], stored["padding"]) == (None, None)


def stop_after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


def test_stored_relations_are_the_teachers(shared_world: World) -> None:
    """Oracle: the eager model's attentions, through the dense codec."""
    path = shared_world.dump("dense", codec="dense").path
    cache = open_cache(path)
    model = AutoModel.from_pretrained(shared_world.teacher, attn_implementation="eager").eval()
    for number in (0, len(cache) // 2, len(cache) - 1):
        ids = cache[number].input_ids
        with torch.no_grad():
            expected = model(ids[None], output_attentions=True).attentions[-1][0]
        found = cache[number].relation("attention")

        torch.testing.assert_close(found, expected, atol=1e-5, rtol=2**-10)


def test_packed_sequences_are_the_corpus_and_nothing_else(shared_world: World) -> None:
    """Every document comes whole, separated by [SEP], each sequence [CLS] ... [SEP]."""
    cache = open_cache(shared_world.root / "cache")
    tokenizer = AutoTokenizer.from_pretrained(shared_world.teacher)
    num_train, found = cache.manifest.num_train, []
    for part in (range(num_train), range(num_train, len(cache))):  # they are packed apart
        stream = ",".join(str(token) for n in part for token in cache[n].input_ids.tolist()[1:-1])
        found += [tuple(document.split(",")) for document in stream.split(",3,")]
    documents = shared_world.corpus.read_text().strip().split("\n\n")
    expected = sorted(tuple(map(str, tokenizer(d, add_special_tokens=False)["input_ids"])) for d in documents)

    assert sorted(found) == expected
    lengths = [len(cache[n].input_ids) for n in range(len(cache))]
    assert {*lengths[: num_train - 1], *lengths[num_train:-1]} == {32}


def test_records_are_one_sequence_each(world: World) -> None:
    path = world.dump(packing="records").path
    manifest = manifest_of(path)
    tokenizer = AutoTokenizer.from_pretrained(world.teacher)
    documents = world.corpus.read_text().strip().split("\n\n")
    expected = sorted(tuple(tokenizer(d, truncation=True, max_length=32)["input_ids"]) for d in documents)
    cache = open_cache(path)

    assert manifest.num_sequences == len(documents)
    assert sorted(tuple(cache[n].input_ids.tolist()) for n in range(len(cache))) == expected


def test_a_dump_is_reproducible(world: World) -> None:
    first, second = world.dump("one").path, world.dump("two").path

    assert arrays_of(first) == arrays_of(second)


@pytest.mark.parametrize("calls", [0, 2, 4])
def test_a_resumed_dump_is_byte_for_byte_an_uninterrupted_one(world: World, calls: int) -> None:
    expected = arrays_of(world.dump("whole").path)
    path = world.root / "parts"
    with pytest.raises(InterruptedRunError, match=r"Run the same command again to go on\.$"):
        dump_cache(world.config(), out=path, session=Session(world.home, should_stop=stop_after(calls)))
    with pytest.raises(CacheIncompleteError, match="shards are committed"):
        open_cache(path)
    committed = {file.name: file.read_bytes() for file in (path / "commits").glob("*.json")}
    result = dump_cache(world.config(), out=path, session=Session(world.home))

    assert arrays_of(path) == expected
    assert result.shards_kept == len(committed)
    assert {name: (path / "commits" / name).read_bytes() for name in committed} == committed


def test_ranks_write_one_cache_together(world: World) -> None:
    expected = arrays_of(world.dump("whole").path)
    world.dump("parts", rank=1, world_size=2)
    with pytest.raises(CacheIncompleteError):
        open_cache(world.root / "parts")
    world.dump("parts", rank=0, world_size=2)

    assert arrays_of(world.root / "parts") == expected


def test_a_finished_dump_has_nothing_left_to_do(world: World) -> None:
    path = world.dump().path
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if "locks" not in file.parts}
    result = world.dump()

    assert (result.shards_written, result.shards_kept) == (0, len(CacheReader(path).ranges))
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_repeating_a_dump_repairs_damaged_shards(world: World, damage: str) -> None:
    path = world.dump().path
    expected = arrays_of(path)
    file = path / "relations/value/weight/c/1/0/0"
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        file.unlink()
    result = world.dump()

    assert result.shards_written == 1
    assert arrays_of(path) == expected


def test_resuming_compares_sizes_unless_it_is_asked_for_more(world: World) -> None:
    path = world.dump().path
    expected = arrays_of(path)
    flipped, short = path / "relations/value/weight/c/1/0/0", path / "relations/value/weight/c/2/0/0"
    content = flipped.read_bytes()
    flipped.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    short.write_bytes(short.read_bytes()[:-1])

    assert world.dump(check="sizes").shards_written == 1
    with pytest.raises(CacheCorruptError, match=r"c/1/0/0 is damaged.*--check full"):
        open_cache(path).reader.segment(1)
    assert world.dump(check="full").shards_written == 1
    assert arrays_of(path) == expected


def test_a_disk_that_is_too_small_is_noticed_after_the_first_shard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(world.root)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
        with pytest.raises(
            StorageError, match=r"takes \d\.\d MB, and 0\.0 MB are free there\. Free some space"
        ):
            world.dump()
    (committed,) = (world.root / "cache/commits").rglob("*.json")
    assert committed.exists()
    resumed = world.dump()
    assert resumed.shards_kept == 1
    assert resumed.manifest.complete


def test_a_shard_has_one_writer(world: World) -> None:
    path = world.root / "cache"
    with pytest.raises(InterruptedRunError):
        dump_cache(world.config(), out=path, session=Session(world.home, should_stop=stop_after(1)))
    config = world.config()
    manifest = manifest_of(path)
    attachments = {name: (path / name).read_bytes() for name in manifest.files if name.startswith("teacher/")}
    ranges = CacheReader(path, partial=True).ranges
    writer = CacheWriter(path, manifest, ranges=ranges, attachments=attachments)
    lock = writer.claim(0)
    try:
        with pytest.raises(ShardBusyError, match=r"shard 0 .* is being written by another process"):
            dump_cache(config, out=path, session=Session(world.home))
    finally:
        lock.release()
    dump_cache(config, out=path, session=Session(world.home))


def test_a_committed_shard_is_not_written_twice(world: World) -> None:
    """Two processes whose lists of shards overlap: the second finds the first one's shards and skips them."""
    expected = arrays_of(world.dump("whole").path)
    path = world.root / "cache"
    world.dump(rank=1, world_size=2)
    before = {file.name: file.read_bytes() for file in (path / "commits").iterdir()}
    everything = _Overtaken(path, world)
    dump_cache(world.config(), out=path, session=Session(world.home, should_stop=everything))

    assert arrays_of(path) == expected
    assert {name: (path / "commits" / name).read_bytes() for name in before} == before
    assert everything.overtaken


class _Overtaken:
    """Another process that writes every shard while this one is at its first."""

    def __init__(self, path: Path, world: World) -> None:
        self.overtaken = False
        self._path, self._world = path, world

    def __call__(self) -> bool:
        if not self.overtaken:
            self.overtaken = True
            for rank in range(1, 4):
                forget_ranks(self._path)  # each believes to be in a folder of its own
                dump_cache(
                    self._world.config(rank=2 * rank, world_size=8),
                    out=self._path,
                    session=Session(self._world.home),
                )
        return False


def test_what_a_kill_left_before_the_first_commit_is_not_in_the_way(world: World) -> None:
    path = world.root / "cache"
    path.mkdir()
    (path / ".manifest.json.0123.partial").write_text("{")
    world.dump()

    assert manifest_of(path).complete


def test_long_sequences_take_two_bytes_for_columns(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher", max_position_embeddings=600)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt", 120))
    path = world.dump(max_length=600, shard_tokens=1024, k=5, select="largest").path
    exact = open_cache(world.dump("dense", max_length=600, shard_tokens=1024, codec="dense").path)
    cache = open_cache(path)
    group = zarr.open_group(path, mode="r", zarr_format=3)
    high = group["relations/value/gap_high"]
    assert isinstance(high, zarr.Array)
    assert int(np.asarray(high[:600]).max()) >= 1
    for number in (0, len(cache) - 1):
        for kind in ("attention", "value"):
            stored, teachers = cache[number].relation(kind), exact[number].relation(kind)
            entries = stored > stored.amin(-1, keepdim=True)
            smallest = teachers.masked_fill(~entries, 1).amin(-1)
            largest_left_out = teachers.masked_fill(entries, 0).amax(-1)
            assert bool((largest_left_out <= smallest * 1.002).all())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"k": 7}, "codec.k (6 there, 7 asked)"),
        ({"seed": 1}, "packing.seed"),
        ({"max_length": 16}, "packing.max_length"),
        ({"shard_tokens": 512}, "shard_tokens (256 there, 512 asked)"),
        ({"codec": "dense"}, "codec"),
    ],
    ids=str,
)
def test_a_folder_of_another_cache_is_refused_and_left_alone(
    world: World, changes: dict[str, Any], field: str
) -> None:
    path = world.dump().path
    before = arrays_of(path)
    with pytest.raises(IdentityMismatchError) as caught:
        world.dump(**changes)

    assert field in str(caught.value)
    assert arrays_of(path) == before


def test_no_resume_refuses_a_folder_that_exists(world: World) -> None:
    path = world.dump().path
    shutil.rmtree(world.teacher)  # which is not looked at
    with pytest.raises(IdentityMismatchError, match="exists"):
        dump_cache(world.config(), out=path, resume=False, session=Session(world.home))


def test_the_fingerprint_names_content_and_nothing_else(world: World) -> None:
    base = world.dump("a").manifest.fingerprint
    copy = world.root / "elsewhere.txt"
    copy.write_bytes(world.corpus.read_bytes())

    assert world.dump("b", corpus=str(copy), shard_tokens=512, batch_size=3).manifest.fingerprint == base
    copy.write_text(copy.read_text().replace("ba", "be", 1))
    assert world.dump("c", corpus=str(copy)).manifest.fingerprint != base


def test_the_default_folder_is_in_the_home_and_named_by_content(world: World) -> None:
    result = dump_cache(world.config(), out=None, session=Session(world.home))

    assert (
        result.path == world.home / "caches" / f"teacher-corpus.txt-topk-{result.manifest.fingerprint[:12]}"
    )


def test_max_tokens_is_a_limit(world: World) -> None:
    manifest = world.dump(max_tokens=200).manifest

    assert manifest.num_tokens == 193


def test_held_out_sequences_are_the_last_ones(shared_world: World) -> None:
    manifest = manifest_of(shared_world.root / "cache")

    assert manifest.held_out_by == "documents"
    assert (manifest.num_sequences, manifest.num_held_out) == (47, 2)


def test_fidelity_is_measured_from_the_bytes_on_disk(world: World) -> None:
    path = world.dump("largest", select="largest", k=6).path
    measured = manifest_of(path).measured
    assert measured is not None
    cache = open_cache(path)
    model = AutoModel.from_pretrained(world.teacher, attn_implementation="eager").eval()
    total, rows = 0.0, 0
    for number in range(cache.manifest.num_train, len(cache)):
        ids = cache[number].input_ids
        with torch.no_grad():
            teacher = model(ids[None], output_attentions=True).attentions[-1][0].double()
        stored = cache[number].relation("attention").double()
        total += float(torch.special.xlogy(teacher, teacher / stored).nan_to_num().sum())
        rows += teacher.shape[0] * teacher.shape[1]

    found = measured.fidelity[0].relations[RelationKind.ATTENTION].kl_teacher_to_stored
    assert found == pytest.approx(total / rows, rel=1e-3)


def test_more_positions_than_the_teacher_has_are_refused(world: World) -> None:
    with pytest.raises(InvalidConfigError, match="--max-length 67 is more than teacher"):
        world.dump(max_length=67, shard_tokens=1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "--k 0"),
        ({"k": 33}, "--k 33 is above --max-length 32"),
        ({"max_length": 3}, "--max-length 3"),
        ({"shard_tokens": 100}, "--shard-tokens 100 is not a power of two"),
        ({"shard_tokens": 32}, "--shard-tokens 32"),
        ({"tail": "uniform"}, "--tail needs --select"),
        ({"codec": "dense", "k": 4}, "--k goes with --codec topk, not with dense"),
        ({"k": 5000, "max_length": 9000}, "--k 5000"),
        ({"rank": 2, "world_size": 2}, "--rank 2 is not below --world-size 2"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"codec": "zip"}, "--codec zip"),
        ({"seed": -1}, "--seed -1"),
        ({"max_tokens": 3}, "--max-tokens 3"),
        ({"max_tokens": 20}, "--max-tokens 20 is below --max-length 32"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    settings = {"teacher": "t", "max_length": 32, **changes}
    with pytest.raises(InvalidConfigError) as caught:
        validated(DumpConfig, settings)

    assert message in str(caught.value)
