"""What commands read from the environment: the home of caches, the ranks of a cluster, the newest cache."""

import os
from pathlib import Path

from minilm_cache.errors import InvalidConfigError
from minilm_cache.progress import Progress
from minilm_cache.settings import cache_home

HOME_VARIABLE = "MINILM_CACHE_HOME"
_RANKS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Rank, world size, and the number of the first rank where that is not 0."""


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


def rank_and_world_size(rank: int | None, world_size: int | None, progress: Progress) -> tuple[int, int]:
    """Return the options given, else what torchrun or SLURM say of this process, else a process alone.

    Raises:
        InvalidConfigError: only one of the two is given, or the environment makes no sense.
    """
    if (rank is None) != (world_size is None):
        raise InvalidConfigError("--rank and --world-size go together. Give both, or neither.")
    if rank is not None and world_size is not None:
        return rank, world_size
    for names in _RANKS:
        found = [os.environ.get(name) for name in names]
        if all(value is not None and value.isdecimal() for value in found):
            rank, world_size, *first = (int(value or 0) for value in found)
            rank -= first[0] if first else 0
            if world_size > 1:
                progress.note(f"rank {rank} of {world_size}, as {' and '.join(names)} say")
            return rank, world_size
    return 0, 1


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars and advice off stderr; downloads keep theirs."""
    from transformers.utils import logging  # noqa: PLC0415 - importing it takes long

    logging.set_verbosity_error()
    logging.disable_progress_bar()
