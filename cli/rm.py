"""`minilm-cache rm`: removes caches and runs."""

import sys
from typing import Annotated

import typer
from rich.filesize import decimal

from minilm_cache.cli.console import TerminalProgress, print_json, print_table
from minilm_cache.cli.options import JsonOption
from minilm_cache.errors import InvalidConfigError
from minilm_cache.settings import cache_home


def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Folders, or names of caches and runs of the home.")
    ],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also remove what other runs need.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove caches and runs from this machine, after asking.

    A cache that runs of the home or of the same folder were trained from is kept, and so is a run that others
    began with.

    Example: minilm-cache rm notes.cache
    """
    from minilm_cache.workflows.remove import find_removal, remove  # noqa: PLC0415 - it takes seconds

    named = (find_removal(name, cache_home()) for name in names)
    paths = {removal.path.resolve(): removal for removal in named}
    removals = list(paths.values())
    for removal in removals:
        needing = [run for run in removal.needed_by if run.resolve() not in paths]
        if needing and not force:
            runs = ", ".join(run.name for run in needing)
            raise InvalidConfigError(
                f"{removal.path} is needed by {runs}. Remove these, too, or give --force: what they have "
                "trained stays, but cannot be resumed or reported again."
            )
    if not yes:
        rows = [[str(removal.path), decimal(removal.num_bytes)] for removal in removals]
        if json or not sys.stdin.isatty():
            raise InvalidConfigError("there is no terminal to ask on. Give --yes to remove without asking.")
        print_table("To be removed", ["folder", "size"], rows)
        if not typer.confirm("Remove for good?", err=True):
            return
    for removal in removals:
        remove(removal)
        TerminalProgress().note(f"removed {removal.path} ({decimal(removal.num_bytes)})")
    if json:
        num_bytes = sum(removal.num_bytes for removal in removals)
        print_json({"removed": [str(removal.path) for removal in removals], "bytes": num_bytes})
