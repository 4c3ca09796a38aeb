"""Damaged caches by the thousand: each is refused with an error of ours, or is read as it was."""

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from minilm_cache import open_cache
from minilm_cache.errors import MiniLMCacheError
from minilm_cache.relations.signals import SparseLabels
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.layout import commit_path
from tests.processes import CONTEXT
from tests.support import World, save_teacher

MUTATIONS = {"topk": 300, "vectors": 300, "states": 200, "pooled": 100}
"""Number of mutations of a cache of each codec, of one with every hidden state and labels, and of one with
pooled vectors alone; four times as many with `--soak`."""
SPARE_BYTES = 2**29
"""Bytes of address space in addition to what reading the undamaged cache has taken."""
NUMBERS = (-1, 0, 1, 2**16, 2**31, 2**40, 2**63, 2**200, 0.5, -1e308, float("nan"), float("inf"), True)
STRINGS = (
    "",
    "../../etc/passwd",
    "/etc/passwd",
    "a" * 300,
    "\x00",
    "C:\\x",
    "vectors/9/codes",
    "\ud800",
    "\x1b[2J",
)
OTHERS: tuple[Any, ...] = (None, [], {}, [[]], {"": {}})


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Change, insert, remove or repeat some bytes."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        at = chance.randrange(len(changed) + 1)
        way = chance.randrange(6)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif way == 1 and at < len(changed):
            changed[at] = chance.choice((0, 1, 127, 128, 255))
        elif way == 2:
            changed[at:at] = chance.randbytes(chance.choice((1, 4, 64)))
        elif way == 3:
            del changed[at : at + chance.choice((1, 4, 64))]
        elif way == 4:
            del changed[at:]
        else:
            changed[at : at + 8] = chance.choice((2**64 - 1, 2**63, 2**32, 0)).to_bytes(8, "little")
    return bytes(changed)


def altered(content: bytes, chance: random.Random) -> bytes:
    """Change a value somewhere in a JSON document, remove it, or add one."""
    document = json.loads(content)
    holder, key = chance.choice(list(_places(document)))
    way = chance.randrange(8)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[chance.choice(STRINGS)] = holder[key]
    else:
        holder[key] = chance.choice((*NUMBERS, *STRINGS, *OTHERS))
    return json.dumps(document).encode()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries:
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)


class Target:
    """An undamaged cache: its files and their listings are read once, since every damage is made good."""

    def __init__(self, path: Path) -> None:
        """Look at a cache."""
        self._path = path
        left_out = ("README.md", "seal.lock")
        files = [file for file in path.rglob("*") if file.is_file() and file.name not in left_out]
        self._files = [*files, *[path / "manifest.json"] * 10]
        self._contents = {file: file.read_bytes() for file in files}
        commits = path.glob(commit_path(0).replace("00000", "[0-9]*"))
        self._listed = {
            listing: json.loads(self._contents[listing]) for listing in (path / "manifest.json", *commits)
        }

    def damage(self, chance: random.Random) -> tuple[Callable[[], None], bool]:
        """Damage one file; return what makes it good again, and whether hashes were made to agree."""
        file = chance.choice(self._files)
        content = self._contents[file]
        is_json = file.suffix == ".json" and chance.random() < 0.8
        changed = (altered if is_json else flipped)(content, chance)
        file.write_bytes(changed)
        name = file.relative_to(self._path).as_posix()
        touched = [file]
        for listing, document in self._listed.items():
            if listing != file and name in document["files"] and chance.random() < 0.9:
                touched.append(listing)
                files = {**document["files"], name: digest_bytes(changed).model_dump()}
                agreeing = {key: value for key, value in document.items() if key != "checksum"}
                listing.write_text(json.dumps({**agreeing, "files": files}))

        def restore() -> None:
            for each in touched:
                each.write_bytes(self._contents[each])

        return restore, len(touched) > 1


def read_all(path: Path) -> list[torch.Tensor]:
    """Return what a cache says of a sequence of each shard."""
    cache = open_cache(path)
    found = []
    for shard in cache.reader.ranges:
        sequence = cache[shard.first_sequence]
        found.append(sequence.input_ids)
        for layer in cache.layers[-1:]:
            found += [sequence.relation(kind) for kind in cache.codecs[layer].everything.kinds]
        if cache.signals_codec is not None:
            states = sequence.states()
            found += states.values.values()
            if states.masked is not None and isinstance(states.masked.labels, SparseLabels):
                found += [states.masked.ids, states.masked.chosen, *states.masked.labels]
    return found


def fuzz(path: Path, mutations: int, answer: Connection) -> None:
    """Read a cache damaged in many ways, in bounded memory; send counts, and what must not have happened."""
    expected = read_all(path)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    chance, target = random.Random(0), Target(path)
    refused = read = 0
    wrong: list[str] = []
    for number in range(mutations):
        restore, agrees = target.damage(chance)
        try:
            found = read_all(path)
            read += 1
            if len(found) != len(expected):
                wrong.append(f"{number}: other sequences")
            elif not agrees and not all(map(torch.equal, found, expected)):
                wrong.append(f"{number}: other values, though its hashes tell of the damage")
        except MiniLMCacheError as error:
            refused += 1
            if "\n" in str(error):
                wrong.append(f"{number}: {str(error)[:200]}")
        except BaseException as error:  # noqa: BLE001 - whatever else it is, is the finding
            wrong.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
        restore()
    answer.send((refused, read, wrong))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", MUTATIONS)
def test_damage_of_any_kind_ends_in_an_error_of_ours(world: World, what: str, soak: int) -> None:
    mutations = MUTATIONS[what] * soak
    settings: dict[str, Any] = {"codec": what, "max_length": 16, "shard_tokens": 512}
    if what == "states":
        save_teacher(world.teacher, head="tokens")
        settings |= {"codec": "topk", "hidden": (0, 3), "masked_hidden": "last", "first_hidden": "last"}
        settings |= {"labels": True, "label_k": 4, "k": 2}
    if what == "pooled":
        settings |= {"codec": "none", "pooled": True, "pooling": "mean", "packing": "records"}
    path = world.dump(**settings).path
    shutil.rmtree(path / "preview")
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=fuzz, args=(path, mutations, there))
    process.start()
    there.close()
    refused, read, wrong = here.recv()
    process.join()

    assert not wrong, wrong[:20]
    assert process.exitcode == 0
    assert refused + read == mutations
    assert refused > mutations / 2
