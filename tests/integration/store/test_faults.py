"""What machines and people do to caches: each fault is found, nothing turns into zeros, repeating repairs."""

import io
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minilm_cache.cache import open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    InterruptedRunError,
    MiniLMCacheError,
    ShardBusyError,
    StorageError,
)
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import DenseParameters, TopKParameters, VectorsParameters
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.pull import pull
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.shards import ShardWriter
from minilm_cache.store.writer import CacheWriter
from minilm_cache.train.config import TrainConfig
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of, manifest_of, stop_after
from tests.support import World, change_record, pushed, save_teacher, write_corpus
from tests.unit.store.support import keep_shards

KINDS = {
    "shard": ("relations/attention/gap/c/1/0/0", "relations/attention/gap/c/2/0/0"),
    "sequence table": ("sequences/part-00001.parquet", "sequences/part-00002.parquet"),
    "ranges": ("index/ranges.parquet", "sequences/part-00001.parquet"),
    "index": ("index/shards.parquet", "sequences/part-00001.parquet"),
    "manifest": ("manifest.json", "commits/00001.json"),
    "array metadata": ("relations/attention/gap/zarr.json", "relations/attention/weight/zarr.json"),
    "group metadata": ("zarr.json", "relations/zarr.json"),
    "teacher's configuration": ("teacher/config.json", "teacher/tokenizer_config.json"),
}
"""Each with the file that it is swapped with."""


def flip(file: Path, at: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 4
    file.write_bytes(content)


def swap(file: Path, other: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
    "a bit flipped near the start": lambda file: flip(file, 0.1),
    "a bit flipped in the middle": lambda file: flip(file, 0.5),
    "a bit flipped near the end": lambda file: flip(file, 0.95),
}


def damage_file(cache: Path, earlier: Path, kind: str, damage: str) -> None:
    """Damage a file; stale: the one of an earlier dump of other text and settings."""
    name, other = KINDS[kind]
    if damage == "swapped":
        swap(cache / name, cache / other)
    elif damage == "stale":
        (cache / name).write_bytes((earlier / name).read_bytes())
    else:
        DAMAGES[damage](cache / name)


@pytest.fixture(scope="module")
def two_dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path, Path]:
    root = tmp_path_factory.mktemp("faults")
    teacher = save_teacher(root / "teacher")
    before = write_corpus(root / "before.txt", seed=1)
    earlier = World(root, teacher, before).dump("earlier", k=5, max_length=24).path
    world = World(root, teacher, write_corpus(root / "corpus.txt"))
    return world, world.dump().path, earlier


_STALE_ELSEWHERE = {"group metadata", "teacher's configuration", "manifest"}
"""The first two do not depend on text and settings; a manifest has a test of its own."""


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        (kind, damage)
        for kind in KINDS
        for damage in (*DAMAGES, "swapped", "stale")
        if damage != "stale" or kind not in _STALE_ELSEWHERE
    ],
)
def test_damage_is_found_and_mended(
    two_dumps: tuple[World, Path, Path], command: Command, kind: str, damage: str, tmp_path: Path
) -> None:
    world, sound, earlier = two_dumps
    cache = tmp_path / "cache"
    shutil.copytree(sound, cache)
    damage_file(cache, earlier, kind, damage)
    name, _ = KINDS[kind]

    with pytest.raises(MiniLMCacheError, match=name):
        read_everything(cache)
    if kind == "manifest":  # what a cache is cannot be guessed
        for arguments in (("verify", "--full", cache), ("train", cache, "--arch", "1x32")):
            command.fails(*arguments, code=3 if "verify" in arguments else 1, says=name)
        with pytest.raises(MiniLMCacheError, match=r"manifest\.json|is not a cache"):
            dump_cache(world.config(), out=cache, session=Session(world.home))
        return
    code, out, err = command("verify", "--full", cache, "--json")
    assert code == 3, err
    assert name in {found["path"] for found in json.loads(out)["damage"]}
    dump_cache(world.config(), out=cache, session=Session(world.home))
    assert arrays_of(cache) == arrays_of(sound)
    assert command("verify", "--full", cache)[0] == 0


def test_a_manifest_of_another_dump_fits_nothing(
    two_dumps: tuple[World, Path, Path], command: Command, tmp_path: Path
) -> None:
    world, sound, earlier = two_dumps
    cache = tmp_path / "cache"
    shutil.copytree(sound, cache)
    (cache / "manifest.json").write_bytes((earlier / "manifest.json").read_bytes())

    with pytest.raises(CacheCorruptError, match="is damaged"):
        open_cache(cache)
    command.fails("verify", cache, code=3, says="damaged")
    with pytest.raises(MiniLMCacheError, match="holds another cache"):
        dump_cache(world.config(), out=cache, session=Session(world.home))


def read_everything(path: Path) -> None:
    cache = open_cache(path)
    for name in cache.manifest.files:
        cache.reader.attachment(name)
    for number in range(len(cache.reader.ranges)):
        cache.reader.segment(number)


def test_a_record_that_lies_about_its_tokens_is_redone(
    two_dumps: tuple[World, Path, Path], tmp_path: Path, command: Command
) -> None:
    """Every file is as the record says; only the hash of the token ids in it is not."""
    world, sound, _ = two_dumps
    cache = tmp_path / "cache"
    shutil.copytree(sound, cache)
    change_record(cache, 1, tokens_xxh3="0" * 32)
    code, out, _ = command("verify", "--full", cache, "--json")
    assert (code, json.loads(out)["shards_to_redo"]) == (3, [1])
    assert dump_cache(world.config(), out=cache, session=Session(world.home)).shards_written == 1
    assert command("verify", "--full", cache)[0] == 0


def test_a_figure_that_changed_in_the_manifest_is_damage(world: World, command: Command) -> None:
    """Whatever reads it: one digit more would train on held-out sequences."""
    cache = world.dump().path
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["num_held_out"] -= 1
    (cache / "manifest.json").write_text(json.dumps(manifest))
    command.fails(
        *("train", cache, "--arch", "1x32"), code=1, says=("manifest.json is damaged", "`checksum`")
    )


def test_dumps_of_two_settings_into_one_folder_are_not_mixed(world: World) -> None:
    with pytest.raises(InterruptedRunError):
        dump_cache(
            world.config(), out=world.root / "cache", session=Session(world.home, should_stop=stop_after(3))
        )
    before = {file: file.read_bytes() for file in (world.root / "cache").rglob("*") if file.is_file()}
    for change in ({"k": 5}, {"seed": 1}, {"max_length": 16}, {"shard_tokens": 512}, {"codec": "dense"}):
        with pytest.raises(MiniLMCacheError, match="holds another cache, which differs in"):
            world.dump(**change)
    for file, content in before.items():
        assert file.read_bytes() == content


def test_two_dumps_at_once_make_one_cache(world: World) -> None:
    """Both begin with every shard to do; whoever comes second to one stops, or finds it done."""
    expected = arrays_of(world.dump("whole").path)
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(world.dump().shards_written)
        except ShardBusyError as error:
            outcomes.append(error)

    both = [threading.Thread(target=run) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(120)
    assert len(outcomes) == 2
    world.dump()
    assert arrays_of(world.root / "cache") == expected


def test_a_reader_during_a_dump_sees_committed_shards_only(world: World) -> None:
    whole = CacheReader(world.dump("whole").path)
    path = world.root / "cache"
    seen: list[int] = []

    def look() -> bool:
        if (path / "manifest.json").exists():
            with pytest.raises(CacheIncompleteError):
                open_cache(path)
            reader = CacheReader(path, partial=True)
            seen.append(len(reader.records))
            for number in range(len(reader.ranges)):
                if number not in reader.records:
                    with pytest.raises(CacheIncompleteError, match=f"shard {number} .*not committed"):
                        reader.segment(number)
                    continue
                for name, rows in reader.segment(number).rows.items():
                    np.testing.assert_array_equal(rows, whole.segment(number).rows[name])
        return False

    dump_cache(world.config(), out=path, session=Session(world.home, should_stop=look))
    assert len(set(seen)) > 2  # one shard is written while the teacher runs on the next


# Known failures of others.


def test_files_of_a_shard_without_its_record_are_written_again(world: World) -> None:
    """Resuming by the existence of files would adopt what a crash left half-written."""
    path = world.dump().path
    expected = arrays_of(path)
    keep_shards(path, {0, 1, 3, 4, 5})
    for name in ("relations/value/gap/c/2/0/0", "sequences/part-00002.parquet"):
        (path / name).write_bytes(b"left by a crash")
    with pytest.raises(CacheIncompleteError, match="5 of 6 shards are committed"):
        open_cache(path)
    assert world.dump().shards_written == 1
    assert arrays_of(path) == expected


def test_a_manifest_is_never_half_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets its name when it is whole: another process sees none, or all of it."""
    seen = []
    real = Path.replace

    def watch(self: Path, target: Path) -> Path:
        if target.name == "manifest.json":
            seen.append(json.loads(self.read_bytes())["complete"])
            assert not json.loads(target.read_bytes())["complete"]
        return real(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    world.dump()
    assert seen == [True]


def test_a_changed_world_size_mixes_no_samples(world: World) -> None:
    expected = arrays_of(world.dump("whole").path)
    world.dump(rank=2, world_size=3)
    world.dump(rank=1, world_size=2)
    world.dump()
    assert arrays_of(world.root / "cache") == expected


def test_training_has_no_settings_of_codecs(world: World) -> None:
    """How targets are to be read stands in the cache alone."""
    codecs = (TopKParameters, DenseParameters, VectorsParameters)
    settings = {name for codec in codecs for name in codec.model_fields} | set(DumpConfig.model_fields)

    # How a student is computed has the names of how the teacher was.
    shared = {"seed", "device", "batch_size", "precision", "compiled"}
    assert settings & set(TrainConfig.model_fields) == shared
    for k in (3, 6):
        assert manifest_of(world.dump(f"k{k}", k=k).path).identity.codec.model_dump()["k"] == k
        rows = open_cache(world.root / f"k{k}")[0].target_rows("value")
        assert rows.index.shape[-1] == k  # type: ignore[union-attr]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("written_by", "method"), [(CacheWriter, "commit_shard"), (ShardWriter, "append")])
def test_a_writer_in_the_background_that_dies_ends_the_dump(
    world: World, monkeypatch: pytest.MonkeyPatch, written_by: type[object], method: str
) -> None:
    real = getattr(written_by, method)

    def fail(self: Any, *arguments: Any, **named: Any) -> Any:
        files = arguments[0] if method == "commit_shard" else self
        if files.shard == 1:
            raise StorageError("the disk went away")
        return real(self, *arguments, **named)

    monkeypatch.setattr(written_by, method, fail)
    with pytest.raises(StorageError, match="the disk went away"):
        world.dump()
    assert not list((world.root / "cache").rglob("*.partial"))
    monkeypatch.undo()
    assert world.dump().manifest.complete


def test_a_copied_cache_is_a_cache(world: World, command: Command) -> None:
    path = world.dump().path
    shutil.copytree(path, world.root / "copy")
    shutil.rmtree(path)
    assert command("verify", "--full", world.root / "copy")[0] == 0


def test_an_error_that_is_kept_keeps_no_lock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook keeps the last error, and with it the frames that it came through."""

    def fail(*_: object, **_more: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("minilm_cache.models.teacher.Teacher.read", fail)
        with pytest.raises(RuntimeError) as kept:
            world.dump()
    assert world.dump().manifest.complete
    assert "out of memory" in str(kept.value)


def test_a_table_that_is_a_bomb_is_refused(world: World) -> None:
    """It says eight rows at its end and thirty million in its row group."""
    cache = world.dump().path
    path = "sequences/part-00001.parquet"
    table = pq.read_table(cache / path)
    num_rows = 3_000_000
    zeros = {field.name: np.zeros(num_rows, field.type.to_pandas_dtype()) for field in table.schema}
    buffer = io.BytesIO()
    pq.write_table(pa.table(zeros), buffer, compression="zstd", row_group_size=num_rows)
    content = bytearray(buffer.getvalue())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    at = content.index(b"\x16" + varint(num_rows), footer)  # the field of the number of rows, zigzag-coded
    lie = varint(table.num_rows)
    padded = bytes(byte | 0x80 for byte in lie[:1]) + b"\x80" * (len(varint(num_rows)) - 2) + b"\x00"
    content[at + 1 : at + 1 + len(padded)] = padded
    assert pq.ParquetFile(io.BytesIO(content)).metadata.num_rows == table.num_rows
    (cache / path).write_bytes(content)
    change_record(cache, 1, files={path: digest_bytes(bytes(content)).model_dump()})
    with pytest.raises(CacheCorruptError, match="numbers of rows do not agree"):
        CacheReader(cache).table(1)


def varint(number: int) -> bytes:
    """Return a number as Thrift's compact protocol codes it."""
    number, coded = number << 1, bytearray()
    while number >= 0x80:
        coded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*coded, number])


def test_a_copy_whose_index_is_damaged_is_not_dumped_anew_unasked(world: World, command: Command) -> None:
    """Without records, nothing says which of its shards are sound."""
    world.dump()
    url = pushed(world, str(world.root / "store"))
    copy = pull(url, world.root / "copy", session=Session()).place
    before = arrays_of(Path(copy))
    flip(Path(copy, "index/shards.parquet"), 0.5)
    with pytest.raises(CacheCorruptError, match=r"index/shards\.parquet is damaged.*fetch the cache again"):
        world.dump("copy")
    after = arrays_of(Path(copy))

    assert {path for path in before if after[path] != before[path]} == {"index/shards.parquet"}


@pytest.mark.parametrize("damage", ["shard", "table"])
def test_a_copy_with_a_damaged_shard_is_repaired_by_a_dump(world: World, damage: str) -> None:
    expected = arrays_of(world.dump().path)
    url = pushed(world, str(world.root / "store"))
    copy = Path(pull(url, world.root / "copy", session=Session()).place)
    flip(copy / ("tokens/c/2" if damage == "shard" else "sequences/part-00002.parquet"), 0.5)
    assert world.dump("copy").shards_written == 1
    assert arrays_of(copy) == expected
    assert len(list((copy / "commits").iterdir())) == 6
