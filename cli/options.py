"""Options that several commands share, and what they read from the environment."""

import os
from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.config import cache_home
from minilm_cache.progress import Progress

HOME_VARIABLE = "MINILM_CACHE_HOME"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DeviceOption = Annotated[str | None, typer.Option(help="torch device [default: a GPU where there is one]")]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Take up unfinished work, or refuse a folder that exists."),
]
CacheArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[CACHE]", help="Folder of the cache [default: the newest complete one]"),
]


def chosen_cache(cache: Path | None, progress: Progress) -> Path:
    """Return the cache given, else the newest complete one, said aloud."""
    from minilm_cache.cache import newest_cache  # noqa: PLC0415 - importing it takes seconds

    if cache is not None:
        return cache
    found = newest_cache(home())
    progress.note(f"no CACHE given: taking the newest complete one, {found}")
    return found


def home() -> Path:
    """Return the folder of caches and runs."""
    return cache_home(os.environ.get(HOME_VARIABLE))


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars and advice off stderr; downloads keep theirs."""
    from transformers.utils import logging  # noqa: PLC0415 - importing it takes long

    logging.set_verbosity_error()
    logging.disable_progress_bar()
