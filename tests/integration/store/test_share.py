"""Caches of a team, over a real S3 server: pushed, listed, pulled, trained from."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfFileSystem

from minilm_cache import open_cache
from minilm_cache.errors import (
    CacheCorruptError,
    CacheNotFoundError,
    IdentityMismatchError,
    InterruptedRunError,
    InvalidConfigError,
    StorageError,
)
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.store.catalogue import catalogue
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.pull import pull
from minilm_cache.store.remote import open_store
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of, manifest_of, stop_after
from tests.integration.train.test_train import assert_same, weights
from tests.integration.train.test_train import settings as train_settings
from tests.s3 import Between, tamper
from tests.support import World, change_record, dump_arguments, pushed


@pytest.mark.parametrize("codec", ["topk", "vectors"])
def test_a_cache_goes_the_whole_way_through_a_store(
    world: World, command: Command, store: str, codec: str
) -> None:
    cache, elsewhere = world.root / "cache", world.root / "elsewhere"
    expected = world.dump(codec=codec)
    code, out, err = command("push", cache, store, "--json")
    assert code == 0, err
    url = json.loads(out)["url"]
    assert url == f"{store}/teacher-corpus.txt-{codec}-{expected.manifest.fingerprint[:12]}"

    code, out, _ = command("ls", store, "--json")
    (listed,) = json.loads(out)["caches"]
    assert (code, listed["url"], listed["problem"]) == (0, url, None)
    assert listed["fingerprint"] == expected.manifest.fingerprint
    assert listed["tokens"] == expected.manifest.num_tokens
    assert "KL(teacher, stored)" in command("ls", store)[1]

    told = [json.loads(command("info", place, "--json")[1]) for place in (cache, url)]
    assert told[0] | {"cache": url} == told[1]
    code, out, err = command("verify", "--full", url, "--json")
    assert code == 0, err
    local = json.loads(command("verify", cache, "--json")[1])
    assert [json.loads(out)[name] for name in ("num_files", "num_bytes", "damage")] == [
        local[name] for name in ("num_files", "num_bytes", "damage")
    ]

    code, out, err = command("pull", url, "--out", elsewhere)
    assert code == 0, err
    assert "6 copied, 0 were there" in out
    assert manifest_of(elsewhere) == manifest_of(cache)
    assert arrays_of(elsewhere) == arrays_of(cache)
    assert (elsewhere / "README.md").read_bytes() == (cache / "README.md").read_bytes()
    assert command("verify", "--full", elsewhere)[0] == 0
    assert "0 copied, 6 were there" in command("pull", url, "--out", elsewhere)[1]
    assert "0 copied, 6 were there" in command("push", cache, store)[1]

    offline = train_students(
        train_settings(steps=4), cache, out=world.root / "local", session=Session(world.home)
    )
    remote = train_students(
        train_settings(steps=4), url, out=world.root / "remote", session=Session(world.home)
    )
    for arch, found in weights(remote).items():
        assert_same(found, weights(offline)[arch])


def test_a_url_is_read_within_its_bound_on_this_machine(world: World, store: str) -> None:
    expected = open_cache(world.dump(codec="dense").path)
    url = pushed(world, store)
    sizes = [sum(file.size for file in record.files.values()) for record in expected.reader.records.values()]
    cache = open_cache(url, home=world.home, local_bytes=2 * max(sizes))
    for number in range(len(expected)):
        torch.testing.assert_close(cache[number].relation("value"), expected[number].relation("value"))
        kept = [file for file in cache.reader.root.rglob("c/*") if file.is_file()]
        kept += [file for file in cache.reader.root.rglob("c/**/0") if file.is_file()]
        assert sum(file.stat().st_size for file in set(kept)) <= 2 * max(sizes)
    assert kept
    again = open_cache(url, home=world.home, local_bytes=2 * max(sizes))
    assert torch.equal(again[0].input_ids, expected[0].input_ids)


def test_what_is_kept_of_a_url_is_checked_each_time(world: World, store: str) -> None:
    world.dump()
    url = pushed(world, store)
    cache = open_cache(url, home=world.home)
    assert os.fspath(cache) == url
    expected = cache[0].relation("attention")
    file = cache.reader.root / "relations/attention/weight/c/0/0/0"
    file.write_bytes(b"x" * file.stat().st_size)

    assert torch.equal(open_cache(url, home=world.home)[0].relation("attention"), expected)


@pytest.mark.parametrize("period", [2, 5])
def test_a_bad_network_changes_nothing(
    world: World, store: str, server: str, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are refused with 503, dropped, or answered by half."""
    world.dump()
    between = Between(server, period=period)
    with between.serving() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        url = pushed(world, f"{store}/{period}")
        pull(url, world.root / "elsewhere", session=Session())

    assert between.num_failed >= between.num_requests // period > 5
    assert arrays_of(world.root / "elsewhere") == arrays_of(world.root / "cache")


def test_a_pull_that_is_cut_off_is_no_cache_and_goes_on(world: World, store: str) -> None:
    world.dump()
    url = pushed(world, store)
    out = world.root / "elsewhere"
    with pytest.raises(InterruptedRunError, match="is kept"):
        pull(url, out, session=Session(should_stop=stop_after(3)))
    assert not out.exists()
    done = pull(url, out, session=Session())

    assert (done.shards_kept, done.shards_copied) == (3, 3)
    assert arrays_of(out) == arrays_of(world.root / "cache")


def test_keys_that_expire_in_the_middle_lose_nothing(
    world: World, store: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dump()
    url = pushed(world, store)
    out = world.root / "elsewhere"
    counting = Between(server)
    with counting.serving() as endpoint, monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", endpoint)
        pull(url, world.root / "counted", session=Session())
    between = Between(server, allowed=counting.num_requests - 8)
    with between.serving() as endpoint, monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StorageError, match="Check the credentials"):
            pull(url, out, session=Session())
    assert not out.exists()
    again = Between(server)
    with again.serving() as endpoint, monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", endpoint)
        pull(url, out, session=Session())

    assert again.num_requests < counting.num_requests // 2
    assert arrays_of(out) == arrays_of(world.root / "cache")


@pytest.mark.parametrize(
    "path",
    ["relations/value/gap/c/3/0/0", "sequences/part-00002.parquet", "teacher/tokenizer.json", "zarr.json"],
)
def test_what_was_damaged_in_the_store_is_never_taken(
    world: World, server: str, store: str, path: str
) -> None:
    cache = world.dump().path
    url = pushed(world, store)
    content = (cache / path).read_bytes()
    for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:], content + b"x", b""):
        tamper(server, f"{url}/{path}", damaged)
        with pytest.raises(CacheCorruptError, match=path):
            pull(url, world.root / "elsewhere", session=Session())
        assert not (world.root / "elsewhere").exists()
    tamper(server, f"{url}/{path}", None)
    with pytest.raises(CacheNotFoundError, match=path):
        pull(url, world.root / "elsewhere", session=Session())
    tamper(server, f"{url}/{path}", content)

    assert pull(url, world.root / "elsewhere", session=Session()).manifest.complete


def test_records_and_manifests_that_lie_are_refused(world: World, server: str, store: str) -> None:
    cache = world.dump().path
    url = pushed(world, store)
    digest = digest_bytes(b"").model_dump()
    change_record(cache, 1, files={"tokens/c/1": digest | {"size": 2**39}})
    for path in ("index/shards.parquet", "manifest.json"):
        tamper(server, f"{url}/{path}", (cache / path).read_bytes())
    with pytest.raises(CacheCorruptError, match="claims 549755813888 bytes, more than it can need"):
        pull(url, world.root / "elsewhere", session=Session())
    for path in ("index/shards.parquet", "index/ranges.parquet"):
        manifest = json.loads((cache / "manifest.json").read_text())
        manifest["files"][path]["size"] = 2**39
        tamper(server, f"{url}/manifest.json", json.dumps(manifest | {"checksum": None}).encode())
        with pytest.raises(CacheCorruptError, match=f"{path} claims 549755813888 bytes, more than it can"):
            pull(url, world.root / "elsewhere", session=Session())
    tamper(server, f"{url}/manifest.json", b"{}")
    (entry,) = catalogue(store)
    assert entry.problem is not None
    assert not (world.root / "outside").exists()


def test_credentials_that_are_refused_are_one_line_without_them(
    world: World, command: Command, store: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dump()
    with Between(server, allowed=0).serving() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for arguments in (
            ("push", world.root / "cache", store),
            ("ls", store),
            ("pull", f"{store}/x"),
            ("train", f"{store}/x", "--arch", "1x32"),
        ):
            line = command.fails(*arguments, code=1, says="Check the credentials that the environment holds")
            assert not any(secret in line for secret in ("key-of-the-test", "secret-of-the-test"))


def test_a_store_that_does_not_answer_is_one_line(
    world: World, command: Command, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    command.fails("ls", store, code=1, says=(f"cannot read {store}", "Check the URL and the network"))
    command.fails(
        "ls", "gopher://x/y", code=2, says=("cannot open gopher://x/y", "s3://, gs://, az://, hf://")
    )


def test_what_a_file_system_raises_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems of fsspec raise whatever the libraries below them raise."""

    def unreachable(*_: object, **__: object) -> None:
        raise RuntimeError("no route to host\nin two lines")

    monkeypatch.setattr(HfFileSystem, "cat_file", unreachable)
    url = "hf://buckets/team/caches"
    command.fails("ls", url, code=1, says=(f"cannot read {url}", "no route to host. Check"))


def test_names_in_a_store_cannot_reach_the_terminal_as_they_are(world: World, command: Command) -> None:
    world.dump()
    url = Path(pushed(world, str(world.root / "shared")))
    url.rename(url.with_name("\x1b[2Jblank\r"))
    code, out, _ = command("ls", world.root / "shared")
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[2Jblank\\r" in out


def test_equal_fingerprints_are_pulled_instead_of_dumped(
    world: World, command: Command, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = world.dump(batch_size=32)
    monkeypatch.setenv("MINILM_CACHE_STORE", store)
    code, _, err = command(*dump_arguments(world, "--max-tokens", 512, "--out", world.root / "other"))
    assert code == 0
    assert f"this cache is not in {store}" in err
    pushed(world, store)
    monkeypatch.setattr(Teacher, "read", None)  # whoever runs the teacher now fails
    monkeypatch.setattr(Teacher, "check_length", lambda *_: None)
    code, out, err = command(*dump_arguments(world, "--out", world.root / "mine", "--json"))

    assert code == 0, err
    assert "to be pulled from" in err
    assert json.loads(out)["shards_written"] == 0
    assert arrays_of(world.root / "mine") == arrays_of(expected.path)


def test_two_pulls_into_one_folder_wait_for_each_other(world: World, store: str) -> None:
    cache = world.dump().path
    url = pushed(world, store)
    out = world.root / "elsewhere"
    out.mkdir()
    (out / ".left.partial").mkdir()
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda _: pull(url, out, session=Session()), range(4)))

    assert sorted(one.shards_copied for one in done) == [0, 0, 0, 6]
    assert arrays_of(out) == arrays_of(cache)
    assert [file.name for file in world.root.glob(".elsewhere*")] == []


def test_folders_are_stores_and_destinations_are_not_overwritten(world: World, command: Command) -> None:
    world.dump()
    shared = world.root / "shared"
    url = pushed(world, str(shared))
    assert [entry.url for entry in catalogue(str(shared))] == [url]
    assert [entry.url for entry in catalogue(url)] == [url]
    assert catalogue(str(world.root / "nothing")) == []
    (world.root / "mine").mkdir()
    (world.root / "mine/notes.txt").write_text("keep me")
    with pytest.raises(IdentityMismatchError, match="is not empty and is not a cache"):
        pull(url, world.root / "mine", session=Session())
    other = world.dump("other", max_tokens=512).path
    with pytest.raises(IdentityMismatchError, match="holds another cache"):
        pull(url, other, session=Session())
    assert "teacher-corpus.txt-topk" in command("ls", shared)[1]
    assert command("ls")[0] == 0


def test_damage_in_a_store_is_found_there(world: World, command: Command) -> None:
    """A size that differs is seen at once, and other bytes of the same size by `--full`."""
    world.dump()
    url = f"file://{pushed(world, str(world.root / 'store'))}"
    path = Path(url.removeprefix("file://")) / "tokens/c/1"
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert command("verify", url)[0] == 0
    says = ("tokens/c/1 of shard 1", "not those that were committed", "push --full")
    command.fails("verify", url, "--full", code=3, says=says)
    path.write_bytes(before[:-1])
    command.fails("verify", url, code=3, says=f"{len(before) - 1} bytes, {len(before)} expected")
    path.unlink()
    command.fails("verify", url, code=3, says="missing")
    command.fails("verify", url, "--teacher", world.teacher, code=2, says="minilm-cache pull")


def test_a_file_that_is_too_long_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 100)
    with pytest.raises(CacheCorruptError, match="longer than the 99 bytes"):
        open_store(str(tmp_path)).read("long", 99)
    assert open_store(str(tmp_path)).read("long", 100) == b"x" * 100
    with pytest.raises(CacheCorruptError, match="it is not a regular file"):
        open_store(str(tmp_path)).read("", 99)
    with pytest.raises(InvalidConfigError):
        open_store("nothing://x")


def test_a_pull_takes_no_unfinished_cache_for_done(world: World) -> None:
    world.dump()
    url = pushed(world, str(world.root / "store"))
    out = world.root / "there"
    world.dump("there", rank=0, world_size=2)
    with pytest.raises(IdentityMismatchError, match="holds this cache, but unfinished"):
        pull(url, out, session=Session())


def test_two_processes_share_what_is_kept_of_a_url(world: World) -> None:
    """Two readers stand in for them: each removes what the other has fetched."""
    world.dump()
    url = f"file://{pushed(world, str(world.root / 'store'))}"
    readers = [MirrorReader(url, world.home, 20_000) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(readers[n % 2].segment, n * 5 % 6) for n in range(60)]
        assert all(len(read.result().rows) == 5 for read in reads)


def test_a_disk_that_is_too_small_is_noticed_before_a_pull(
    world: World, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dump()
    url, usage = pushed(world, store), shutil.disk_usage(world.root)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
        with pytest.raises(StorageError, match="cannot pull a cache into"):
            pull(url, world.root / "elsewhere", session=Session())
    assert not (world.root / "elsewhere").exists()
    pull(url, world.root / "elsewhere", session=Session())
    assert arrays_of(world.root / "elsewhere") == arrays_of(world.root / "cache")


def test_weights_that_a_copy_lacks_stay_in_the_store(world: World, command: Command, store: str) -> None:
    """They were dropped from the manifest, so that nobody else got them; and a pull did not fetch them."""
    weights = "teacher/model.safetensors"
    plain, whole = world.root / "cache", world.root / "whole"
    world.dump()
    url = pushed(world, store)
    shutil.copytree(plain, whole)
    world.dump("whole", keep_weights=True)
    code, _, err = command("push", whole, store)
    assert code == 0, err
    assert weights in open_store(url).sizes()
    code, out, err = command("push", plain, store)
    assert code == 0, err
    assert f"has {weights}, too" in err
    assert "0 copied, 6 were there" in out

    code, _, err = command("pull", url, "--out", world.root / "new")
    assert code == 0, err
    assert (world.root / "new" / weights).read_bytes() == (whole / weights).read_bytes()
    code, _, err = command("pull", url, "--out", plain)
    assert code == 0, err
    assert f"without {weights}" in err
    assert (plain / weights).read_bytes() == (whole / weights).read_bytes()
    assert manifest_of(plain) == manifest_of(whole)
    assert command("verify", "--full", plain)[0] == command("verify", "--full", url)[0] == 0
    assert "nothing to do" in command("pull", url, "--out", plain)[2]


@pytest.mark.parametrize("path", ["manifest.json", "index/shards.parquet", "index/ranges.parquet"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_damaged_tables_of_a_store_are_damage(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch, path: str, *, is_kept: bool
) -> None:
    """Whatever this machine has kept of the cache before."""
    monkeypatch.setenv("MINILM_CACHE_HOME", str(world.root / "another"))
    world.dump()
    url = f"file://{pushed(world, str(world.root / 'store'))}"
    file = Path(url.removeprefix("file://")) / path
    before = file.read_bytes()
    if is_kept:
        assert command("verify", url)[0] == 0
    file.write_bytes(before[:40] + bytes([before[40] ^ 1]) + before[41:])
    line = command.fails("verify", url, code=3, says=(path, "push --full"))
    assert line.count("Ask its publisher") == 1
    file.unlink()
    command.fails("verify", url, code=3, says=path)


def test_a_copy_that_got_weights_later_is_mended(world: World, command: Command) -> None:
    world.dump()
    url, copy = pushed(world, str(world.root / "store")), world.root / "copy"
    pull(url, copy, session=Session())
    world.dump("copy", keep_weights=True)
    kept = manifest_of(copy)
    shard = copy / "tokens/c/1"
    before = shard.read_bytes()
    shard.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    pull(url, copy, session=Session())
    assert (shard.read_bytes(), manifest_of(copy)) == (before, kept)
    assert command("verify", "--full", copy)[0] == 0
    weights = copy / "teacher/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(CacheCorruptError, match=r"model\.safetensors is damaged, and .* does not have it"):
        pull(url, copy, session=Session())


def test_a_copy_that_could_not_be_opened_is_not_made(world: World, command: Command) -> None:
    world.dump()
    place = Path(pushed(world, str(world.root / "store")))
    document = json.loads((place / "manifest.json").read_text())
    document["identity"]["relation_heads"] = 1024
    identity = CacheIdentity.model_validate_json(json.dumps(document["identity"]))
    document |= {"fingerprint": identity.fingerprint(), "checksum": None}
    (place / "manifest.json").write_text(json.dumps(document))
    out = world.root / "out"
    command.fails("pull", place, "--out", out, code=1, says=("is not the metadata", "publisher"))
    assert not out.exists()


def test_places_that_are_none_are_refused(world: World, command: Command) -> None:
    world.dump()
    cache = world.root / "cache"
    command.fails("merge", "s3://bucket/x", cache, code=2, says="this is a URL")
    command.fails("merge", world.corpus, cache, code=2, says="is a file")
    command.fails("pull", f"{cache}/.", code=2, says="Give --out")
    command.fails("push", "s3://bucket/x", world.root / "store", code=2, says="this is a URL")
    (world.root / "out.parquet").touch()
    command.fails("export", cache, world.root / "out.parquet", code=2, says="Choose another OUT")
    with pytest.raises(InvalidConfigError, match="this is a URL"):
        open_cache(Path("s3://bucket/x"))
    with pytest.raises(InvalidConfigError, match="an empty text"):
        open_cache("")


def test_a_cache_without_its_manifest_says_what_helps(world: World, command: Command) -> None:
    world.dump()
    (world.root / "cache/manifest.json").unlink()
    for words in (("info",), ("verify",)):
        code, _, err = command(*words, world.root / "cache")
        assert code == (1 if words == ("info",) else 3)
        assert err.count("Pull it again into this folder, or dump it into another one") == 1


def test_nothing_is_written_into_a_complete_cache(world: World) -> None:
    """It may be somebody else's."""
    world.dump()
    files = {path: path.stat().st_mtime_ns for path in (world.root / "cache").rglob("*") if path.is_file()}
    (world.root / "cache/locks/seal.lock").unlink()
    assert world.dump().shards_written == 0
    left = {path: path.stat().st_mtime_ns for path in (world.root / "cache").rglob("*") if path.is_file()}
    assert left.items() <= files.items()
    assert not (world.root / "cache/locks/seal.lock").exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_stands_in_the_place_of_a_shard_is_replaced(world: World, command: Command, kind: str) -> None:
    world.dump()
    shard = world.root / "cache/tokens/c/1"
    before = shard.read_bytes()
    shard.unlink()
    if kind == "folder":
        (shard / "inner").mkdir(parents=True)
    else:
        (world.root / "mine").write_bytes(b"mine")
        shard.symlink_to(world.root / "mine")
    command.fails("verify", world.root / "cache", code=3, says="--check full")
    assert world.dump(check="full").shards_written == 1
    assert shard.read_bytes() == before
    if kind == "link":
        assert (world.root / "mine").read_bytes() == b"mine"
    assert command("verify", "--full", world.root / "cache")[0] == 0
