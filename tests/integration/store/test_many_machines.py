"""Dumps by several machines: who writes what, and how the parts become one cache."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from minilm_cache.cache import row_checker
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, InterruptedRunError, ShardBusyError
from minilm_cache.session import Session
from minilm_cache.store.leases import announce_rank
from minilm_cache.store.merge import merge
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.verify import unsound_shards
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of, manifest_of, stop_after
from tests.processes import CommandProcess
from tests.support import World, dump_arguments, write_document
from tests.unit.store.support import Recorder


def parts_of(world: World, world_size: int = 2, **changes: object) -> list[Path]:
    """Dump each rank into a folder of its own."""
    return [
        world.dump(f"part{rank}", rank=rank, world_size=world_size, **changes).path
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("codec", ["topk", "vectors"])
def test_parts_of_machines_become_the_cache_of_one(world: World, command: Command, codec: str) -> None:
    expected = world.dump("whole", codec=codec).path
    one, other = parts_of(world, codec=codec)
    out = world.root / "merged"
    code, printed, err = command("merge", out, one, "--json")
    assert code == 0, err
    assert json.loads(printed)["shards_missing"] == 3
    code, printed, err = command("merge", out, one, other)
    assert code == 0, err
    assert "3 copied, 6 in all" in printed
    assert "every shard is there; the dump command" in printed
    assert not manifest_of(out).complete
    result = world.dump("merged", codec=codec)

    assert (result.shards_written, result.shards_kept) == (0, 6)
    assert result.manifest.complete
    assert result.manifest.measured == manifest_of(expected).measured
    assert arrays_of(out) == arrays_of(expected)
    assert command("verify", "--full", out)[0] == 0


def test_what_is_no_part_of_the_same_cache_is_refused(world: World, command: Command) -> None:
    one, other = parts_of(world)
    again = world.dump("again", rank=0, world_size=2).path
    different = world.dump("different", k=5, rank=1, world_size=2).path
    out = world.root / "merged"
    command.fails("merge", out, one, different, code=1, says=("not parts of one cache", "codec.k"))
    assert merge([one, again], world.root / "equal", session=Session()).shards_copied
    record = json.loads((again / "commits/00000.json").read_text())
    write_document(again / "commits/00000.json", record | {"tokens_xxh3": "0" * 32})
    command.fails("merge", out, one, again, code=1, says=("shard 0 is in", "from two dumps"))
    assert not out.exists()
    weight = other / "relations/value/weight/c/1/0/0"
    weight.write_bytes(weight.read_bytes()[:-1])
    with pytest.raises(CacheCorruptError, match="c/1/0/0 is damaged"):
        merge([one, other], out, session=Session())
    command.fails("merge", out, world.root / "nothing", code=1, says="no cache at")


def test_codecs_that_were_fitted_apart_are_not_mixed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.dump("part0", codec="vectors", rank=0, world_size=2).path
    monkeypatch.setattr("minilm_cache.codecs.vectors._STEP_ROUNDS", 5)  # stands in for another machine
    other = world.dump("part1", codec="vectors", rank=1, world_size=2).path
    assert manifest_of(one).files != manifest_of(other).files
    with pytest.raises(IdentityMismatchError, match="their codecs were fitted on each machine"):
        merge([one, other], world.root / "merged", session=Session())


def test_ranks_take_what_slow_killed_and_late_ranks_leave(world: World) -> None:
    """Four ranks: one takes five times as long, one was killed after it had begun, one comes late."""
    expected = arrays_of(world.dump("whole", shard_tokens=64).path)
    out, written = world.root / "together", dict.fromkeys(range(3), 0)
    config = world.config(shard_tokens=64, world_size=4)

    def run(rank: int, delay_s: float, pause_s: float) -> None:
        time.sleep(delay_s)

        def pause() -> bool:
            time.sleep(pause_s)
            return False

        own = config.with_changes(rank=rank)
        written[rank] = dump_cache(
            own, out=out, session=Session(world.home, should_stop=pause)
        ).shards_written

    killed = config.with_changes(rank=3)
    with pytest.raises(InterruptedRunError):
        dump_cache(killed, out=out, session=Session(world.home, should_stop=stop_after(2)))
    ranks = [
        threading.Thread(target=run, args=arguments)
        for arguments in ((0, 0.0, 0.05), (1, 0.0, 0.25), (2, 1.0, 0.05))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)

    assert arrays_of(out) == expected
    num_shards = len(CacheReader(out).ranges)
    assert sum(written.values()) >= num_shards - 2  # the killed rank had committed at most two
    assert 0 < written[1] < written[0]
    assert not list((out / "locks").glob("rank-*"))


def test_a_rank_waits_for_what_others_write_and_can_be_interrupted_then(world: World) -> None:
    out = world.dump(rank=0, world_size=2).path
    announce_rank(out, 1)
    notes = Recorder()
    with (
        FileLock(out / "locks/00003.lock"),
        pytest.raises(InterruptedRunError, match="other ranks are writing"),
    ):
        dump_cache(
            world.config(rank=0, world_size=2),
            out=out,
            session=Session(
                world.home,
                progress=notes,
                should_stop=lambda: bool(notes.notes) and notes.notes[-1].startswith("waiting for"),
            ),
        )

    assert sorted(CacheReader(out, partial=True).records) == [0, 1, 2, 4, 5]
    assert world.dump(rank=0, world_size=2).manifest.complete


def test_ranks_help_those_of_their_own_folder_alone(world: World) -> None:
    """Two machines, of which one began with a copy of the other's folder: each has two of four ranks."""
    one = world.dump("one", rank=0, world_size=4).path
    begun = Path(shutil.copytree(one, world.root / "two"))
    shutil.rmtree(begun / "commits")
    announce_rank(one, 1)  # killed before its first shard
    world.dump("one", rank=0, world_size=4)
    announce_rank(begun, 3)
    world.dump("two", rank=2, world_size=4)

    assert sorted(CacheReader(one, partial=True).records) == [0, 1, 4, 5]
    assert sorted(CacheReader(begun, partial=True).records) == [2, 3]
    merged = merge([one, begun], world.root / "merged", session=Session())
    assert merged.shards_missing == 0


def test_an_interrupted_merge_goes_on(world: World) -> None:
    parts = parts_of(world)
    out = world.root / "merged"
    with pytest.raises(InterruptedRunError, match="Run the same command again"):
        merge(parts, out, session=Session(should_stop=stop_after(2)))
    assert merge(parts, out, session=Session()).shards_copied == 4


def test_a_cache_folder_that_was_begun_elsewhere_can_be_copied(world: World) -> None:
    """What the message above advises."""
    one = world.dump("part0", codec="vectors", rank=0, world_size=2).path
    begun = world.root / "part1"
    shutil.copytree(one, begun)
    shutil.rmtree(begun / "commits")
    other = world.dump("part1", codec="vectors", rank=1, world_size=2, batch_size=3).path

    assert merge([one, other], world.root / "merged", session=Session()).shards_missing == 0


@pytest.mark.parametrize(
    ("variables", "shards"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 3),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "4"}, 2),
        (
            {
                f"SLURM_ARRAY_TASK_{name}": n
                for name, n in (("ID", "20"), ("COUNT", "3"), ("MIN", "0"), ("STEP", "10"))
            },
            2,
        ),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 1),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 6),
    ],
    ids=str,
)
def test_ranks_come_from_torchrun_and_slurm(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], shards: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = command(*dump_arguments(world), "--json")
    assert code == 0, err
    assert json.loads(out)["shards_written"] == shards
    assert ("rank " in err and ", from " in err) == (shards < 6)
    code, out, _ = command(*dump_arguments(world, "--rank", 0, "--world-size", 1), "--json")
    assert json.loads(out)["shards_written"] == 6 - shards
    command.fails(*dump_arguments(world), "--rank", 0, code=2, says="--rank and --world-size go together")


def test_two_processes_dump_at_the_same_time(world: World) -> None:
    """With the environment that torchrun gives them."""
    own = {"MINILM_CACHE_HOME": world.home, "WORLD_SIZE": 2}
    words = dump_arguments(world)
    processes = [CommandProcess(*words, environment={**own, "RANK": rank}) for rank in range(2)]
    ends = [process.end() for process in processes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    manifest = manifest_of(world.root / "cache")
    assert manifest.complete
    expected = arrays_of(world.dump("alone").path)
    assert arrays_of(world.root / "cache") == expected


def test_what_an_engine_needs(world: World, command: Command) -> None:
    arguments = dump_arguments(world, "--engine")
    command.fails(*arguments, "spark", "--world-size", 2, code=2, says="unknown engine. Use ray")
    command.fails(*arguments, "ray", code=2, says="Give --world-size")
    command.fails(*arguments, "ray", "--world-size", 2, "--rank", 0, code=2, says="without --rank")
    command.fails(
        *(*arguments, "ray", "--world-size", 2, "--no-resume"), code=2, says="cannot be used with --no-resume"
    )


def test_a_shard_that_another_merge_committed_is_not_touched(world: World) -> None:
    one, other = parts_of(world)
    out = world.root / "merged"

    def overtake() -> bool:
        if not out.exists() or not list(out.glob("commits/*.json")):
            merge([one], out, session=Session())
        return False

    with pytest.raises(ShardBusyError, match="was committed meanwhile"):
        merge([one, other], out, session=Session(should_stop=overtake))
    merge([one, other], out, session=Session())
    assert unsound_shards(out, shards=range(6), check_rows=row_checker, session=Session()) == []


def test_a_part_may_keep_the_teachers_weights(world: World) -> None:
    one = world.dump("part0", rank=0, world_size=2).path
    whole = world.dump("whole", keep_weights=True).path
    out = world.root / "merged"
    merged = merge([one, whole], out, session=Session())
    assert merged.shards_missing == 0
    world.dump("merged", keep_weights=True)
    weights = "teacher/model.safetensors"
    assert (out / weights).read_bytes() == (whole / weights).read_bytes()
    assert manifest_of(out) == manifest_of(whole)
    assert {**arrays_of(out), "manifest.json": b""} == {**arrays_of(whole), "manifest.json": b""}

    notes = Recorder()
    assert merge([whole], one, session=Session(progress=notes)).shards_missing == 0  # begun without weights
    assert "begun without the teacher's weights" in str(notes.notes)
    assert manifest_of(world.dump("part0", keep_weights=True).path) == manifest_of(whole)
