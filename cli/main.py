"""The Typer app: runs commands, and shows errors as one line and an exit code.

Exit codes: 0 done, 1 failure, 2 misuse, 3 verification failed, 130 interrupted (state kept).
Commands import the library in their bodies, so that `--help` is fast.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Final

import typer

from minilm_cache import __version__
from minilm_cache.cli.chain import chain
from minilm_cache.cli.console import print_error, print_json
from minilm_cache.cli.demo import demo
from minilm_cache.cli.dump import dump
from minilm_cache.cli.environment import refuse_many, settle_process
from minilm_cache.cli.evaluate import embeddings, evaluate, speed
from minilm_cache.cli.generate import generate
from minilm_cache.cli.info import info, report
from minilm_cache.cli.listing import ls, rm
from minilm_cache.cli.models import augment, cut, export_model, head, tokenize, trim, truncate
from minilm_cache.cli.options import GroupedCommand
from minilm_cache.cli.plan import plan
from minilm_cache.cli.ranking import mine, rerank
from minilm_cache.cli.search import search
from minilm_cache.cli.search_text import search_text
from minilm_cache.cli.share import export, import_file, merge, pull, push
from minilm_cache.cli.study import study
from minilm_cache.cli.train import train
from minilm_cache.cli.verify import verify
from minilm_cache.errors import (
    ErrorKind,
    InterruptedRunError,
    InvalidConfigError,
    MiniLMCacheError,
    first_line,
    is_panic,
    remedy_of,
)
from minilm_cache.store.urls import hide_secrets, without_secrets

_ONE_SLASH: Final = re.compile(
    r"(?P<option>--[\w-]+=)?(?P<scheme>s3|gs|az|file):/(?P<path>[^/].*)", re.IGNORECASE
)
"""A URL with one slash, which would be read as the path of a folder. `hf:ID` is a text of the hub."""

app = typer.Typer(
    name="minilm-cache",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(dump, train, chain, study, search, report, info, verify, plan, push, pull, ls, rm, merge),
    *(
        evaluate,
        speed,
        embeddings,
        mine,
        rerank,
        generate,
        search_text,
        export,
        import_file,
        head,
        cut,
        truncate,
        trim,
        export_model,
        augment,
        tokenize,
        demo,
    ),
)
_OTHERWISE_NAMED: dict[Callable[..., None], str] = {cut: "slice", import_file: "import"}
"""Commands whose names are words of Python's own."""
for command in _COMMANDS:
    summary = (command.__doc__ or "").partition("\n")[0]  # typer would cut it off where the line ends
    has_all = not hasattr(command, "common")  # its `-h` shows every option
    named = {"help_option_names": ["-h", "--help", *["--help-all"] * has_all]}
    name = _OTHERWISE_NAMED.get(command)
    app.command(name, cls=GroupedCommand, short_help=summary, context_settings=named)(command)


def _print_version(is_requested: bool | None) -> None:
    if is_requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = None,
) -> None:
    """Run a teacher once, then train many students from what it computed.

    Caches and runs are kept in MINILM_CACHE_HOME. Without it they are kept in ~/.cache/minilm-cache.
    Numbers may end with k, M or G: 20k is 20,000.
    """


@cache
def _command() -> Callable[..., Any]:
    """Return the command line, made once: programs and notebooks may run many commands."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; an error is shown as one line on stderr."""
    try:
        settle_process(arguments)
        refuse_many(arguments)
        _refuse_slips(arguments)
        code = _command()(list(arguments) or ["--help"], prog_name="minilm-cache", standalone_mode=False)
    except MiniLMCacheError as error:
        return _fail(arguments, error.kind, message=str(error), exit_code=error.exit_code)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        named = [word for word in arguments[:1] if not word.startswith("-")]
        command = " ".join(["minilm-cache", *named]) if context is None else context.command_path
        message = f"{error.format_message()} See `{command} --help`."
        return _fail(arguments, ErrorKind.INVALID_CONFIG, message=message, exit_code=error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}. {remedy_of(error)}."
        return _fail(arguments, ErrorKind.STORAGE, message=message, exit_code=1)
    except BaseException as error:
        if is_panic(error):
            message = (
                f"a library gave up on its input: {first_line(error)}. Check what was given to the command."
            )
            return _fail(arguments, ErrorKind.STORAGE, message=message, exit_code=1)
        if not isinstance(error, KeyboardInterrupt | typer.Abort):
            raise
        code = InterruptedRunError.exit_code
    if code == InterruptedRunError.exit_code:  # typer itself catches a KeyboardInterrupt of a command
        message = (
            "interrupted at once. What was written before is kept. The same command goes on, or begins anew."
        )
        return _fail(arguments, ErrorKind.INTERRUPTED, message=message, exit_code=code)
    return int(code or 0)


def _refuse_slips(arguments: Sequence[str]) -> None:
    """Raise InvalidConfigError for an empty argument, or a URL with one slash."""
    for place, argument in enumerate(arguments):
        if argument == "" or re.fullmatch(r"--[\w-]+=", argument):
            where = argument.rstrip("=") or (
                f"what follows {arguments[place - 1]}" if place else "the command"
            )
            raise InvalidConfigError(
                f"{where} is empty, like a shell variable that was never set. Give a value, or leave it out."
            )
        slip = _ONE_SLASH.fullmatch(argument)
        if slip is not None:
            url = without_secrets(f"{slip['scheme']}://{slip['path']}")
            raise InvalidConfigError(
                f"{slip['option'] or ''}{slip['scheme']}:/... is a URL with one slash. Write {url}, or "
                f"./{url.replace('://', ':/')} for a folder of that name."
            )


def _fail(arguments: Sequence[str], kind: ErrorKind, *, message: str, exit_code: int) -> int:
    """Print an error, also as JSON with --json, and return the exit code. Passwords in URLs are left out."""
    message = hide_secrets(message)
    print_error(message)
    if "--json" in arguments and kind is not ErrorKind.VERIFICATION_FAILED:
        with suppress(OSError):  # stdout itself may be what failed
            print_json({"error": {"kind": kind, "message": message}})
    return exit_code
