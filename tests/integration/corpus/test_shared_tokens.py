"""Tokens in a store: made by one machine, fetched by others, and checked on arrival."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minilm_cache.corpus import tokenise as tokenising
from minilm_cache.corpus import tokens as token_files
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.corpus.tokens import Tokens, block_sums
from minilm_cache.errors import CacheCorruptError, InterruptedRunError, StorageError
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.session import Session
from minilm_cache.store import leases
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.leases import Leases
from minilm_cache.store.remote import open_store
from tests.s3 import tamper
from tests.support import World


@pytest.fixture
def shared(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the tokens of machines, which are homes here, be shared in a store; return its URL."""
    monkeypatch.setenv("MINILM_CACHE_TOKENS", f"{store}/tokens")
    monkeypatch.setattr(tokenising, "_PART_BYTES", 1000)
    monkeypatch.setattr(token_files, "_POLL_S", 0.05)
    # Processes take seconds to start, and test_tokens.py has them.
    monkeypatch.setattr(tokenising, "_pool", lambda *_, **__: ThreadPool(1))
    return f"{store}/tokens"


def tokens_of(world: World, machine: str) -> Tokens:
    corpus, tokenizer = load_corpus(str(world.corpus)), load_tokenizer(world.teacher)
    return tokenise(corpus, tokenizer, num_processes=1, session=Session(world.root / machine))


def content(tokens: Tokens) -> dict[str, bytes]:
    files = (file for file in tokens.folder.iterdir() if file.is_file() and file.name != ".lock")
    return {file.name: file.read_bytes() for file in files}


def test_machines_that_begin_together_tokenise_once(
    world: World, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    real = tokenising._seal

    def counting(folder: Path, *arguments: object, **more: object) -> None:
        written.append(folder)
        real(folder, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenising, "_seal", counting)
    with ThreadPoolExecutor(3) as threads:
        machines = list(threads.map(lambda machine: tokens_of(world, machine), ("a", "b", "c")))

    assert len(written) == 1
    assert len(machines[0].record.parts) > 2
    assert content(machines[0]) == content(machines[1]) == content(machines[2])
    names = {name.partition("/")[2] for name in open_store(shared).sizes()}
    assert names == content(machines[0]).keys(), "no lease is left"
    monkeypatch.delenv("MINILM_CACHE_TOKENS")
    assert content(tokens_of(world, "alone")) == content(machines[0])


def test_a_machine_that_stopped_holds_up_no_other(
    world: World, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.2)
    address = tokens_of(world, "first").folder.name
    folder = open_store(shared).below(address)
    folder.remove(["tokens.json"])
    lost = Leases(folder.below("claims"))
    assert lost.acquire("tokenise") is not None
    lost.close()  # as if the process had been killed: nobody renews it

    assert tokens_of(world, "second").num_tokens > 0
    assert folder.read_if_there("tokens.json", 2**20) is not None


def test_tokens_that_were_here_before_are_sent(
    world: World, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose sending failed: they are complete here, and the store lacks them."""
    with monkeypatch.context() as patched:
        patched.delenv("MINILM_CACHE_TOKENS")
        address = tokens_of(world, "first").folder.name
    tokens_of(world, "first")

    assert open_store(shared).below(address).read_if_there("tokens.json", 2**20) is not None
    assert content(tokens_of(world, "second")) == content(tokens_of(world, "first"))


def test_whoever_waits_can_be_stopped(world: World, shared: str) -> None:
    address = tokens_of(world, "first").folder.name
    folder = open_store(shared).below(address)
    folder.remove(["tokens.json"])
    held = Leases(folder.below("claims"))
    assert held.acquire("tokenise") is not None
    corpus, tokenizer = load_corpus(str(world.corpus)), load_tokenizer(world.teacher)
    with pytest.raises(InterruptedRunError, match="while another machine tokenises"):
        tokenise(corpus, tokenizer, session=Session(world.root / "second", should_stop=lambda: True))
    held.close()


LIES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "fewer": lambda parts: parts.pop(),
    "huge": lambda parts: parts[0].update(num_tokens=10**400),
}


@pytest.mark.parametrize(
    "damage",
    ["bit", "short", "missing", "ids", "ends", "other", "path", "lacking", "malformed", "fewer", "huge"],
)
def test_what_a_store_has_damaged_is_refused_and_not_kept(
    world: World, shared: str, server: str, damage: str
) -> None:
    first = tokens_of(world, "first")
    address, ids = first.folder.name, (first.folder / "part-00001.ids").read_bytes()
    name = "part-00001.ids"
    changed: bytes | None = ids
    if damage == "missing":
        changed = None
    elif damage == "ends":
        name = "ends"
        changed = bytes(len((first.folder / "ends").read_bytes()))
    elif damage == "malformed":
        name, changed = "tokens.json", b"{}"
    elif damage == "bit":
        changed = bytes([ids[0] ^ 1]) + ids[1:]
    elif damage == "short":
        changed = ids[:-2]
    elif damage == "ids":  # with checksums that fit
        changed = np.full(len(ids) // 2, 60_000, "<u2").tobytes()
    else:
        name, document = "tokens.json", json.loads((first.folder / "tokens.json").read_text())
        document.pop("checksum")
        if damage == "other":
            document["corpus"]["sha256"] = "0" * 64
        elif damage == "lacking":
            del document["files"]["ends"]
        elif damage in LIES:
            LIES[damage](document["parts"])
        else:
            document["files"]["../../outside"] = document["files"]["ends"]
        changed = json.dumps(document).encode()
    tamper(server, f"{shared}/{address}/{name}", changed)

    with pytest.raises(CacheCorruptError, match=rf"{name} is damaged\. Remove s3://.*{address}"):
        tokens_of(world, "second")
    assert not (world.root / "second/tokens" / address / "tokens.json").exists()
    assert not list(world.root.glob("**/outside"))


def test_a_store_that_refuses_is_said_in_one_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tokens_of(world, "second")
    expected = content(kept)
    monkeypatch.setenv("MINILM_CACHE_TOKENS", f"file://{world.corpus}/tokens")
    for machine in ("first", "second"):
        with pytest.raises(StorageError):
            tokens_of(world, machine)
    assert content(kept) == expected, "tokens that are whole are not made again because a store refuses"


def test_tokens_of_another_text_are_seen_though_all_sums_fit(world: World, shared: str, server: str) -> None:
    """Only the text itself can tell: a sample of it is tokenised anew."""
    first = tokens_of(world, "first")
    folder = first.folder
    document = json.loads((folder / "tokens.json").read_text())
    document.pop("checksum")
    for number, part in enumerate(document["parts"]):
        sevens = np.full(part["num_tokens"], 7, "<u2").tobytes()
        sums = block_sums(np.frombuffer(sevens, np.uint8)).tobytes()
        part["sums"] = digest_bytes(sums).model_dump()
        tamper(server, f"{shared}/{folder.name}/part-{number:05d}.ids", sevens)
        tamper(server, f"{shared}/{folder.name}/part-{number:05d}.sums", sums)
    tamper(server, f"{shared}/{folder.name}/tokens.json", json.dumps(document).encode())
    with pytest.raises(CacheCorruptError, match="tokens of another text"):
        tokens_of(world, "second")
    assert not (world.root / "second/tokens" / folder.name / "tokens.json").exists()
