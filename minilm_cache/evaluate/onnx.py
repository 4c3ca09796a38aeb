"""Encoders as ONNX files, and the runtime that runs them."""

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

try:
    import onnx  # noqa: F401 - torch writes by it
    import onnxruntime
    import onnxscript  # noqa: F401 - likewise
except ModuleNotFoundError as error:
    raise InvalidConfigError(
        f"--onnx needs {error.name}, which is not installed: pip install 'minilm-cache[onnx]'."
    ) from error

_TOLERANCE: Final = 1e-3
_MAX_ONE_FILE: Final = 2**30
"""Bytes of weights that are written into the .onnx itself; its format ends at 2 GiB."""
_INPUTS: Final = ("input_ids", "attention_mask")
_OUTPUT: Final = "last_hidden_state"


class _LastState(nn.Module):
    """An encoder whose answer is its last state alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden states, `(batch, length, hidden)`."""
        states: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return states


def export(model: PreTrainedModel, file: Path) -> None:
    """Write an encoder as ONNX, with a batch and a length of any size.

    Args:
        model: on the CPU, of float32.
        file: that is written; weights of more than 1 GiB lie beside it.

    Raises:
        DeviceError: torch cannot export it.
        OSError: the file system refused.
    """
    whole = _LastState(model).eval()
    ids = torch.ones((2, 16), dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    num_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts of torch that the export passes through
        logger.setLevel(logging.ERROR)
        try:
            torch.onnx.export(
                whole,
                (ids, torch.ones_like(ids)),
                file,
                input_names=_INPUTS,
                output_names=[_OUTPUT],
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
    """Return a function that runs a file on ids and mask, and gives its last hidden states.

    Raises:
        DeviceError: the runtime that is installed has no such device, or cannot read the file.
    """
    provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise DeviceError(f"onnxruntime has no {provider}. Install onnxruntime-gpu, or give --device cpu.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other models take turns
    try:
        opened = onnxruntime.InferenceSession(file, options, providers=[provider])
    except Exception as error:
        raise DeviceError(f"onnxruntime cannot read {file}: {first_line(error)}.") from error

    def run(ids: Tensor, mask: Tensor) -> Any:  # noqa: ANN401 - arrays
        return opened.run(None, {"input_ids": ids.cpu().numpy(), "attention_mask": mask.cpu().numpy()})[0]

    return run


@torch.no_grad()
def check_alike(model: PreTrainedModel, run: Callable[[Tensor, Tensor], Any], name: str) -> float:
    """Return the greatest difference of states between a model and its ONNX file, on another shape.

    Raises:
        DeviceError: it is more than 1e-3.
    """
    ids = torch.arange(5, 5 + 3 * 24).reshape(3, 24) % model.config.vocab_size
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    found = torch.from_numpy(np.asarray(run(ids, mask)))
    difference = float((found - expected)[mask.bool()].abs().max())
    if difference > _TOLERANCE:
        raise DeviceError(
            f"{name} as ONNX answers otherwise than in torch, by {difference:.2g}. Do not use it."
        )
    return difference
