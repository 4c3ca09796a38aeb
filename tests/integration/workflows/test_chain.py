"""Teacher, assistants, students: every stage once, whatever happens in between."""

import json
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.cache import open_cache
from minilm_cache.cli.chain import _show_students
from minilm_cache.cli.main import run
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.session import Session, ShouldStop
from minilm_cache.store.reader import CacheReader, read_manifest
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.record import load_record
from minilm_cache.workflows.chain import ChainRecord, ChainStudent, run_chain
from minilm_cache.workflows.chain_plan import stages
from minilm_cache.workflows.config import ChainConfig
from tests.fixtures import Command
from tests.processes import CommandProcess
from tests.support import World, save_teacher, write_corpus


def chain_config(world: World, *, compare_direct: bool = True, **changes: object) -> ChainConfig:
    """Return a chain of one assistant and two students."""
    recipe = TrainConfig(
        arch=("1x16", "1x32"), steps=12, batch_size=4, lr=5e-3, checkpoint_steps=4, device="cpu"
    )
    return ChainConfig(
        dump=world.config(**changes), assistants=("2x32",), train=recipe, compare_direct=compare_direct
    )


def arguments(world: World, *more: object) -> list[str]:
    """Return the same chain as words of the command line."""
    options = {
        "--teacher": world.teacher,
        "--corpus": world.corpus,
        "--assistant": "2x32",
        "--max-length": 32,
        "--shard-tokens": 256,
        "--k": 6,
        "--dump-batch-size": 8,
        "--steps": 12,
        "--batch-size": 4,
        "--lr": 5e-3,
        "--checkpoint-steps": 4,
        "--device": "cpu",
        "--out": world.root / "chain",
    }
    words = [part for pair in options.items() for part in pair]
    return [str(word) for word in ("chain", *words, "--arch", "1x16", "--arch", "1x32", *more)]


def test_a_document_is_the_same_chain_as_its_options(world: World, command: Command) -> None:
    document = world.root / "notes.yaml"
    text: dict[str, Any] = {
        "dump": {"teacher": "teacher", "corpus": "corpus.txt", "max_length": 32, "shard_tokens": 256, "k": 6},
        "assistants": ["2x32"],
        "train": {"arch": ["1x16"], "steps": 12, "batch_size": 4, "lr": 1.0},
    }
    document.write_text(json.dumps(text))
    options = ("--lr", "5e-3", "--arch", "1x16", "--arch", "1x32", "--dump-batch-size", 8, "--device", "cpu")
    more = ("--checkpoint-steps", 4, "--dry-run", "--json", "--out")
    code, out, err = command("chain", document, *options, *more, world.root / "chain")
    assert code == 0, err
    assert json.loads(out) == json.loads(command(*arguments(world, "--dry-run", "--json"))[1])
    for place in ("packed", "main"):  # words of a document, and folders beside it
        (world.root / place).mkdir()
    document.write_text(json.dumps({**text, "dump": {**text["dump"], "packing": "packed"}}))
    assert command("chain", document, *options, *more, world.root / "chain")[0] == 0
    command.fails("chain", document, "--batch-size", 0, code=2, says="--batch-size 0: ")
    assert command("chain", document, *options, "--epochs", 1, *more, world.root / "chain")[0] == 0
    aside = world.root / "aside/notes.yaml"  # an option replaces a path that is not beside the document
    aside.parent.mkdir()
    aside.write_text(document.read_text())
    replaced = ("--teacher", world.teacher, "--corpus", world.corpus)
    assert command("chain", aside, *replaced, "--dry-run")[0] == 0
    document.write_text("dump:\n  teacher: teacher\n  rank: 1\ntrain: {arch: [1x16]}\nassistants: [2x32]\n")
    command.fails("chain", document, code=2, says=("notes.yaml, line 3, dump.rank", "leave it out"))
    document.write_text("dump: {teacher: teacher}\ntrain: {arch: [1x16], stepz: 3}\nassistants: [2x32]\n")
    command.fails("chain", document, code=2, says=("notes.yaml, line 2, train.stepz", "did you mean steps?"))
    command.fails(
        "chain", "--teacher", world.teacher, "--arch", "1x16", code=2, says="--assistant is missing"
    )
    for dump, assistant, says in (
        ("max_length: 32", "2x31", "--arch 2x31: hidden size 31"),
        ("max_length: 32, layers: [7]", "2x32", "--layers 7: teacher teacher has layers 0 to 2"),
        ("max_length: 200", "2x32", "--max-length 200 is more than teacher teacher"),
    ):
        wrong = f"dump: {{teacher: teacher, {dump}}}\ntrain: {{arch: [1x16]}}\nassistants: [{assistant}]\n"
        document.write_text(wrong)
        command.fails("chain", document, "--dry-run", code=2, says=("notes.yaml: ", says))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world whose folder `chain` is a finished one."""
    root = tmp_path_factory.mktemp("finished")
    world = World(root, save_teacher(root / "teacher"), write_corpus(root / "corpus.txt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILM_CACHE_HOME", str(world.home))
        assert run(arguments(world)) == 0
    return world


@pytest.fixture
def chained(finished: World, tmp_path: Path) -> World:
    """Return a world of one test's own, with a copy of a finished chain."""
    shutil.copytree(finished.root / "chain", tmp_path / "chain")
    return World(tmp_path, finished.teacher, finished.corpus)


def after(asked: int) -> ShouldStop:
    """Return what says stop when it has been asked so often."""
    calls = iter(range(asked))
    return lambda: next(calls, None) is None


def content(folder: Path) -> dict[str, bytes]:
    """Return what must be the same however often a chain was stopped: arrays, weights, figures."""
    kept = ("**/c/*", "**/c/*/*", "**/*.safetensors", "chain.json")
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for pattern in kept
        for file in folder.glob(pattern)
        if file.is_file()
    }


def test_a_chain_is_ordinary_caches_and_runs_with_shared_tokens(world: World, command: Command) -> None:
    folder = world.root / "chain"
    record = run_chain(chain_config(world), folder, session=Session(world.home)).record
    first, second = (folder / path for path in record.caches)

    assert [one.way for one in record.students] == ["assistant", *["via assistants"] * 2, *["direct"] * 2]
    assert set(record.gains) == {"1x16:s0", "1x32:s0"}
    for cache in (first, second):
        assert command("verify", cache, "--full")[0] == 0
    files = sorted(path.relative_to(first) for path in first.glob("tokens/c/*"))
    assert len(files) == len(CacheReader(first).ranges) > 1
    for path in files:
        assert (first / path).stat().st_ino == (second / path).stat().st_ino
    assert open_cache(second).manifest.identity.teacher.hidden_size == 32


def test_a_damaged_shared_file_is_mended_in_one_cache_without_touching_the_other(
    world: World, command: Command
) -> None:
    folder = world.root / "chain"
    record = run_chain(chain_config(world, compare_direct=False), folder, session=Session(world.home)).record
    first, second = (folder / path for path in record.caches)
    before = content(folder)
    file = second / "tokens/c/0"
    file.write_bytes(b"\0" * file.stat().st_size)  # one file: both caches have the damage
    assert command("verify", first, "--full")[0] == 3
    run_chain(chain_config(world, compare_direct=False), folder, session=Session(world.home))

    assert content(folder) == before
    for cache in (first, second):
        assert command("verify", cache, "--full")[0] == 0


def test_students_are_compared_with_the_teacher_not_with_the_assistant(world: World) -> None:
    """Direct students learn from the teacher's own cache, so both ways of looking at them must agree."""
    folder = world.root / "chain"
    record = run_chain(chain_config(world, codec="dense"), folder, session=Session(world.home)).record
    direct = json.loads((folder / record.runs[-1] / "run.json").read_text())["students"]
    via = json.loads((folder / record.runs[-2] / "run.json").read_text())["students"]
    found = {(one.way, one.arch): one.held_out_kl or {} for one in record.students}
    for student in direct:
        for kind, value in student["held_out_after"].items():
            assert found["direct", student["arch"]][kind] == pytest.approx(value, abs=2e-4)  # float16 rows
    for student in via:
        own = sum(student["held_out_after"].values())
        assert sum(found["via assistants", student["arch"]].values()) != pytest.approx(own, rel=1e-3)


def test_seeds_are_named_where_a_shape_has_several(capsys: pytest.CaptureFixture[str]) -> None:
    students = tuple(
        ChainStudent(arch=arch, seed=seed, way="direct", num_parameters=1, held_out_kl=None)
        for arch, seed in (("1x16", 0), ("1x16", 1), ("1x32", 0))
    )
    record = ChainRecord(teacher="t", assistants=(), caches=(), runs=(), students=students, gains={})
    _show_students(record)
    rows = [word for word in capsys.readouterr().out.split() if word.startswith("1x")]
    assert rows == ["1x16:s0", "1x16:s1", "1x32"]


def test_students_of_vectors_are_compared_with_the_teacher_by_their_own_loss(
    world: World, command: Command
) -> None:
    words = [*arguments(world, "--compare-direct"), "--objective", "embedding", "--pooling", "mean"]
    place = words.index("--k")
    del words[place : place + 2]  # a cache of vectors holds no codes of relations
    code, shown, err = command(*words)
    assert code == 0, err
    record = json.loads((world.root / "chain/chain.json").read_text())
    direct = json.loads((world.root / "chain" / record["runs"][-1] / "run.json").read_text())["students"]
    losses = {(one["way"], one["arch"]): one["held_out_loss"] for one in record["students"]}
    for student in direct:
        own = student["held_out_after"]["cosine"]
        assert losses["direct", student["arch"]] == pytest.approx(own, abs=1e-3)  # the cache's are rounded
    for arch in ("1x16", "1x32"):
        gain = losses["via assistants", arch] / losses["direct", arch]
        assert record["gains"][f"{arch}:s0"] == pytest.approx(gain)
    assert "Held-out loss to" in shown
    assert "times the held-out loss that it has directly" in shown


def test_a_chain_stopped_at_any_stage_goes_on_to_the_same_end(world: World) -> None:
    config = chain_config(world)
    run_chain(config, world.root / "whole", session=Session(world.home))
    stopped_in = set()
    done = False
    while not done:
        try:
            run_chain(config, world.root / "chain", session=Session(world.home, should_stop=after(9)))
            done = True
        except InterruptedRunError as error:
            stopped_in.add(str(error).partition(world.root.name)[2].split("/")[3].split(".")[0])

    assert len(stopped_in) >= 4
    assert content(world.root / "chain") == content(world.root / "whole")


def test_a_chain_killed_twice_goes_on_to_the_same_end(world: World) -> None:
    run_chain(chain_config(world), world.root / "whole", session=Session(world.home))
    words = arguments(world, "--compare-direct")
    folder = world.root / "chain"
    for moment in ("runs/1-2x32/log.jsonl", "runs/students-1x16_1x32/run.json"):
        process = CommandProcess(*words, environment={})
        process.wait_for(folder / moment)
        process.send(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
    assert CommandProcess(*words, environment={}).end()[0] == 0

    assert content(folder) == content(world.root / "whole")
    for log in folder.glob("runs/*/log.jsonl"):
        assert log.read_bytes() == (world.root / "whole" / log.relative_to(folder)).read_bytes()


def test_a_complete_chain_is_not_done_again(chained: World, command: Command) -> None:
    first = json.loads((chained.root / "chain/chain.json").read_text())
    files = [path for path in chained.root.glob("chain/*/*/**/*") if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in files}
    code, out, err = command(*arguments(chained, "--json"))

    assert (code, json.loads(out)["students"]) == (0, first["students"])
    assert err.count("nothing to do") == 4
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_a_dry_run_tells_the_stages_and_does_nothing(world: World, chained: World, command: Command) -> None:
    shutil.move(chained.root / "chain", chained.root / "done")
    code, out, _ = command(*arguments(world, "--dry-run", "--compare-direct", "--json"))
    found = json.loads(out)["stages"]

    assert code == 0
    assert [stage["does"] for stage in found] == ["dump", "train", "dump", "train", "train"]
    assert {stage["state"] for stage in found} == {"to do"}
    assert not (world.root / "chain").exists()
    shutil.move(chained.root / "done", chained.root / "chain")
    code, out, _ = command(*arguments(chained, "--dry-run", "--compare-direct"))
    assert out.count("complete") == 4
    assert out.count("to do") == 1


def test_another_student_takes_up_what_is_there(chained: World, command: Command) -> None:
    words = [word for word in arguments(chained) if word not in ("1x16", "1x32")]
    words = [word for word in words if word != "--arch"]
    code, out, err = command(*words, "--arch", "1x48", "--json")

    assert code == 0
    assert err.count("nothing to do") == 3
    assert [one["arch"] for one in json.loads(out)["students"]] == ["2x32", "1x48"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("--assistant", "2x33"), "2x33: hidden size 33 is not divisible"),
        (("--arch", "big"), "--arch big: write LAYERSxHIDDEN"),
        (("--objective", "minilmv2"), "--objective minilmv2 needs the query and key relation"),
        (("--teacher", "nowhere"), "there is no folder nowhere, and the hub cannot be asked"),
        (("--assistant", "2x32:h8"), "--arch 2x32:h8: 8 heads, but"),
        (("--accumulate", "3"), "--batch-size 4 does not divide into 3 parts"),
        (("--device", "gpu9"), "--device gpu9"),
    ],
)
def test_what_cannot_end_well_is_refused_before_the_first_stage(
    world: World, command: Command, changes: tuple[str, str], says: str
) -> None:
    code = 1 if changes[0] == "--teacher" else 2
    command.fails(*arguments(world, *changes), code=code, says=says)
    assert not (world.root / "chain").exists()


def test_another_chain_is_refused_by_a_dry_run_too(chained: World, command: Command) -> None:
    for more in ((), ("--dry-run",)):
        command.fails(
            *arguments(chained, "--lr", 0.5, *more),
            code=1,
            says=("holds another chain", "train.lr (0.005 there, 0.5 asked)"),
        )


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(world: World, command: Command) -> None:
    (world.root / "chain").mkdir()
    (world.root / "chain/students.csv").write_text("mine")
    command.fails(*arguments(world), code=1, says=("is not empty", "holds no chain (students.csv)"))
    assert [path.name for path in (world.root / "chain").iterdir()] == ["students.csv"]
    (world.root / "chain/students.csv").unlink()
    (world.root / "chain/runs/minilm-of-a-study").mkdir(parents=True)
    command.fails(*arguments(world), code=1, says="something else than this chain (runs/minilm-of-a-study)")


def test_a_chain_of_the_first_release_is_the_same_chain(chained: World, command: Command) -> None:
    file = chained.root / "chain/settings.json"
    file.write_text(file.read_text().replace('"keep_checkpoints": 0', '"keep_checkpoints": 1'))
    assert '"keep_checkpoints": 1' in file.read_text()
    assert command(*arguments(chained, "--dry-run"))[0] == 0
    command.fails(
        *arguments(chained, "--lr", 0.5), code=1, says="differs in train.lr (0.005 there, 0.5 asked). "
    )


@pytest.mark.parametrize("content", ["{", "[]", "null", "3"])
def test_settings_that_are_none_are_said_to_be_damaged(
    chained: World, command: Command, content: str
) -> None:
    (chained.root / "chain/settings.json").write_text(content)
    command.fails(*arguments(chained), code=1, says="settings.json is damaged. Choose another --out.")


def test_students_that_ended_worse_are_named(world: World, command: Command) -> None:
    world.corpus.write_text("\n\n".join([world.corpus.read_text()] * 4))
    code, out, err = command(*arguments(world, "--lr", 1, "--json"))
    assert code == 0, err
    assert any("ended worse than with the weights" in line for line in json.loads(out)["cautions"])
    assert "ended worse than with the weights that training began with" in err


def test_a_moved_chain_goes_on(chained: World, command: Command) -> None:
    (chained.root / "chain").rename(chained.root / "moved")
    code, _, err = command(*arguments(chained, "--out", chained.root / "moved"))
    assert (code, err.count("nothing to do")) == (0, 4)


def test_a_pulled_cache_is_complete_whatever_its_shards(world: World, command: Command) -> None:
    dump_cache(world.config(shard_tokens=512), out=world.root / "cache", session=Session(world.home))
    store = world.root / "store"
    command("push", world.root / "cache", store)
    nowhere = ("--cache-store", world.root / "stroe")
    command.fails(*arguments(world, *nowhere), code=2, says=("--cache-store", "there is no such folder"))
    for _ in range(2):
        code, _, err = command(*arguments(world, "--cache-store", store))
        assert code == 0, err
    assert read_manifest(world.root / "chain/caches/0-teacher").shard_tokens == 512
    assert read_manifest(world.root / "chain/caches/1-2x32").shard_tokens == 512


def test_the_layer_that_students_learn_from_is_the_one_they_are_compared_with(world: World) -> None:
    config = chain_config(world, codec="vectors", max_kl=0.01, layers="0,2")
    config = config.model_copy(update={"train": config.train.model_copy(update={"teacher_layer": 0})})
    record = run_chain(config, world.root / "chain", session=Session(world.home)).record
    (direct,) = (world.root / "chain/runs").glob("direct-*/run.json")
    found = {one.arch: one.held_out_kl for one in record.students if one.way == "direct"}

    for student in json.loads(direct.read_text())["students"]:
        for kind, value in student["held_out_after"].items():
            assert (found[student["arch"]] or {})[kind] == pytest.approx(value, abs=0.03)


def test_repairs_leave_nothing_behind(world: World) -> None:
    config = chain_config(world, compare_direct=False)
    run_chain(config, world.root / "chain", session=Session(world.home))
    damaged = [file for file in world.root.glob("chain/caches/1-2x32/relations/**/0") if file.is_file()]
    for file in damaged:
        file.write_bytes(b"")
    run_chain(config, world.root / "chain", session=Session(world.home))
    assert damaged
    assert list((world.root / "chain").rglob("*.partial")) == []


def test_many_students_have_folders_of_their_own(world: World) -> None:
    def last(number: int) -> str:
        arch = tuple(f"{layers}x384" for layers in range(1, number))
        config = chain_config(world, compare_direct=False)
        update = {"train": config.train.model_copy(update={"arch": arch})}
        return stages(config.model_copy(update=update), Path("chain"))[-1].path.name

    assert len({last(number) for number in range(2, 30)}) == 28


def test_assistants_keep_the_heads_that_students_after_them_have(world: World, command: Command) -> None:
    words = [word for word in arguments(world) if word not in ("--k", "6")]
    words += ["--codec", "vectors", "--objective", "minilmv2"]
    assert command(*words, "--dry-run")[0] == 0
    command.fails(
        *words, "--assistant", "2x32:h8", code=2, says="an assistant must have its teacher's 4 heads"
    )


def test_a_chain_of_minilmv2_goes_on_with_the_heads_it_began_with(world: World, command: Command) -> None:
    words = [word for word in arguments(world) if word not in ("--k", "6")]
    words += ["--codec", "vectors", "--max-kl", "0.05", "--objective", "minilmv2"]
    assert command(*words)[0] == 0
    code, _, err = command(*words)
    assert (code, err.count("nothing to do")) == (0, 4)
    command.fails(*words, "--relation-heads", 2, code=1, says="train.relation_heads (4 there, 2 asked)")


def test_stages_follow_each_other(world: World) -> None:
    config = chain_config(world).model_copy(update={"assistants": ("3x48", "2x32")})
    found = stages(config, Path("chain"))

    assert [(stage.does, stage.path.name) for stage in found] == [
        ("dump", "0-teacher"),
        ("train", "1-3x48"),
        ("dump", "1-3x48"),
        ("train", "2-2x32"),
        ("dump", "2-2x32"),
        ("train", "students-1x16_1x32"),
        ("train", "direct-1x16_1x32"),
    ]
    assert all(one.source.startswith(str(before.path)) for before, one in pairwise(found[:6]))


def test_a_chain_may_be_given_more_hours(world: World, command: Command) -> None:
    words: list[object] = ["chain", "--teacher", world.teacher, "--corpus", world.corpus]
    words += ["--assistant", "2x32", "--arch", "1x16", "--max-length", 32, "--k", 6, "--steps", 2]
    words += ["--batch-size", 4, "--device", "cpu", "--out", world.root / "c"]
    code, _, err = command(*words, "--max-hours", 1)
    assert code == 0, err
    code, _, err = command(*words, "--max-hours", 2, "--keep-checkpoints", 1)
    assert code == 0, err


def test_assistants_are_cut_from_the_teacher_and_students_from_assistants(world: World) -> None:
    folder = world.root / "chain"
    run_chain(chain_config(world), folder, session=Session(world.home))
    names = ("1-2x32", "students-1x16_1x32", "direct-1x16_1x32")
    records = [load_record(folder / "runs" / name) for name in names]
    begun = [record.students[0].begun_with for record in records]
    assert begun == [
        "layers 0, 2, cut to this shape, of teacher teacher",
        "layer 1, cut to this shape, of teacher 2x32",
        "layer 2, cut to this shape, of teacher teacher",
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("--init", "somewhere"), "no folder fits all of them"),
        (("--objective", "embedding", "--also", "b.cache"), "a chain's stages have one teacher each"),
        (("--init-layers", "1"), "each stage of a chain takes its students from its own teacher"),
        (("--init-teacher", "mini"), "each stage of a chain takes its students from its own teacher"),
        (("--init", "slice", "--arch", "3x32"), "--arch 3x32: more layers than the teacher's 2"),
        (("--init", "teacher-layers"), "the teacher's layers have width 32 and 4 heads"),
        (("--tracker", "wandb"), "--tracker wandb is not installed"),
        (("--teacher-layer", 9), "--teacher-layer 9: the dump stores layer 2"),
        (("--batches", "by-query"), "--batches by-query is for pairs of texts"),
        (("--dump-batch-size", 0), "--dump-batch-size 0: give at least 1"),
    ],
)
def test_what_does_not_fit_every_stage_is_refused(
    world: World, command: Command, changes: tuple[object, ...], says: str
) -> None:
    command.fails(*arguments(world, *changes), code=2, says=says)
    assert not (world.root / "chain").exists()
