"""Measure the cost of inference: weights, operations, latency and throughput, relative to the teacher's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.models import Evaluated, find_models
from minilm_cache.evaluate.settings import SpeedConfig
from minilm_cache.models.decoding import GENERATION_FILE, Decoding
from minilm_cache.models.device import choose_device, enough_memory
from minilm_cache.models.exported import CPU_PROVIDER, IDS, MASK, ExportedModel, onnx_session
from minilm_cache.models.generation import TextGenerator, check_generates
from minilm_cache.models.pooling import SentenceEncoder
from minilm_cache.models.student import ModelSize, model_size, seconds_in_turns
from minilm_cache.models.tokenizer import some_token
from minilm_cache.models.truncate import saving
from minilm_cache.session import ALONE, Session
from minilm_cache.store.durable import new_folder, refuse_existing, refuse_file
from minilm_cache.train.folder import refuse_run_as_teacher

TORCH: Final = "torch"
ONNX: Final = "onnx"
GENERATE: Final = "generate"
ONNX_FILE: Final = "model.onnx"
_MILLISECONDS: Final = 1e3
Encoder = PreTrainedModel | SentenceEncoder | ExportedModel
"""A model that gives last hidden states, or one that pools them."""
Run = Callable[[Tensor, Tensor], object]
"""A forward pass of a model on ids and mask, both `(batch, length)`."""


class _Key(NamedTuple):
    """What is measured."""

    runtime: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Cost of a forward pass of a model, or of texts that it generates, as medians over turns."""

    runtime: str
    """torch, onnx or openvino, or `generate` for texts that are generated in torch."""
    batch_size: int
    """Sequences of the pass."""
    length: int
    """Tokens of each sequence."""
    latency_ms: float
    """Milliseconds of the pass, or of all the texts."""
    tokens_per_s: float
    """Tokens that are read a second, or that are generated."""
    speedup: float
    """The first model's time over this one's, for the same batch size and length; of a first model that is
    exported by `--onnx`, too, its time in torch. Generated texts are compared with those of the first model
    that generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpeed:
    """Size of a model and the cost of its passes."""

    model: str
    size: ModelSize
    """Weights and operations, the latter for sequences of the greatest length."""
    num_bytes: int
    """Bytes of its files of weights."""
    flops_share: float
    """Operations of this model over the first one's."""
    passes: list[Pass]
    onnx_difference: float | None
    """Greatest difference of outputs between ONNX and torch. None means no export."""


def compare_speed(config: SpeedConfig, names: Sequence[str], *, session: Session = ALONE) -> list[ModelSpeed]:
    """Measure models relative to the first one, which is the teacher.

    A model whose folder has a `modules.json` is measured with its pooling, and one that `export-model` wrote
    on its own runtime, on the CPU.

    Args:
        config: batch sizes, lengths, device and precision.
        names: names of the models, same as for `evaluate`; the first one is the teacher.
        session: its progress shows the number of passes. Its `should_stop` is called before each batch size
            and length; True stops.

    Returns:
        Measurements of each model, in the order of the models.

    Raises:
        TeacherError: a model does not exist.
        InvalidConfigError: the first model is a run, a model has fewer positions than a length, ONNX is not
            installed, or texts are to be generated and no model does.
        DeviceError: a model cannot be exported, or the device has too little memory.
        StorageError: a folder of --onnx exists already, or cannot be written.
        InterruptedRunError: a stop was requested.
    """
    device = choose_device(config.device)
    refuse_run_as_teacher(names)
    models = find_models(names, config.revision, note=session.progress.note)
    longest = max(config.length)
    # Each model is asked for its tokenizer first, which checks that it has enough positions.
    tokens = [some_token(model.tokenizer(longest, "--length", has_ends=False)) for model in models]
    loaded = [model.encoder().eval() for model in models]
    dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
    generators = _generators(models, config, device, dtype=dtype)
    exported = _export_all(models, loaded, folder=config.onnx, device=device, session=session)
    runs: dict[_Key, Run] = {
        _Key(model.runtime or TORCH, model.name): _forward(_placed(encoder, device, dtype))
        for model, encoder in zip(models, loaded, strict=True)
    }
    runs |= {_Key(ONNX, name): run for name, (run, _) in exported.items()}
    runs |= generators
    passes = list(_passes(runs, config, token=min(tokens), device=device, session=session))
    sizes = {model.name: _size(encoder, longest) for model, encoder in zip(models, loaded, strict=True)}
    teacher_flops = sizes[models[0].name].flops_per_token
    differences = {name: difference for name, (_, difference) in exported.items()}
    return [
        ModelSpeed(
            model=model.name,
            size=sizes[model.name],
            num_bytes=model.num_bytes,
            flops_share=sizes[model.name].flops_per_token / teacher_flops,
            passes=[measured for name, measured in passes if name == model.name],
            onnx_difference=differences.get(model.name),
        )
        for model in models
    ]


def _export_all(
    models: Sequence[Evaluated],
    loaded: Sequence[Encoder],
    *,
    folder: Path | None,
    device: torch.device,
    session: Session,
) -> dict[str, tuple[Run, float]]:
    """Export models to ONNX, and return for each how to run it and how much it differs from torch.

    A folder of None means that nothing is exported.
    """
    if folder is None:
        return {}
    refuse_file(folder, "--onnx")
    for model in models:
        refuse_existing(folder / model.slug, "--onnx")
    exported = {}
    for model, encoder in zip(models, loaded, strict=True):
        if not isinstance(encoder, ExportedModel) and model.runtime is None:
            session.progress.note(f"exporting {model.name}")
            exported[model.name] = _export(model, encoder, folder=folder, device=device)
    return exported


def _export(
    model: Evaluated, encoder: PreTrainedModel | SentenceEncoder, *, folder: Path, device: torch.device
) -> tuple[Run, float]:
    from minilm_cache.deploy.onnx import check_same, export  # noqa: PLC0415 - an extra

    path, provider = folder / model.slug, "CUDAExecutionProvider" if device.type == "cuda" else CPU_PROVIDER
    with saving("write model", path), new_folder(path) as new:
        export(encoder, new / ONNX_FILE)
        difference = check_same(encoder, onnx_session(new / ONNX_FILE)[0], model.name)
    run, _ = onnx_session(path / ONNX_FILE, provider)
    return lambda ids, mask: run({IDS: ids, MASK: mask}), difference


def _placed(encoder: Encoder, device: torch.device, dtype: torch.dtype) -> Encoder:
    """Return an encoder on a device, with its weights in a precision; pooling is always float32."""
    (encoder.model if isinstance(encoder, SentenceEncoder) else encoder).to(dtype)  # type: ignore[arg-type]
    encoder.to(device)  # type: ignore[arg-type]
    return encoder


def _size(encoder: Encoder, length: int) -> ModelSize:
    """Return the size of an encoder, with the linear maps of its pooling."""
    if not isinstance(encoder, SentenceEncoder):
        return model_size(encoder.config, length)
    size = model_size(encoder.model.config, length)
    maps = sum(weight.numel() for weight in encoder.pooler.parameters())
    return replace(size, num_parameters=size.num_parameters + maps)


def _forward(model: Encoder) -> Run:
    def run(ids: Tensor, mask: Tensor) -> object:
        return model(input_ids=ids, attention_mask=mask)

    return run


def _generators(
    models: Sequence[Evaluated], config: SpeedConfig, device: torch.device, *, dtype: torch.dtype
) -> dict[_Key, Run]:
    """Return how each model that was fine-tuned for it generates texts from ids."""
    if config.generate is None:
        return {}
    able = [model for model in models if (model.folder / GENERATION_FILE).is_file()]
    if not able:
        raise InvalidConfigError(
            f"--generate {config.generate}: none of the models was fine-tuned to generate texts. Leave it "
            "out, or name a folder that `minilm-cache evaluate --task squad-qg --keep-models` wrote."
        )
    decoding = Decoding(
        max_source=max(config.length), max_new_tokens=config.generate, min_new_tokens=config.generate - 1
    )
    runs: dict[_Key, Run] = {}
    for model in able:
        generator = TextGenerator.load(model.folder, str(device))
        check_generates(generator.model.model, decoding, model.name, options=("--length", "--generate"))
        generator.model.to(dtype)  # type: ignore[arg-type]
        runs[_Key(GENERATE, model.name)] = partial(generator.generate_ids, decoding=decoding)
    return runs


_NOT_SAVED: Final = "interrupted: a comparison of speeds is not saved. Run it again."


def _passes(
    runs: Mapping[_Key, Run], config: SpeedConfig, *, token: int, device: torch.device, session: Session
) -> Iterator[tuple[str, Pass]]:
    sweep = list(dict.fromkeys(product(config.batch_size, config.length)))
    session.progress.start("speed", len(sweep) * len(runs) * (config.turns + 1), "passes")
    for batch_size, length in sweep:
        session.stop_if_asked(_NOT_SAVED)
        with enough_memory(device, "Take a lower --batch-size or --length"):
            ids = torch.full((batch_size, length), token, device=device)
            mask = torch.ones_like(ids)
        seconds: dict[_Key, float] = {}
        # Idle threads of one runtime wait busily and slow down the other: measure one after the other.
        for runtime in dict.fromkeys(key.runtime for key in runs):
            passes = {key: partial(run, ids, mask) for key, run in runs.items() if key.runtime == runtime}
            with enough_memory(device, "Take a lower --batch-size or --length"):
                seconds |= seconds_in_turns(
                    passes, device, config.turns, before_each=lambda: session.stop_if_asked(_NOT_SAVED)
                )
        session.progress.advance(len(runs) * (config.turns + 1))
        for key, latency_s in seconds.items():
            generates = key.runtime == GENERATE
            first = seconds[next(other for other in runs if (other.runtime == GENERATE) == generates)]
            num_tokens = batch_size * (config.generate if generates and config.generate else length)
            yield (
                key.model,
                Pass(
                    runtime=key.runtime,
                    batch_size=batch_size,
                    length=length,
                    latency_ms=latency_s * _MILLISECONDS,
                    tokens_per_s=num_tokens / latency_s,
                    speedup=first / latency_s,
                ),
            )
