"""The command line as a user meets it: what it prints, and how bad input ends."""

import errno
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from minilm_cache import __version__
from minilm_cache.cli.console import TerminalProgress, print_error, print_table
from minilm_cache.cli.main import run
from tests.fixtures import Command
from tests.support import World, dump_arguments, save_teacher, tiny_model, tiny_tokenizer

CHANGELOG = Path(__file__).parents[3] / "CHANGELOG.md"
"""Real text that is always there, and short."""


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
    assert f"no CACHE given: using the newest complete one, {world.home / 'caches'}" in err
    assert "2 steps" in err
    assert "1x32" in out
    for name in ("info", "verify"):
        code, out, err = command(name)
        assert code == 0
        assert "no CACHE given" in err


def test_a_corpus_that_is_not_given_is_python_docs_and_said_aloud(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minilm_cache.corpus.load.python_docs", lambda: iter(["ba be bi"] * 9))
    code, _, err = command("dump", "--teacher", world.teacher, "--max-length", 16, "--k", 4)

    assert code == 0
    assert "no --corpus given: using python-docs" in err


def test_the_pretrained_encoder_goes_the_whole_way(command: Command, world: World) -> None:
    code, out, err = command(
        *("dump", "--teacher", "mini", "--corpus", CHANGELOG, "--max-tokens", 4096),
        *("--out", world.root / "mini.cache", "--json"),
    )
    assert code == 0, err
    (fidelity,) = json.loads(out)["measured"]["fidelity"]
    assert fidelity["layer"] == 5
    for kind in ("attention", "value"):
        assert abs(fidelity["relations"][kind]["cross_entropy_bias"]) < 0.1
    train = ("train", world.root / "mini.cache", "--arch", "3x384", "--steps", 2, "--lr", "1e-6")
    code, out, err = command(*train, "--json")
    assert code == 0, err
    student = json.loads(out)["students"][0]
    assert AutoModel.from_pretrained(student["path"]).config.num_hidden_layers == 3


def test_version_and_help(command: Command) -> None:
    assert command("--version")[:2] == (0, f"{__version__}\n")
    for name in ("dump", "train", "info", "verify", "plan", "demo"):
        code, out, _ = command(name, "--help")
        assert code == 0
        assert "Example: minilm-cache" in out or name == "demo"
    words = " ".join(
        command("chain", "--help-all")[1].split()
    )  # its seed is that of the dump and of trainings
    assert (
        "what codec topk draws. Seed of initial weights, dropout and the order of batches. [default: 0]"
        in words
    )


@pytest.mark.parametrize("option", ["--k", "--lr", "--nonsense"])
def test_misuse_is_one_line_and_exit_code_2(command: Command, option: str) -> None:
    command.fails("dump", "--teacher", "x", option, "many", code=2, says=option)
    command.fails("nonsense", code=2, says="nonsense")


@pytest.mark.parametrize(
    ("name", "tokens", "says"),
    [
        ("head", 100, "--max-tokens 100 is below --max-length 128: not one sequence"),
        ("dump", 100, "--max-tokens 100 is below --max-length 128: not one sequence"),
        ("dump", "20000G", "--max-tokens"),
        ("plan", "20000G", "--max-tokens"),
    ],
)
def test_tokens_of_a_text_that_are_too_few_or_too_many(
    world: World, command: Command, name: str, tokens: object, says: str
) -> None:
    out = ("--out", world.root / "out") if name == "head" else ()
    command.fails(name, "--teacher", world.teacher, "--max-tokens", tokens, *out, code=2, says=says)


def test_an_error_is_json_too(command: Command) -> None:
    code, out, _ = command("info", "/nowhere", "--json")

    assert (code, json.loads(out)["error"]["kind"]) == (1, "cache_not_found")


# Teachers


def test_unknown_teacher(world: World, command: Command) -> None:
    command.fails(
        *dump_arguments(world, "--teacher", "no/such-model"),
        code=1,
        says=(
            "there is no folder no/such-model, and the hub cannot be asked",
            "Check the name and the network",
        ),
    )


def test_teacher_without_tokenizer(world: World, command: Command) -> None:
    for file in world.teacher.glob("tokenizer*"):
        file.unlink()
    command.fails(*dump_arguments(world), code=1, says=("has no tokenizer", "save_pretrained"))


def test_teacher_of_a_family_with_attention_of_its_own(world: World, command: Command) -> None:
    config = AutoConfig.for_model(
        "convbert", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    shutil.rmtree(world.teacher)
    AutoModel.from_config(config).save_pretrained(world.teacher)
    tiny_tokenizer().save_pretrained(world.teacher)
    command.fails(*dump_arguments(world), code=1, says=("'convbert'", "Use an encoder such as BERT"))


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_teacher_with_weights_that_are_no_numbers(world: World, command: Command, value: float) -> None:
    model = tiny_model("bert")
    model.get_parameter("encoder.layer.0.output.dense.weight").data[0, 0] = value
    model.save_pretrained(world.teacher)
    says = ("NaN or infinite: encoder.layer.0.output.dense.weight", str(world.teacher))
    command.fails(*dump_arguments(world), code=1, says=says)
    assert not (world.root / "cache").exists()
    out = ("--out", world.root / "slice")
    command.fails("slice", "--teacher", world.teacher, "--arch", "1x16", *out, code=1, says=says)

    model = tiny_model("bert")
    model.get_parameter("pooler.dense.weight").data[0, 0] = value  # which no dump of relations reads
    model.save_pretrained(world.teacher)
    assert command(*dump_arguments(world))[0] == 0


def test_teacher_that_brings_code_is_not_run(world: World, command: Command) -> None:
    document = json.loads((world.teacher / "config.json").read_text())
    document |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}}
    (world.teacher / "config.json").write_text(json.dumps(document))
    (world.teacher / "own.py").write_text(f"open({str(world.root / 'ran')!r}, 'w')")
    command.fails(*dump_arguments(world), code=1, says=("no model family 'own'", "no code"))
    assert not (world.root / "ran").exists()


def test_teacher_that_reads_no_text(world: World, command: Command) -> None:
    config = AutoConfig.for_model(
        "vit", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
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
        ("number.jsonl", b'{"text": 3}\n', "column 'text' of line 1 holds a number, not text"),
        ("broken.jsonl", b'{"text": "ba"}\n{nonsense\n', "line 2 is not JSON"),
        ("half.jsonl", b'{"text": "ba"}\n\n{"text": "\\ud800"}\n', "line 3 has half of a character"),
        ("key.jsonl", b'{"text": "ba", "document": "\\ud800"}\n', "line 1 has half of a character"),
        ("list.jsonl", b'{"text": ["ba"]}\n', "column 'text' of line 1 holds a list, not text"),
        ("comma.csv", b"text\nba\nHello, ba\n", "line 3: 2 fields, where the header has 1"),
        ("after.csv", b"text,label\nba,1,\n", "line 2: 3 fields, where the header has 2"),
        ("short.csv", b'number,text\n1,"ba\nbe"\n2\n', "line 4: 1 fields, where the header has 2"),
        ("twice.csv", b"text,text\nba,be\n", "two columns of one name"),
        ("latin.csv", b"text\nba \xff\n", "cannot read corpus"),
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
    assert line.count(str(file)) == 1
    assert not (world.root / "cache").exists()


def test_corpus_that_does_not_exist(world: World, command: Command) -> None:
    command.fails(
        *dump_arguments(world, "--corpus", "nowhere.txt"), code=1, says="corpus nowhere.txt does not exist"
    )


def test_messages_and_tables_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "hf:ID:CONFIG [bold]a[/bold] :smile:"
    print_error(name)
    TerminalProgress().note(name)
    print_table("of names", ["name"], [[name]])
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"error: {name}", name]
    assert name in shown.out


def test_lines_of_progress_stand_where_their_task_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress().shown() as progress:
        progress.start("first", 2, "tokens")
        progress.advance(1)
        progress.note("in between")
        progress.advance(1)
        progress.note("next")
        progress.start("second", 0, "tokens")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["in between", "first", "next"]


def test_a_full_stdout_is_one_line(
    shared_world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert run(["info", str(shared_world.root / "cache"), "--json"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line


def test_a_shape_larger_than_memory(shared_world: World, command: Command, tmp_path: Path) -> None:
    cache = shared_world.root / "cache"
    command.fails(
        *("train", cache, "--arch", "1x999996", "--steps", 1, "--out", tmp_path / "run"),
        code=1,
        says=("too little memory", "smaller --arch"),
    )


def test_fidelity_is_told_of_what_it_was_measured_on(world: World, command: Command) -> None:
    world.corpus.write_text("ba be bi")
    code, out, err = command(*dump_arguments(world))
    assert code == 0, err
    assert "Fidelity on 1 training sequence (none is held out)" in out


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
        says=("--arch 3x385", "is not divisible by 4 heads", "3x384 or 3x388"),
    )


# Caches


def test_another_text_is_refused_before_a_codec_is_fitted_to_it(world: World, command: Command) -> None:
    world.dump(codec="vectors")
    with world.corpus.open("a") as corpus:
        corpus.write("\n\nba be bi\n")
    words = dump_arguments(world, "--codec", "vectors", k=None)
    code, _, err = command(*words)
    assert code == 1
    assert "differs in corpus.num_documents (60 there, 61 asked)" in err
    assert "of the first dump, on the same text" in err
    assert "calibrat" not in err
    words = dump_arguments(
        world, "--codec", "topk", "--add", world.root / "cache", "--out", world.root / "more"
    )
    command.fails(*words, code=1, says=("--add", "codec.name (vectors there, topk asked)"))


def test_folder_of_another_cache(world: World, command: Command) -> None:
    world.dump()
    command.fails(
        *dump_arguments(world, "--k", 5), code=1, says=("holds another cache", "Choose another --out")
    )
    command.fails(
        *dump_arguments(world, "--out", world.teacher), code=1, says="is not empty and is not a cache"
    )


def test_no_cache(world: World, command: Command) -> None:
    for arguments in (["info"], ["verify"], ["train", "--arch", "1x32"]):
        command.fails(*arguments, code=1, says="no complete cache in")
    command.fails("info", world.root, code=1, says=f"no cache at {world.root}")


def test_an_unfinished_cache_is_told_and_not_trained_from(world: World, command: Command) -> None:
    command(*dump_arguments(world, "--rank", 0, "--world-size", 2))
    code, out, _ = command("info", world.root / "cache")
    assert code == 0
    assert "unfinished: finish it with the same `minilm-cache dump` command" in out
    command.fails("train", world.root / "cache", "--arch", "1x32", code=1, says="is unfinished")


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
        says=(str(file), "--check full"),
    )
    line = command.fails(
        *("verify", "--full", cache), code=3, says="relations/attention/gap/c/1/0/0 of shard 1"
    )
    assert "which writes shard 1 again" in line
    if damage not in {"flipped", "swapped"}:
        command.fails("verify", cache, code=3, says="relations/attention/gap/c/1/0/0")


@pytest.mark.parametrize(
    "file", ["manifest.json", "zarr.json", "index/shards.parquet", "teacher/config.json"]
)
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[" * 100_000, b"\xff"])
def test_damaged_documents(world: World, command: Command, file: str, content: bytes | None) -> None:
    cache = world.dump().path
    if content is None:
        (cache / file).unlink()
    else:
        (cache / file).write_bytes(content)
    command.fails("train", cache, "--arch", "1x32", "--steps", 2, code=1, says=str(cache))
    command.fails("verify", "--full", cache, code=3, says=file)


def test_a_newer_format_is_told_apart_from_damage(world: World, command: Command) -> None:
    cache = world.dump().path
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**manifest, "format_version": 3}))
    command.fails("info", cache, code=1, says=("format version 3", "Install a newer minilm-cache"))


def test_output_folder_below_a_file(world: World, command: Command) -> None:
    blocked = world.root / "file"
    blocked.write_text("not a folder")
    says = f"{blocked} is a file. Choose another folder"
    command.fails(*dump_arguments(world, "--out", blocked / "cache"), code=2, says=says)
    world.dump()
    command.fails(
        *("train", world.root / "cache", "--arch", "1x32", "--steps", 1, "--out", blocked / "run"),
        code=2,
        says=says,
    )


def test_teacher_of_another_vocabulary_than_its_tokenizer(world: World, command: Command) -> None:
    tiny_model("bert", vocab_size=50).save_pretrained(world.teacher)
    command.fails(*dump_arguments(world), code=1, says="tokens, and the model has 50 embeddings")


def test_roberta_teacher_with_positions_of_its_own(world: World, command: Command) -> None:
    save_teacher(world.root / "roberta", "roberta", max_position_embeddings=34)
    command.fails(
        *dump_arguments(world, "--teacher", world.root / "roberta", "--max-length", 33),
        code=2,
        says="--max-length 33 is more than teacher",
    )
