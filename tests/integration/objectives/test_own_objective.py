"""A new objective is one module and one row: everything else reads the row."""

import json
from pathlib import Path

import pytest
from transformers import AutoModel

from minilm_cache.objectives.spec import OBJECTIVES, register_objective
from minilm_cache.report.runs import TrainedRun
from tests.fixtures import Command
from tests.support import World, dump_arguments
from tests.toy_objective import TOY


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the toy objective while a test runs."""
    monkeypatch.setitem(OBJECTIVES, TOY.name, TOY)
    register_objective(TOY)
    return TOY.name


def test_an_objective_of_one_file_goes_the_whole_way(
    world: World, command: Command, toy: str, tmp_path: Path
) -> None:
    code, _, err = command(*dump_arguments(world, "--for", f"{toy},minilm", k=None))
    assert code == 0, err
    code, out, err = command("info", world.root / "cache")
    assert code == 0, err
    assert "hidden states of first tokens 3" in out

    run = tmp_path / "run"
    code, out, err = command(
        *("train", world.root / "cache", "--arch", "2x16", "--objective", toy, "--steps", 60),
        *("--batch-size", 8, "--lr", 5e-3, "--out", run, "--json"),
    )
    assert code == 0, err
    student = json.loads(out)["students"][0]
    assert student["held_out_after"]["toy"] < student["held_out_before"]["toy"]
    assert AutoModel.from_pretrained(student["path"]).config.num_hidden_layers == 2
    assert "objective `toy`) from the last state of a teacher's first token" in (
        Path(student["path"], "README.md").read_text()
    )
    assert "toy" in repr(TrainedRun.open(run)["2x16"])


def test_a_cache_that_lacks_what_the_row_needs_is_refused_with_the_remedy(
    shared_world: World, command: Command, toy: str
) -> None:
    command.fails(
        *("train", shared_world.root / "cache", "--arch", "2x16", "--objective", toy, "--steps", 2),
        code=2,
        says=("--objective toy needs states", "hidden states of first tokens", "--for toy"),
    )


def test_an_objective_that_nobody_registered_is_refused(shared_world: World, command: Command) -> None:
    cache = shared_world.root / "cache"
    says = "there is no objective toy; there are minilm, minilmv2"
    command.fails("train", cache, "--arch", "2x16", "--objective", "toy", code=2, says=says)
    command.fails("dump", "--teacher", "mini", "--for", "toy", code=2, says=says)
