"""Caches with states: adding to them, damage, refusals, travel, ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor

from minilm_cache.cache import Cache, open_cache, row_checker
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import (
    CacheCorruptError,
    CorpusError,
    IdentityMismatchError,
    InterruptedRunError,
    InvalidConfigError,
    TeacherError,
)
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.tap import Tap
from minilm_cache.models.teacher import Teacher, TeacherReading
from minilm_cache.session import Session
from minilm_cache.storage_schema.manifest import StateFidelity
from minilm_cache.storage_schema.states import SignalName, StateFamily
from minilm_cache.store.pull import pull
from minilm_cache.store.push import push
from minilm_cache.store.verify import verify
from tests.fixtures import Command
from tests.integration.codecs.conftest import EVERYTHING, held_out
from tests.support import World, dump_arguments, write_corpus


def test_adding_is_dumping_all_at_once_without_what_is_there(stored: World) -> None:
    base = stored.dump("base", codec="vectors")
    asked = stored.config(**{"for": EVERYTHING}, codec="vectors", max_error=0.05, label_k=12)
    added = dump_cache(asked, out=stored.root / "added", add=base.path, session=Session(stored.home))
    whole = stored.root / "cache"
    files = {file.relative_to(whole) for file in whole.rglob("*") if file.is_file()}

    assert added.manifest.fingerprint == open_cache(whole).manifest.fingerprint
    assert {file.relative_to(added.path) for file in added.path.rglob("*") if file.is_file()} == files
    differing = [file for file in files if (added.path / file).read_bytes() != (whole / file).read_bytes()]
    assert {file.parts[0] for file in differing} == {"commits"}, "only the attempts differ"
    for path in ("tokens/c/0", "vectors/2/codes/c/0/0", "sequences/part-00000.parquet"):
        assert (added.path / path).stat().st_ino == (base.path / path).stat().st_ino
    first = json.loads((base.path / "manifest.json").read_text())
    assert first["complete"]
    assert not verify(base.path, full=True, num_threads=2, check_rows=row_checker, session=Session()).damage


def test_adding_asks_the_teacher_only_for_the_rest(stored: World, monkeypatch: pytest.MonkeyPatch) -> None:
    base = stored.dump("relations")
    asked: list[tuple[tuple[int, ...], tuple[int, ...], str | None]] = []
    read = Teacher.read

    def told(self: Teacher, inputs: Inputs, tap: Tap, places: Tensor | None = None) -> TeacherReading:
        asked.append((tap.layers, tap.hidden, tap.head))
        return read(self, inputs, tap, places)

    def dumped(name: str, add: Path, **settings: Any) -> Path:
        with monkeypatch.context() as patched:
            patched.setattr(Teacher, "read", told)
            patched.setattr("minilm_cache.dump.run.audit", lambda *_, **__: measured)
            patched.setattr("minilm_cache.dump.run.audit_states", lambda cache, *_, **__: states_of(cache))
            asked.clear()
            return dump_cache(
                stored.config(**settings), out=stored.root / name, add=add, session=Session(stored.home)
            ).path

    fidelity = open_cache(base.path).manifest.measured
    assert fidelity is not None
    measured = fidelity.fidelity
    hidden = dumped("and-hidden", base.path, hidden="last")
    assert set(asked) == {((), (3,), None)}
    labels = dumped("and-labels", hidden, hidden="last", labels=True)
    assert set(asked) == {((), (), "tokens")}
    dumped("and-masked", labels, hidden="last", labels=True, masked_hidden="last")
    assert set(asked) == {((), (3,), None)}
    for kind in ("attention", "value"):
        one, other = (open_cache(path)[0].relation(kind) for path in (base.path, labels))
        assert torch.equal(one, other)


def states_of(cache: Cache) -> tuple[StateFidelity, ...]:
    """Return figures that nobody measured, for a cache whose teacher is not asked."""
    assert cache.signals_codec is not None
    paths = cache.signals_codec.parameters.paths
    return tuple(StateFidelity(path=path, bytes_per_token=1.0, relative_error=0.0) for path in paths)


def test_a_cache_begun_apart_takes_nothing_over(stored: World, tmp_path: Path) -> None:
    """Codes mean nothing without the basis that they were fitted with."""
    base = stored.dump("fitted", codec="vectors").path
    out = tmp_path / "new"
    asked = stored.config(codec="vectors", hidden="last", batch_size=3)
    with pytest.raises(InterruptedRunError):
        dump_cache(asked, out=out, session=Session(stored.home, should_stop=(out / "manifest.json").exists))
    codes = "vectors/2/basis/c/0/0"
    assert (out / codes).read_bytes() != (base / codes).read_bytes()
    with pytest.raises(IdentityMismatchError, match="were begun separately"):
        dump_cache(asked, out=out, add=base, session=Session(stored.home))
    asked = stored.config(codec="vectors", hidden="last", shard_tokens=512)
    with pytest.raises(InvalidConfigError, match="has shards of 256 tokens"):
        dump_cache(asked, out=tmp_path / "other", add=base, session=Session(stored.home))


def test_what_cannot_be_added_to_is_refused(stored: World, tmp_path: Path, command: Command) -> None:
    base = stored.dump("small", k=4).path
    other = write_corpus(tmp_path / "other.txt", seed=5)
    with pytest.raises(IdentityMismatchError, match="differs in codec"):
        dump_cache(stored.config(hidden="last"), out=tmp_path / "a", add=base, session=Session(stored.home))
    with pytest.raises(IdentityMismatchError, match="differs in corpus"):
        dump_cache(
            stored.config(k=4, corpus=str(other)), out=tmp_path / "b", add=base, session=Session(stored.home)
        )
    full = stored.root / "cache"
    asked = stored.config(codec="vectors", layers="all", hidden="last", max_error=0.05)
    with pytest.raises(IdentityMismatchError, match="differs in hidden"):
        dump_cache(asked, out=tmp_path / "c", add=full, session=Session(stored.home))
    with pytest.raises(IdentityMismatchError, match="differs in states"):
        dump_cache(
            stored.config(codec="vectors", layers="all"),
            out=tmp_path / "d",
            add=full,
            session=Session(stored.home),
        )
    command.fails(
        *dump_arguments(stored, "--add", tmp_path / "none"), "--out", tmp_path / "e", code=1, says="no cache"
    )


def test_a_damaged_part_is_not_taken_over(stored: World, tmp_path: Path) -> None:
    base = stored.dump("damaged").path
    file = base / "relations/value/weight/c/1/0/0"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(CacheCorruptError, match="relations/value/weight/c/1/0/0"):
        dump_cache(
            stored.config(hidden="last"), out=tmp_path / "cache", add=base, session=Session(stored.home)
        )


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")  # of the codec's name
def test_states_survive_verify_and_open_with_plain_zarr(stored: World) -> None:
    root = stored.root / "cache"
    verdict = verify(root, full=True, num_threads=2, check_rows=row_checker, session=Session())
    group = zarr.open_group(str(root), mode="r")
    cache = open_cache(root)
    sequence = cache[0]
    length = len(sequence.input_ids)
    folder = "states/hidden/2"
    arrays = {name: np.asarray(group[f"{folder}/{name}"]) for name in ("mean", "basis", "step")}
    codes = np.asarray(group[f"{folder}/codes"])[:length]
    plain = arrays["mean"] + (codes * arrays["step"]) @ arrays["basis"].astype(np.float32)
    found = sequence.states()[SignalName(StateFamily.HIDDEN, 2)][0]

    assert not verdict.damage
    np.testing.assert_allclose(found.numpy(), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("states/hidden/1/codes", -(2**15), "no codes"),
        ("states/first/2", float("nan"), "NaN or infinite"),
        ("labels/read", 120, "outside the vocabulary"),
        ("labels/index", 65000, "outside the vocabulary"),
        ("labels/weight", 255, "invalid weight"),
        ("labels/weight", 1, "no slot"),
        ("labels/weight", [0, 1, 1] + [200] * 9, "sum to more than 1"),
    ],
)
def test_rows_that_no_writer_writes_are_refused(
    stored: World, path: str, value: float | list[int], says: str
) -> None:
    cache = open_cache(stored.root / "cache")
    codec = cache.signals_codec
    assert codec is not None
    shard = cache.reader.segment(0)
    rows = {name: torch.from_numpy(array.copy()) for name, array in shard.rows.items()}
    lengths = torch.from_numpy(shard.lengths.repeat(shard.lengths))
    codec.check(rows, lengths)
    chosen = rows["labels/read"].to(torch.int64) != 2**16 - 2
    at = int(chosen.nonzero()[0]) if path.startswith("labels") else int(shard.starts[0])
    wide = rows[path].to(torch.float64)
    wide[at] = torch.tensor(value, dtype=torch.float64)
    rows[path] = wide.to(torch.int32) if path.startswith("labels") else wide.to(rows[path].dtype)
    with pytest.raises(CacheCorruptError, match=says):
        codec.check(rows, lengths)


def test_what_a_teacher_cannot_say_is_refused(tmp_path: Path, world: World, command: Command) -> None:
    say = [*dump_arguments(world), "--out", tmp_path / "no"]
    command.fails(*say, "--labels", code=1, says=("teacher has no head for masked tokens", "head` fits"))
    records = ("--packing", "records", "--logits")
    command.fails(*say, *records, code=1, says=("no head that classifies", "Fine-tune"))
    command.fails(*say, "--logits", code=2, says="--logits goes with --packing records")
    command.fails(*say, "--hidden", "9", code=2, says="hidden states 0 (the output of its embeddings) to 3")
    command.fails(*say, "--hidden", "last,1", code=2, says="give last, all")
    command.fails(*say, "--label-k", 4, code=2, says="--label-k needs --labels")
    command.fails(*say, "--max-error", 0.1, code=2, says="--max-error needs --hidden")
    command.fails(
        *say,
        "--for",
        "minilm,bert",
        code=2,
        says="there is no objective bert (did you mean tinybert?); there are minilm",
    )
    command.fails(*say, "--for", "tinybert", code=2, says="--k goes with --codec topk")
    command.fails(*say, "--for", "minilmv2", "--codec", "dense", code=2, says="leave out --codec dense")
    command.fails(
        *say, "--hidden", "1", "--max-error", 1e-7, code=2, says="--max-error 1e-07 cannot be reached"
    )
    with pytest.raises(TeacherError, match="no mask_token"):
        _without_mask(world)
    assert not (tmp_path / "no").exists()


def _without_mask(world: World) -> None:
    file = world.teacher / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content.pop("mask_token", None)
    file.write_text(json.dumps(content))
    special = world.teacher / "special_tokens_map.json"
    if special.exists():
        special.unlink()
    world.dump("other", masked_hidden="last")


def test_codes_of_states_need_text(tmp_path: Path, world: World) -> None:
    (tmp_path / "few.txt").write_text("ba be bi\n")
    with pytest.raises(CorpusError, match="codes of states are fitted to the corpus"):
        world.dump("few", corpus=str(tmp_path / "few.txt"), hidden="last")
    with pytest.raises(InvalidConfigError, match="--logits cannot be combined with --labels"):
        world.config(logits=True, labels=True, packing="records")


def test_a_cache_without_states_says_so(shared_world: World) -> None:
    with pytest.raises(InvalidConfigError, match="stores only relations"):
        open_cache(shared_world.root / "cache")[0].states()
    assert "states" not in json.loads((shared_world.root / "cache/manifest.json").read_text())["identity"]


def test_states_travel_with_their_cache(stored: World, tmp_path: Path) -> None:
    place = push(stored.root / "cache", str(tmp_path / "store"), session=Session()).place
    pulled = tmp_path / "pulled"
    pull(place, pulled, session=Session())
    there = World(tmp_path, stored.teacher, stored.corpus)
    for sequence, other in zip(held_out(stored), held_out(there, "pulled"), strict=True):
        for name, values in sequence.states().values.items():
            assert torch.equal(values, other.states()[name])
    assert not verify(pulled, full=True, num_threads=2, check_rows=row_checker, session=Session()).damage


def test_ranks_write_what_one_process_does(stored: World, tmp_path: Path) -> None:
    asked = {"for": EVERYTHING, "codec": "vectors", "max_error": 0.05, "label_k": 12, "world_size": 2}
    for rank in range(2):
        dump_cache(stored.config(**asked, rank=rank), out=tmp_path / "cache", session=Session(stored.home))
    whole = stored.root / "cache"
    for file in whole.rglob("*"):
        own = tmp_path / "cache" / file.relative_to(whole)
        if file.is_file() and file.parent.name not in ("commits", "locks"):
            assert own.read_bytes() == file.read_bytes(), own
