"""`minilm-cache chain`: teacher, assistants, students, one command."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs, print_table
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import (
    AccumulateOption,
    ArchOption,
    BatchSizeOption,
    CheckpointStepsOption,
    CodecOption,
    CorpusOption,
    DeviceOption,
    EpochsOption,
    EvalStepsOption,
    JsonOption,
    KOption,
    LrOption,
    MaxGradNormOption,
    MaxKlOption,
    MaxLengthOption,
    MaxTokensOption,
    ObjectiveOption,
    PackingOption,
    PrecisionOption,
    PresetOption,
    RelationHeadsOption,
    RevisionOption,
    ShardTokensOption,
    StepsOption,
    StoreOption,
    TeacherOption,
    TextColumnOption,
    WarmupOption,
    WeightDecayOption,
    home,
    quiet_libraries,
)
from minilm_cache.config import ChainConfig, DumpConfig, TrainConfig, make_config
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.presets import describe_preset, with_preset
from minilm_cache.wording import number_text

if TYPE_CHECKING:
    from minilm_cache.chain import ChainRecord, Stage


def chain(  # noqa: PLR0913 - one parameter for each option
    teacher: TeacherOption,
    assistant: Annotated[
        list[str],
        typer.Option(help="Shape of an assistant; repeat for several, each learns from the one before"),
    ],
    arch: ArchOption,
    corpus: CorpusOption = None,
    text_column: TextColumnOption = None,
    compare_direct: Annotated[
        bool, typer.Option("--compare-direct", help="Train the students straight from the teacher, too")
    ] = False,
    codec: CodecOption = None,
    k: KOption = None,
    max_kl: MaxKlOption = None,
    packing: PackingOption = "packed",
    max_length: MaxLengthOption = 128,
    max_tokens: MaxTokensOption = None,
    shard_tokens: ShardTokensOption = None,
    dump_batch_size: Annotated[int, typer.Option(help="Sequences per forward pass of a teacher")] = 32,
    preset: PresetOption = None,
    objective: ObjectiveOption = None,
    relation_heads: RelationHeadsOption = None,
    steps: StepsOption = None,
    epochs: EpochsOption = None,
    batch_size: BatchSizeOption = None,
    lr: LrOption = None,
    warmup: WarmupOption = None,
    weight_decay: WeightDecayOption = None,
    max_grad_norm: MaxGradNormOption = None,
    precision: PrecisionOption = None,
    accumulate: AccumulateOption = 1,
    checkpoint_steps: CheckpointStepsOption = 500,
    eval_steps: EvalStepsOption = None,
    seed: Annotated[int, typer.Option(help="Of every stage")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the chain [default: in the cache home]")] = None,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    cache_store: StoreOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the stages and how far they have come; do nothing")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Dump a teacher, train assistants one from the other, and students from the last of them.

    Each stage is an ordinary cache or run in the chain's folder; what is complete is not done again.

    Example: minilm-cache chain --teacher bert-base --assistant 12x384 --arch 3x384 --compare-direct
    """
    from minilm_cache.chain import chain_folder, check_chain, remarks, run_chain, stages  # noqa: PLC0415 - slow

    recipe = {
        "objective": objective,
        "relation_heads": relation_heads,
        "steps": steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "warmup": warmup,
        "weight_decay": weight_decay,
    }
    config = ChainConfig(
        dump=make_config(
            DumpConfig,
            teacher=teacher,
            corpus=corpus or DumpConfig.model_fields["corpus"].default,
            text_column=text_column,
            packing=packing,
            max_length=max_length,
            max_tokens=max_tokens,
            codec=codec,
            k=k,
            max_kl=max_kl,
            shard_tokens=shard_tokens,
            batch_size=dump_batch_size,
            seed=seed,
            revision=revision,
            device=device,
        ),
        assistants=tuple(assistant),
        train=make_config(
            TrainConfig,
            **with_preset(preset, recipe),
            arch=tuple(arch),
            max_grad_norm=max_grad_norm,
            precision=precision,
            accumulate=accumulate,
            checkpoint_steps=checkpoint_steps,
            eval_steps=eval_steps,
            seed=seed,
            device=device,
        ),
        compare_direct=compare_direct,
    )
    quiet_libraries()
    folder = out or chain_folder(config, home())
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        if corpus is None:
            progress.note(f"no --corpus given: taking {config.dump.corpus}")
        if preset is not None:
            progress.note(describe_preset(preset, config.train))
        if dry_run:
            config = check_chain(config, folder)
            _show_plan(folder, stages(config, folder), json=json)
            return
        result = run_chain(
            config, folder, home(), cache_store=cache_store, progress=progress, should_stop=should_stop
        )
    if json:
        print_json({"chain": str(result.path), **result.record.model_dump(mode="json")})
        return
    print_pairs({"chain": result.path, "report": result.path / "report.html"})
    _show_students(result.record)
    for remark in remarks(result.record.gains):
        print_pairs({"gain": remark})


def _show_plan(folder: Path, planned: "tuple[Stage, ...]", *, json: bool) -> None:
    rows = [
        {
            "does": stage.does,
            "what": ", ".join(stage.arch) or stage.source,
            "path": str(stage.path),
            "state": stage.state(),
        }
        for stage in planned
    ]
    if json:
        print_json({"chain": str(folder), "stages": rows})
        return
    print_table(
        f"Stages of {folder}", ["does", "what", "folder", "state"], [list(row.values()) for row in rows]
    )


def _show_students(record: "ChainRecord") -> None:
    kinds = next((list(one.held_out_kl) for one in record.students if one.held_out_kl), [])
    print_table(
        f"KL({record.teacher}, student) on held-out sequences (nats)",
        ["student", "way", "parameters", *kinds, "sum"],
        [
            [
                one.arch,
                one.way,
                number_text(one.num_parameters, 0),
                *_figures(one.held_out_kl, len(kinds) + 1),
            ]
            for one in record.students
        ],
    )


def _figures(found: dict[RelationKind, float] | None, width: int) -> list[str]:
    if found is None:
        return ["-"] * width
    return [f"{value:.4f}" for value in (*found.values(), sum(found.values()))]
