"""Chains under torchrun: all processes dump and train every stage together."""

import json

import pytest

from minilm_cache.session import Session
from minilm_cache.workflows.chain import run_chain
from tests.fixtures import Command
from tests.integration.workflows.test_chain import arguments, chain_config, content
from tests.processes import by_two_ranks
from tests.support import World


def test_processes_of_torchrun_run_a_chain_together(world: World) -> None:
    """Both dump and train every stage: the caches of the teacher are the same, and students alike."""
    environment = {"MINILM_CACHE_HOME": world.home, "OMP_NUM_THREADS": 1}
    codes, out, err = by_two_ranks(*arguments(world, "--json", "--compare-direct"), environment=environment)
    assert codes == [0, 0], err
    assert err.count("1 of 6: dump") == 1  # only the first process shows what is done
    record = json.loads(out)
    config = chain_config(world)
    config = config.with_changes(train=config.train.with_changes(accumulate=2, streams=2))  # as two ranks do
    expected = run_chain(config, world.root / "alone", session=Session(world.home)).record

    assert record["gains"].keys() == expected.gains.keys()
    ranks = {
        json.loads(file.read_text())["rank"]
        for cache in record["caches"]
        for file in (world.root / "chain" / cache).glob("commits/*.json")
    }
    assert ranks == {0, 1}
    teacher = "caches/0-teacher"
    assert content(world.root / "chain" / teacher) == content(world.root / "alone" / teacher)
    for own, there in zip(record["students"], expected.students, strict=True):
        assert (own["arch"], own["way"]) == (there.arch, there.way)
        assert sum(own["held_out_kl"].values()) == pytest.approx(
            sum((there.held_out_kl or {}).values()), rel=0.01
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--first", "minilmv2"), "--first runs in one process"),
        (("--batch-size", 5), "does not divide into 2 parts"),
        (("--engine", "ray"), "a chain on Ray runs in one process. Start it without torchrun"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_the_first_stage(
    world: World, command: Command, options: tuple[object, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    command.fails(*arguments(world), *options, code=2, says=says)
    assert not (world.root / "chain").exists()
