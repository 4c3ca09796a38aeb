"""Export encoders to ONNX files, and run them with onnxruntime."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.errors import DeviceError, InvalidConfigError, first_line
from minilm_cache.models.pooling import SentenceEncoder

try:
    import onnx  # noqa: F401 - torch.onnx.export needs it
    import onnxruntime
    import onnxscript  # noqa: F401 - torch.onnx.export needs it
except ModuleNotFoundError as error:
    raise InvalidConfigError(
        f"--onnx needs {error.name}, which is not installed: pip install 'minilm-cache[onnx]'."
    ) from error

_TOLERANCE: Final = 1e-3
"""Largest allowed difference of outputs between torch and ONNX."""
_MAX_ONE_FILE: Final = 2**30
"""Most bytes of weights that are written into the .onnx file itself, whose format is limited to 2 GiB."""
_INPUTS: Final = ("input_ids", "attention_mask")
_STATES: Final = "last_hidden_state"
_EMBEDDING: Final = "sentence_embedding"


class _Output(nn.Module):
    """An encoder that returns only one tensor."""

    def __init__(self, encoder: PreTrainedModel | SentenceEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the vectors, `(batch, width)`, or the last hidden states, `(batch, length, hidden)`."""
        output = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        tensor: Tensor = output if isinstance(self.encoder, SentenceEncoder) else output.last_hidden_state
        return tensor


def export(encoder: PreTrainedModel | SentenceEncoder, file: Path) -> None:
    """Write an encoder as ONNX, with a batch and a length of any size.

    The output is `sentence_embedding` for an encoder with its pooling, and `last_hidden_state` for another.

    Args:
        encoder: model in float32 on the CPU.
        file: file to write. Weights of more than 1 GiB are written to a second file next to it.

    Raises:
        DeviceError: torch cannot export the model.
        OSError: the file cannot be written.
    """
    output = _EMBEDDING if isinstance(encoder, SentenceEncoder) else _STATES
    ids = torch.ones((2, 16), dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    num_bytes = 4 * sum(weight.numel() for weight in encoder.parameters())
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch itself, which users cannot act on
        logger.setLevel(logging.ERROR)
        try:
            torch.onnx.export(
                _Output(encoder).eval(),
                (ids, torch.ones_like(ids)),
                file,
                input_names=_INPUTS,
                output_names=[output],
                dynamic_shapes=dict.fromkeys(_INPUTS, sizes),
                dynamo=True,
                external_data=num_bytes > _MAX_ONE_FILE,
                verbose=False,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise DeviceError(f"torch cannot export this model to ONNX: {first_line(error)}.") from error
        finally:
            logger.setLevel(level)


def session(file: Path, device: torch.device) -> Callable[[Tensor, Tensor], Any]:
    """Return a function that runs an ONNX file on ids and mask, and returns its output.

    Raises:
        DeviceError: the installed onnxruntime does not support the device, or cannot read the file.
    """
    provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise DeviceError(f"onnxruntime has no {provider}. Install onnxruntime-gpu, or give --device cpu.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other models run in between
    try:
        opened = onnxruntime.InferenceSession(file, options, providers=[provider])
    except Exception as error:
        raise DeviceError(f"onnxruntime cannot read {file}: {first_line(error)}.") from error

    def run(ids: Tensor, mask: Tensor) -> Any:  # noqa: ANN401 - a NumPy array, which onnxruntime does not type
        return opened.run(None, {"input_ids": ids.cpu().numpy(), "attention_mask": mask.cpu().numpy()})[0]

    return run


@torch.no_grad()
def check_same(
    encoder: PreTrainedModel | SentenceEncoder, run: Callable[[Tensor, Tensor], Any], name: str
) -> float:
    """Return the greatest difference of outputs between an encoder and its ONNX file.

    The batch has another shape than that of the export.

    Args:
        encoder: model that was exported.
        run: function from `session` that runs the file.
        name: name of the model, for the error message.

    Raises:
        DeviceError: the difference is more than 1e-3.
    """
    config = encoder.model.config if isinstance(encoder, SentenceEncoder) else encoder.config
    ids = torch.arange(5, 5 + 3 * 24).reshape(3, 24) % config.vocab_size
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    expected = _Output(encoder)(ids, mask)
    differences = (torch.from_numpy(np.asarray(run(ids, mask))) - expected).abs()
    if differences.dim() > 2:  # noqa: PLR2004 - hidden states: those of padding may differ
        differences = differences[mask.bool()]
    difference = float(differences.max())
    if difference > _TOLERANCE:
        raise DeviceError(
            f"{name}: outputs in ONNX differ from torch by {difference:.2g}. Do not use the file."
        )
    return difference
