"""Dumps straight into a real S3 server: killed, several at once, through a bad network, and damaged."""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.cache import open_cache
from minilm_cache.dump.into_store import dump_into_store
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    IdentityMismatchError,
    InterruptedRunError,
)
from minilm_cache.session import Session, never_stop
from minilm_cache.store import leases
from minilm_cache.store.creation import remove_leftovers
from minilm_cache.store.leases import Lease, Leases
from minilm_cache.store.pull import pull
from minilm_cache.store.remote import AccessDeniedError, RemoteFolder, open_store
from minilm_cache.store.writer import CacheWriter
from minilm_cache.workflows.remove import find_removal, remove
from minilm_cache.workflows.verify import verify_cache
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of, stop_after
from tests.processes import CONTEXT
from tests.s3 import Between, tamper
from tests.support import World

KILLS = 5
"""How often the dumps of each codec are killed."""


def config(world: World, **changes: Any) -> Any:
    return world.config(check="sizes", **changes)


def work(world: World, url: str, settings: dict[str, Any]) -> None:
    dump_into_store(config(world, **settings), url, session=Session(world.home))


def work_slowly(
    environment: dict[str, str], world: World, url: str, settings: dict[str, Any], pause_s: float
) -> None:
    """Pause before each batch, in a process that began before the test set its environment."""
    os.environ.update(environment)

    def pause() -> bool:
        if open_store(url).sizes():  # fitting the codec is not slowed down
            time.sleep(pause_s)
        return False

    dump_into_store(config(world, **settings), url, session=Session(world.home, should_stop=pause))


def assert_is_as_a_local_dump(world: World, url: str, **settings: Any) -> None:
    """Compare the cache in the store with a local dump, byte for byte."""
    expected = world.dump("expected", **settings).path
    pull(url, world.root / "pulled", session=Session())

    assert arrays_of(world.root / "pulled") == arrays_of(expected)
    for name in ("manifest.json", "index/shards.parquet", "preview/sequences.parquet"):
        assert (world.root / "pulled" / name).read_bytes() == (expected / name).read_bytes()
    left = {name.split("/")[0] for name in open_store(url).sizes()}
    assert left.isdisjoint({"staging", "claims", "commits", "unfinished.json"})


def test_a_dump_into_a_store_is_the_local_one_and_opens_there(
    world: World, store: str, command: Command
) -> None:
    arguments = ("--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32, "--k", 6)
    shards = ("--shard-tokens", 256, "--batch-size", 8, "--device", "cpu")
    code, out, err = command("dump", *arguments, *shards, "--out", f"{store}/cache", "--json")

    assert code == 0, err
    assert json.loads(out)["cache"] == f"{store}/cache"
    assert_is_as_a_local_dump(world, f"{store}/cache")
    assert len(open_cache(f"{store}/cache")) == json.loads(out)["num_sequences"]
    code, out, err = command("dump", *arguments, *shards, "--out", f"{store}/cache", "--json")
    assert (code, json.loads(out)["shards_written"]) == (0, 0), err
    command.fails("dump", *arguments, "--k", 5, "--out", f"{store}/cache", code=1, says="differs in codec.k")
    command.fails("dump", *arguments, "--out", store, code=1, says=("holds other caches", "cache", "NAME"))
    command.fails("dump", *arguments, "--out", "hf://team/x", code=2, says="no place to dump into")
    command.fails("dump", *arguments, "--out", store, "--add", "x", code=2, says="go with a folder")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", ["topk", "vectors"])
def test_two_dumps_at_once_that_are_killed_again_and_again(
    world: World, store: str, codec: str, soak: int
) -> None:
    if soak == 1 and codec == "topk":
        pytest.skip("codes of `vectors` are more to agree on; both codecs are tried with --soak")
    world.corpus.write_text(world.corpus.read_text() * 6)
    settings, url = {"codec": codec, "batch_size": 2}, f"{store}/cache"
    chance, committed, processes = random.Random(codec), set[str](), list[Any]()

    def start(number: int, pause_s: float) -> None:
        rank = {"rank": number % 2, "world_size": 2}
        arguments = (dict(os.environ), world, url, settings | rank, pause_s)
        processes.append(CONTEXT.Process(target=work_slowly, args=arguments))
        processes[-1].start()

    def commits() -> set[str]:
        return set(open_store(url).below("commits").sizes())

    start(0, 0.2)
    for number in range(1, KILLS + 1):
        start(number, 0.2)
        deadline = time.monotonic() + (60 if number % 5 == 0 else 0)
        while time.monotonic() < deadline and commits() == committed:
            time.sleep(0.1)
        time.sleep(chance.uniform(0, 1))
        victim = processes.pop(chance.randrange(2))
        assert victim.is_alive()
        victim.kill()
        victim.join()
        assert committed <= commits()
        committed = commits()
    assert committed
    processes.pop().kill()
    for number in range(2):
        start(number, 0)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert_is_as_a_local_dump(world, url, **settings)


def test_leases_decide_nothing(world: World, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that both hold every lease write every shard twice, and commit it once."""
    monkeypatch.setattr(Leases, "acquire", lambda leases, name: Lease(leases, name, 0))
    places, url = (world.root / "first", world.root / "second"), f"{store}/cache"

    def slowly() -> bool:
        time.sleep(0.05)
        return False

    with ThreadPoolExecutor(2) as threads:
        dumps = [
            threads.submit(
                dump_into_store, config(world), url, session=Session(home, should_stop=should_stop)
            )
            for home, should_stop in zip(places, (slowly, never_stop), strict=True)
        ]
        assert sum(dump.result().shards_written for dump in dumps) > 0
    assert_is_as_a_local_dump(world, url)


def test_a_dump_through_a_network_that_fails(
    world: World, store: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Between(server, period=9).serving() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for _ in range(20):  # whatever the network does, running it again goes on
            try:
                work(world, f"{store}/cache", {})
                break
            except Exception as error:  # noqa: BLE001 - only the end counts
                assert "cannot" in str(error)  # noqa: PT017
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    assert_is_as_a_local_dump(world, f"{store}/cache")


def test_an_interrupted_dump_goes_on_from_what_is_committed(world: World, store: str) -> None:
    with pytest.raises(InterruptedRunError):
        dump_into_store(
            config(world), f"{store}/cache", session=Session(world.home, should_stop=stop_after(5))
        )
    kept = len(open_store(f"{store}/cache").below("commits").sizes())
    result = dump_into_store(config(world), f"{store}/cache", session=Session(world.home))

    assert kept > 0
    assert result.shards_written == result.num_shards - kept
    assert_is_as_a_local_dump(world, f"{store}/cache")


def test_a_shard_whose_files_were_not_placed_or_have_gone(world: World, store: str, server: str) -> None:
    """A kill after the record: the files are placed from staging. Without them the shard is written again."""
    url = f"{store}/cache"
    with pytest.raises(InterruptedRunError):
        dump_into_store(config(world), url, session=Session(world.home, should_stop=stop_after(6)))
    records = sorted(open_store(url).below("commits").sizes())
    assert len(records) > 1
    first, second = (int(name.removesuffix(".json")) for name in records[:2])
    tamper(server, f"{url}/sequences/part-{first:05d}.parquet", None)
    names = [name for name in open_store(url).sizes() if f"part-{second:05d}" in name]
    for name in names:  # where it belongs, and where it was staged
        tamper(server, f"{url}/{name}", None)
    assert len(names) == 2
    dump_into_store(config(world), url, session=Session(world.home))

    assert_is_as_a_local_dump(world, url)


def test_a_damaged_beginning_and_another_dump_are_refused(world: World, store: str, server: str) -> None:
    url = f"{store}/cache"
    with pytest.raises(InterruptedRunError):
        dump_into_store(config(world), url, session=Session(world.home, should_stop=stop_after(3)))
    with pytest.raises(IdentityMismatchError, match=r"differs in codec\.k"):
        dump_into_store(config(world, k=5), url, session=Session(world.home))
    staged = next(name for name in open_store(url).sizes() if name.endswith("teacher/config.json"))
    tamper(server, f"{url}/{staged}", b"{}")
    with pytest.raises(CacheCorruptError, match="is damaged"):
        dump_into_store(config(world), url, session=Session(world.home))


def test_what_a_store_holds_besides_a_dump_into_it_is_left_alone(
    world: World, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = f"file://{world.root}/begun"
    with pytest.raises(InterruptedRunError):
        dump_into_store(config(world), begun, session=Session(world.home, should_stop=stop_after(3)))
    for read in (open_cache, lambda url: verify_cache(url.removeprefix("file://"))):
        with pytest.raises(CacheIncompleteError, match="finishes it"):
            read(begun)
    found = find_removal(begun, world.home)
    assert found.is_unfinished
    remove(found)
    assert not (world.root / "begun").exists()
    unfinished = world.root / "unfinished"
    with pytest.raises(InterruptedRunError):
        dump_cache(config(world), out=unfinished, session=Session(world.home, should_stop=stop_after(3)))
    url = f"file://{unfinished}"
    kept = open_store(url).sizes()
    with pytest.raises(IdentityMismatchError, match="holds an unfinished dump into a folder"):
        dump_into_store(config(world), url, session=Session(world.home))
    remove_leftovers(open_store(url))
    assert open_store(url).sizes() == kept

    finished = dump_into_store(config(world), f"{store}/cache", session=Session(world.home))
    open_store(f"{store}/cache").write("unfinished.json", b"{}")

    def refuse(folder: RemoteFolder, paths: object) -> None:
        raise AccessDeniedError(f"{folder.url}: 403 for {paths}")

    monkeypatch.setattr(RemoteFolder, "remove", refuse)  # as for those who may only read
    again = dump_into_store(config(world), f"{store}/cache", session=Session(world.home))
    assert (again.shards_written, again.num_shards) == (0, finished.num_shards)


def test_a_lease_passes_on_when_it_is_released_or_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_store(f"file://{tmp_path}")
    mine, others = Leases(folder), Leases(folder)
    lease = mine.acquire("00001")

    assert lease is not None
    assert others.acquire("00001") is None
    assert others.acquire("00002") is not None
    lease.release()
    taken = others.acquire("00001")
    assert taken is not None
    monkeypatch.setattr(leases, "LEASE_S", 0.1)
    assert mine.acquire("00001") is None  # seen for the first time
    time.sleep(0.2)
    assert mine.acquire("00001") is not None  # not renewed: its thread waits for LEASE_S of before
    mine.close()
    others.close()


def test_a_process_whose_lease_ended_while_it_measured_replaces_nothing(
    world: World, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(world, f"{store}/one", {})
    one, two = open_store(f"{store}/one"), open_store(f"{store}/two")
    seal, sent = CacheWriter.seal, []

    def another_is_faster(writer: CacheWriter, measured: Any, preview: Any) -> None:
        seal(writer, measured, preview)
        for name in one.sizes():
            two.write(name, one.read(name, 2**30))
        monkeypatch.setattr(RemoteFolder, "send", lambda _, path, file: sent.append((path, file)))

    monkeypatch.setattr(CacheWriter, "seal", another_is_faster)
    work(world, f"{store}/two", {})
    assert sent == []


def test_a_renewal_that_is_late_leaves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.2)
    folder = open_store(f"file://{tmp_path}")
    holder = Leases(folder)
    write, lease = RemoteFolder.write, holder.acquire("00001")
    assert lease is not None

    def slow(self: RemoteFolder, path: str, content: bytes) -> None:
        lease.release()
        write(self, path, content)

    monkeypatch.setattr(RemoteFolder, "write", slow)
    deadline = time.monotonic() + 30
    while holder._held and time.monotonic() < deadline:
        time.sleep(0.01)
    holder.close()
    assert not list(tmp_path.rglob("00001-*"))
