"""What strangers and accidents leave in folders: each is one line, and nothing outside is read or written."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from minilm_cache.errors import CacheCorruptError, InvalidConfigError, MiniLMCacheError, TeacherError
from minilm_cache.evaluate.card import check_cards
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.models.pooling import load_pooler
from minilm_cache.store.leases import Leases
from minilm_cache.store.remote import open_store
from minilm_cache.workflows.study_source import Source
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.integration.store.test_attacks import changed_run
from tests.mutations import mutations
from tests.support import World, save_teacher

CARDS: dict[str, str] = {
    "deep": "---\n" + "a: " + "[" * 3_000 + "]" * 3_000 + "\n---\n",
    "integer key": "---\n1: x\n---\n",
    "tags": "---\ntags: 7\n---\n",
    "digits": "---\na: 0x" + "f" * 20_000 + "\n---\n",
    "no yaml": "---\na: [\n---\n",
    "long": "x" * (2**20 + 1),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CARDS)
def test_cards_that_cannot_be_written_are_refused_before_anything_is_trained(
    tmp_path: Path, name: str
) -> None:
    folder = save_teacher(tmp_path / "model")
    (folder / "README.md").write_text(CARDS[name])
    with pytest.raises(InvalidConfigError, match=r"README\.md") as caught:
        check_cards([Evaluated(name="model", folder=folder)], [str(folder)])
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
def test_a_card_is_a_file_of_its_folder(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "model")
    model, secret = Evaluated(name="model", folder=folder), tmp_path / "secret"
    secret.write_text("secret text of a file elsewhere")
    (folder / "README.md").symlink_to(secret)
    with pytest.raises(InvalidConfigError, match="link"):
        check_cards([model], [str(folder)])
    (folder / "README.md").unlink()
    os.mkfifo(folder / "README.md")
    with pytest.raises(InvalidConfigError, match=r"README\.md"):
        check_cards([model], [str(folder)])
    (folder / "README.md").unlink()
    (folder / "README.md").write_text("\n" * 2**19 + "<!-- scores of SST-2 -->" * 2_000)
    check_cards([model], [str(folder)])  # in no time that grows with its square


@pytest.mark.parametrize("name", ["1x16", "[31mred"])
def test_control_characters_do_not_reach_the_terminal(
    trained: World, command: Command, tmp_path: Path, name: str
) -> None:
    def change(record: dict[str, Any]) -> None:
        record["identity"]["objective"] = "embedding"
        record["students"][0]["held_out_before"] = {f"\x1b]0;PWN\x07\x1b{name}": 0.5}
        record["students"][0]["held_out_after"] = {f"\x1b]0;PWN\x07\x1b{name}": 0.25}

    run = changed_run(trained, tmp_path / "run", change)
    _, out, err = command("info", run)
    assert "\x1b" not in out + err
    assert "Traceback" not in err


FIGURES: list[tuple[object, object]] = [
    ({}, {"attention": 1.0, "value": 1.0}),
    ({"value": 1.0}, {"attention": 2.0}),
]


@pytest.mark.parametrize("figures", FIGURES)
def test_figures_that_do_not_belong_together_are_shown(
    trained: World, command: Command, tmp_path: Path, figures: tuple[object, object]
) -> None:
    before, after = figures
    run = changed_run(
        trained,
        tmp_path / "run",
        lambda record: record["students"][0].update(held_out_before=before, held_out_after=after),
    )
    code, _, err = command("info", run)
    assert (code, "Traceback" in err) == (0, False)


@pytest.mark.parametrize("place", ["\0", "loop", "x" * 5_000])
def test_a_strange_run_does_not_keep_a_cache_from_being_removed(
    world: World, command: Command, trained: World, place: str
) -> None:
    world.dump()
    (world.root / "loop").symlink_to(world.root / "loop")
    shown = str(world.root / "loop") if place == "loop" else place
    changed_run(trained, world.root / "run", lambda record: record.update(cache=shown, init=shown))
    assert command("rm", world.root / "cache", "--yes")[0] == 0
    assert not (world.root / "cache").exists()


def test_locks_of_a_linked_folder_are_not_opened(world: World, command: Command) -> None:
    cache, outside = world.dump().path, world.root / "outside"
    outside.mkdir()
    (outside / "precious").write_text("text")
    shutil.rmtree(cache / "locks", ignore_errors=True)
    (cache / "locks").symlink_to(outside)
    assert command("rm", cache, "--yes")[0] == 0
    assert (outside / "precious").read_text() == "text"


def test_what_a_killed_removal_left_is_removed(world: World, command: Command) -> None:
    cache = world.dump().path
    left = cache.with_name(f".{cache.name}.removed")
    cache.rename(left)
    (left / ".being-removed").touch()
    (left / "manifest.json").unlink()
    assert command("ls", world.root)[0] == 0
    code, out, _ = command("rm", cache, "--yes", "--json")
    assert (code, json.loads(out)["removed"]) == (0, [str(left)])
    assert not left.exists()


def test_what_a_killed_pull_left_is_removed(world: World, command: Command) -> None:
    fingerprint = world.dump().manifest.fingerprint
    arriving = world.root / f".copy.{fingerprint[:12]}.arriving"
    (arriving / "teacher").mkdir(parents=True)
    (arriving / "teacher/.config.json.0.partial").write_text("half")
    assert command("pull", f"file://{world.root}/cache", "--out", world.root / "copy")[0] == 0
    assert not list((world.root / "copy").rglob("*.partial"))
    (world.root / "loop").symlink_to(world.root / "loop")
    command.fails(
        "pull", f"file://{world.root}/cache", "--out", world.root / "loop", code=2, says="loop of links"
    )


def test_what_killed_pushes_slices_and_tokens_left_is_removed(world: World, command: Command) -> None:
    """Each command removes what the same command, killed, left behind."""
    cache, store = world.dump().path, world.root / "store"
    assert command("push", cache, f"file://{store}")[0] == 0
    (pushed,) = store.iterdir()
    slicing = ("slice", "--teacher", world.teacher, "--corpus", world.corpus, "--arch", "1x16")
    (finished,) = (world.home / "tokens").glob("*/tokens.json")
    finished.unlink()
    tokens = finished.parent
    places = [pushed / "tokens/c/.0.0.partial", world.root / ".sliced.0.partial", tokens / ".0.0.partial"]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"half")
        os.utime(place, (1, 1))
    assert command("push", cache, f"file://{store}")[0] == 0
    assert command(*slicing, "--max-length", 32, "--out", world.root / "sliced")[0] == 0
    world.dump(out="again")
    assert [place for place in places if place.exists()] == []


@pytest.mark.parametrize("part", ["teacher", "index", "relations", "sequences"])
def test_linked_folders_of_a_store_are_not_followed(world: World, command: Command, part: str) -> None:
    cache, outside = world.dump().path, world.root / "outside"
    shutil.move(cache / part, outside)
    (cache / part).symlink_to(outside)
    code, _, err = command("pull", f"file://{cache}", "--out", world.root / "copy")
    assert (code, "symbolic link" in err) == (1, True)
    before = sorted(outside.rglob("*"))
    assert command("push", cache, f"file://{world.root}/store")[0] != 0
    assert sorted(outside.rglob("*")) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["long", "pipe", "folder", "json", "text"])
def test_nonsense_among_leases_is_passed_over(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "00001-0"
    make: dict[str, Callable[[], object]] = {
        "long": lambda: file.write_bytes(b"x" * 2_000),
        "pipe": lambda: os.mkfifo(file),
        "folder": file.mkdir,
        "json": lambda: file.write_text("{}"),
        "text": lambda: file.write_text("no lease"),
    }
    make[kind]()
    leases = Leases(open_store(f"file://{tmp_path}"))
    lease = leases.acquire("00001")
    assert lease is not None
    lease.release()
    leases.close()


def test_a_link_in_the_place_of_a_lease_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/00001-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheCorruptError, match="00001-0 is a symbolic link"):
        Leases(open_store(f"file://{tmp_path}/store")).acquire("00001")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("setting", ["steps", "batch_size", "seed"])
def test_numbers_of_thousands_of_digits_are_refused(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "STUDY.yaml"
    file.write_text(f"train: {{{setting}: 0x{'f' * 20_000}}}\n")
    with pytest.raises(InvalidConfigError, match=r"STUDY\.yaml, line 1: .* has 20002 digits"):
        Source(file)


def test_labels_of_thousands_of_digits_are_one_line(world: World, command: Command) -> None:
    folder = world.root / "sst2"
    folder.mkdir()
    for name in ("train", "dev"):
        (folder / f"{name}.jsonl").write_text('{"sentence": "ba", "label": ' + "1" * 5_000 + "}\n")
    code, _, err = command("evaluate", world.teacher, "--task", "sst2", "--data", folder)
    assert (code, "Traceback" in err) == (1, False)


def test_a_report_of_a_folder_whose_name_is_not_utf_8(
    trained: World, command: Command, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained.root / "run", tmp_path / "na\udcefve"))
    command.fails(
        "report", run, "--out", tmp_path / "page.html", code=1, says="its path is not UTF-8. Rename"
    )


def test_a_linear_map_of_no_bytes_takes_no_memory(world: World) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    save_file(
        {"linear.weight": torch.zeros(10**9, 0), "linear.bias": torch.zeros(3)},
        world.teacher / "2_Dense/model.safetensors",
    )
    with pytest.raises(TeacherError, match="has the shape"):
        load_pooler(world.teacher, None, 32)


@pytest.mark.parametrize("name", ["module_input_name", "module_output_name"])
def test_names_of_a_linear_map_may_be_anything(world: World, name: str) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    file = world.teacher / "2_Dense/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: ["x"]}))
    with pytest.raises(TeacherError, match="2_Dense"):
        load_pooler(world.teacher, None, 32)


@pytest.mark.timeout(900)
def test_mutated_tokenizers_end_in_one_line(world: World) -> None:
    """Any byte may be another one; what is no tokenizer any more is named, and nothing gives up."""
    from minilm_cache.models.tokenizer import load_tokenizer  # noqa: PLC0415 - with its test alone

    file = world.teacher / "tokenizer.json"
    seed, refused = file.read_bytes(), 0
    for content in mutations(seed, 150):
        file.write_bytes(content)
        try:
            load_tokenizer(world.teacher)
        except MiniLMCacheError as error:
            refused += "\n" not in str(error)
    assert refused > 20
