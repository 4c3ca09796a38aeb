"""Pushes that are cut off, that meet another dump, or that find damage in the store."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pyarrow.parquet as pq
import pytest

from minilm_cache.errors import (
    CacheCorruptError,
    CacheNotFoundError,
    IdentityMismatchError,
    InterruptedRunError,
)
from minilm_cache.session import Session
from minilm_cache.store.catalogue import catalogue
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.layout import cache_name
from minilm_cache.store.pull import pull
from minilm_cache.store.push import push
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.remote import RemoteFolder, open_store
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of, manifest_of, stop_after
from tests.s3 import BUCKET, tamper
from tests.support import World, change_record, pushed


def test_a_push_that_is_cut_off_is_no_cache_and_goes_on(world: World, store: str) -> None:
    cache = world.dump().path
    with pytest.raises(InterruptedRunError, match="is kept"):
        push(cache, store, session=Session(should_stop=stop_after(2)))
    manifest = manifest_of(cache)
    url = f"{store}/{cache_name(manifest.labels, manifest.identity)}"
    assert catalogue(store) == []
    with pytest.raises(CacheNotFoundError, match=r"no cache at .* `minilm-cache ls` shows it"):
        pull(url, world.root / "elsewhere", session=Session())
    done = push(cache, store, session=Session())

    assert done.shards_kept == 2
    assert done.shards_copied == 4
    assert pull(url, world.root / "elsewhere", session=Session()).shards_copied == 6


def test_a_damaged_cache_is_not_pushed(world: World, store: str) -> None:
    cache = world.dump().path
    file = cache / "relations/value/gap/c/3/0/0"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(CacheCorruptError, match="its bytes are not those committed"):
        pushed(world, store)
    assert catalogue(store) == []


def other_dump(world: World) -> Path:
    """Return a sound dump of the fingerprint of `world.dump()` with other bytes in its first shard."""
    cache = world.dump("other").path
    part = cache / "sequences/part-00000.parquet"
    pq.write_table(pq.read_table(part), part, compression="none", write_page_checksum=True)
    digest = digest_bytes(part.read_bytes())
    assert CacheReader(cache).records[0].files["sequences/part-00000.parquet"] != digest
    change_record(cache, 0, files={"sequences/part-00000.parquet": digest.model_dump()})
    return cache


def test_dumps_of_one_fingerprint_are_not_mixed_in_a_store(world: World, store: str) -> None:
    with pytest.raises(InterruptedRunError):
        push(world.dump().path, store, session=Session(should_stop=stop_after(2)))
    other = other_dump(world)
    with pytest.raises(IdentityMismatchError, match="shards of another dump of the same fingerprint"):
        push(other, store, session=Session())
    url = pushed(world, store)
    assert push(other, store, session=Session()).shards_copied == 0
    with pytest.raises(IdentityMismatchError, match="only a push of that dump can finish or repair"):
        push(other, store, full=True, session=Session())
    pull(url, world.root / "elsewhere", session=Session())
    assert arrays_of(world.root / "elsewhere") == arrays_of(world.root / "cache")


@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_two_dumps_pushed_at_once_do_not_mix(
    world: World, store: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = store if kind == "bucket" else str(world.root / "shared")
    caches = [world.dump().path, other_dump(world)]
    both, sizes = Barrier(2), RemoteFolder.sizes

    def after_the_other(folder: RemoteFolder) -> dict[str, int]:
        both.wait(60)
        return sizes(folder)

    def outcome(cache: Path) -> str | None:
        try:
            return push(cache, target, session=Session()).place
        except IdentityMismatchError:
            return None

    monkeypatch.setattr(RemoteFolder, "sizes", after_the_other)
    with ThreadPoolExecutor(2) as threads:
        places = list(threads.map(outcome, caches))
    (winner,) = [cache for cache, place in zip(caches, places, strict=True) if place is not None]
    url = next(place for place in places if place is not None)
    pull(url, world.root / "elsewhere", session=Session())
    assert arrays_of(world.root / "elsewhere") == arrays_of(winner)


@pytest.mark.parametrize(
    "path", ["relations/value/gap/c/3/0/0", "index/shards.parquet", "manifest.json", "teacher/tokenizer.json"]
)
def test_another_push_mends_what_was_damaged_in_the_store(
    world: World, command: Command, server: str, store: str, path: str
) -> None:
    cache = world.dump().path
    url = pushed(world, store)
    content = (cache / path).read_bytes()
    for damaged, options in ((content[:-1], ()), (None, ()), (content[:-1] + b"x", ("--full",))):
        tamper(server, f"{url}/{path}", damaged)
        code, out, err = command("push", cache, store, *options)
        assert code == 0, err
        assert ("0 copied, 6 were there" in out) == ("/3/" not in path)
        assert open_store(url).read(path, 2**20) == content
    assert "nothing to do" in command("push", cache, store, "--full")[2]


def test_a_cache_is_no_store_of_caches(world: World, command: Command, store: str) -> None:
    cache = world.dump().path
    command.fails("push", cache, cache, code=2, says="is no store of caches")
    command.fails("push", cache, cache / "inner", code=2, says="is no store of caches")
    assert command("push", cache, store)[0] == 0
    (url,) = (entry.url for entry in catalogue(store))
    command.fails("push", cache, url, code=2, says="is no store of caches")
    command.fails("pull", url, "--out", cache / "inner", code=2, says="it lies in the cache")
    assert not (cache / "inner").exists()


def test_the_root_of_a_bucket_is_a_store(world: World, command: Command, store: str) -> None:
    cache = world.dump(seed=41).path
    assert command("push", cache, f"s3://{BUCKET}")[0] == 0
    assert "nothing to do" in command("push", cache, f"s3://{BUCKET}")[2]
    urls = [entry.url for entry in catalogue(f"s3://{BUCKET}")]
    assert [pull(url, world.root / "elsewhere", session=Session()).shards_copied for url in urls] == [6]
