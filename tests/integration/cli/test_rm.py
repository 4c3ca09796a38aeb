"""Removing caches and runs: what nobody needs, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from minilm_cache.store.layout import BEGUN, lock_path
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.train.folder import RunFolder
from tests.fixtures import Command
from tests.support import World


@pytest.fixture
def run(world: World, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run of the home, whose cache is `cache`."""
    monkeypatch.setenv("MINILM_CACHE_HOME", str(world.home))
    world.dump()
    assert command("train", world.root / "cache", "--arch", "1x32", "--steps", 2)[0] == 0
    (run,) = (world.home / "runs").iterdir()
    return run


def test_a_run_is_removed_by_its_name(world: World, run: Path, command: Command) -> None:
    size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    code, out, _ = command("rm", run.name, "--yes", "--json")

    assert (code, json.loads(out)) == (0, {"removed": [str(run)], "bytes": size})
    assert list((world.home / "runs").iterdir()) == []
    assert (world.root / "cache/manifest.json").is_file()


def test_a_folder_that_is_named_twice_is_removed_once(
    world: World, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    code, out, _ = command("rm", run, f"./{run.name}", "--yes", "--json")
    assert (code, len(json.loads(out)["removed"]), run.exists()) == (0, 1, False)


def test_what_a_run_needs_is_kept(
    world: World, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.root / "cache"
    monkeypatch.chdir(run.parent)
    began = ("--init", run.name, "--steps", 3, "--lr", "1e-6")
    assert command("train", cache, "--arch", "1x32", *began)[0] == 0
    monkeypatch.chdir(world.root)  # the folder that the run began with was named relative to another one
    command.fails("rm", cache, "--yes", code=2, says=("is needed by", run.name, "--force"))
    command.fails("rm", run, "--yes", code=2, says=f"{run} is needed by")
    assert cache.is_dir()
    assert run.is_dir()

    assert command("rm", cache, "--yes", "--force")[0] == 0
    assert command("rm", *(world.home / "runs").iterdir(), "--yes")[0] == 0
    assert not cache.exists()
    assert list((world.home / "runs").iterdir()) == []


@pytest.mark.parametrize("place", ["found/round-0", "study/runs/one"])
def test_what_a_search_or_a_study_beside_it_needs_is_kept(
    world: World, run: Path, command: Command, place: str
) -> None:
    (world.root / place).parent.mkdir(parents=True)
    run.rename(world.root / place)
    command.fails("rm", world.root / "cache", "--yes", code=2, says=f"is needed by {Path(place).name}")
    assert (world.root / "cache").is_dir()


def test_a_run_whose_students_others_were_cut_from_is_kept(world: World, run: Path, command: Command) -> None:
    student = run / "students/1x32"
    for name, words in (
        ("init", ("--init", student)),
        ("donor", ("--init", "slice", "--init-teacher", student)),
    ):
        arch = "1x32" if name == "init" else "1x16"
        more = ("--arch", arch, "--steps", 3, "--lr", "1e-6", "--out", world.home / "runs" / name)
        code, _, err = command("train", world.root / "cache", *words, *more)
        assert code == 0, err
        command.fails("rm", run, "--yes", code=2, says=(f"{run} is needed by", name))
        assert command("rm", world.home / "runs" / name, "--yes")[0] == 0
    assert command("rm", run, "--yes")[0] == 0


def test_nothing_is_removed_without_a_yes(
    world: World, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.fails("rm", run, code=2, says=("no terminal to ask on", "--yes"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    code, out, _ = command("rm", run)
    assert (code, run.name in out, run.is_dir()) == (0, True, True)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert command("rm", run)[0] == 0
    assert not run.exists()


def test_other_folders_stay(world: World, command: Command) -> None:
    command.fails("rm", world.teacher, "--yes", code=2, says="neither a cache nor a run")
    command.fails("rm", "nowhere", "--yes", code=1, says=("no cache or run nowhere", "minilm-cache ls"))
    world.dump()
    (world.root / "link").symlink_to(world.root / "cache")
    command.fails("rm", world.root / "link", "--yes", code=2, says="neither a cache nor a run")
    assert world.teacher.is_dir()


def test_what_is_being_written_stays(world: World, run: Path, command: Command) -> None:
    cache = world.root / "cache"
    for folder, lock in ((run, RunFolder(path=run).lock), (cache, cache / lock_path(0))):
        with FileLock(lock):
            command.fails("rm", folder, "--yes", "--force", code=1, says="a process writes")
        assert folder.is_dir()


def test_what_an_interrupted_removal_leaves_is_no_run(
    world: World, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        assert command("rm", run, "--yes")[0] == 130
    assert json.loads(command("ls", "--json")[1])["runs"] == []
    assert command("train", world.root / "cache", "--arch", "1x32", "--steps", 2)[0] == 0
    assert command("rm", run, "--yes")[0] == 0
    assert list((world.home / "runs").iterdir()) == []


def test_a_cache_of_a_store_is_removed(
    world: World, command: Command, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else the store holds stays, and a run that was trained from the cache keeps it."""
    monkeypatch.setenv("MINILM_CACHE_HOME", str(world.home))
    world.dump()
    code, out, err = command("push", world.root / "cache", store, "--json")
    assert code == 0, err
    url = json.loads(out)["url"]
    beside = open_store(f"{store}/notes")
    beside.write("kept.txt", b"1")
    assert command("train", url, "--arch", "1x32", "--steps", 1)[0] == 0
    command.fails("rm", url, "--yes", code=2, says=("is needed by", "--force"))
    command.fails("rm", f"{store}/notes", "--yes", code=1, says="no cache at")

    size = sum(open_store(url).sizes().values())
    code, out, err = command("rm", f"{url}/", "--yes", "--force", "--json")
    assert (code, json.loads(out)) == (0, {"removed": [url], "bytes": size}), err
    assert open_store(url).sizes() == {}
    assert beside.sizes() == {"kept.txt": 1}
    command.fails("rm", url, "--yes", code=1, says="no cache at")


def test_an_interrupted_removal_of_a_store_goes_on(
    world: World, command: Command, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dump()
    url = json.loads(command("push", world.root / "cache", store, "--json")[1])["url"]
    stopped = RemoteFolder.remove

    def once(folder: RemoteFolder, names: list[str]) -> None:
        stopped(folder, names)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "remove", once)
        assert command("rm", url, "--yes")[0] == 130
    command.fails("info", url, code=1, says="no cache at")
    assert command("rm", url, "--yes")[0] == 0
    assert open_store(url).sizes() == {}


def test_what_others_may_write_in_a_store_is_kept(command: Command, store: str) -> None:
    folder = open_store(store).below("begun")
    folder.write(BEGUN, b"{}")
    folder.write(".being-removed", b"")  # of an interrupted removal, after which a new dump has begun
    command.fails("rm", folder.url, "--yes", code=2, says=("is unfinished", "--force"))
    assert command("rm", folder.url, "--yes", "--force")[0] == 0
    assert folder.sizes() == {}


@pytest.mark.parametrize("record", ["manifest.json", BEGUN])
def test_files_of_other_programs_stay_in_a_store(command: Command, store: str, record: str) -> None:
    """A file of a web site or of another program may have the name of a cache's record."""
    folder = open_store(store).below("site")
    for name in (record, "index.html", "photos/1.jpg"):
        folder.write(name, b'{"name": "a web site"}')
    command.fails("rm", folder.url, "--yes", "--force", code=2, says="neither a cache nor a run")
    folder.below("inner").write(BEGUN, b"{}")
    command.fails("rm", folder.url, "--yes", "--force", code=2, says=("holds another cache", "inner"))
    assert {record, "index.html", "photos/1.jpg"} <= folder.sizes().keys()


def test_a_url_of_a_folder_is_the_folder(
    world: World, run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What protects a folder protects it under its other name, too."""
    url = (world.root / "cache").as_uri()
    command.fails("rm", url, "--yes", code=2, says=("is needed by", run.name))
    monkeypatch.chdir(tmp_path)
    trained = ("--objective", "minilm", "--arch", "1x16", "--steps", 1, "--device", "cpu")
    assert command("train", url, *trained, "--out", "here")[0] == 0
    command.fails("rm", world.root / "cache", "--yes", code=2, says="here")
    shutil.rmtree("here")
    assert command("rm", url, run, "--yes")[0] == 0
    assert not (world.root / "cache").exists()


def test_a_cache_below_another_is_kept(world: World, command: Command, store: str) -> None:
    world.dump()
    url = json.loads(command("push", world.root / "cache", store, "--json")[1])["url"]
    below, place = f"{url}/v2", open_store(url)  # as an earlier release could push one
    for name in place.sizes():
        place.copy(name, f"v2/{name}")
    command.fails("rm", url, "--yes", code=2, says=("holds another cache", "v2"))
    assert command("rm", below, "--yes")[0] == 0
    assert command("rm", url, "--yes")[0] == 0
    assert open_store(url).sizes() == {}


def test_other_folders_with_the_same_file_names_stay(tmp_path: Path, command: Command) -> None:
    """Web applications have a manifest.json, too."""
    for name, content in (("manifest.json", '{"name": "app", "icons": []}'), ("run.json", "{}")):
        folder = tmp_path / name.replace(".", "-")
        (folder / "src").mkdir(parents=True)
        (folder / name).write_text(content)
        command.fails("rm", folder, "--yes", "--force", code=2, says="neither a cache nor a run")
        assert (folder / "src").is_dir()


def test_damaged_caches_and_runs_can_be_removed(world: World, run: Path, command: Command) -> None:
    for folder, name in ((run, "run.json"), (world.root / "cache", "manifest.json")):
        (folder / name).write_text("{")
        assert command("rm", folder, "--yes")[0] == 0
        assert not folder.exists()


@pytest.mark.parametrize("moved", [False, True])
def test_what_runs_of_a_study_need_is_kept(world: World, command: Command, *, moved: bool) -> None:
    """The caches of a study and its runs are not in one folder; they may have moved together."""
    study, cache = world.root / "study", world.root / "study/caches/one"
    world.dump("study/caches/one")
    for name in ("a", "b"):
        words = ("--arch", "1x32", "--steps", 1, "--out", study / "runs" / name)
        assert command("train", cache, *words)[0] == 0
    if moved:
        study = study.rename(world.root / "elsewhere")
        cache = study / "caches/one"
    command.fails("rm", cache, "--yes", code=2, says="is needed by a, b")
    for name in ("a", "b"):
        assert command("rm", study / "runs" / name, "--yes")[0] == 0
    assert command("rm", cache, "--yes")[0] == 0


def test_what_lies_inside_a_cache_is_not_removed_with_it(world: World, command: Command) -> None:
    world.dump()
    cache, run = world.root / "cache", world.root / "cache/run"
    asked = ("--arch", "1x16", "--steps", 2, "--batch-size", 4, "--device", "cpu")
    assert command("train", cache, *asked, "--out", run)[0] == 0
    for place in (cache, f"file://{cache}"):
        command.fails("rm", place, "--yes", "--force", code=2, says=("holds another cache or run", str(run)))
    assert command("rm", run, "--yes")[0] == command("rm", cache, "--yes")[0] == 0
    assert not cache.exists()


def test_a_url_of_a_folder_means_the_same_as_in_other_commands(world: World, command: Command) -> None:
    """Nothing in it is decoded, so that no folder goes that nobody has named."""
    world.dump()
    for name in ("a b", "a%20b"):
        shutil.copytree(world.root / "cache", world.root / name)
    url = f"file://{world.root / 'a%20b'}"
    assert command("verify", url)[0] == command("rm", url, "--yes")[0] == 0
    assert [(world.root / name).exists() for name in ("a b", "a%20b")] == [True, False]
