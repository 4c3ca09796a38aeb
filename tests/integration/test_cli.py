"""The command line as a user meets it: what it prints, and how bad input ends."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from minilm_cache import __version__
from minilm_cache.cli.dump import dump
from minilm_cache.cli.train import train
from minilm_cache.config import DumpConfig, TrainConfig
from tests.conftest import Command
from tests.support import World, save_teacher, tiny_model, tiny_tokenizer


def dump_arguments(world: World, *more: object) -> list[object]:
    settings: dict[str, object] = {
        "--teacher": world.teacher,
        "--corpus": world.corpus,
        "--max-length": 32,
        "--shard-tokens": 256,
        "--k": 6,
        "--out": world.root / "cache",
    }
    return ["dump", *(part for pair in settings.items() for part in pair), *more]


def test_dump_info_train_verify_speak_json(world: World, command: Command) -> None:
    """Exactly one JSON object on stdout, whatever goes to stderr."""
    code, out, _ = command(*dump_arguments(world), "--json")
    dumped = json.loads(out)
    assert (code, dumped["complete"], dumped["shards_kept"]) == (0, True, 0)

    code, out, _ = command("info", dumped["cache"], "--json")
    shown = json.loads(out)
    assert (code, shown["manifest"]["fingerprint"]) == (0, dumped["fingerprint"])
    assert shown["shards_committed"] == dumped["shards_written"]

    code, out, _ = command(
        "train", dumped["cache"], "--arch", "2x16", "--arch", "1x32", "--steps", "3", "--json"
    )
    trained = json.loads(out)
    assert (code, [student["arch"] for student in trained["students"]]) == (0, ["2x16", "1x32"])
    assert Path(trained["students"][0]["path"], "model.safetensors").is_file()

    code, out, _ = command("verify", "--full", dumped["cache"], "--json")
    assert (code, json.loads(out)["damage"]) == (0, [])


def test_commands_say_what_they_chose(world: World, command: Command) -> None:
    arguments = dump_arguments(world)
    del arguments[arguments.index("--out") : arguments.index("--out") + 2]
    code, out, err = command(*arguments)
    assert code == 0
    assert str(world.home / "caches") in out

    code, out, err = command("train", "--arch", "1x32", "--steps", "2", "--batch-size", "4")
    assert code == 0
    assert f"no CACHE given: taking the newest complete one, {world.home / 'caches'}" in err
    assert "2 steps" in err
    assert "1x32" in out
    for name in ("info", "verify"):
        code, out, err = command(name)
        assert code == 0
        assert "no CACHE given" in err


def test_a_corpus_that_is_not_given_is_python_docs_and_said_aloud(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minilm_cache.dump.corpus._python_docs", lambda: iter(["ba be bi"] * 9))
    code, _, err = command("dump", "--teacher", world.teacher, "--max-length", 16, "--k", 4)

    assert code == 0
    assert "no --corpus given: taking python-docs" in err


def test_the_pretrained_encoder_goes_the_whole_way(command: Command, world: World) -> None:
    code, out, err = command(
        *("dump", "--teacher", "mini", "--max-tokens", 4096, "--out", world.root / "mini.cache", "--json")
    )
    assert code == 0, err
    measured = json.loads(out)["measured"]
    for kind in ("attention", "value"):
        assert abs(measured["fidelity"][kind]["cross_entropy_bias"]) < 0.1
    code, out, err = command("train", world.root / "mini.cache", "--arch", "3x384", "--steps", 2, "--json")
    assert code == 0, err
    student = json.loads(out)["students"][0]
    assert AutoModel.from_pretrained(student["path"]).config.num_hidden_layers == 3


def plan_arguments(world: World, *more: object) -> list[object]:
    return [
        *("plan", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32, "--k", 4),
        *("--max-kl", 0.02, "--max-kl", 0.1, "--sample-tokens", 1024, *more),
    ]


def test_a_plan_is_what_the_dumps_then_are(world: World, command: Command) -> None:
    code, out, err = command(*plan_arguments(world, "--json"))
    assert code == 0, err
    found = json.loads(out)
    names = [setting["codec"]["name"] for setting in found["settings"]]
    assert names == ["topk", "vectors", "vectors", "dense"]
    assert all(setting["break_even_epochs"] >= 2 for setting in found["settings"])
    dumped = world.dump(codec="dense", shard_tokens=None, max_length=32)
    assert found["num_tokens"] == dumped.manifest.num_tokens
    total = sum(file.stat().st_size for file in dumped.path.rglob("*") if file.is_file())
    assert found["settings"][3]["total_bytes"] == pytest.approx(total, rel=0.25)
    kls = [setting["fidelity"]["value"]["kl_teacher_to_stored"] for setting in found["settings"]]
    assert kls[0] is None
    assert 0 <= kls[3] < kls[1] < kls[2]


def test_a_plan_chooses_the_best_setting_of_a_size(world: World, command: Command) -> None:
    _, out, _ = command(*plan_arguments(world, "--json"))
    sizes = {json.dumps(one["codec"]): one["total_bytes"] for one in json.loads(out)["settings"]}
    vectors = [name for name in sizes if '"vectors"' in name]
    code, out, _ = command(*plan_arguments(world, "--json", "--max-bytes", sizes[vectors[0]]))
    assert code == 0
    assert json.loads(out)["best"] == json.loads(vectors[0])
    code, out, _ = command(*plan_arguments(world, "--no-dense", "--max-bytes", 10**12))
    assert code == 0
    assert "one epoch of one student never is" in out
    assert "vectors max_kl=0.02" in out.splitlines()[-1]
    command.fails(
        *plan_arguments(world, "--max-bytes", 1000), code=2, says="nothing is so small; the least is"
    )


def test_version_and_help(command: Command) -> None:
    assert command("--version")[:2] == (0, f"{__version__}\n")
    for name in ("dump", "train", "info", "verify", "plan", "demo"):
        code, out, _ = command(name, "--help")
        assert code == 0
        assert "Example: minilm-cache" in out or name == "demo"


@pytest.mark.parametrize("option", ["--k", "--lr", "--nonsense"])
def test_misuse_is_one_line_and_exit_code_2(command: Command, option: str) -> None:
    command.fails("dump", "--teacher", "x", option, "many", code=2, says=option)
    command.fails("nonsense", code=2, says="nonsense")
    command.fails(code=2, says="Missing command")


def test_an_error_is_json_too(command: Command) -> None:
    code, out, _ = command("info", "/nowhere", "--json")

    assert (code, json.loads(out)["error"]["kind"]) == (1, "cache_not_found")


# Teachers


def test_unknown_teacher(world: World, command: Command) -> None:
    command.fails(
        *dump_arguments(world, "--teacher", "no/such-model"),
        code=1,
        says=("unknown teacher 'no/such-model'", "Give a folder, a hub id, or one of mini, bert-base"),
    )


def test_teacher_without_tokenizer(world: World, command: Command) -> None:
    for file in world.teacher.glob("tokenizer*"):
        file.unlink()
    command.fails(*dump_arguments(world), code=1, says=("has no tokenizer", "save_pretrained"))


def test_teacher_of_a_family_with_attention_of_its_own(world: World, command: Command) -> None:
    config = AutoConfig.for_model(
        "deberta-v2", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    shutil.rmtree(world.teacher)
    AutoModel.from_config(config).save_pretrained(world.teacher)
    tiny_tokenizer().save_pretrained(world.teacher)
    command.fails(*dump_arguments(world), code=1, says=("'deberta-v2'", "Use an encoder such as BERT"))


def test_teacher_with_pickled_weights_only(world: World, command: Command) -> None:
    (world.teacher / "model.safetensors").unlink()
    torch.save({}, world.teacher / "pytorch_model.bin")
    command.fails(
        *dump_arguments(world),
        code=1,
        says=("only as pytorch_model.bin", "save_pretrained(NEW), then give NEW"),
    )


def test_teacher_whose_weights_are_damaged(world: World, command: Command) -> None:
    (world.teacher / "model.safetensors").write_bytes(b"nonsense")
    command.fails(*dump_arguments(world), code=1, says=("cannot load a model", str(world.teacher)))


def test_teacher_that_brings_code_is_not_run(world: World, command: Command) -> None:
    document = json.loads((world.teacher / "config.json").read_text())
    document |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (world.teacher / "config.json").write_text(json.dumps(document))
    (world.teacher / "own.py").write_text(f"open({str(world.root / 'ran')!r}, 'w')")
    command.fails(*dump_arguments(world), code=1, says="cannot load a")
    assert not (world.root / "ran").exists()


def test_teacher_that_reads_no_text(world: World, command: Command) -> None:
    config = AutoConfig.for_model(
        "vit", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    config.vocab_size = 500
    shutil.rmtree(world.teacher)
    AutoModel.from_config(config).save_pretrained(world.teacher)
    tiny_tokenizer().save_pretrained(world.teacher)
    command.fails(*dump_arguments(world), code=1, says=("'vit'", "Use an encoder such as BERT"))


def test_options_that_do_not_apply_are_refused(world: World, command: Command) -> None:
    command.fails(*dump_arguments(world, "--revision", "main"), code=2, says="--revision main goes with")
    arguments = dump_arguments(world, "--corpus", "python-docs", "--text-column", "body")
    command.fails(*arguments, code=2, says="--text-column body: python-docs has no columns")


def test_teacher_that_is_an_empty_folder(world: World, command: Command) -> None:
    (world.root / "empty").mkdir()
    command.fails(
        *dump_arguments(world, "--teacher", world.root / "empty"), code=1, says=str(world.root / "empty")
    )


# Corpora


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b"\n \n\n", "is empty"),
        ("no.jsonl", b'{"body": "ba"}\n', "has no column 'text'; it has body"),
        ("null.jsonl", b'{"text": "ba"}\n{"text": null}\n', "record 1 (counted from 0) has no text"),
        ("number.jsonl", b'{"text": 3}\n', "column 'text' holds int64, not text"),
        ("broken.jsonl", b'{"text": "ba"}\n{nonsense\n', "cannot read corpus"),
        ("broken.parquet", b"nonsense", "cannot read corpus"),
        ("latin.txt", b"ba \xff\xfe be\n", "cannot read corpus"),
        ("a.pdf", b"x", "has the ending '.pdf'"),
    ],
)
def test_corpora_that_cannot_be_read(
    world: World, command: Command, name: str, content: bytes, says: str
) -> None:
    file = world.root / name
    file.write_bytes(content)
    line = command.fails(*dump_arguments(world, "--corpus", file), code=1, says=says)
    assert str(file) in line
    assert not (world.root / "cache").exists()


def test_corpus_that_does_not_exist(world: World, command: Command) -> None:
    command.fails(
        *dump_arguments(world, "--corpus", "nowhere.txt"), code=1, says="corpus nowhere.txt does not exist"
    )


def test_corpus_folder_without_text(world: World, command: Command) -> None:
    (world.root / "folder").mkdir()
    command.fails(*dump_arguments(world, "--corpus", world.root / "folder"), code=1, says="is empty")


# Settings


def test_k_of_nothing_and_k_above_the_length(world: World, command: Command) -> None:
    command.fails(*dump_arguments(world, "--k", 0), code=2, says="--k 0")
    command.fails(*dump_arguments(world, "--k", 33), code=2, says="--k 33 is above --max-length 32")
    assert not (world.root / "cache").exists()


def test_heads_that_do_not_divide(world: World, command: Command) -> None:
    world.dump()
    command.fails(
        *("train", world.root / "cache", "--arch", "3x385"),
        code=2,
        says=("--arch 3x385", "does not divide by 4 heads", "3x384 or 3x388"),
    )


def test_default_settings_are_those_of_the_configuration() -> None:
    """Typer and pydantic each state defaults; they must not drift apart."""
    for function, model in ((dump, DumpConfig), (train, TrainConfig)):
        for name, parameter in signature(function).parameters.items():
            field = model.model_fields.get(name)
            if field is not None and not field.is_required() and name != "corpus":
                assert parameter.default == field.default, name


# Caches


def test_folder_of_another_cache(world: World, command: Command) -> None:
    world.dump()
    command.fails(
        *dump_arguments(world, "--k", 5), code=1, says=("holds another cache", "Choose another --out")
    )
    command.fails(*dump_arguments(world, "--out", world.teacher), code=1, says="is not empty and is no cache")


def test_no_cache(world: World, command: Command) -> None:
    for arguments in (["info"], ["verify"], ["train", "--arch", "1x32"]):
        command.fails(*arguments, code=1, says="no complete cache in")
    command.fails("info", world.root, code=1, says=f"no cache at {world.root}")


def test_an_unfinished_cache_is_told_and_not_trained_from(world: World, command: Command) -> None:
    command(*dump_arguments(world, "--world-size", 2))
    code, out, _ = command("info", world.root / "cache")
    assert code == 0
    assert "incomplete: finish it with the same `minilm-cache dump` command" in out
    command.fails("train", world.root / "cache", "--arch", "1x32", code=1, says="is incomplete")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "swapped"])
def test_damaged_shards(world: World, command: Command, damage: str) -> None:
    """Never zeros: each ends training with one line that names the file, and `verify` finds each."""
    cache = world.dump().path
    file = cache / "relations/attention/gap/c/1/0/0"
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "flipped":
        file.write_bytes(content[:100] + bytes([content[100] ^ 8]) + content[101:])
    elif damage == "swapped":
        file.write_bytes((cache / "relations/attention/gap/c/2/0/0").read_bytes())
    else:
        file.unlink()
    command.fails(
        *("train", cache, "--arch", "1x32", "--steps", 50, "--batch-size", 4),
        code=1,
        says=(str(file), "minilm-cache dump --resume"),
    )
    line = command.fails(
        *("verify", "--full", cache), code=3, says="relations/attention/gap/c/1/0/0 of shard 1"
    )
    assert "writes damaged shards again" in line
    if damage not in {"flipped", "swapped"}:
        command.fails("verify", cache, code=3, says="relations/attention/gap/c/1/0/0")


@pytest.mark.parametrize("file", ["manifest.json", "zarr.json", "commits/00000.json", "teacher/config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[" * 100_000, b"\xff"])
def test_damaged_documents(world: World, command: Command, file: str, content: bytes | None) -> None:
    cache = world.dump().path
    if content is None:
        (cache / file).unlink()
    else:
        (cache / file).write_bytes(content)
    command.fails("train", cache, "--arch", "1x32", "--steps", 2, code=1, says=str(cache))
    code, _, err = command("verify", "--full", cache)
    assert code == (1 if file == "manifest.json" else 3), err
    assert "Traceback" not in err


def test_a_newer_format_is_told_apart_from_damage(world: World, command: Command) -> None:
    cache = world.dump().path
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**manifest, "format_version": 2}))
    command.fails("info", cache, code=1, says=("format version 2", "Install a newer minilm-cache"))


# The machine


class Process:
    """The command line in a process of its own."""

    def __init__(self, world: World, *arguments: object, limit_bytes: int | None = None) -> None:
        """Start a command; `limit_bytes`: no file may grow larger."""

        def limit() -> None:
            if limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

        self.process = subprocess.Popen(
            [sys.executable, "-m", "minilm_cache.cli.main", *map(str, arguments)],
            env={**os.environ, "MINILM_CACHE_HOME": str(world.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )

    def wait_for(self, path: Path) -> None:
        """Wait until a file is there."""
        deadline = time.monotonic() + 120
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return exit code and stderr."""
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_dump_keeps_its_shards_and_goes_on(world: World, number: signal.Signals) -> None:
    world.corpus.write_text(world.corpus.read_text() * 20)
    arguments = dump_arguments(world, "--shard-tokens", 1024)
    process = Process(world, *arguments, "--batch-size", 1)
    process.wait_for(world.root / "cache/commits/00001.json")
    process.process.send_signal(number)
    code, err = process.end()

    assert code == 130
    assert "Run the same command again to go on." in err
    assert "Traceback" not in err
    kept = {file: file.read_bytes() for file in (world.root / "cache/commits").glob("*.json")}
    assert len(kept) >= 2
    assert Process(world, *arguments).end()[0] == 0
    assert {file: file.read_bytes() for file in kept} == kept


def test_an_interrupted_training_keeps_its_state_and_goes_on(world: World) -> None:
    world.dump()
    arguments = [
        "train",
        world.root / "cache",
        "--arch",
        "2x64",
        "--steps",
        4000,
        "--out",
        world.root / "run",
    ]
    process = Process(world, *arguments)
    process.wait_for(world.root / "run/log.jsonl")
    time.sleep(1)
    process.process.send_signal(signal.SIGINT)
    code, err = process.end()

    assert code == 130
    assert "is kept in" in err
    assert "Traceback" not in err
    (checkpoint,) = (world.root / "run/checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["step"] > 0
    kept = json.loads((checkpoint / "state.json").read_text())["step"]
    process = Process(world, *arguments)
    process.wait_for(world.root / "run/run.json")
    deadline = time.monotonic() + 60
    while f'"step": {kept + 10 - kept % 10}' not in (world.root / "run/log.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.process.send_signal(signal.SIGTERM)
    code, err = process.end()

    assert code == 130
    assert f"going on after step {kept}" in err
    (checkpoint,) = (world.root / "run/checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["step"] > kept


def test_a_file_system_that_refuses_is_one_line(world: World) -> None:
    """A limit on file sizes stands in for a full disk: the same failure of the same calls."""
    code, err = Process(world, *dump_arguments(world, "--k", 24), limit_bytes=9000).end()

    assert code == 1, err
    assert err.count("error: ") == 1
    assert "File too large" in err
    assert "Traceback" not in err
    assert Process(world, *dump_arguments(world, "--k", 24)).end()[0] == 0


def test_a_killed_dump_resumes(world: World) -> None:
    world.corpus.write_text(world.corpus.read_text() * 5)
    expected = world.dump("whole", batch_size=4).path
    process = Process(world, *dump_arguments(world, "--batch-size", 4))
    process.wait_for(world.root / "cache/commits/00001.json")
    process.process.kill()
    process.end()
    code, err = Process(world, *dump_arguments(world, "--batch-size", 4)).end()

    assert code == 0, err
    files = [file.relative_to(expected) for file in (expected / "relations").rglob("*") if file.is_file()]
    for file in files:
        assert (world.root / "cache" / file).read_bytes() == (expected / file).read_bytes()


def test_output_folder_without_permission(world: World, command: Command) -> None:
    blocked = world.root / "file"
    blocked.write_text("not a folder")
    command.fails(*dump_arguments(world, "--out", blocked / "cache"), code=1, says=("cannot", str(blocked)))
    world.dump()
    command.fails(
        *("train", world.root / "cache", "--arch", "1x32", "--steps", 1, "--out", blocked / "run"),
        code=1,
        says=("cannot", str(blocked)),
    )


def test_teacher_of_another_vocabulary_than_its_tokenizer(world: World, command: Command) -> None:
    tiny_model("bert", vocab_size=50).save_pretrained(world.teacher)
    command.fails(*dump_arguments(world), code=1, says="tokens, the model only 50")


def test_roberta_teacher_with_positions_of_its_own(world: World, command: Command) -> None:
    save_teacher(world.root / "roberta", "roberta", max_position_embeddings=34)
    command.fails(
        *dump_arguments(world, "--teacher", world.root / "roberta", "--max-length", 33),
        code=2,
        says="--max-length 33 is more than teacher",
    )
