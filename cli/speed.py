"""`minilm-cache speed`: measures the cost of running models, compared with a teacher."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from minilm_cache.cli.console import print_json, print_table
from minilm_cache.cli.environment import quiet_libraries
from minilm_cache.cli.interrupt import stoppable_session
from minilm_cache.cli.options import ComparedModelsArgument, Given, JsonOption, options
from minilm_cache.evaluate.settings import SpeedConfig
from minilm_cache.settings import validated

if TYPE_CHECKING:
    from minilm_cache.evaluate.speed import ModelSpeed


@options(SpeedConfig)
def speed(
    given: Given,
    *,
    models: ComparedModelsArgument,
    json: JsonOption = False,
) -> None:
    """Measure size, latency and throughput of models against the first.

    Models take turns on the same batches, so that ratios are valid on a busy machine; times are medians.

    Example: minilm-cache speed mini RUN --batch-size 1 --batch-size 64
    """
    from minilm_cache.evaluate.speed import compare_speed  # noqa: PLC0415 - importing it takes seconds

    config = validated(SpeedConfig, given)
    quiet_libraries()
    with stoppable_session() as session:
        speeds = compare_speed(config, models, session=session)
    if json:
        print_json({"models": [asdict(model) for model in speeds]})
    else:
        _print(speeds, config)


def _print(speeds: "list[ModelSpeed]", config: SpeedConfig) -> None:
    print_table(
        f"Parameters, and operations of a pass over sequences of {max(config.length)} tokens",
        ["model", "parameters", "embeddings'", "layers'", "MFLOPs/token", "of the teacher's"],
        [
            [
                model.model,
                *(f"{count:,}" for count in (model.size.num_parameters, model.size.embedding_parameters)),
                f"{model.size.transformer_parameters:,}",
                f"{model.size.flops_per_token / 1e6:.1f}",
                f"{model.flops_share:.1%}",
            ]
            for model in speeds
        ],
    )
    print_table(
        f"Passes, medians of {config.turns} turns; speed is relative to {speeds[0].model} in torch",
        ["model", "runtime", "batch", "length", "latency, ms", "tokens/s", "speed"],
        [
            [
                *(model.model, run.runtime, str(run.batch_size), str(run.length)),
                *(f"{run.latency_ms:.2f}", f"{run.tokens_per_s:,.0f}", f"{run.speedup:.2f}x"),
            ]
            for model in speeds
            for run in model.passes
        ],
    )
