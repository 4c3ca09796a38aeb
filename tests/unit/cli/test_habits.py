"""What people type without thinking: no arguments, -h, 20k, an empty variable, s3:/ with one slash."""

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from minilm_cache.cli.console import print_table
from minilm_cache.cli.options import typed_decimal, typed_number
from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.settings import validated
from minilm_cache.train.config import TrainConfig
from tests.fixtures import Command


def test_without_arguments_there_is_help(command: Command) -> None:
    code, out, err = command()

    assert (code, err) == (0, "")
    assert out == command("--help")[1] == command("-h")[1]
    assert "Commands:" in out


@pytest.mark.parametrize("name", ["dump", "train", "ls"])
def test_every_command_knows_short_help(command: Command, name: str) -> None:
    assert command(name, "-h") == command(name, "--help")


def test_python_runs_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minilm_cache", "--version"], capture_output=True, check=True
    )

    assert done.stdout.count(b".") == 2


def test_a_shell_can_complete_commands(command: Command) -> None:
    code, out, _ = command("--help")

    assert (code, "--install-completion" in out, "--show-completion" in out) == (0, True, True)


def test_misuse_points_to_the_help_of_its_command(command: Command) -> None:
    command.fails("train", "--nonsense", code=2, says="See `minilm-cache train --help`")
    command.fails("--nonsense", code=2, says="See `minilm-cache --help`")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("train", "", "--arch", "2x96"), "what follows train is empty"),
        (("dump", "--teacher", ""), "what follows --teacher is empty"),
        (("dump", "--teacher", "x", "--corpus="), "--corpus is empty"),
        (("",), "the command is empty"),
    ],
)
def test_empty_arguments_are_refused(command: Command, arguments: tuple[str, ...], where: str) -> None:
    command.fails(*arguments, code=2, says=(where, "a shell variable"))


@pytest.mark.parametrize("place", ["s3:/team/caches", "--store=s3:/team/caches"])
def test_urls_have_two_slashes(command: Command, place: str) -> None:
    command.fails(
        "push", "notes.cache", place, code=2, says=("one slash", "Write s3://team/caches, or ./s3:/")
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("-3", -3), ("20000", 20_000), ("20k", 20_000), ("1.5M", 1_500_000), ("2G", 2 * 10**9)),
        *(("20_000", 20_000), ("1e6", 10**6), ("2.5e3", 2500)),
    ],
)
def test_numbers_have_suffixes(text: str, number: int) -> None:
    assert typed_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1e-3", "1e999", "20K", "1__0", "2 k", "0.0001k", "nan", "٣"]
)
def test_other_numbers_are_refused(text: str, command: Command) -> None:
    with pytest.raises(typer.BadParameter, match=r"not a whole number\. Write it like 20000, 20_000, 20k"):
        typed_number(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("0.5", 0.5), ("1_000", 1000.0), ("2k", 2000.0), (".5", 0.5), ("-1e1", -10.0)],
)
def test_a_number_is_read_as_it_is_typed(text: str, value: float) -> None:
    assert typed_decimal(text) == value


@pytest.mark.parametrize("text", ["", "x", "1e-3x", "1__0", "_1", "1,5"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a number\. Write it like 0\.001 or 1e-3\.$"):
        typed_decimal(text)


@pytest.mark.parametrize("columns", ["30", "1", "0"])
def test_figures_of_a_table_stay_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table(
        "sizes",
        ["a shape", "weights of it", "bytes per token", "what came of it"],
        [["1x48:ff96", "1,539,264", "10,032", "left " * 9]],
    )
    printed = capsys.readouterr().out
    for figure in ("1x48:ff96", "1,539,264", "10,032"):
        assert figure in printed


def test_a_wrong_number_names_its_option(command: Command) -> None:
    command.fails("train", "x", "--steps", "many", code=2, says=("--steps", "'many' is not a whole number"))
    command.fails("train", "x", "--arch", "2x32", "--matryoshka", "x", code=2, says="--matryoshka")


def test_a_person_at_a_terminal_is_told_that_libraries_load() -> None:
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "minilm_cache", "info", "/nowhere"]
    with subprocess.Popen(arguments, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # Linux says so when the other side is closed
            while part := os.read(ours, 1024):
                said += part
    os.close(ours)
    assert said.startswith(b"loading ...\rerror: no cache at /nowhere")
    assert process.returncode == 1


def test_the_list_of_commands_is_not_cut_off(command: Command) -> None:
    assert "..." not in command("--help")[1].partition("Commands:")[2]


@pytest.mark.parametrize(
    "name", ["dump", "train", "chain", "study", "report", "pull", "slice", "import", "augment"]
)
def test_out_has_a_short_form(command: Command, name: str) -> None:
    assert "-o, --out" in command(name, "-h")[1]


def test_settings_in_python_take_paths_and_single_values() -> None:
    dumping = validated(DumpConfig, {"teacher": Path("teacher"), "corpus": Path("a/c.txt")})
    given = {"arch": "1x32", "objective": "embedding", "also": Path("other"), "init": Path("model")}
    training = validated(TrainConfig, given)
    tuning = validated(EvaluateConfig, {"task": Path("own.csv"), "lr": "3e-5", "epochs": "2"})

    assert (dumping.teacher, dumping.corpus) == ("teacher", "a/c.txt")
    assert (training.also, training.init) == (("other",), "model")
    assert (tuning.task, tuning.lr, tuning.epochs) == (("own.csv",), (3e-5,), (2,))


def test_true_is_no_number() -> None:
    with pytest.raises(InvalidConfigError, match="--steps"):
        validated(TrainConfig, {"arch": "1x32", "steps": True})
