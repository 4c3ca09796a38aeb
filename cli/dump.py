"""`minilm-cache dump`: run a teacher once over a corpus."""

from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs
from minilm_cache.cli.info import fidelity_table, max_kl_in_words
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import (
    CodecOption,
    CorpusOption,
    DeviceOption,
    ForOption,
    JsonOption,
    KOption,
    LabelTokensOption,
    MaskingsOption,
    MaxKlOption,
    MaxLengthOption,
    MaxTokensOption,
    PackingOption,
    ResumeOption,
    RevisionOption,
    ShardTokensOption,
    StoreOption,
    TeacherOption,
    TextColumnOption,
    home,
    quiet_libraries,
    rank_and_world_size,
)
from minilm_cache.config import DumpConfig, make_config
from minilm_cache.errors import InvalidConfigError


def dump(  # noqa: PLR0913 - one parameter for each option
    teacher: TeacherOption,
    corpus: CorpusOption = None,
    text_column: TextColumnOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the cache [default: in the cache home]")] = None,
    objectives: ForOption = None,
    codec: CodecOption = None,
    k: KOption = None,
    select: Annotated[
        str | None, typer.Option(help="pps (unbiased sample) or largest, for topk [default: pps]")
    ] = None,
    tail: Annotated[
        str | None, typer.Option(help="uniform or renormalise, for largest [default: uniform]")
    ] = None,
    max_kl: MaxKlOption = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="last, all, or numbers from 0 on like 2,5,8; several for vectors; --for may need all "
            "[default: last]"
        ),
    ] = None,
    hidden: Annotated[
        str | None,
        typer.Option(help="Hidden states to store: last, all, or numbers; 0 is the embeddings' output"),
    ] = None,
    masked_hidden: Annotated[
        str | None, typer.Option(help="The same of sequences read with tokens masked")
    ] = None,
    first_hidden: Annotated[
        str | None, typer.Option(help="The same of each sequence's first token, [CLS], alone")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Relative error of hidden states [default: 0.1]")
    ] = None,
    labels: Annotated[bool, typer.Option("--labels", help="Store soft labels of masked tokens")] = False,
    label_tokens: LabelTokensOption = None,
    maskings: MaskingsOption = None,
    label_k: Annotated[int | None, typer.Option(help="Entries of each label [default: 32]")] = None,
    label_temperature: Annotated[
        float | None, typer.Option(help="Of the labels [default: 1; with --for distilbert 2]")
    ] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Store the answers of a teacher that classifies")
    ] = False,
    add: Annotated[
        Path | None,
        typer.Option(metavar="CACHE", help="Take over what this cache holds, and compute only the rest"),
    ] = None,
    packing: PackingOption = "packed",
    max_length: MaxLengthOption = 128,
    max_tokens: MaxTokensOption = None,
    shard_tokens: ShardTokensOption = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass")] = 32,
    seed: Annotated[int, typer.Option(help="Of the order of documents and of the sample")] = 0,
    rank: Annotated[
        int | None, typer.Option(help="Number of this process [default: as torchrun or SLURM say]")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Processes that write this cache [default: likewise]")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="ray: run the --world-size ranks as tasks of a Ray cluster")
    ] = None,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    cache_store: StoreOption = None,
    resume: ResumeOption = True,
    json: JsonOption = False,
) -> None:
    """Run a teacher once over a corpus and write its relations into a cache.

    Example: minilm-cache dump --teacher mini --corpus notes.txt --out notes.cache

    Example: minilm-cache dump --teacher mini --corpus notes.txt --for minilm,tinybert --add notes.cache
    """
    from minilm_cache.dump.on_ray import dump_on_ray  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.dump.run import dump as run_dump  # noqa: PLC0415 - importing it takes seconds

    if engine is None:
        this_rank, all_ranks = rank_and_world_size(rank, world_size, TerminalProgress())
    else:
        this_rank, all_ranks = 0, _ranks_of_engine(engine, rank, world_size)
        if cache_store is not None or add is not None or not resume:
            raise InvalidConfigError(
                "--engine does not go with --no-resume, --add or --cache-store (MINILM_CACHE_STORE). Leave "
                "them out; `minilm-cache pull` fetches a cache that is there already."
            )
    config = make_config(
        DumpConfig,
        teacher=teacher,
        corpus=corpus or DumpConfig.model_fields["corpus"].default,
        text_column=text_column,
        packing=packing,
        max_length=max_length,
        max_tokens=max_tokens,
        codec=codec,
        k=k,
        select=select,
        tail=tail,
        max_kl=max_kl,
        layers=layers,
        hidden=hidden,
        masked_hidden=masked_hidden,
        first_hidden=first_hidden,
        max_error=max_error,
        labels=labels or None,
        label_tokens=label_tokens,
        maskings=maskings,
        label_k=label_k,
        label_temperature=label_temperature,
        logits=logits or None,
        shard_tokens=shard_tokens,
        batch_size=batch_size,
        seed=seed,
        rank=this_rank,
        world_size=all_ranks,
        revision=revision,
        device=device,
        **{"for": objectives},
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        if corpus is None:
            progress.note(f"no --corpus given: taking {config.corpus}")
        if engine is not None:
            result = dump_on_ray(config, out, home(), progress=progress, should_stop=should_stop)
        else:
            result = run_dump(
                config,
                out,
                home(),
                resume=resume,
                cache_store=cache_store,
                add=add,
                progress=progress,
                should_stop=should_stop,
            )
    manifest = result.manifest
    if json:
        print_json(
            {
                "cache": str(result.path),
                "shards_written": result.shards_written,
                "shards_kept": result.shards_kept,
                "fingerprint": manifest.fingerprint,
                "complete": manifest.complete,
                "num_tokens": manifest.num_tokens,
                "num_sequences": manifest.num_sequences,
                "num_held_out": manifest.num_held_out,
                "held_out_by": manifest.held_out_by,
                "kl_over_max": manifest.kl_over_max,
                "measured": manifest.measured.model_dump(mode="json") if manifest.measured else None,
            }
        )
        return
    print_pairs(
        {
            "cache": result.path,
            "state": "complete" if manifest.complete else "incomplete: other ranks have shards to write",
            "fingerprint": manifest.fingerprint,
            "shards": f"{result.shards_written} written, {result.shards_kept} there before, "
            f"{len(manifest.shards)} in all",
            "tokens": f"{manifest.num_tokens:,} in {manifest.num_sequences:,} sequences, "
            f"{manifest.held_out_in_words}",
        }
    )
    if manifest.measured is not None:
        fidelity_table(manifest)
    bound = max_kl_in_words(manifest)
    if bound is not None:
        print_pairs({"KL bound": bound})


def _ranks_of_engine(engine: str, rank: int | None, world_size: int | None) -> int:
    """Return how many ranks an engine is to run.

    Raises:
        InvalidConfigError: there is no such engine, or the options do not go with one.
    """
    if engine != "ray":
        raise InvalidConfigError(f"--engine {engine}: there is no such engine. Take ray, or leave it out.")
    if rank is not None or world_size is None:
        raise InvalidConfigError(
            "--engine ray runs every rank itself. Give --world-size, the number of ranks, without --rank."
        )
    return world_size
