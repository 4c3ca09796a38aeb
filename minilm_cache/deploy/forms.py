"""The forms in which a model runs on a CPU: torch, ONNX and OpenVINO, the latter two also in 8 bit."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from minilm_cache.models.exported import FILES, Run, Runtime, opened


class Form(NamedTuple):
    """What runs a model, and how exactly."""

    runtime: Runtime
    int8: bool


FORMS: Final[Mapping[str, Form]] = {
    "onnx": Form("onnx", int8=False),
    "onnx-int8": Form("onnx", int8=True),
    "openvino": Form("openvino", int8=False),
    "openvino-int8": Form("openvino", int8=True),
}
"""Forms that are files, by their names."""


def write_form(
    model: PreTrainedModel,
    folder: Path,
    form: Form,
    *,
    inputs: Iterable[Mapping[str, Tensor]],
    name: str,
    reads_pairs: bool = False,
) -> tuple[Run, tuple[str, ...]]:
    """Write the file of a model into a folder, after checking that the whole one answers as torch does.

    Args:
        model: model in float32 on the CPU.
        folder: folder of the export.
        form: runtime and precision.
        inputs: inputs by name, each of one text, that OpenVINO takes the ranges of 8 bit from.
        name: name of the model, for error messages.
        reads_pairs: whether it answers from its last hidden states, perhaps about pairs.

    Returns:
        A function that runs the file, and the names of its inputs.

    Raises:
        InvalidConfigError: a package is not installed.
        DeviceError: the model cannot be exported, or answers otherwise.
        OSError: the file cannot be written.
    """
    from minilm_cache.deploy.onnx import check_same, export, quantise  # noqa: PLC0415 - an extra

    whole, file = folder / FILES["onnx"], folder / FILES[form.runtime]
    for each in {whole.parent, file.parent}:
        each.mkdir()
    export(model, whole, reads_pairs=reads_pairs)
    run, wanted = opened(whole, "onnx")
    check_same(model, run, name, reads_pairs=reads_pairs)
    if form.runtime == "openvino":
        from minilm_cache.deploy.openvino import convert  # noqa: PLC0415 - an extra

        batches = [{key: batch[key] for key in wanted} for batch in inputs] if form.int8 else None
        convert(whole, file, batches)
        shutil.rmtree(whole.parent)
    elif form.int8:
        smaller = whole.with_name("smaller.onnx")
        quantise(whole, smaller)
        for each in whole.parent.glob(f"{whole.name}*"):
            each.unlink()
        smaller.rename(whole)
    return opened(file, form.runtime)
