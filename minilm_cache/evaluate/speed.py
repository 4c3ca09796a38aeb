"""What models cost in use: weights, operations, latency and throughput beside a teacher's, in one run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minilm_cache.errors import InterruptedRunError
from minilm_cache.evaluate.models import Evaluated, find_models
from minilm_cache.evaluate.settings import SpeedConfig
from minilm_cache.models.device import choose_device, enough_memory
from minilm_cache.models.load import load_model
from minilm_cache.models.saving import saving
from minilm_cache.models.size import ModelSize, model_size, seconds_in_turns
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.store.durable import new_folder, refuse_existing, refuse_file

TORCH: Final = "torch"
ONNX: Final = "onnx"
ONNX_FILE: Final = "model.onnx"
_MILLISECONDS: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward pass of a model, medians over turns."""

    runtime: str
    """torch or onnx."""
    batch_size: int
    length: int
    latency_ms: float
    tokens_per_s: float
    speedup: float
    """Of the first model's time in torch over this one's, same batch and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpeed:
    """A model and its passes."""

    model: str
    size: ModelSize
    """Operations over sequences of the greatest length."""
    flops_share: float
    """Operations of this model over the first one's."""
    passes: list[Pass]
    onnx_difference: float | None
    """Greatest difference of its last states in ONNX; none: it was not exported."""


def compare_speed(
    config: SpeedConfig,
    names: Sequence[str],
    *,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> list[ModelSpeed]:
    """Measure models beside the first one, which is the teacher.

    Args:
        config: batches, lengths, device.
        names: of models, as of an evaluation.
        progress: told of passes.
        should_stop: asked between batches.

    Raises:
        TeacherError: a model is not there.
        InvalidConfigError: a model has fewer positions than a length, or ONNX is not installed.
        DeviceError: a model cannot be exported, or the device lacks memory.
    """
    progress = progress or Silent()
    device = choose_device(config.device)
    models = find_models(names, config.revision, untrained=False)
    longest = max(config.length)
    tokens = [_token(model, longest) for model in models]
    loaded = [load_model(model.folder, attention="sdpa").eval() for model in models]
    runs: dict[str, Callable[[Tensor, Tensor], object]] = {}
    differences: dict[str, float] = {}
    if config.onnx is not None:
        refuse_file(config.onnx, "--onnx")
        for model in models:
            refuse_existing(config.onnx / model.slug, "--onnx")
        for model, weights in zip(models, loaded, strict=True):
            progress.note(f"exporting {model.name}")
            run, differences[model.name] = _export(model, weights, folder=config.onnx, device=device)
            runs[f"{ONNX} {model.name}"] = run
    dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
    torch_runs = {
        f"{TORCH} {model.name}": _forward(weights.to(device, dtype))
        for model, weights in zip(models, loaded, strict=True)
    }
    passes = list(
        _passes(
            {**torch_runs, **runs},
            config,
            token=min(tokens),
            device=device,
            progress=progress,
            should_stop=should_stop,
        )
    )
    sizes = {
        model.name: model_size(weights.config, longest) for model, weights in zip(models, loaded, strict=True)
    }
    first = sizes[models[0].name].flops_per_token
    return [
        ModelSpeed(
            model=model.name,
            size=sizes[model.name],
            flops_share=sizes[model.name].flops_per_token / first,
            passes=[one for name, one in passes if name == model.name],
            onnx_difference=differences.get(model.name),
        )
        for model in models
    ]


def _token(model: Evaluated, longest: int) -> int:
    return int(model.tokenizer(longest, "--length").cls_token_id)


def _export(
    model: Evaluated, weights: PreTrainedModel, *, folder: Path, device: torch.device
) -> tuple[Callable[[Tensor, Tensor], object], float]:
    from minilm_cache.evaluate.onnx import check_alike, export, session  # noqa: PLC0415 - an extra

    path = folder / model.slug
    with saving("write model", path), new_folder(path) as new:
        export(weights, new / ONNX_FILE)
        difference = check_alike(weights, session(new / ONNX_FILE, torch.device("cpu")), model.name)
    return session(path / ONNX_FILE, device), difference


def _forward(model: PreTrainedModel) -> Callable[[Tensor, Tensor], object]:
    def run(ids: Tensor, mask: Tensor) -> object:
        return model(input_ids=ids, attention_mask=mask)

    return run


def _passes(
    runs: Mapping[str, Callable[[Tensor, Tensor], object]],
    config: SpeedConfig,
    *,
    token: int,
    device: torch.device,
    progress: Progress,
    should_stop: ShouldStop,
) -> Iterator[tuple[str, Pass]]:
    sweep = list(dict.fromkeys(product(config.batch_size, config.length)))
    progress.start("speed", len(sweep) * len(runs) * (config.turns + 1), "passes")
    for batch_size, length in sweep:
        if should_stop():
            raise InterruptedRunError("interrupted: nothing is kept of a comparison of speeds. Run it again.")
        with enough_memory(device, "Take a lower --batch-size or --length"):
            ids = torch.full((batch_size, length), token, device=device)
            mask = torch.ones_like(ids)
        seconds: dict[str, float] = {}
        # Runtimes keep threads of their own, which wait busily for more: they take turns apart.
        for runtime in (TORCH, ONNX):
            own = {name: run for name, run in runs.items() if name.partition(" ")[0] == runtime}
            passes = {name: partial(run, ids, mask) for name, run in own.items()}
            with enough_memory(device, "Take a lower --batch-size or --length"):
                seconds |= seconds_in_turns(passes, device, config.turns)
        progress.advance(len(runs) * (config.turns + 1))
        first = next(iter(seconds.values()))
        for name, taken in seconds.items():
            runtime, _, model = name.partition(" ")
            yield (
                model,
                Pass(
                    runtime=runtime,
                    batch_size=batch_size,
                    length=length,
                    latency_ms=taken * _MILLISECONDS,
                    tokens_per_s=batch_size * length / taken,
                    speedup=first / taken,
                ),
            )
