"""What commands read from their environment: the folder of caches, the newest cache and the rank."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from minilm_cache.errors import InvalidConfigError
from minilm_cache.session import Session
from minilm_cache.settings import NO_HOME, cache_home
from minilm_cache.store.urls import is_url

_RANKS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables of the rank, of the world size and, where the first rank may not be 0, of the first rank and of
the distance of two ranks."""


_OF_ONE_PROCESS: Final = frozenset(
    {
        *("search", "evaluate", "speed", "embeddings", "mine", "rerank", "generate", "augment", "report"),
        *("slice", "truncate", "trim", "head", "export-model", "export", "import", "merge", "demo"),
    }
)
"""Commands that write or measure, and whose work torchrun's processes cannot divide among themselves."""


def refuse_many(arguments: Sequence[str]) -> None:
    """Raise InvalidConfigError where torchrun starts a command that runs in one process."""
    is_many = (os.environ.get("WORLD_SIZE") or "1") != "1"
    if is_many and arguments and arguments[0] in _OF_ONE_PROCESS and not {"-h", "--help"} & {*arguments}:
        raise InvalidConfigError(
            f"{arguments[0]} runs in one process, and WORLD_SIZE is {os.environ['WORLD_SIZE']}. Start it "
            "without torchrun, or unset WORLD_SIZE."
        )


def settle_process(arguments: Sequence[str]) -> None:
    """Refuse a Python without docstrings, and give a user without a home the one of this project.

    Libraries keep files below `~`, and make a folder of that name where there is none.

    Raises:
        InvalidConfigError: transformers cannot work in this process, or there is no home at all.
    """
    if sys.flags.optimize > 1:
        raise InvalidConfigError(
            "PYTHONOPTIMIZE=2 (python -OO) removes docstrings, which transformers needs to load models. "
            "Unset it, or set it to 1."
        )
    asks_for_help = not arguments or {"-h", "--help", "--version"} & {*arguments}
    if not asks_for_help and not os.environ.get("HOME") and not _has_home():
        os.environ["HOME"] = str(_home_to_use())
        os.environ.setdefault("USER", str(os.getuid()))


def _home_to_use() -> Path:
    """Return the folder that libraries take for this user's home.

    Raises:
        InvalidConfigError: MINILM_CACHE_HOME is not set.
    """
    if not os.environ.get("MINILM_CACHE_HOME"):
        raise InvalidConfigError(NO_HOME)
    return cache_home().absolute()


def _has_home() -> bool:
    try:
        return Path.home() != Path("/")
    except RuntimeError:
        return False


def chosen_cache(session: Session) -> Path:
    """Return the newest complete cache, and show which it is."""
    from minilm_cache.store.catalogue import newest_cache  # noqa: PLC0415 - importing it takes seconds

    newest = newest_cache(cache_home())
    session.progress.note(f"no CACHE given: using the newest complete one, {newest}")
    return newest


def chosen_place(cache: str | None, session: Session) -> Path | str:
    """Return the given cache, or its URL. None means the newest complete one here, which is then shown."""
    if cache is None:
        return chosen_cache(session)
    return cache if is_url(cache) else Path(cache)


def is_first_process() -> bool:
    """Return whether this is the process of torchrun that prints, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def note_default_corpus(given: Mapping[str, object], corpus: str, session: Session) -> None:
    """Say which text is read where the command names none."""
    if not given.get("corpus"):
        session.progress.note(f"no --corpus given: using {corpus}")


def rank_and_world_size(rank: int | None, world_size: int | None, session: Session) -> tuple[int, int]:
    """Return rank and world size: as given, else as torchrun or SLURM set them, else 0 and 1.

    Args:
        rank: rank that is given. None means that it is read from the environment.
        world_size: number of ranks that is given. None means that it is read from the environment.
        session: its progress shows a rank that was read from the environment.

    Raises:
        InvalidConfigError: only one of the two is given.
    """
    if (rank is None) != (world_size is None):
        raise InvalidConfigError("--rank and --world-size go together. Give both, or neither.")
    if rank is not None and world_size is not None:
        return rank, world_size
    for names in _RANKS:
        values = [os.environ.get(name) for name in names]
        if all(value is not None and value.isdecimal() for value in values):
            rank, world_size, *first = (int(value or 0) for value in values)
            rank = (rank - (first[0] if first else 0)) // (first[1] if len(first) > 1 and first[1] else 1)
            if rank >= world_size:
                raise InvalidConfigError(
                    f"{' and '.join(names)} make this rank {rank} of {world_size}. Give --rank and "
                    "--world-size."
                )
            if world_size > 1:
                session.progress.note(f"rank {rank} of {world_size}, from {' and '.join(names)}")
            return rank, world_size
    return 0, 1


def quiet_libraries() -> None:
    """Turn off the progress bars and hints of libraries on stderr, except those of downloads."""
    from transformers.utils import logging  # noqa: PLC0415 - importing it takes long

    logging.set_verbosity_error()
    logging.disable_progress_bar()
