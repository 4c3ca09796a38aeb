"""Write models as files of OpenVINO, whole or in 8 bit."""

import io
import logging
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from torch import Tensor

from minilm_cache.errors import DeviceError, needs
from minilm_cache.models.exported import last_line

with needs("--openvino", "openvino"):
    import nncf
    import openvino
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix


def convert(file: Path, out: Path, batches: Sequence[Mapping[str, Tensor]] | None) -> None:
    """Write an ONNX file as one of OpenVINO: `out`, and its weights next to it.

    In 8 bit, weights and activations are rounded by ranges that are taken from inputs, and outliers of
    activations are moved into weights first (SmoothQuant, arXiv 2211.10438). Weights use seven of the eight
    bits, as in `onnx.quantise`.

    Args:
        file: whole ONNX file.
        out: .xml file to write.
        batches: inputs of the model by name, each of one text, that the ranges of 8 bit are taken from. None
            means that weights stay in float32.

    Raises:
        DeviceError: OpenVINO cannot read or convert the file.
        OSError: the file cannot be written.
    """
    nncf.set_log_level(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):  # nncf draws progress bars where results are printed
            _convert(file, out, batches)
    except Exception as error:
        raise DeviceError(
            f"OpenVINO cannot convert this model: {last_line(error)}. Use --onnx instead."
        ) from error


def _convert(file: Path, out: Path, batches: Sequence[Mapping[str, Tensor]] | None) -> None:
    model = openvino.Core().read_model(file)
    if batches is not None:
        arrays = [{name: value.numpy() for name, value in batch.items()} for batch in batches]
        model = nncf.quantize(
            model,
            nncf.Dataset(arrays),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(arrays),
            advanced_parameters=AdvancedQuantizationParameters(overflow_fix=OverflowFix.ENABLE),
        )
    openvino.save_model(model, out, compress_to_fp16=False)
