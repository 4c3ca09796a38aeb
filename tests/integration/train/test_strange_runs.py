"""A run of a stranger, or a damaged one, is refused in one line, and nothing outside its folder changes."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minilm_cache.cache import open_cache
from minilm_cache.errors import IdentityMismatchError, InterruptedRunError, MiniLMCacheError
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session
from minilm_cache.train.checkpoint import load_state, load_students
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.record import MAX_LOG_BYTES, last_logged_step, load_record
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.fixtures import Command
from tests.integration.train.test_train import assert_same, settings, stop_after, weights
from tests.mutations import mutations
from tests.support import World, save_teacher, write_corpus

SETTINGS = settings(steps=8, checkpoint_steps=4)
WORDS = (
    "--arch",
    "2x16",
    "--arch",
    "1x32",
    "--steps",
    8,
    "--batch-size",
    4,
    "--lr",
    "5e-3",
    "--device",
    "cpu",
)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with a cache and a run that stopped after a checkpoint."""
    root = tmp_path_factory.mktemp("begun")
    world = World(root, save_teacher(root / "teacher"), write_corpus(root / "corpus.txt"))
    world.dump()
    with pytest.raises(InterruptedRunError):
        train_students(
            SETTINGS, root / "cache", out=root / "run", session=Session(world.home, should_stop=stop_after(6))
        )
    return world


@pytest.fixture
def run(begun: World, tmp_path: Path) -> Path:
    """Return a copy of that run."""
    shutil.copytree(begun.root / "run", tmp_path / "run")
    return tmp_path / "run"


def resume(begun: World, run: Path) -> TrainResult:
    return train_students(SETTINGS, begun.root / "cache", out=run, session=Session(begun.home))


def state_of(run: Path) -> Path:
    return max(run.glob("checkpoints/step-*"))


def changed(**new: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """Return a change of all tensors of a kind: the last part of their names."""
    return lambda tensors: {
        name: new.get(name.rsplit("/", 1)[-1], value).clone() for name, value in tensors.items()
    }


def without(ending: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if not name.endswith(ending)}


TENSORS: dict[str, Callable[[Tensors], Tensors]] = {
    "short moments": changed(exp_avg=torch.ones(1), exp_avg_sq=torch.ones(1)),
    "empty moments": changed(exp_avg=torch.ones(0)),
    "moments of another type": lambda tensors: {
        name: value.double() if name.endswith("exp_avg") else value for name, value in tensors.items()
    },
    "weights of another type": lambda tensors: {
        name: value.half() if name.startswith("model/") else value for name, value in tensors.items()
    },
    "a step that is a list": changed(step=torch.ones(1)),
    "no moments": lambda tensors: {
        name: value for name, value in tensors.items() if name.startswith("model/")
    },
    "no second moments": without("exp_avg_sq"),
    "one weight less": without("model/model.model.embeddings.word_embeddings.weight"),
    "a key of nothing": lambda tensors: tensors | {"optimizer/foo": torch.ones(1)},
    "another weight": lambda tensors: tensors | {"model/foo": torch.ones(1)},
    "transposed weights": lambda tensors: {
        name: value.T.contiguous() if value.ndim > 1 else value for name, value in tensors.items()
    },
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_never_reach_the_optimizer(begun: World, run: Path, name: str) -> None:
    """The fused AdamW writes as far as the weight is long, whatever the length of its moments."""
    state = state_of(run)
    document = json.loads((state / "state.json").read_text())
    older = document | {"files": None, "checksum": None}  # as an earlier release wrote it
    (state / "state.json").write_text(json.dumps(older))
    file = state / "2x16.safetensors"
    save_file(TENSORS[name](load_file(file)), file)
    with pytest.raises(IdentityMismatchError, match=r"2x16\.safetensors cannot be used"):
        resume(begun, run)


def test_one_flipped_bit_is_seen(begun: World, run: Path) -> None:
    whole = weights(resume(begun, Path(shutil.copytree(run, run.with_name("whole")))))
    for place in (0.3, 0.6, 0.99):
        copy = Path(shutil.copytree(run, run.with_name(f"bit {place}")))
        file = state_of(copy) / "1x32.safetensors"
        content = bytearray(file.read_bytes())
        content[int(len(content) * place)] ^= 1
        file.write_bytes(content)
        with pytest.raises(IdentityMismatchError, match="not those that were written"):
            resume(begun, copy)
    older = state_of(run) / "state.json"  # checkpoints of earlier releases note no files
    document = json.loads(older.read_text())
    del document["files"], document["checksum"]
    older.write_text(json.dumps(document))
    resumed = weights(resume(begun, run))
    for arch, expected in whole.items():
        assert_same(resumed[arch], expected)


STATES: list[dict[str, Any]] = [
    {"step": 5},
    {"step": 0},
    {"step": -4},
    {"step": 10**30},
    {"diverged": {"1x16": 3}},
    {"diverged": {"2x16": 1, "1x32": 1}},
    {"diverged": {"2x16": 7}},
    {"bytes_read": 10**30},
    {"bytes_read": -1},
    {"train_s": float("nan")},
    {"train_s": -1.0},
    {"best": {"9x9": {"step": 1, "held_out": {}}}},
    {"files": {}},
    {"files": {"2x16.safetensors": {"size": 1, "xxh3_128": "0" * 32}}},
    {"checksum": "0" * 64},
    {"more": 1},
]


@pytest.mark.parametrize("change", STATES, ids=str)
def test_a_state_of_another_run_is_refused(begun: World, run: Path, change: dict[str, Any]) -> None:
    file = state_of(run) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"checksum": None} | change))
    with pytest.raises(IdentityMismatchError, match="cannot be used"):
        resume(begun, run)


PARTS = ["checkpoints", "best", "students", "log.jsonl", "checkpoints/step-00000004"]


@pytest.mark.parametrize("part", PARTS)
def test_links_in_a_run_are_not_followed(begun: World, run: Path, part: str) -> None:
    outside = run.with_name("outside")
    if (run / part).is_dir():
        shutil.move(run / part, outside)
    else:
        (run / part).unlink(missing_ok=True)
        (outside / "1x32").mkdir(parents=True)
    (outside / "1x32.00000001.safetensors").write_text("precious")
    (outside / "step-00000001").mkdir(exist_ok=True)
    before = {str(path): path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    (run / part).symlink_to(outside / "x" if part == "log.jsonl" else outside)
    config = settings(steps=8, checkpoint_steps=4, eval_steps=4) if part == "best" else SETTINGS
    with pytest.raises(MiniLMCacheError, match="link"):
        train_students(
            config,
            begun.root / "cache",
            out=fresh(run) if part == "best" else run,
            session=Session(begun.home),
        )
    assert {str(path): path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


def fresh(run: Path) -> Path:
    """Return a folder of a new run whose folder of best weights is a link."""
    new = run.with_name("fresh")
    new.mkdir()
    (new / "best").symlink_to(run.with_name("outside"))
    shutil.copy(run / "run.json", new / "run.json")
    document = json.loads((new / "run.json").read_text())
    document["identity"]["eval_steps"] = 4
    (new / "run.json").write_text(json.dumps(document))
    return new


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["state.json", "2x16.safetensors", "../../log.jsonl"])
def test_pipes_in_a_run_do_not_hang(begun: World, run: Path, part: str) -> None:
    file = (state_of(run) / part).resolve()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(MiniLMCacheError):
        resume(begun, run)


LOGS = {
    "deep": b"[" * 100_000,
    "objects": b'{"a":' * 2_000,
    "infinity": b'{"step": -Infinity}\n',
    "digits": b'{"step": ' + b"9" * 400 + b"}\n",
    "bytes": b"\xff\xfe\n",
    "newlines": b"\n" * 2**20,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LOGS)
def test_logs_of_any_content_are_read(begun: World, run: Path, name: str, command: Command) -> None:
    before = (run / "log.jsonl").read_bytes()
    (run / "log.jsonl").write_bytes(LOGS[name])
    assert last_logged_step(run) is None
    assert command("info", run)[0] == 0
    (run / "log.jsonl").write_bytes(before + LOGS[name])
    lines = (resume(begun, run).path / "log.jsonl").read_bytes().splitlines()
    assert lines[: len(before.splitlines())] == before.splitlines()[: len(lines)]
    assert all(json.loads(line)["step"] >= 0 for line in lines)
    assert MAX_LOG_BYTES > 0


@pytest.mark.parametrize("arch", ["../../teacher", "/etc", "1x16/..", "a\nb", "1x16:../x"])
def test_a_shape_is_no_path(run: Path, arch: str) -> None:
    document = json.loads((run / "run.json").read_text())
    document["identity"]["arch"] = [arch, "1x32"]
    document["students"][0]["arch"] = arch
    (run / "run.json").write_text(json.dumps(document))
    with pytest.raises(IdentityMismatchError, match="is damaged"):
        load_record(run)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["run.json", "log.jsonl"])
def test_mutated_records_of_a_run_end_in_one_line(run: Path, name: str, command: Command) -> None:
    for content in mutations((run / name).read_bytes(), 40):
        (run / name).write_bytes(content)
        code, _, err = command("info", run)
        assert (code in (0, 1, 2), "Traceback" in err) == (True, False), content


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["state.json", "2x16.safetensors"])
def test_mutated_checkpoints_end_in_one_line(begun: World, run: Path, name: str) -> None:
    """Whatever hashes say: those of weights are left out, so that tensors are compared themselves."""
    state = state_of(run)
    document = json.loads((state / "state.json").read_text())
    if name != "state.json":
        (state / "state.json").write_text(json.dumps(document | {"files": None, "checksum": None}))
    file, refused, trainers = state / name, 0, trainers_of(begun)
    whole = file.read_bytes()
    for content in mutations(whole[:4_000], 40):
        file.write_bytes(content + whole[4_000:])
        try:
            read = load_state(run / "checkpoints")
            read.check(run, arch=SETTINGS.arch, steps=SETTINGS.steps or 0)
            load_students(run / "checkpoints", read, trainers=trainers, device=torch.device("cpu"))
        except MiniLMCacheError as error:
            refused += "\n" not in str(error)
    assert refused > 10


def trainers_of(begun: World) -> list[StudentTrainer]:
    """Return students of the run's shapes, with random weights."""
    opened = open_cache(begun.root / "cache")
    return build_trainers(
        SETTINGS,
        opened,
        shapes=[parse_arch(arch, 4) for arch in SETTINGS.arch],
        objective=choose_objective(SETTINGS, opened, arch=SETTINGS.arch),
        steps=8,
        ranks=Ranks.alone(torch.device("cpu")),
    )


def test_a_complete_run_of_another_request_is_not_shown(begun: World, tmp_path: Path) -> None:
    """Without --init students are slices: a run of random weights is another one, and says so."""
    random_run = SETTINGS.with_changes(init="random")
    train_students(random_run, begun.root / "cache", out=tmp_path / "run", session=Session(begun.home))
    with pytest.raises(IdentityMismatchError, match=r"differs in init.*name the same --init"):
        resume(begun, tmp_path / "run")
    again = train_students(
        random_run, begun.root / "cache", out=tmp_path / "run", session=Session(begun.home)
    )
    assert again.record.identity.init == "random"
    assert resume(begun, tmp_path / "slice").record.identity.init.startswith("slice-")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_follow_the_umask(begun: World, run: Path, umask: int) -> None:
    shutil.rmtree(begun.home / "slices", ignore_errors=True)
    before = os.umask(umask)
    try:
        resume(begun, run)
        resume(begun, run.with_name(f"new {umask}"))
    finally:
        os.umask(before)
    written = [*run.glob("students/**/*"), *run.with_name(f"new {umask}").rglob("*")]
    written += begun.home.glob("slices/*/*")
    modes = {oct(stat.S_IMODE(path.stat().st_mode)) for path in written if path.is_file()}
    assert modes == {oct(0o666 & ~umask)}
