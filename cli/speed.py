"""`minilm-cache speed`: what models cost in use, beside a teacher."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_table
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import DeviceOption, JsonOption, RevisionOption, quiet_libraries
from minilm_cache.config import make_config


def speed(  # noqa: PLR0913 - one parameter for each option
    models: Annotated[
        list[str],
        typer.Argument(metavar="TEACHER MODEL...", help="mini, hub ids, folders of models or of runs"),
    ],
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Sequences of a pass; may be repeated [default: 1 and 32]")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a sequence; may be repeated [default: 32 and 128]")
    ] = None,
    turns: Annotated[int, typer.Option(help="Passes of each model that are measured, in turns")] = 10,
    precision: Annotated[str, typer.Option(help="Of weights in torch: float32 or bfloat16")] = "float32",
    onnx: Annotated[
        Path | None, typer.Option(help="Folder: export models to ONNX there, and measure these, too")
    ] = None,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Measure parameters, operations, latency and throughput of models, beside the first one's.

    Models take turns on the same batches, so that ratios hold on a busy machine; times are medians.

    Example: minilm-cache speed mini RUN --batch-size 1 --batch-size 64
    """
    from minilm_cache.evaluate.speed import SpeedConfig, compare_speed  # noqa: PLC0415 - takes seconds

    given = {"batch_size": tuple(batch_size or ()), "length": tuple(length or ())}
    config = make_config(
        SpeedConfig,
        **{name: values for name, values in given.items() if values},
        turns=turns,
        precision=precision,
        onnx=onnx,
        revision=revision,
        device=device,
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        found = compare_speed(config, models, progress=progress, should_stop=should_stop)
    if json:
        print_json({"models": [asdict(one) for one in found]})
        return
    print_table(
        f"Weights, and operations of a pass over sequences of {max(config.length)} tokens",
        ["model", "parameters", "embeddings'", "layers'", "MFLOPs/token", "of the teacher's"],
        [
            [
                one.model,
                *(f"{count:,}" for count in (one.size.num_parameters, one.size.embedding_parameters)),
                f"{one.size.transformer_parameters:,}",
                f"{one.size.flops_per_token / 1e6:.1f}",
                f"{one.flops_share:.1%}",
            ]
            for one in found
        ],
    )
    print_table(
        f"Passes, medians of {config.turns} turns; speed is times that of {found[0].model} in torch",
        ["model", "runtime", "batch", "length", "latency, ms", "tokens/s", "speed"],
        [
            [
                *(one.model, run.runtime, str(run.batch_size), str(run.length)),
                *(f"{run.latency_ms:.2f}", f"{run.tokens_per_s:,.0f}", f"{run.speedup:.2f}x"),
            ]
            for one in found
            for run in one.passes
        ],
    )
