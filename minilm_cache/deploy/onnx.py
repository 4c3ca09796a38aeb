"""Write models as files of ONNX, whole or in 8 bit."""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.errors import DeviceError, first_line, needs
from minilm_cache.models.exported import IDS, LOGITS, MASK, POOLED, SEGMENTS, STATES, Run
from minilm_cache.models.load import has_sides, is_classifier, usable_length
from minilm_cache.models.pooling import SentenceEncoder

with needs("an export", "onnx"):
    import onnx
    import onnxruntime.quantization as quantization
    import onnxscript  # noqa: F401 - torch.onnx.export needs it
    from onnxruntime.quantization.shape_inference import quant_pre_process

TOLERANCE: Final = 1e-3
"""Largest allowed difference of outputs between torch and ONNX."""
_MAX_ONE_FILE: Final = 2**30
"""Most bytes of weights that are written into the .onnx file itself, whose format is limited to 2 GiB."""


class Traced(nn.Module):
    """A model that takes its inputs in order and returns one tensor, as an export needs it."""

    def __init__(self, model: PreTrainedModel | SentenceEncoder, *, reads_pairs: bool = False) -> None:
        """Take a model: its output is pooled vectors, logits or last hidden states.

        Args:
            model: the model.
            reads_pairs: whether it answers from its last hidden states, perhaps about pairs. Models with a
                head of their own always may.
        """
        super().__init__()
        self.model = model
        self.output = STATES
        config: Any = model.model.config if isinstance(model, SentenceEncoder) else model.config
        if isinstance(model, SentenceEncoder):
            self.output = POOLED
        elif is_classifier(config) and model.base_model is not model:  # with its head
            self.output, reads_pairs = LOGITS, True
        self.inputs = (IDS, MASK, SEGMENTS) if reads_pairs and has_sides(config) else (IDS, MASK)

    def forward(self, *values: Tensor) -> Tensor:
        """Return the output for inputs in the order of `inputs`, each `(batch, length)`."""
        output = self.model(**dict(zip(self.inputs, values, strict=True)))
        tensor: Tensor = output if self.output == POOLED else getattr(output, self.output)
        return tensor


def export(model: PreTrainedModel | SentenceEncoder, file: Path, *, reads_pairs: bool = False) -> None:
    """Write a model as ONNX, with a batch and a length of any size.

    The output is `sentence_embedding` for an encoder with its pooling, `logits` for a classifier, and
    `last_hidden_state` for another. Classifiers of families that tell the sides of a pair apart take these.

    Args:
        model: model in float32 on the CPU.
        file: file to write. Weights of more than 1 GiB are written to a second file next to it.
        reads_pairs: same as for `Traced`.

    Raises:
        DeviceError: torch cannot export the model.
        OSError: the file cannot be written.
    """
    traced = Traced(model, reads_pairs=reads_pairs).eval()
    ids = torch.ones((2, 16), dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    num_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    with _quiet("torch.onnx"):
        try:
            torch.onnx.export(
                traced,
                tuple(torch.ones_like(ids) for _ in traced.inputs),
                file,
                input_names=list(traced.inputs),
                output_names=[traced.output],
                dynamic_shapes=(tuple(sizes for _ in traced.inputs),),
                dynamo=True,
                external_data=num_bytes > _MAX_ONE_FILE,
                verbose=False,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            cause: BaseException = error  # what torch says around it ends in the middle of its first line
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise DeviceError(
                f"torch cannot export this model to ONNX: {first_line(cause).rstrip('!')}. Models of BERT's "
                "family can be exported; this one runs in PyTorch."
            ) from error
    # The sizes of the traced batch stand at inner values, which the quantiser would take for facts.
    written = onnx.load(file, load_external_data=False)
    del written.graph.value_info[:]
    onnx.save(written, file)


def quantise(file: Path, out: Path) -> None:
    """Write an ONNX file with weights in 8 bit; activations are rounded while it runs, by their own range.

    Weights of a matrix are rounded by the range of each column, and use seven of the eight bits: on
    processors without VNNI, sums of products of two 8-bit numbers do not fit their 16-bit registers.

    Args:
        file: whole file.
        out: file to write.

    Raises:
        DeviceError: onnxruntime cannot read or convert the file.
        OSError: the file cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as folder, _quiet("root"):
        prepared = Path(folder) / file.name
        large = sum(each.stat().st_size for each in file.parent.iterdir()) > _MAX_ONE_FILE
        try:
            quant_pre_process(file, prepared, skip_symbolic_shape=True, save_as_external_data=large)
            quantization.quantize_dynamic(
                prepared,
                out,
                weight_type=quantization.QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
                use_external_data_format=large,
            )
        except Exception as error:
            raise DeviceError(
                f"onnxruntime cannot convert this model to 8 bit: {first_line(error)}. Leave out --int8."
            ) from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Show no warnings of libraries, which users cannot act on."""
    logger = logging.getLogger(name)
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


@torch.no_grad()
def check_same(
    model: PreTrainedModel | SentenceEncoder, run: Run, name: str, *, reads_pairs: bool = False
) -> float:
    """Return the greatest difference of outputs between a model and its whole file.

    The batch has another shape than that of the export.

    Args:
        model: model that was exported.
        run: function that runs the file.
        name: name of the model, for the error message.
        reads_pairs: same as for `Traced`.

    Raises:
        DeviceError: the difference is more than `TOLERANCE`.
    """
    traced = Traced(model, reads_pairs=reads_pairs).eval()
    plain = model.model if isinstance(model, SentenceEncoder) else model
    assert isinstance(plain, PreTrainedModel), "an exported model is not exported again"
    config, length = plain.config, usable_length(plain, 24)
    ids = torch.arange(5, 5 + 3 * length).reshape(3, length) % config.vocab_size
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    sides = torch.zeros_like(ids)
    sides[:, length // 3 :] = 1
    every: Mapping[str, Tensor] = {IDS: ids, MASK: mask, SEGMENTS: sides}
    values = {each: every[each] for each in traced.inputs}
    differences = (run(values) - traced(*values.values())).abs()
    if traced.output == STATES:  # those of padding may differ
        differences = differences[mask.bool()]
    difference = float(differences.max())
    if not difference <= TOLERANCE:  # also where it is not a number
        raise DeviceError(
            f"{name}: outputs of the exported file differ from torch by {difference:.2g}, so "
            "nothing is kept. Use the model in torch, or another runtime."
        )
    return difference
