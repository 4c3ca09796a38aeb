"""What a student costs in use: weights, floating point operations, tokens per second beside its teacher."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

_TURNS = 5
_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Of a whole encoder."""

    embedding_parameters: int
    """Weights of embedding tables (words, positions, token types), which cost memory and no time."""
    transformer_parameters: int
    """Weights of the layers (MiniLM, Wang et al. 2020, arXiv 2002.10957, table 4 tells both apart)."""
    num_parameters: int
    """All weights; with norms, projections and the pooler outside layers."""
    flops_per_token: float
    """Of a forward pass, 2 for each multiplication and addition, attention over the sequence counted."""


def model_size(config: PreTrainedConfig, length: int) -> ModelSize:
    """Return the size of an encoder from its configuration; no weights are made.

    Args:
        config: of the model.
        length: tokens of the sequence that floating point operations are counted over.
    """
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation="eager", trust_remote_code=False).eval()
        ids = torch.zeros((1, length), dtype=torch.int64)
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model(input_ids=ids)
    tables = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)]
    return ModelSize(
        embedding_parameters=sum(tables),
        transformer_parameters=sum(map(_num_weights, _layers(model))),
        num_parameters=_num_weights(model),
        flops_per_token=counter.get_total_flops() / length,
    )


def _layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of an encoder: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def _num_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@torch.no_grad()
def inference_rates(
    configs: Mapping[str, PreTrainedConfig], length: int, device: torch.device
) -> dict[str, float]:
    """Return the tokens per second of encoders' forward passes, medians over turns taken one after the other.

    Weights are drawn at random, which changes no time. Batches of 8 sequences; sdpa attention.

    Args:
        configs: of the models, by name.
        length: tokens of each sequence.
        device: where they run.
    """
    models = {name: _random_model(config, device) for name, config in configs.items()}
    ids = torch.zeros((_BATCH_SIZE, length), dtype=torch.int64, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(_TURNS + 1):
        for name, model in models.items():
            started = time.perf_counter()
            model(input_ids=ids)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    return {name: ids.numel() / median(taken[1:]) for name, taken in seconds.items()}


def _random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    model = AutoModel.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
    assert isinstance(model, PreTrainedModel)
    model.eval().to(device)
    return model
