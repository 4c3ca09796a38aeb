"""Settings of an export of a model."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from minilm_cache.errors import InvalidConfigError
from minilm_cache.settings import ColumnSettings, RevisionSettings

FormName = Literal["torch", "onnx", "onnx-int8", "openvino", "openvino-int8"]
"""A form in which a model runs on a CPU."""


class ExportModelConfig(RevisionSettings, ColumnSettings):
    """Settings of an export of a model: what shall run it, how exactly, and what it may lose."""

    group = "Export"
    onnx: bool = False
    """Write a file that onnxruntime runs."""
    openvino: bool = False
    """Write a file that OpenVINO runs, which is the faster one on most Intel and AMD processors."""
    int8: bool = False
    """Store and multiply weights in 8 bit: about a quarter of the size, and a multiple of the speed on
    processors with instructions for it."""
    corpus: str | None = None
    """Text that the export is fitted to and judged by: a folder or URL of a cache, `python-docs`, a file, a
    folder of files, or `hf:ID[:CONFIG][:SPLIT]`. None means the cache that the student was trained from."""
    pair_columns: str | None = None
    """Columns of a record's two texts, with a comma between them, for models that read pairs. None means
    that each document is one text."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Maximum tokens of a text, or of a pair of texts."""
    texts: Annotated[int, Field(ge=8, le=100_000)] = 256
    """Maximum number of texts that the export is fitted to; as many others judge it."""
    min_cosine: Annotated[float, Field(ge=-1, le=1)] = 0.99
    """Minimum mean cosine of the export's vectors with the model's own. For a classifier or a cross-encoder:
    the cosine of all centred predictions, which for one score is their correlation. Below it nothing is
    written."""
    retrieval: Path | None = None
    """Retrieval data of your own that nDCG@10 is measured on, before and after: a .jsonl file of `question`
    and `answer`, or a folder in BEIR's layout. None means that it is not measured."""
    data: str | None = None
    """Folder of STS-B in GLUE's layout, or a folder of such folders, that the Spearman correlation is
    measured on, before and after; `hf` for the hub. None means that it is not measured."""
    max_drop: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Maximum points, of 100, that `--retrieval` and `--data` may lose. Beyond it nothing is written."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> "ExportModelConfig":
        if self.onnx == self.openvino:
            raise ValueError("give either --onnx (for onnxruntime) or --openvino")
        measures = self.retrieval is not None or self.data is not None
        if not measures and self.max_drop != type(self).model_fields["max_drop"].default:
            raise ValueError(
                "--max-drop needs --retrieval or --data. Add one of them, or leave out --max-drop"
            )
        return self

    @property
    def runtime(self) -> Literal["onnx", "openvino"]:
        """What will run the model."""
        return "onnx" if self.onnx else "openvino"


def no_texts(name: str) -> InvalidConfigError:
    """Return the error of a model that no run trained, where no text is given."""
    return InvalidConfigError(
        f"{name} is no student of a run, so its texts are not known. Give --corpus: a cache, or text such as "
        "it will read."
    )
