"""Caches from a stranger: digests that agree, content that must not be believed."""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numcodecs.zstd import compress

from minilm_cache.cache import open_cache
from minilm_cache.errors import CacheCorruptError
from minilm_cache.session import Session
from minilm_cache.storage_schema.arrays import array_specs
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store import reader
from minilm_cache.store.card import cache_card
from minilm_cache.store.catalogue import newest_cache
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.push import push
from minilm_cache.store.reader import read_manifest
from tests.fixtures import Command
from tests.support import World, change_record, write_document

WEIGHT = "relations/value/weight/c/1/0/0"


def replace_in_shard(cache: Path, path: str, change: Callable[[bytes], bytes], shard: int = 1) -> None:
    """Change a file of a shard, and what the cache says of it."""
    content = change((cache / path).read_bytes())
    (cache / path).write_bytes(content)
    change_record(cache, shard, files={path: digest_bytes(content).model_dump()})


def replace_in_manifest(cache: Path, path: str, content: bytes) -> None:
    """Change a file outside the shards, and the manifest with it."""
    (cache / path).write_bytes(content)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["files"][path] = digest_bytes(content).model_dump()
    write_document(cache / "manifest.json", manifest)


def shard_file(chunk: bytes | None) -> bytes:
    """Return a shard of one inner chunk, as the sharding codec lays it out."""
    if chunk is None:
        body, entry = b"", struct.pack("<QQ", 2**64 - 1, 2**64 - 1)
    else:
        body = chunk + google_crc32c.value(chunk).to_bytes(4, "little")
        entry = struct.pack("<QQ", 0, len(body))
    return bytes(body + entry + google_crc32c.value(entry).to_bytes(4, "little"))


def assert_refused(command: Command, cache: Path, says: str) -> None:
    line = command.fails(
        *("train", cache, "--arch", "1x32", "--steps", 50, "--batch-size", 4), code=1, says=(str(cache), says)
    )
    assert len(line) < 1000
    command.fails("verify", "--full", cache, code=3, says=says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (shard_file(None), "an inner chunk is missing"),
        (shard_file(compress(bytes(2**28), 1)), "cannot be decompressed"),
        (shard_file(compress(bytes(10), 1)), "cannot be decompressed"),
        (shard_file(b"nonsense"), "cannot be decompressed"),
        (b"", "the index of its chunks is missing"),
        (shard_file(compress(bytes(10), 1))[:-1] + b"\0", "crc32c"),
        (shard_file(b"abc") + bytes(2), "crc32c"),
    ],
    ids=["missing chunk", "bomb", "short chunk", "no zstd", "empty", "index", "shifted"],
)
def test_shards_that_are_none(world: World, command: Command, content: bytes, says: str) -> None:
    cache = world.dump().path
    replace_in_shard(cache, WEIGHT, lambda _: content)
    assert_refused(command, cache, says)


def test_a_flipped_byte_behind_a_digest_that_agrees(world: World, command: Command) -> None:
    cache = world.dump().path
    replace_in_shard(cache, WEIGHT, lambda old: old[:50] + bytes([old[50] ^ 1]) + old[51:])
    assert_refused(command, cache, "crc32c")


def rewritten(manifest: CacheManifest, path: str, rows: np.ndarray[Any, Any]) -> bytes:
    """Return a shard file that holds these rows in its one inner chunk."""
    (spec,) = [spec for spec in array_specs(manifest.identity) if path.startswith(f"{spec.path}/")]
    whole = np.zeros((spec.chunk_tokens(manifest.shard_tokens), *spec.row_shape), spec.dtype)
    whole[: len(rows)] = rows
    return shard_file(compress(whole.tobytes(), 1))


@pytest.mark.parametrize(
    ("path", "value", "settings", "says"),
    [
        (WEIGHT, 255, {}, "an invalid weight"),
        (WEIGHT, 1, {}, "no slot"),
        ("relations/value/gap/c/1/0/0", 40, {}, "a column that it does not see"),
        ("tokens/c/1", 60_000, {}, "token ids outside the vocabulary"),
        ("relations/value/probability/c/1/0/0", np.nan, {"codec": "dense"}, "not a probability"),
        ("relations/value/probability/c/1/0/0", -1, {"codec": "dense"}, "not a probability"),
        ("relations/value/probability/c/1/0/0", 1, {"codec": "dense"}, "does not sum to 1"),
    ],
)
def test_rows_that_no_codec_writes(
    world: World, command: Command, path: str, value: float, settings: dict[str, Any], says: str
) -> None:
    cache = world.dump(**settings)
    (spec,) = [spec for spec in array_specs(cache.manifest.identity) if path.startswith(f"{spec.path}/")]
    rows = np.full((256, *spec.row_shape), value, spec.dtype)
    replace_in_shard(cache.path, path, lambda _: rewritten(cache.manifest, path, rows))
    assert_refused(command, cache.path, says)


def with_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, table[name].type))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.slice(1),
        lambda table: pa.concat_tables([table] * 1000),
        lambda table: table.drop_columns("offset"),
        lambda table: table.append_column("more", pa.array(["x"] * len(table))),
        lambda table: with_column(table, "offset", [0] * len(table)),
        lambda table: with_column(table, "length", [2**30] * len(table)),
        lambda table: with_column(table, "entropy_value", [float("nan")] * len(table)),
        lambda table: with_column(table, "sequence", [None] * len(table)),
        lambda table: with_column(table, "entropy_value", [1e30] * len(table)),
        lambda table: with_column(table, "entropy_attention", [-1.0] * len(table)),
        lambda table: with_column(table, "document", [-(2**62)] * len(table)),
    ],
    ids=[
        *("fewer", "many", "no offset", "more columns", "offsets", "lengths", "entropy", "nulls"),
        *("large entropy", "entropy below 0", "document"),
    ],
)
def test_tables_that_lie(world: World, command: Command, change: Callable[[pa.Table], pa.Table]) -> None:
    cache = world.dump().path

    def rewrite(old: bytes) -> bytes:
        sink = io.BytesIO()
        pq.write_table(change(pq.read_table(io.BytesIO(old))), sink)
        return sink.getvalue()

    replace_in_shard(cache, "sequences/part-00001.parquet", rewrite)
    assert_refused(command, cache, "part-00001.parquet")


def test_a_table_whose_columns_have_names_that_are_no_text(world: World, command: Command) -> None:
    cache = world.dump().path
    table = "sequences/part-00001.parquet"
    replace_in_shard(cache, table, lambda old: old.replace(b"sequence", b"se\xf1uence"))
    assert_refused(command, cache, "part-00001.parquet is not a Parquet file")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "evil"},
        {"type_vocab_size": 10**10},
        {"max_position_embeddings": 10**10},
        {"hidden_dropout_prob": 7},
        {"layer_norm_eps": "x"},
        {"pad_token_id": 10**6},
        {"vocab_size": 5},
        {"num_attention_heads": 2},
        {"intermediate_size": None},
    ],
    ids=str,
)
def test_configurations_that_describe_no_model(
    world: World, command: Command, change: dict[str, object]
) -> None:
    cache = world.dump().path
    config = json.loads((cache / "teacher/config.json").read_text()) | change
    replace_in_manifest(cache, "teacher/config.json", json.dumps(config).encode())
    code, _, err = command("train", cache, "--arch", "1x32", "--steps", 2)

    assert code == 1, err
    assert "teacher/config.json of the cache cannot be used" in err
    assert "Traceback" not in err


def test_configurations_that_bring_code_or_quantisation_lose_it(world: World, command: Command) -> None:
    cache = world.dump().path
    config = json.loads((cache / "teacher/config.json").read_text())
    config |= {
        "auto_map": {"AutoModel": "evil.Evil"},
        "quantization_config": {"quant_method": "evil"},
        "_attn_implementation": "evil",
    }
    replace_in_manifest(cache, "teacher/config.json", json.dumps(config).encode())
    code, out, err = command("train", cache, "--arch", "1x32", "--steps", 2, "--json")
    assert code == 0, err
    student = (Path(json.loads(out)["students"][0]["path"]) / "config.json").read_text()
    assert "evil" not in student


def test_files_beside_the_tokenizer_are_not_taken(world: World) -> None:
    cache = world.dump().path
    replace_in_manifest(cache, "teacher/adapter_config.json", b"{}")
    with pytest.raises(CacheCorruptError, match=r"adapter_config\.json is no file of the format"):
        open_cache(cache)


def test_a_link_out_of_the_cache_is_not_followed(world: World) -> None:
    cache = world.dump().path
    secret = world.root / "secret"
    secret.write_bytes((cache / WEIGHT).read_bytes())
    (cache / WEIGHT).unlink()
    (cache / WEIGHT).symlink_to(secret)
    with pytest.raises(CacheCorruptError, match="is a symbolic link"):
        open_cache(cache).reader.segment(1)


@pytest.mark.parametrize("linked", ["sequences", "index", "README.md", "relations/value"])
def test_a_linked_folder_is_neither_read_nor_written_nor_pushed(world: World, linked: str) -> None:
    cache = world.dump().path
    outside = world.root / "outside"
    (cache / linked).rename(outside)
    (cache / linked).symlink_to(outside)
    if linked == "README.md":  # made from the manifest, and never read
        outside.write_text("secret")
        place = Path(push(cache, str(world.root / "store"), session=Session()).place)
        assert (place / "README.md").read_text() == cache_card(read_manifest(cache))
    else:
        with pytest.raises(CacheCorruptError, match="is a symbolic link"):
            push(cache, str(world.root / "store"), session=Session())
        before = sorted(outside.rglob("*"))
        with pytest.raises(CacheCorruptError, match="is a symbolic link"):
            world.dump()
        assert sorted(outside.rglob("*")) == before


def test_segments_that_would_fill_memory_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest texts of a shard may lie together, in one of its segments."""
    cache = world.dump().path
    monkeypatch.setattr(reader, "check_size", lambda *_: None)
    monkeypatch.setattr(reader, "MAX_SEGMENT_BYTES", 1000)
    with pytest.raises(CacheCorruptError, match=r"a segment of shard 0 of .* decodes to more than"):
        open_cache(cache)[0]


def test_a_neighbour_that_cannot_be_read_does_not_stand_in_the_way(world: World) -> None:
    good = world.dump(str(world.home / "caches/good")).path
    for name, content in {"newer": b'{"format_version": 3}', "broken": b"{"}.items():
        (world.home / "caches" / name).mkdir()
        (world.home / "caches" / name / "manifest.json").write_bytes(content)

    assert newest_cache(world.home) == good


@pytest.mark.parametrize(("name", "value"), [("step", 3e38), ("step", -1.0), ("mean", 3e38)])
def test_steps_of_any_size_are_no_code(world: World, command: Command, name: str, value: float) -> None:
    cache = world.dump(codec="vectors").path
    path = f"vectors/2/{name}/c/0"
    values = np.full(len((cache / path).read_bytes()) // 4, value, "<f4")
    replace_in_manifest(cache, path, values.tobytes())
    words = ("train", cache, "--arch", "1x16", "--steps", 1, "--out", world.root / "run")
    command.fails(*words, code=1, says=(str(cache), "vectors/2 are no code of finite numbers"))
    assert command("verify", cache, "--full")[0] == 3


def test_metadata_of_arrays_that_are_not_there_is_refused(world: World, command: Command) -> None:
    cache = world.dump().path
    (cache / "evil").mkdir()
    replace_in_manifest(cache, "evil/zarr.json", b"anything")
    for words in (("info", cache), ("train", cache, "--arch", "1x16")):
        command.fails(*words, code=1, says=("evil/zarr.json", "no file of the format"))
    assert command("verify", cache)[0] == 3


def test_metadata_of_another_meaning_and_the_same_size_is_found_at_once(
    world: World, command: Command
) -> None:
    cache = world.dump().path
    file = cache / "tokens/zarr.json"
    file.write_text(file.read_text().replace("uint16", "uint32"))
    assert command("verify", cache)[0] == 3


@pytest.mark.parametrize(
    ("relations", "says"),
    [
        (["attention", "attention"], "a relation is named twice"),
        (["value"], "relations/attention/zarr.json, which is no file of the format"),
    ],
)
def test_a_cache_of_other_relations_trains_nothing(
    world: World, command: Command, relations: list[str], says: str
) -> None:
    cache = world.dump(codec="dense").path
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["identity"]["relations"] = relations
    manifest["fingerprint"] = canonical_sha256(manifest["identity"])
    write_document(cache / "manifest.json", manifest)
    code, _, err = command("train", cache, "--arch", "1x16", "--steps", 1, "--out", world.root / "run")
    assert code in {1, 2}
    assert "Traceback" not in err
    assert says in err
