"""`minilm-cache dump`: run a teacher once over a corpus."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs
from minilm_cache.cli.early import (
    refuse_cache_of_others,
    refuse_missing,
    refuse_no_layers,
    refuse_no_prompt,
    refuse_no_text,
    refuse_too_long,
)
from minilm_cache.cli.environment import note_default_corpus, rank_and_world_size
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import (
    EngineOption,
    Given,
    GpusOption,
    JsonOption,
    ResumeOption,
    StoreOption,
    check_engine,
    options,
)
from minilm_cache.cli.tables import fidelity_table
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.fidelity import kl_infinite_because, max_kl_in_words, states_in_words, verdict
from minilm_cache.errors import InvalidConfigError
from minilm_cache.objectives.config import COMPARING
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.durable import refuse_file
from minilm_cache.store.layout import refuse_begun
from minilm_cache.store.urls import is_url, parts_of_url
from minilm_cache.wording import counted

if TYPE_CHECKING:
    from minilm_cache.dump.run import DumpResult


@options(
    DumpConfig,
    leave_out={DumpConfig: ("signal",)},  # their code is registered in Python
    common=(
        *("teacher", "corpus", "text_column", "packing", "max_length", "max_tokens"),
        *("serve", "codec", "layers", "pooled", "device", "out", "add", "json"),
    ),
)
def dump(
    given: Given,
    *,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PLACE",
            help="Folder of the cache, or its URL in a store (s3://, gs://, az://, file://), where "
            "dumps of any machines meet. [default: in the cache home]",
        ),
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option(metavar="CACHE", help="Reuse what this cache holds, and compute only the rest."),
    ] = None,
    engine: EngineOption = None,
    gpus_per_task: GpusOption = None,
    cache_store: StoreOption = None,
    resume: ResumeOption = True,
    json: JsonOption = False,
) -> None:
    """Run a teacher once over a corpus and write its relations or vectors into a cache.

    Example: minilm-cache dump --teacher mini --corpus notes.txt --out notes.cache

    Example: minilm-cache dump --teacher mini --corpus notes.txt --for minilm,tinybert --add notes.cache
    """
    place = out if out is None or is_url(out) else Path(out)
    reuses = cache_store is not None or add is not None or not resume
    if isinstance(place, str) and reuses:
        raise InvalidConfigError(f"--out {out}: {_ONLY_LOCAL}")
    check_engine(engine, gpus_per_task)
    config = _config_of_rank(given) if engine is None else _config_of_engine(given, reuses=reuses)
    _refuse_mistakes(config, place, add=add, resume=resume)
    from minilm_cache.dump.into_store import dump_into_store, dump_on_ray  # noqa: PLC0415 - it takes seconds
    from minilm_cache.dump.run import dump_cache  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        note_default_corpus(given, config.corpus, session)
        if engine is not None:
            result = dump_on_ray(config, out=place, gpus_per_task=gpus_per_task, session=session)
        elif isinstance(place, str):
            result = dump_into_store(config, place, session=session)
        else:
            result = dump_cache(
                config, out=place, resume=resume, cache_store=cache_store, add=add, session=session
            )
    if json:
        print_json(_document(result))
    else:
        _print(result, config)


def _refuse_mistakes(config: DumpConfig, place: Path | str | None, *, add: Path | None, resume: bool) -> None:
    """Raise the error of a mistake that shows without torch."""
    if isinstance(place, Path):
        refuse_file(place)
    elif place is not None:
        parts_of_url(place)
    refuse_missing(teacher=config.teacher, revision=config.revision, corpus=config.corpus, cache=add)
    refuse_no_layers(config)
    refuse_no_prompt(config)
    refuse_no_text(config.corpus, config.text_column, config.pair_columns, truncation=config.truncation)
    refuse_too_long(config.max_length, [config.teacher], config.revision, is_teacher=True)
    if isinstance(place, Path):
        if not resume:
            refuse_begun(place)
        refuse_cache_of_others(config, place)


def _config_of_rank(given: Given) -> DumpConfig:
    """Return the settings, with the rank and world size that are given or that torchrun or SLURM set."""
    rank, world_size = rank_and_world_size(
        given.get("rank"), given.get("world_size"), Session(progress=TerminalProgress())
    )
    return validated(DumpConfig, {**given, "rank": rank, "world_size": world_size})


_ONLY_LOCAL = (
    "--no-resume, --add and --cache-store (MINILM_CACHE_STORE) go with a folder. Leave them out, or dump "
    "into a folder and `minilm-cache push` it."
)


def _config_of_engine(given: Given, *, reuses: bool) -> DumpConfig:
    """Return the settings of a dump by an engine, which cannot reuse other caches."""
    if reuses:
        raise InvalidConfigError(
            "--engine cannot be used with --no-resume, --add or --cache-store (MINILM_CACHE_STORE). "
            "Leave them out; `minilm-cache pull` fetches a cache that exists already."
        )
    return validated(DumpConfig, {**given, "world_size": _ranks_of_engine(given)})


def _ranks_of_engine(given: Given) -> int:
    """Return the number of ranks that an engine runs.

    Raises:
        InvalidConfigError: the options do not fit an engine.
    """
    world_size = given.get("world_size")
    if "rank" in given or world_size is None:
        raise InvalidConfigError(
            "--engine ray runs every rank itself. Give --world-size, the number of ranks, without --rank."
        )
    return int(world_size)


def _document(result: "DumpResult") -> dict[str, Any]:
    manifest = result.manifest
    return {
        "cache": result.place,
        "shards_written": result.shards_written,
        "shards_kept": result.shards_kept,
        "fingerprint": manifest.fingerprint,
        "complete": manifest.complete,
        "num_tokens": manifest.num_tokens,
        "num_sequences": manifest.num_sequences,
        "num_held_out": manifest.num_held_out,
        "held_out_by": manifest.held_out_by,
        "cut": manifest.cut,
        "kl_over_max": manifest.kl_over_max,
        "kl_infinite_because": kl_infinite_because(manifest),
        "verdict": verdict(manifest),
        "measured": manifest.measured,
    }


def _print(result: "DumpResult", config: DumpConfig) -> None:
    manifest = result.manifest
    print_pairs(
        {
            "cache": result.place,
            "state": "complete" if manifest.complete else "unfinished: other ranks have shards to write",
            "fingerprint": manifest.fingerprint,
            "shards": f"{result.shards_written} written, {result.shards_kept} there before, "
            f"{result.num_shards} in all",
            "tokens": f"{manifest.num_tokens:,} in {counted(manifest.num_sequences, 'sequence')}, "
            f"{manifest.held_out_in_words}",
            **({"cut off": manifest.cut.in_words} if manifest.cut else {}),
        }
    )
    if manifest.measured is not None:
        fidelity_table(manifest)
    bound = max_kl_in_words(manifest)
    if bound is not None:
        print_pairs({"KL bound": bound})
    beyond = states_in_words(manifest)
    if beyond is not None:
        print_pairs({"bounds of states": beyond})
    objective = _served(manifest, config)
    if manifest.complete and objective is not None:
        teacher = manifest.identity.teacher
        arch = f"{max(1, teacher.num_layers // 2)}x{teacher.hidden_size}"
        if objective == "mobilebert":  # its students are as deep
            arch = f"{teacher.num_layers}x{teacher.hidden_size}:b{teacher.hidden_size // 4}"
        option = "" if objective == "minilm" else f" --objective {objective}"
        print_pairs({"next": f"minilm-cache train {shlex.quote(result.place)} --arch {arch}{option}"})


def _served(manifest: CacheManifest, config: DumpConfig) -> str | None:
    """Return an objective that a cache surely serves. None means that none does for sure."""
    if config.serve:
        return next((name for name in config.serve if name in COMPARING), config.serve[0])
    identity = manifest.identity
    if identity.num_classes is not None:
        return "score" if identity.num_classes == 1 else "tinybert-prediction"
    if identity.has_relations:
        return "minilm"
    return "embedding" if identity.pooled is not None else None
