"""What students begin with: cut from the teacher by default, wherever its weights are at hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from minilm_cache import dump_cache, open_cache
from minilm_cache.errors import (
    CacheCorruptError,
    IdentityMismatchError,
    InterruptedRunError,
    InvalidConfigError,
    TeacherError,
)
from minilm_cache.models.load import load_model, read_config
from minilm_cache.session import Session
from minilm_cache.slicing import forward, slices
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, TEACHER_WEIGHTS
from minilm_cache.store.card import attach
from minilm_cache.store.pull import pull
from minilm_cache.train.record import load_record
from minilm_cache.train.run import TrainResult, train_students
from tests.fixtures import Command
from tests.integration.train.test_train import assert_same, settings, stop_after, weights
from tests.support import VOCABULARY, World, pushed, save_teacher, write_corpus

ONE = ("2x16",)


def _train(world: World, cache: Path, out: str, **changes: Any) -> TrainResult:
    config = settings(**{"arch": ONE, "steps": 2, **changes})
    return train_students(config, cache, out=world.root / out, session=Session(world.home))


def _begun(result: TrainResult) -> tuple[str | None, str | None]:
    student = result.record.students[0]
    return student.init, student.begun_with


@pytest.fixture
def cache(world: World) -> Path:
    """A cache whose teacher is on this machine."""
    return world.dump(codec="dense").path


def test_students_begin_cut_from_the_teacher_by_default(world: World, cache: Path) -> None:
    result = _train(world, cache, "run")
    assert _begun(result)[0] == "slice"
    assert "layers 0, 2, cut to this shape, of teacher teacher" in str(_begun(result)[1])
    assert (
        "begun with layers 0, 2, cut to this shape" in (result.student_path("2x16") / "README.md").read_text()
    )
    drawn = _train(world, cache, "random", init="random")
    before = [sum((run.record.students[0].held_out_before or {}).values()) for run in (result, drawn)]
    assert before[0] < before[1]


def test_without_the_teachers_weights_students_begin_with_random_ones(world: World, cache: Path) -> None:
    shutil.rmtree(world.teacher)
    result = _train(world, cache, "run")
    assert _begun(result)[0] == "random"
    assert "are not on this machine" in str(_begun(result)[1])
    with pytest.raises(InvalidConfigError, match="Give --init-teacher"):
        _train(world, cache, "other", init="slice")


def test_a_shape_that_cannot_be_cut_begins_with_random_weights_and_says_why(
    world: World, cache: Path
) -> None:
    result = _train(world, cache, "run", arch=("2x16", "5x16"))
    assert [student.init for student in result.record.students] == ["slice", "random"]
    assert "more layers than the teacher's 3" in str(result.record.students[1].begun_with)
    with pytest.raises(InvalidConfigError, match="more layers than the teacher's 3"):
        _train(world, cache, "other", arch=("5x16",), init="slice")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arch": ("2x64",)}, "hidden size 64 is above the teacher's 32"),
        ({"arch": ("2x32:b16",)}, "bottlenecks"),
        ({"init_layers": "1"}, "names 1 layer,"),
        ({"init_layers": "1,x"}, "different numbers from 0 to 2"),
        ({"init_layers": "2,1"}, "ascending"),
    ],
)
def test_what_cannot_be_cut_is_misuse(world: World, cache: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfigError, match=says):
        _train(world, cache, "run", **{"init": "slice", **changes})
    assert not (world.root / "run").exists()


def test_another_teacher_is_refused(world: World, cache: Path, tmp_path: Path) -> None:
    other = save_teacher(tmp_path / "other", seed=1)
    with pytest.raises(IdentityMismatchError, match="is not the teacher of this cache"):
        _train(world, cache, "run", init_teacher=str(other))


def test_a_teacher_that_changed_since_the_dump_is_not_taken(world: World, cache: Path) -> None:
    shutil.rmtree(world.teacher)
    save_teacher(world.teacher, seed=1)
    assert _begun(_train(world, cache, "run"))[0] == "random"


def test_a_named_teacher_is_not_given_up_for_random_weights(world: World, cache: Path) -> None:
    with pytest.raises(InvalidConfigError, match="more layers than the teacher's 3"):
        _train(world, cache, "run", arch=("5x16",), init_teacher=str(world.teacher))


def test_embeddings_are_cut_for_students_of_any_depth(world: World, cache: Path) -> None:
    assert _begun(_train(world, cache, "run", arch=("5x16",), init="embeddings"))[0] == "embeddings"


def test_modernberts_layers_alone_need_the_first(tmp_path: Path) -> None:
    world = World(tmp_path, save_teacher(tmp_path / "modern", "modernbert"), tmp_path / "corpus.txt")
    world.corpus.write_text("ba be bi bo\n\nfa fe fi fo fun fan\n\n" * 20)
    cache = world.dump(codec="dense").path
    with pytest.raises(InvalidConfigError, match=r"Keep layer 0.*Name layers by --init-layers"):
        _train(world, cache, "run", arch=("2x32:ff48",), init="teacher-layers")
    named = _train(world, cache, "run", arch=("2x32:ff48",), init="teacher-layers", init_layers="0,3")
    assert _begun(named)[0] == "teacher-layers"


def test_whole_layers_are_the_teachers(world: World, cache: Path) -> None:
    result = _train(world, cache, "run", arch=("2x32:ff64",), init="teacher-layers", steps=1, lr=1e-12)
    own, theirs = weights(result)["2x32:ff64"], load_model(world.teacher).state_dict()
    for number, layer in enumerate((0, 2)):
        name = "encoder.layer.{}.attention.self.query.weight"
        torch.testing.assert_close(own[name.format(number)], theirs[name.format(layer)])
    with pytest.raises(InvalidConfigError, match="Take --arch 2x32:ff64"):
        _train(world, cache, "other", init="teacher-layers")


def test_layers_are_named(world: World, cache: Path) -> None:
    first = _train(world, cache, "a", init_layers="1,2")
    assert "layers 1, 2" in str(_begun(first)[1])
    assert first.record.identity.init != _train(world, cache, "b").record.identity.init
    assert _train(world, cache, "a").record == first.record  # no layers are named: the run is as it began
    with pytest.raises(IdentityMismatchError, match="differs in init"):
        _train(world, cache, "b", init_layers="1,2")


def test_embeddings_alone(world: World, cache: Path) -> None:
    result = _train(world, cache, "run", init="embeddings")
    assert _begun(result) == ("embeddings", "random layers, and the embeddings of teacher teacher")
    seeds = [
        weights(_train(world, cache, f"s{seed}", init="embeddings", seed=seed, lr=1e-12)) for seed in (0, 1)
    ]
    name = "embeddings.word_embeddings.weight"
    torch.testing.assert_close(seeds[0]["2x16"][name], seeds[1]["2x16"][name])
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.allclose(seeds[0]["2x16"][name], seeds[1]["2x16"][name])


def test_a_slice_is_made_once_and_reused(world: World, cache: Path) -> None:
    _train(world, cache, "a")
    (made,) = (world.home / "slices").glob("*/weights.safetensors")
    before = made.stat()
    _train(world, cache, "b", seed=1)
    after = made.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_slices_of_one_run_are_those_of_runs_of_their_own(
    world: World, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher reads the text once for all of them."""
    archs = ("2x16", "1x32", "3x16")
    whole, read = forward.run_encoder, list[bool]()

    def counted(*given: Any) -> Any:
        read.append(True)
        return whole(*given)

    monkeypatch.setattr(slices, "run_encoder", counted)
    for arch in archs:
        _train(world, cache, arch, arch=(arch,))
    assert len(read) == 3
    apart = (world.home / "slices").rename(world.root / "apart")
    _train(world, cache, "together", arch=archs)
    assert len(read) == 4
    made = sorted(apart.glob("*/weights.safetensors"))
    assert len(made) == 3
    for file in made:
        assert (world.home / "slices" / file.relative_to(apart)).read_bytes() == file.read_bytes()


def test_a_damaged_slice_is_made_again(world: World, cache: Path) -> None:
    first = weights(_train(world, cache, "a"))
    (made,) = (world.home / "slices").glob("*/weights.safetensors")
    made.write_bytes(made.read_bytes()[:100])
    assert_same(first["2x16"], weights(_train(world, cache, "b"))["2x16"])


def test_a_resumed_run_equals_an_uninterrupted_one_although_its_slice_is_gone(
    world: World, cache: Path
) -> None:
    whole = _train(world, cache, "whole", steps=12)
    config = settings(arch=ONE, steps=12, checkpoint_steps=4)
    with pytest.raises(InterruptedRunError):
        train_students(
            config, cache, out=world.root / "cut", session=Session(world.home, should_stop=stop_after(7))
        )
    shutil.rmtree(world.home / "slices")
    resumed = train_students(config, cache, out=world.root / "cut", session=Session(world.home))
    assert_same(weights(whole)["2x16"], weights(resumed)["2x16"])


def test_a_run_that_began_with_random_weights_is_resumed_so(world: World, cache: Path) -> None:
    """As runs of the first releases, whose default it was; a complete one is another request's."""
    config = settings(arch=ONE, steps=12, checkpoint_steps=4)
    with pytest.raises(InterruptedRunError):
        train_students(
            config.with_changes(init="random"),
            cache,
            out=world.root / "run",
            session=Session(world.home, should_stop=stop_after(7)),
        )
    resumed = train_students(config, cache, out=world.root / "run", session=Session(world.home))
    assert resumed.record.identity.init == "random"
    with pytest.raises(IdentityMismatchError, match="differs in init"):
        train_students(config, cache, out=world.root / "run", session=Session(world.home))


def test_an_unfinished_run_of_an_earlier_release_is_found_by_its_name(world: World, cache: Path) -> None:
    """Its default was random weights, and without --out its folder is named by them."""
    config = settings(arch=ONE, steps=12, checkpoint_steps=4)
    random = config.with_changes(init="random")
    with pytest.raises(InterruptedRunError):
        train_students(random, cache, session=Session(world.home, should_stop=stop_after(7)))
    (begun,) = (world.home / "runs").iterdir()
    document = json.loads((begun / "run.json").read_text())
    for student in document["students"]:  # as the first releases wrote it
        del student["init"], student["begun_with"]
    (begun / "run.json").write_text(json.dumps(document))
    result = train_students(config, cache, session=Session(world.home))
    assert result.path == begun
    assert result.record.complete
    assert (
        train_students(config, cache, session=Session(world.home)).path != begun
    )  # a new run begins as a slice


def test_a_run_that_began_as_a_slice_goes_on_without_the_teacher(world: World, cache: Path) -> None:
    config = settings(arch=ONE, steps=12, checkpoint_steps=4)
    whole = train_students(config, cache, out=world.root / "whole", session=Session(world.home))
    with pytest.raises(InterruptedRunError):
        train_students(
            config, cache, out=world.root / "cut", session=Session(world.home, should_stop=stop_after(7))
        )
    shutil.rmtree(world.teacher)
    shutil.rmtree(world.home / "slices")
    resumed = train_students(config, cache, out=world.root / "cut", session=Session(world.home))
    assert_same(weights(whole)["2x16"], weights(resumed)["2x16"])
    again = train_students(config, cache, out=world.root / "whole", session=Session(world.home))
    assert again.record == whole.record


@pytest.mark.parametrize("step", [2, 6, None], ids=["resumed", "longer", "written again"])
def test_layers_keep_their_kinds_where_a_run_goes_on_without_the_teacher(
    tmp_path: Path, step: int | None
) -> None:
    """ModernBERT's layers differ: layers 0, 1 and 3 of 4 attend to other columns than the last three do."""
    teacher = save_teacher(tmp_path / "teacher", "modernbert", num_hidden_layers=4)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    cache = world.dump().path
    shape = {"arch": ("3x32:ff48",), "checkpoint_steps": 2, "dropout": "none"}

    def run(out: str, steps: int, stop: int | None = None) -> TrainResult:
        session = Session(world.home, should_stop=(lambda: False) if stop is None else stop_after(stop))
        config = settings(**shape, steps=steps)
        return train_students(config, cache, out=tmp_path / out, session=session)

    whole = run("whole", 6)
    if step == 2:
        with pytest.raises(InterruptedRunError):
            run("parts", 6, stop=3)
    else:
        run("parts", 6)
    kinds = AutoModel.from_pretrained(whole.student_path("3x32:ff48")).config.layer_types
    assert kinds != read_config(teacher).layer_types[-3:]
    teacher.rename(tmp_path / "moved")
    if step is None:
        shutil.rmtree(tmp_path / "parts/students")
    went_on = run("parts", 12 if step == 6 else 6)
    student = AutoModel.from_pretrained(went_on.student_path("3x32:ff48"))
    assert student.config.layer_types == kinds
    if step != 6:
        assert_same(weights(whole)["3x32:ff48"], weights(went_on)["3x32:ff48"])
        assert went_on.record.students[0].held_out_after == whole.record.students[0].held_out_after


def test_a_run_of_an_earlier_release_whose_layers_differ_needs_its_teacher(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher", "modernbert", num_hidden_layers=4)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    cache = world.dump().path
    config = settings(arch=("3x32:ff48",), steps=6, checkpoint_steps=2)
    with pytest.raises(InterruptedRunError):
        train_students(
            config, cache, out=tmp_path / "run", session=Session(world.home, should_stop=stop_after(3))
        )
    document = json.loads((tmp_path / "run/run.json").read_text())
    del document["students"][0]["of_layers"]
    (tmp_path / "run/run.json").write_text(json.dumps(document))
    teacher.rename(tmp_path / "moved")
    with pytest.raises(IdentityMismatchError, match="which of its layers have which layer_types"):
        train_students(config, cache, out=tmp_path / "run", session=Session(world.home))


def test_a_damaged_note_of_a_teacher_is_no_teacher(world: World, cache: Path) -> None:
    (note,) = (world.home / "teachers").glob("*.txt")
    note.write_bytes(b"\xff\xfe")
    assert _begun(_train(world, cache, "run"))[0] == "random"


def test_a_home_that_cannot_be_written_to_does_not_hold_up_a_dump(world: World) -> None:
    world.home.mkdir()
    (world.home / "teachers").write_text("a file where a folder is needed")
    assert world.dump().manifest.complete


@pytest.mark.parametrize("content", ["relu", "{"])
def test_settings_of_an_unpacked_teacher_that_changed_are_written_anew(world: World, content: str) -> None:
    """Slices are named by the cache: those of another model would stay, and pass for the teacher's."""
    cache = world.dump(codec="dense", keep_weights=True).path
    shutil.rmtree(world.teacher)
    shutil.rmtree(world.home / "teachers")
    first = _train(world, cache, "first")
    (file,) = (world.home / "teachers").glob("*/config.json")
    changed = (
        json.dumps(json.loads(file.read_text()) | {"hidden_act": "relu"}) if content == "relu" else content
    )
    file.write_text(changed)
    shutil.rmtree(world.home / "slices")
    again = _train(world, cache, "again")
    assert _begun(again) == _begun(first)
    assert again.record.students[0].loss_before == first.record.students[0].loss_before
    assert json.loads(file.read_text())["hidden_act"] == "gelu"


def test_weights_kept_in_a_cache_replace_the_teacher(world: World) -> None:
    cache = world.dump(codec="dense", keep_weights=True).path
    exact = _train(world, cache, "exact")
    manifest = open_cache(cache).manifest
    assert manifest.files[TEACHER_WEIGHTS].size < (world.teacher / "model.safetensors").stat().st_size
    shutil.rmtree(world.teacher)
    result = _train(world, cache, "run")
    assert result.record.students[0].begun_with == (
        "layers 0, 2, cut to this shape, of teacher teacher, whose weights the cache keeps in float16"
    )
    before = [run.record.students[0].held_out_before or {} for run in (exact, result)]
    assert sum(before[1].values()) == pytest.approx(sum(before[0].values()), rel=0.02)
    assert exact.record.identity.init != result.record.identity.init


def test_kept_weights_go_on_with_what_is_added(world: World) -> None:
    whole = world.dump(codec="dense", keep_weights=True).path
    added = dump_cache(
        world.config(codec="dense", hidden="last"),
        out=world.root / "added",
        add=whole,
        session=Session(world.home),
    )
    assert (added.path / TEACHER_WEIGHTS).read_bytes() == (whole / TEACHER_WEIGHTS).read_bytes()


def test_kept_weights_travel_with_a_cache(world: World, store: str) -> None:
    whole = world.dump(codec="dense", keep_weights=True).path / TEACHER_WEIGHTS
    pulled = world.root / "pulled"
    pull(pushed(world, store), pulled, session=Session())
    assert (pulled / TEACHER_WEIGHTS).read_bytes() == whole.read_bytes()
    assert "weights of the teacher" in (pulled / "README.md").read_text()
    shutil.rmtree(world.teacher)
    assert _begun(_train(world, pulled, "run"))[0] == "slice"


def test_weights_are_added_to_a_complete_cache(world: World, command: Command) -> None:
    manifest = world.dump().manifest
    kept = world.dump(keep_weights=True)
    assert TEACHER_WEIGHTS not in manifest.files
    assert TEACHER_WEIGHTS in kept.manifest.files
    assert kept.manifest.fingerprint == manifest.fingerprint
    assert world.dump().manifest.files == kept.manifest.files
    assert command("verify", kept.path, "--full")[0] == 0
    assert "students can be cut from them" in command("info", kept.path)[1]


def test_a_tokenizer_of_any_file_is_compared_with_the_caches(world: World) -> None:
    cache = world.dump(codec="dense").path
    folder = save_teacher(world.root / "other", seed=1)
    words = [*VOCABULARY[:5], *reversed(VOCABULARY[5:])]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    with pytest.raises(InvalidConfigError, match="its tokenizer is not the one of this cache"):
        _train(world, cache, "run", arch=("3x32",), init=str(folder))


def test_weights_that_float16_cannot_hold_are_refused_before_the_dump(world: World) -> None:
    model = AutoModel.from_pretrained(world.teacher)
    model.embeddings.word_embeddings.weight.data[7, 3] = 1e6
    model.save_pretrained(world.teacher)
    with pytest.raises(TeacherError, match="weights above 65504"):
        world.dump(keep_weights=True)
    assert not (world.root / "cache").exists()


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_damaged_weights_are_an_error_and_dumping_again_repairs_them(world: World, damage: str) -> None:
    cache = world.dump(codec="dense", keep_weights=True).path
    file = cache / TEACHER_WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])) if damage == "flip" else file.unlink()
    hidden = world.root / "hidden"
    world.teacher.rename(hidden)
    with pytest.raises(CacheCorruptError, match=r"model\.safetensors"):
        _train(world, cache, "run")
    hidden.rename(world.teacher)
    world.dump(codec="dense", keep_weights=True)
    assert file.read_bytes() == whole


def test_a_configuration_of_a_stranger_that_describes_no_model_is_an_error(world: World) -> None:
    result = world.dump(codec="dense", keep_weights=True)
    config = json.loads((result.path / TEACHER_CONFIG).read_text())
    content = json.dumps({**config, "hidden_act": "nonsense"}).encode()
    attach(result.path, result.manifest, path=TEACHER_CONFIG, content=content)
    shutil.rmtree(world.teacher)
    with pytest.raises(CacheCorruptError, match=r"teacher/config\.json of the cache cannot be used"):
        _train(world, result.path, "run")


def test_a_cache_store_is_no_reason_to_leave_out_weights(world: World, store: str) -> None:
    world.dump()
    pushed(world, store)
    config = world.config(keep_weights=True)
    result = dump_cache(config, out=world.root / "again", cache_store=store, session=Session(world.home))
    assert (result.path / TEACHER_WEIGHTS).is_file()
    assert TEACHER_WEIGHTS in open_cache(result.path).manifest.files


@pytest.mark.parametrize("content", [b"not safetensors", "other names", "too few"])
def test_weights_of_a_stranger_are_hostile_input(world: World, content: object) -> None:
    """The manifest names the file's hash, so only its content can be wrong."""
    result = world.dump(codec="dense", keep_weights=True)
    if content == "other names":
        weights_file = world.root / "other.safetensors"
        kept = load_file(result.path / TEACHER_WEIGHTS)
        save_file({f"x.{name}": weight for name, weight in kept.items()}, weights_file)
        content = weights_file.read_bytes()
    elif content == "too few":
        weights_file = world.root / "few.safetensors"
        save_file({"x": torch.zeros(2)}, weights_file)
        content = weights_file.read_bytes()
    assert isinstance(content, bytes)
    attach(result.path, result.manifest, path=TEACHER_WEIGHTS, content=content)
    shutil.rmtree(world.teacher)
    with pytest.raises(CacheCorruptError, match=r"teacher/model\.safetensors of the cache: the weights"):
        _train(world, result.path, "run")


def test_options_that_contradict_are_misuse(world: World, cache: Path, command: Command) -> None:
    train = ("train", cache, "--arch", "2x16", "--steps", 1, "--out", world.root / "x", "--init")
    for option, value in (("--init-teacher", world.teacher), ("--init-layers", "1,2")):
        says = f"{option} goes with --init slice, teacher-layers or embeddings"
        command.fails(*train, "random", option, value, code=2, says=says)
    command.fails(*train, "nowhere", code=2, says="random, slice, teacher-layers, embeddings, or the folder")


def test_info_says_what_the_students_of_a_run_began_with(world: World, cache: Path, command: Command) -> None:
    run = _train(world, cache, "run").path
    code, out, _ = command("info", run)
    assert code == 0
    assert "began with layers 0, 2, cut to this shape, of teacher" in " ".join(out.split())
    document = json.loads(command("info", run, "--json")[1])
    assert document["record"]["students"][0]["init"] == "slice"
    assert load_record(run).students[0].init == "slice"
