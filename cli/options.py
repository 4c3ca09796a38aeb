"""Options that several commands share, and what they read from the environment."""

import os
from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.config import cache_home
from minilm_cache.errors import InvalidConfigError
from minilm_cache.progress import Progress

HOME_VARIABLE = "MINILM_CACHE_HOME"
_RANKS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Rank, world size, and the number of the first rank where that is not 0."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DeviceOption = Annotated[str | None, typer.Option(help="torch device [default: a GPU where there is one]")]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Take up unfinished work, or refuse a folder that exists."),
]
TeacherOption = Annotated[
    str, typer.Option(help="mini, bert-base, bert-large, xlm-r-base, a folder, or a hub id")
]
CorpusOption = Annotated[
    str | None,
    typer.Option(
        help="python-docs, a .txt/.jsonl/.csv/.parquet file, a folder, or hf:ID [default: python-docs]"
    ),
]
TextColumnOption = Annotated[
    str | None, typer.Option(help="Column with the text, in records [default: text]")
]
CodecOption = Annotated[
    str | None,
    typer.Option(help="vectors, topk or dense; --k, --select or --tail mean topk [default: vectors]"),
]
KOption = Annotated[int | None, typer.Option(help="Entries per row, for topk [default: 16]")]
ForOption = Annotated[
    str | None,
    typer.Option("--for", help="Objectives that the cache is to serve, like minilm,tinybert,mlm-kd"),
]
LabelTokensOption = Annotated[
    str | None,
    typer.Option(help="Tokens with labels: masked or all [default: masked; with --for distilbert all]"),
]
MaskingsOption = Annotated[
    int | None, typer.Option(help="Masked readings of each sequence; epochs take turns [default: 1]")
]
MaxKlOption = Annotated[
    float | None, typer.Option(help="KL of each relation, nats, for vectors [default: 0.005]")
]
PackingOption = Annotated[
    str, typer.Option(help="packed (documents joined to full length) or records (one sequence each)")
]
MaxLengthOption = Annotated[int, typer.Option(help="Tokens per sequence, at most")]
MaxTokensOption = Annotated[
    int | None, typer.Option(help="Tokens in all, at most [default: the whole corpus]")
]
ShardTokensOption = Annotated[
    int | None,
    typer.Option(help="Tokens per shard, a power of two [default: 262144, or 256 MiB decoded]"),
]
RevisionOption = Annotated[str | None, typer.Option(help="Of a teacher from the hub")]
StoreOption = Annotated[
    str | None,
    typer.Option(
        envvar="MINILM_CACHE_STORE", help="URL of a store to pull the cache from, if it is there already"
    ),
]
ArchOption = Annotated[
    list[str],
    typer.Option(help="Student shape LAYERSxHIDDEN[:ffN][:hN][:eN][:bN][:sSEED]; repeat for several"),
]
PresetOption = Annotated[
    str | None, typer.Option(help="Recipe: minilm, minilm-6x768, minilmv2 or minilmv2-large")
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(help="What students learn, as docs/objectives.md lists it [default: minilm]"),
]
RelationHeadsOption = Annotated[
    int | None, typer.Option(help="Relation heads of minilmv2 [default: the teacher's heads]")
]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps")]
EpochsOption = Annotated[float | None, typer.Option(help="Passes over the cache [default: 5]")]
BatchSizeOption = Annotated[
    int | None, typer.Option(help="Sequences per step, of all processes [default: 16]")
]
LrOption = Annotated[float | None, typer.Option(help="Peak learning rate [default: 0.001]")]
WarmupOption = Annotated[
    float | None, typer.Option(help="Share of the steps in which the learning rate rises [default: 0.1]")
]
WeightDecayOption = Annotated[float | None, typer.Option(help="Of AdamW [default: 0.01]")]
MaxGradNormOption = Annotated[float | None, typer.Option(help="Clip gradients to this norm")]
PrecisionOption = Annotated[str | None, typer.Option(help="float32 or bfloat16 [default: bfloat16 on a GPU]")]
AccumulateOption = Annotated[
    int, typer.Option(help="Parts that each process cuts its share of a step into, to save memory")
]
CheckpointStepsOption = Annotated[int, typer.Option(help="Steps between checkpoints")]
EvalStepsOption = Annotated[
    int | None, typer.Option(help="Steps between looks at the held-out KL; the best weights are kept")
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
