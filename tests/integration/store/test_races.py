"""Processes that meet at one place: repairs and sealing, pushes and dumps into a store."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.cache import open_cache
from minilm_cache.dump.into_store import dump_into_store
from minilm_cache.errors import IdentityMismatchError, MiniLMCacheError
from minilm_cache.session import Session
from minilm_cache.storage_schema.manifest import TEACHER_PROMPTS
from minilm_cache.store import card
from minilm_cache.store.card import attach
from minilm_cache.store.durable import lock_if_free, write_file
from minilm_cache.store.layout import SEAL_LOCK, cache_name
from minilm_cache.store.pull import pull
from minilm_cache.store.push import push
from minilm_cache.store.reader import read_manifest
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.store.store_writer import StoreWriter
from minilm_cache.store.verify import verify, verify_url
from minilm_cache.store.writer import CacheWriter
from tests.support import World


class Killed(BaseException):
    """Ends a process here, as SIGKILL would."""


def killed(*_: object, **__: object) -> Iterator[bool]:
    raise Killed


def into_store(world: World, url: str, **changes: Any) -> None:
    dump_into_store(world.config(**{"check": "sizes", **changes}), url, session=Session(world.home))


def damage_of(world: World, url: str) -> tuple[object, ...]:
    return verify_url(url, world.home, full=True, session=Session(world.home)).damage


def test_a_shard_that_is_written_again_is_what_is_sealed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the new record and its files: those that were damaged have the same sizes."""
    url = f"file://{world.root}/store/cache"
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "sealing", killed)
        with pytest.raises(Killed):
            into_store(world, url)
    file = world.root / "store/cache/relations/value/weight/c/2/0/0"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "copy", killed)
        with pytest.raises(Killed):
            into_store(world, url, check="full")
    into_store(world, url)

    assert damage_of(world, url) == ()


def test_nobody_seals_while_a_shard_is_withdrawn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = world.dump(check="sizes").path
    (cache / "tokens/c/1").write_bytes(b"short")
    held = []
    clear = CacheWriter._clear

    def noting(self: CacheWriter, path: str) -> None:
        held.append(lock_if_free(cache / SEAL_LOCK) is None)
        clear(self, path)

    monkeypatch.setattr(CacheWriter, "_clear", noting)
    world.dump(check="sizes")
    assert held
    assert all(held)


def begun(world: World, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a dump into a store, and end before any shard."""
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "claim", killed)
        with pytest.raises(Killed):
            into_store(world, url)


def test_a_push_goes_to_no_place_where_a_dump_has_begun(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, store = world.dump(), world.root / "store"
    place = store / cache_name(cache.manifest.labels, cache.manifest.identity)
    begun(world, f"file://{place}", monkeypatch)
    with pytest.raises(IdentityMismatchError, match="holds an unfinished dump"):
        push(cache.path, str(store), session=Session())
    into_store(world, f"file://{place}")

    assert damage_of(world, f"file://{place}") == ()


@pytest.mark.parametrize("claim", ["index/shards.parquet", "commits/00000.json"])
@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_dump_goes_to_no_place_that_a_push_has_claimed(
    world: World, monkeypatch: pytest.MonkeyPatch, claim: str, is_at_once: bool
) -> None:
    place = open_store(f"file://{world.root}/store/cache")
    create = RemoteFolder.create

    def late(self: RemoteFolder, name: str, content: bytes) -> bool:
        place.write(claim, b"of a push")
        return create(self, name, content)

    if is_at_once:
        monkeypatch.setattr(RemoteFolder, "create", late)
    else:
        place.write(claim, b"of a push")
    with pytest.raises(IdentityMismatchError, match="being pushed there"):
        into_store(world, place.url)

    assert "unfinished.json" not in place.sizes()
    assert place.read(claim, 100) == b"of a push"


def test_a_push_that_meets_a_dump_takes_its_claim_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, create = world.dump(), RemoteFolder.create

    def late(self: RemoteFolder, name: str, content: bytes) -> bool:
        self.write("unfinished.json", b"{}")
        return create(self, name, content)

    monkeypatch.setattr(RemoteFolder, "create", late)
    with pytest.raises(IdentityMismatchError, match="holds an unfinished dump"):
        push(cache.path, str(world.root / "store"), session=Session())
    assert not list((world.root / "store").rglob("shards.parquet"))


def failing(write: Callable[..., None], written: list[str], last: int) -> Callable[..., None]:
    """Return a function that writes files until a number of them have been written, and ends there."""

    def or_fail(self: RemoteFolder, name: str, content: bytes | Path) -> None:
        if len(written) == last:
            raise Killed
        write(self, name, content)
        written.append(name)

    return or_fail


@pytest.mark.parametrize("full", [False, True])
def test_a_cache_in_a_store_is_whole_at_each_moment_while_its_prompts_are_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    cache = world.dump().path

    def with_prompts(text: str) -> None:
        content = f'{{"prompts": {{"q": "{text}"}}}}'.encode()
        attach(cache, read_manifest(cache), path=TEACHER_PROMPTS, content=content)

    with_prompts("one")
    url = push(cache, str(world.root / "store"), session=Session()).place
    with_prompts("two")
    for last in range(5):
        written: list[str] = []
        with monkeypatch.context() as patch, suppress(Killed):
            for name in ("write", "send"):
                patch.setattr(RemoteFolder, name, failing(getattr(RemoteFolder, name), written, last))
            push(cache, str(world.root / "store"), session=Session(), full=full)
        pulled = pull(url, world.root / f"pulled-{last}", session=Session())
        open_cache(world.root / f"pulled-{last}")
    assert pulled.manifest.files == read_manifest(cache).files


def test_a_cache_is_whole_at_each_moment_while_its_prompts_are_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.dump().path
    left = 0

    def or_fail(path: Path, content: bytes) -> None:
        nonlocal left
        if not left:
            raise Killed
        write_file(path, content)
        left -= 1

    for number in range(4):
        left = number
        attach(cache, read_manifest(cache), path=TEACHER_PROMPTS, content=b"{}")
        with monkeypatch.context() as patch:
            patch.setattr(card, "write_file", or_fail)
            with pytest.raises(Killed):
                attach(cache, read_manifest(cache), path=TEACHER_PROMPTS, content=b'{"prompts": {}}')
        with suppress(MiniLMCacheError):  # it may lack them now, and never has others than it names
            assert open_cache(cache).reader.attachment(TEACHER_PROMPTS)
        assert not verify(
            cache, full=True, num_threads=1, session=Session(), check_rows=lambda _: lambda _: None
        ).damage
