"""`minilm-cache train`: students from a cache."""

import os
from collections.abc import Sequence
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
    DeviceOption,
    EpochsOption,
    EvalStepsOption,
    JsonOption,
    LrOption,
    MaxGradNormOption,
    ObjectiveOption,
    PrecisionOption,
    PresetOption,
    RelationHeadsOption,
    ResumeOption,
    StepsOption,
    WarmupOption,
    WeightDecayOption,
    chosen_cache,
    home,
    quiet_libraries,
)
from minilm_cache.config import TrainConfig, make_config
from minilm_cache.train.presets import describe_preset, with_preset
from minilm_cache.train.record import RunIdentity, StudentRecord, measure_in_words

if TYPE_CHECKING:
    from minilm_cache.train.run import TrainResult


def train(  # noqa: PLR0913 - one parameter for each option
    arch: ArchOption,
    cache: Annotated[
        str | None,
        typer.Argument(
            metavar="[CACHE]", help="Folder or URL of the cache [default: the newest complete one]"
        ),
    ] = None,
    preset: PresetOption = None,
    objective: ObjectiveOption = None,
    relation_heads: RelationHeadsOption = None,
    value_relation: Annotated[
        bool, typer.Option("--value-relation/--no-value-relation", help="Of minilm: learn it, too, or not")
    ] = True,
    query_key_relations: Annotated[
        bool, typer.Option("--query-key-relations", help="Of minilm: learn query and key relations, too")
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            help="Whose loss, where they differ: the authors' published code (authors) or their equations "
            "(paper); of tinybert, tinybert-prediction, distilbert, bert-pkd, mobilebert [default: authors]"
        ),
    ] = None,
    patience: Annotated[
        float | None, typer.Option(help="Weight of the patient loss of bert-pkd [default: 500; paper: 100]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="What logits are divided by, for bert-pkd [default: 10; paper: 1] and tinybert-prediction "
            "[default: 1]"
        ),
    ] = None,
    ground_truth: Annotated[
        float | None, typer.Option(help="Share of the tokens themselves in targets of mlm-kd [default: 0]")
    ] = None,
    layer_map: Annotated[
        str | None,
        typer.Option(
            help="Layers that learn: last, last-two, first-last, all, top, bottom, from a cache of --layers; "
            "or of tinybert and bert-pkd all [default: last]"
        ),
    ] = None,
    teacher_layer: Annotated[
        int | None, typer.Option(help="Layer of the teacher to learn from [default: the cache's last]")
    ] = None,
    steps: StepsOption = None,
    epochs: EpochsOption = None,
    batch_size: BatchSizeOption = None,
    lr: LrOption = None,
    warmup: WarmupOption = None,
    weight_decay: WeightDecayOption = None,
    max_grad_norm: MaxGradNormOption = None,
    precision: PrecisionOption = None,
    accumulate: AccumulateOption = 1,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations twice, to save memory")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile layers by torch.compile")] = False,
    place: Annotated[str, typer.Option(help="What processes of torchrun divide: data or students")] = "data",
    streams: Annotated[
        int | None,
        typer.Option(help="Streams that an epoch is dealt to [default: one for each process]"),
    ] = None,
    init: Annotated[
        str,
        typer.Option(help="What students begin with: random, teacher-layers, or a folder (model, run)"),
    ] = "random",
    init_teacher: Annotated[
        str | None, typer.Option(help="Whose layers teacher-layers takes: the cache's teacher")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of initial weights, dropout and order")] = 0,
    buffer_shards: Annotated[int, typer.Option(help="Shards whose sequences are shuffled together")] = 4,
    checkpoint_steps: CheckpointStepsOption = 500,
    keep_checkpoints: Annotated[
        int, typer.Option(help="Newest checkpoints that stay after the run; 0: none, while it goes on: one")
    ] = 0,
    eval_steps: EvalStepsOption = None,
    max_hours: Annotated[
        float | None, typer.Option(help="Stop after so many hours, with exit code 130 and the state kept")
    ] = None,
    tracker: Annotated[
        str, typer.Option(help="Beside log.jsonl: none, tensorboard, trackio, wandb or mlflow")
    ] = "none",
    local_bytes: Annotated[
        int, typer.Option(help="Bytes of shards kept on this machine, of a cache at a URL")
    ] = 2**34,
    out: Annotated[Path | None, typer.Option(help="Folder of the run [default: in the cache home]")] = None,
    device: DeviceOption = None,
    resume: ResumeOption = True,
    json: JsonOption = False,
) -> None:
    """Train students from a cache, all of them in one pass, without the teacher.

    Example: minilm-cache train notes.cache --arch 3x384 --arch 4x312:ff1200 --epochs 5
    """
    from minilm_cache.train.run import train as run_train  # noqa: PLC0415 - importing it takes seconds

    given = {
        "objective": objective,
        "relation_heads": relation_heads,
        "steps": steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "warmup": warmup,
        "weight_decay": weight_decay,
    }
    config = make_config(
        TrainConfig,
        **with_preset(preset, given),
        arch=tuple(arch),
        value_relation=value_relation,
        query_key_relations=query_key_relations,
        form=form,
        patience=patience,
        temperature=temperature,
        ground_truth=ground_truth,
        layer_map=layer_map,
        init=init,
        init_teacher=init_teacher,
        teacher_layer=teacher_layer,
        max_grad_norm=max_grad_norm,
        precision=precision,
        accumulate=accumulate,
        gradient_checkpointing=gradient_checkpointing,
        compiled=compiled,
        place=place,
        streams=streams,
        keep_checkpoints=keep_checkpoints,
        eval_steps=eval_steps,
        max_hours=max_hours,
        tracker=tracker,
        seed=seed,
        buffer_shards=buffer_shards,
        checkpoint_steps=checkpoint_steps,
        local_bytes=local_bytes,
        device=device,
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        if preset is not None and os.environ.get("RANK", "0") == "0":  # one process of torchrun tells it
            progress.note(describe_preset(preset, config))
        path = cache or chosen_cache(None, progress)
        result = run_train(
            config, path, out, home(), resume=resume, progress=progress, should_stop=should_stop
        )
    if not result.is_first:  # one process tells what all have done
        return
    students = result.record.students
    if json:
        print_json(
            {
                "run": str(result.path),
                "cache": str(path),
                "tokens_per_s": result.tokens_per_s,
                "steps": result.record.identity.steps,
                "students": [
                    {**student.model_dump(mode="json"), "path": _path(result, student)}
                    for student in students
                ],
            }
        )
        return
    rate = "" if result.tokens_per_s is None else f", {result.tokens_per_s:,.0f} tokens/s"
    print_pairs(
        {"run": result.path, "steps": f"{result.record.identity.steps}{rate}"}
        | {student.arch: _path(result, student) or "diverged" for student in students}
    )
    students_table(students, result.record.identity)


def _path(result: "TrainResult", student: StudentRecord) -> str | None:
    return None if student.diverged_at is not None else str(result.student_path(student.arch))


def students_table(students: Sequence[StudentRecord], identity: RunIdentity) -> None:
    """Print what training has made of students."""
    print_table(
        f"{measure_in_words(identity, students[0])} on held-out sequences, before -> after",
        ["student", "parameters", *_measured(students[0])],
        [[student.arch, f"{student.num_parameters:,}", *_changes(student)] for student in students],
    )


def _measured(student: StudentRecord) -> list[str]:
    """Return the relations that the students of a run were looked at for."""
    return sorted(student.held_out_before) if student.held_out_before else ["KL"]


def _changes(student: StudentRecord) -> list[str]:
    before, after = student.held_out_before, student.held_out_after
    if student.diverged_at is not None:
        return [f"diverged, stopped at step {student.diverged_at}"]
    if before is None or after is None:
        return ["nothing held out"]
    return [f"{before[kind]:.4f} -> {after[kind]:.4f}" for kind in sorted(after)]
