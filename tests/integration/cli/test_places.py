"""What lies where: lists of caches and runs, and errors that know a cache from a run from a model."""

import json
import shlex
from pathlib import Path

import pytest

from minilm_cache.cache import open_cache
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.session import Session
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.integration.train.test_train import settings, stop_after
from tests.support import World, dump_arguments


@pytest.fixture
def home(world: World, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home with a cache, a run and a damaged run."""
    monkeypatch.setenv("MINILM_CACHE_HOME", str(world.home))
    arguments = dump_arguments(world)
    del arguments[arguments.index("--out") : arguments.index("--out") + 2]
    assert command(*arguments)[0] == 0
    assert command("train", "--arch", "1x32", "--arch", "2x16", "--steps", 2)[0] == 0
    (world.home / "runs/broken").mkdir()
    (world.home / "runs/broken/run.json").write_text("{")
    return world.home


def test_caches_and_runs_are_listed(home: Path, command: Command) -> None:
    code, out, _ = command("ls")
    assert code == 0
    for words in ("teacher-corpus.txt-", "KL(teacher, stored)", "1x32, 2x16", "minilm, 2 steps", "complete"):
        assert words in out
    assert "is damaged" in out

    listed = json.loads(command("ls", "--json")[1])
    (cache,) = listed["caches"]
    broken, run = sorted(listed["runs"], key=lambda listed_run: listed_run["problem"] is None)
    assert cache["problem"] is None
    assert isinstance(cache["bytes"], int)
    assert set(cache["kl_teacher_to_stored"]) == {"attention", "value"}
    assert run["students"] == ["1x32", "2x16"]
    assert (run["steps"], run["complete"], run["cache"]) == (2, True, cache["url"])
    assert "is damaged" in broken["problem"]


def test_a_store_that_does_not_exist_is_an_error(tmp_path: Path, command: Command) -> None:
    command.fails("ls", tmp_path / "nostore", code=1, says=("nostore does not exist", "a store"))
    code, _, err = command("ls")
    assert (code, "no cache in" in err) == (0, True)


def test_a_folder_lists_its_caches_and_runs(world: World, home: Path, command: Command) -> None:
    (cache,) = (home / "caches").iterdir()
    assert cache.name in command("ls", home / "caches")[1]
    listed = json.loads(command("ls", home / "runs", "--json")[1])
    assert (listed["caches"], len(listed["runs"])) == ([], 2)
    assert all(run.name in command("ls", home)[1] for run in (home / "runs").iterdir())
    study = home / "studies/one"
    study.mkdir(parents=True)
    (home / "runs").rename(study / "runs")
    printed = command("ls", study.parent)[1]  # two studies may have runs of one name
    assert all(f"one/runs/{run.name}" in printed for run in (study / "runs").iterdir())
    (study / "runs").rename(home / "runs")
    of_home = json.loads(command("ls", home, "--json")[1])
    assert ([each["url"] for each in of_home["caches"]], len(of_home["runs"])) == ([str(cache)], 2)


def test_a_misspelt_cache_to_pull_lists_those_that_are_there(home: Path, command: Command) -> None:
    (cache,) = (home / "caches").iterdir()
    command.fails("pull", home / "caches/misspelt", code=1, says=("no cache at", f"There: {cache}."))
    command.fails("pull", home / "caches", code=1, says=f"There: {cache}.")


def test_errors_know_a_cache_from_a_run_from_a_model(world: World, home: Path, command: Command) -> None:
    (cache,) = (home / "caches").iterdir()
    run = next(path for path in (home / "runs").iterdir() if path.name != "broken")
    dump = ("dump", "--corpus", world.corpus, "--out", world.root / "out", "--teacher")
    command.fails(*dump, run, code=1, says=("is a run", f"{run}/students/1x32, {run}/students/2x16"))
    command.fails(*dump, cache, code=1, says="is a cache")
    command.fails("verify", run, code=1, says=("no cache at", "is a run"))
    command.fails("train", run, "--arch", "1x32", code=1, says=("no cache at", "is a run"))
    command.fails("train", world.teacher, "--arch", "1x32", code=1, says=("no cache at", "is a model"))
    command.fails("report", cache, code=2, says=("is not a run", "is a cache"))
    command.fails("speed", run, code=2, says=("is a run of students", f"mini {run}"))


def test_one_machines_part_is_to_be_merged(world: World, command: Command) -> None:
    part = world.dump("part0", rank=0, world_size=2).path
    command.fails("train", part, "--arch", "1x32", code=1, says=("is unfinished", "minilm-cache merge"))


@pytest.mark.parametrize("stored", ["minilm", "embedding", "mobilebert", "hidden-mse,minilm"])
def test_commands_end_with_the_next_one(
    world: World, command: Command, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is run as it is printed."""
    monkeypatch.chdir(world.root)

    def following(*arguments: object) -> list[str]:
        code, out, err = command(*arguments)
        assert code == 0, err
        (line,) = [line for line in out.splitlines() if line.startswith("next")]
        words = shlex.split(line.removeprefix("next"))
        assert words[0] == "minilm-cache"
        return words[1:]

    pooling = ("--pooling", "mean") if stored == "embedding" else ()
    train = following(*dump_arguments(world, "--for", stored, *pooling, k=None))
    assert ("--objective" in train) == (stored != "minilm")
    report = following(*train, "--steps", 2, "--lr", "1e-6")
    assert command(*report)[0] == 0
    pull = following("push", world.root / "cache", world.root / "shared")
    assert command(*pull, "--out", world.root / "mine")[0] == 0


def test_info_shows_how_far_a_run_has_come(world: World, command: Command) -> None:
    world.dump()
    run, config = world.root / "run", settings(steps=40, checkpoint_steps=10)
    with pytest.raises(InterruptedRunError):
        train_students(
            config, world.root / "cache", out=run, session=Session(world.home, should_stop=stop_after(21))
        )
    assert "unfinished, at step 21 of 40" in command("info", run)[1]
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 3')  # a line that is being written
    assert "at step 21 of 40" in command("info", run)[1]
    (run / "log.jsonl").unlink()
    assert "no step is logged yet" in command("info", run)[1]


def test_what_is_written_to_this_machine_is_not_written_to_a_url(world: World, command: Command) -> None:
    """A path with a URL in it would be a folder called s3: in the current one."""
    cache = world.dump().path
    for words in (
        ("train", cache, "--arch", "1x16"),
        ("slice", "--teacher", world.teacher, "--arch", "1x16"),
        ("evaluate", world.teacher, "--task", "sst2", "--data", world.root),
        ("truncate", "--teacher", world.teacher, "--layers", "0"),
        ("pull", f"file://{cache}"),
    ):
        command.fails(*words, "--out", "s3://team/out", code=2, says=("s3:", "this is a URL"))
    for out in ("s3://team/out", Path("s3://team/out")):
        with pytest.raises(InvalidConfigError, match="this is a URL"):
            dump_cache(world.config(), out=out)
    with pytest.raises(InvalidConfigError, match="this is a URL"):
        Session("file:///home")
    assert not Path("s3:").exists()


def test_an_open_cache_is_read_from_another_folder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.dump()
    monkeypatch.chdir(world.root)
    cache = open_cache("cache")
    monkeypatch.chdir(world.home)

    assert len(cache[0].input_ids) == 32
