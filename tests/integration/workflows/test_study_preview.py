"""`study --dry-run`: what is to be made, without making it."""

import json
from pathlib import Path

import pytest

from minilm_cache.errors import InterruptedRunError
from minilm_cache.session import Session
from minilm_cache.workflows.study import run_study
from minilm_cache.workflows.study_spec import read_study
from tests.conftest import Command
from tests.integration.workflows.test_study import document
from tests.support import World


def test_a_preview_makes_nothing(world: World, command: Command) -> None:
    before = sorted(world.root.rglob("*"))
    shapes = document(world)
    code, out, _ = command("study", shapes, "--dry-run")

    assert code == 0
    for words in ("sampled", "coded", "4 passes train 8 students", "1x16, 1x32", "to do"):
        assert words in out
    assert sorted(world.root.rglob("*")) == sorted([*before, shapes])


def test_a_preview_knows_what_is_there(world: World, command: Command) -> None:
    shapes, folder = document(world), world.root / "shapes"

    def stop() -> bool:
        return any((folder / "runs").glob("*/students/*/config.json"))

    with pytest.raises(InterruptedRunError):
        run_study(read_study(shapes), folder, session=Session(world.home, should_stop=stop))
    preview = json.loads(command("study", shapes, "--dry-run", "--json")[1])

    assert preview["caches"] == {"sampled": "complete", "coded": "complete"}
    states = [planned["state"] for planned in preview["passes"]]
    assert (states[0], states[-1]) == ("complete", "to do")
    assert [planned["students"] for planned in preview["passes"]] == [["1x16", "1x32"]] * 4


def test_a_preview_refuses_what_the_study_would(world: World, command: Command) -> None:
    shapes = document(world, arch=" [1x17]")
    line = command.fails("study", shapes, "--dry-run", code=2, says=("line ", "1x17"))

    assert line == command.fails("study", shapes, code=2, says="1x17")
    assert not Path(world.root / "shapes").exists()


def test_embeddings_fit_students_of_any_depth(world: World, command: Command) -> None:
    path = document(world, init=" [embeddings]", arch=" [5x32]")
    code, _, err = command("study", path, "--dry-run")
    assert code == 0, err


def test_a_preview_shows_what_trains_assistants(world: World, command: Command) -> None:
    shapes = document(world, caches="\n  one: {codec: vectors}", seed=" [0]", assistants=" [2x32]")
    preview = json.loads(command("study", shapes, "--dry-run", "--json")[1])
    assert [each["students"] for each in preview["assistants"]] == [["2x32"]]
    assert "3 passes train 4 students and 1 assistant" in command("study", shapes, "--dry-run")[1]
