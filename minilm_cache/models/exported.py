"""Models that were exported for a CPU: a file of ONNX or OpenVINO beside a configuration and a tokenizer.

The file has the place that sentence-transformers gives it, so that `SentenceTransformer(FOLDER,
backend="onnx")` opens the folder, too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from minilm_cache.errors import DeviceError, TeacherError, first_line, needs
from minilm_cache.models.files import has_weights
from minilm_cache.models.load import is_classifier, load_model, read_config
from minilm_cache.models.tap import Head
from minilm_cache.store.checked import sha256_files

Runtime = Literal["onnx", "openvino"]
"""What runs an exported model."""
FILES: Final[Mapping[Runtime, str]] = {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}
"""The file of a model, by what runs it. Weights may be in other files of the same folder."""
STATES, LOGITS, POOLED = "last_hidden_state", "logits", "sentence_embedding"
"""Names of outputs."""
IDS, MASK, SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
"""Names of inputs."""
Run = Callable[[Mapping[str, Tensor]], Tensor]
"""Runs a file on its inputs, by name, each `(batch, length)`, and returns its output."""


def runtime_of(folder: Path) -> Runtime | None:
    """Return what runs the model in a folder. None means torch: there are weights, or no model at all.

    Raises:
        TeacherError: the folder has files of both runtimes and no weights.
    """
    if has_weights(folder):
        return None
    found = [runtime for runtime in get_args(Runtime) if (folder / FILES[runtime]).is_file()]
    if len(found) > 1:
        raise TeacherError(f"{folder} holds a model for {' and for '.join(found)}. Keep one in a folder.")
    return found[0] if found else None


def exported_sha256(folder: Path, runtime: Runtime) -> str:
    """Return one SHA-256 (hex) for the files of an exported model."""
    return sha256_files(_files(folder, runtime))


def exported_bytes(folder: Path, runtime: Runtime) -> int:
    """Return the bytes of the files of an exported model."""
    return sum(file.stat().st_size for file in _files(folder, runtime))


def _files(folder: Path, runtime: Runtime) -> list[Path]:
    return sorted(file for file in (folder / FILES[runtime]).parent.iterdir() if file.is_file())


class ExportedModel(nn.Module):
    """Runs the file of an exported model on the CPU; called as the model of transformers is."""

    config: PreTrainedConfig

    def __init__(self, folder: Path, runtime: Runtime) -> None:
        """Open the file of a folder.

        Raises:
            InvalidConfigError: the runtime is not installed.
            TeacherError: the folder has no sound configuration.
            DeviceError: the runtime cannot read the file.
        """
        super().__init__()
        self.config = read_config(folder)
        self.runtime = runtime
        self._file = folder / FILES[runtime]
        self._run, self._inputs = opened(self._file, runtime)
        self._answers = is_classifier(self.config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:  # noqa: ANN401 - one of two outputs of transformers, which have no common base of use
        """Return the last hidden states, `(batch, length, hidden)`, or logits, `(batch, classes)`.

        Args:
            input_ids: token ids, `(batch, length)`, padded at the end.
            attention_mask: 1 at tokens, 0 at padding. None means that nothing is padded.
            token_type_ids: the side of a pair that a token belongs to. None means one side.
            labels: what a classifier should have answered, for its loss; same as for `answered`.

        Raises:
            TeacherError: the file is that of a model of another kind or width.
            DeviceError: the runtime cannot run it.
        """
        given = {IDS: input_ids, MASK: attention_mask, SEGMENTS: token_type_ids}
        defaults = {MASK: torch.ones_like, SEGMENTS: torch.zeros_like}
        values = {name: given[name] for name in self._inputs}
        run = {name: defaults[name](input_ids) if value is None else value for name, value in values.items()}
        output = self._run(run)
        # The numbers of a token or of a text: those of another model's file would be taken for its own.
        size, dimensions = (self.config.num_labels, 2) if self._answers else (self.config.hidden_size, 3)
        if output.ndim != dimensions or output.shape[-1] != size:
            what = "text" if self._answers else "token"
            raise TeacherError(
                f"{self._file} gives numbers of shape {tuple(output.shape)}, and the model of its "
                f"config.json gives {size} for each {what}. Export it again: `minilm-cache export-model`."
            )
        if self._answers:
            return answered(output, labels)
        return BaseModelOutput(last_hidden_state=output)


def answered(logits: Tensor, labels: Tensor | None) -> SequenceClassifierOutput:
    """Return the logits of a classifier, `(batch, labels)`, and their loss where there are labels.

    The loss is the cross entropy in nats, and for values on a scale the squared error, as for transformers'
    own classifiers.

    Args:
        logits: what it answered.
        labels: classes, or values on a scale, `(batch,)`. None means that there is no loss.
    """
    loss = None
    if labels is not None:
        loss = F.mse_loss(logits[:, 0], labels) if logits.shape[1] == 1 else F.cross_entropy(logits, labels)
    return SequenceClassifierOutput(loss=loss, logits=logits)


def load_to_run(folder: Path, head: Head | None = None) -> "PreTrainedModel | ExportedModel":
    """Load a model that only runs: with its weights, or what was exported, on the CPU.

    Args:
        folder: folder of the model.
        head: head that the model needs. None means the encoder alone.

    Raises:
        TeacherError: the folder holds no such model.
        InvalidConfigError: the runtime of an exported model is not installed.
        DeviceError: the runtime cannot read the file.
    """
    runtime = runtime_of(folder)
    if runtime is None:
        model = load_model(folder, head, attention="sdpa")
        model.eval()
        return model
    return ExportedModel(folder, runtime)


def opened(file: Path, runtime: Runtime) -> tuple[Run, tuple[str, ...]]:
    """Return a function that runs a file on the CPU with as many threads as torch, and its inputs' names.

    Raises:
        InvalidConfigError: the runtime is not installed.
        DeviceError: it cannot read the file, or the file takes other inputs than a model of texts.
    """
    run, names = onnx_session(file) if runtime == "onnx" else openvino_session(file)
    if not {IDS, MASK} <= {*names} <= {IDS, MASK, SEGMENTS}:
        raise DeviceError(
            f"{file} takes {', '.join(names)}, and a model of texts takes {IDS}, {MASK} and perhaps "
            f"{SEGMENTS}. Export it again: `minilm-cache export-model`."
        )
    return run, names


CPU_PROVIDER: Final = "CPUExecutionProvider"
"""What onnxruntime runs files with on a CPU."""


def onnx_session(file: Path, provider: str = CPU_PROVIDER) -> tuple[Run, tuple[str, ...]]:
    """Return a function that runs an ONNX file, and the names of its inputs.

    Args:
        file: the file.
        provider: what runs it, as onnxruntime names it.

    Raises:
        InvalidConfigError: onnxruntime is not installed.
        DeviceError: onnxruntime cannot read the file, or does not support the device.
    """
    with needs("this model", "onnx"):
        import onnxruntime  # noqa: PLC0415 - an extra
    if provider not in onnxruntime.get_available_providers():
        raise DeviceError(f"onnxruntime has no {provider}. Install onnxruntime-gpu, or give --device cpu.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other models run in between
    try:
        session = onnxruntime.InferenceSession(file, options, providers=[provider])
    except Exception as error:
        raise DeviceError(
            f"onnxruntime cannot read {file}: {first_line(error)}. Export the model again."
        ) from error
    return _runner(file, partial(session.run, None)), tuple(each.name for each in session.get_inputs())


def openvino_session(file: Path) -> tuple[Run, tuple[str, ...]]:
    """Return a function that runs an OpenVINO file, and the names of its inputs.

    Raises:
        InvalidConfigError: openvino is not installed.
        DeviceError: openvino cannot read the file.
    """
    with needs("this model", "openvino"):
        import openvino  # noqa: PLC0415 - an extra
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    try:
        model: Any = openvino.Core().compile_model(file, "CPU", settings)
    except Exception as error:
        raise DeviceError(
            f"openvino cannot read {file}: {last_line(error)}. Export the model again."
        ) from error
    return _runner(file, model), tuple(each.get_any_name() for each in model.inputs)


def _runner(file: Path, compute: Callable[[Mapping[str, npt.NDArray[np.generic]]], Any]) -> Run:
    """Return a function that runs a file, and turns errors of its runtime into a DeviceError."""

    def run(values: Mapping[str, Tensor]) -> Tensor:
        arrays = {name: value.cpu().numpy() for name, value in values.items()}
        try:
            return torch.from_numpy(np.asarray(compute(arrays)[0]))
        except Exception as error:
            raise DeviceError(
                f"{file} cannot be run: {last_line(error)}. Export the model again: `minilm-cache "
                "export-model`."
            ) from error

    return run


def last_line(error: BaseException) -> str:
    """Return the last line of an error, for messages: OpenVINO says first where in its code it arose."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip().rstrip(".: ")
