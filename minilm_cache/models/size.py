"""What a model costs in use: weights, floating point operations, tokens per second."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

from minilm_cache.errors import CacheCorruptError
from minilm_cache.models.load import check_positions
from minilm_cache.models.student import build_model

_TURNS: Final = 5
_BATCH_SIZE: Final = 8
_MAX_PARAMETERS: Final = 2**32
"""Greatest number of weights of a model that is timed: a stranger's configuration must not fill memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of a whole encoder."""

    embedding_parameters: int
    """Weights of embedding tables (words, positions, token types), which cost memory and no time."""
    transformer_parameters: int
    """Weights of the layers (MiniLM, Wang et al. 2020, arXiv 2002.10957, table 4 lists them separately)."""
    num_parameters: int
    """All weights, also norms, projections and the pooler outside layers."""
    flops_per_token: float
    """Operations of a forward pass, including attention; a multiplication and an addition count as 2."""
    stopped_flops_per_token: float
    """Operations of the layers up to the queries, keys and values of the last layer, where a training of
    relations stops."""

    def pass_flops(self, *, stops_early: bool) -> float:
        """Return the operations per token of a pass, which may stop at the last queries, keys and values."""
        return self.stopped_flops_per_token if stops_early else self.flops_per_token


def model_size(config: PreTrainedConfig, length: int) -> ModelSize:
    """Return the size of an encoder from its configuration; no weights are made.

    Args:
        config: configuration of the model.
        length: tokens of the sequence that floating point operations are counted over.

    Raises:
        CacheCorruptError: the configuration does not describe a model.
        InvalidConfigError: the model has fewer positions than `length`.
    """
    with torch.device("meta"):
        model = build_model(config, "eager").eval()
        ids = torch.zeros((1, length), dtype=torch.int64)
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            check_positions(
                lambda ids: model(input_ids=ids),
                config,
                name=f"a model of the family {config.model_type}",
                ids=ids,
            )
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    depth, total = config.num_hidden_layers, counter.get_total_flops()
    name, layers = _layers(model, depth)
    if layers is None:  # ALBERT's layers are one layer that runs several times
        transformer, stopped = _num_weights(model) - tables, total * (depth - 1) / depth
    else:
        transformer, counts = sum(map(_num_weights, layers)), counter.get_flop_counts()
        names = [f"{type(model).__name__}.{name}.{number}" for number in range(depth - 1)]
        stopped = sum(sum(counts[name].values()) for name in names)
    vectors = 3 * 2 * getattr(config, "true_hidden_size", config.hidden_size) ** 2
    return ModelSize(
        embedding_parameters=tables,
        transformer_parameters=transformer,
        num_parameters=_num_weights(model),
        flops_per_token=total / length,
        stopped_flops_per_token=stopped / length + vectors,
    )


def _layers(model: nn.Module, depth: int) -> tuple[str, nn.ModuleList | None]:
    """Return the name and the list of an encoder's layers: the outermost list of `depth` modules.

    None means that there is no such list, because layers share their weights.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return next((pair for pair in lists if len(pair[1]) == depth), ("", None))


def _num_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@dataclass(frozen=True, slots=True)
class Timed:
    """A model whose speed is to be measured."""

    config: PreTrainedConfig
    length: int
    """Tokens of each sequence."""


def inference_rates(models: Mapping[str, Timed], device: torch.device) -> dict[str, float]:
    """Return the tokens per second of encoders' forward passes, medians over turns of all models.

    Weights are random, which does not change the time. Batches have 8 sequences; attention is sdpa.

    Args:
        models: models by name.
        device: device that they run on.

    Raises:
        CacheCorruptError: a configuration does not describe a model, or has more than 2**32 weights.
    """
    built = {name: _random_model(timed, device) for name, timed in models.items()}
    ids = {
        name: torch.zeros((_BATCH_SIZE, timed.length), dtype=torch.int64, device=device)
        for name, timed in models.items()
    }
    passes = {name: partial(model, input_ids=ids[name]) for name, model in built.items()}
    seconds = seconds_in_turns(passes, device, _TURNS)
    return {name: _BATCH_SIZE * models[name].length / taken for name, taken in seconds.items()}


@torch.no_grad()
def seconds_in_turns(
    passes: Mapping[str, Callable[[], object]], device: torch.device, turns: int
) -> dict[str, float]:
    """Return the seconds of each pass by name: medians over turns, in each of which every pass runs once.

    Args:
        passes: functions to time, by name.
        device: device that they compute on.
        turns: number of measured turns; one more comes first and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(turns + 1):
        for name, run in passes.items():
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    return {name: median(taken[1:]) for name, taken in seconds.items()}


def _random_model(timed: Timed, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        num_weights = _num_weights(build_model(timed.config, "sdpa"))
    if num_weights > _MAX_PARAMETERS:
        raise CacheCorruptError(f"a configuration asks for {num_weights:,} weights. Fetch the cache again.")
    model: nn.Module = build_model(timed.config, "sdpa").eval()
    return model.to(device)
