"""What an evaluation is told, and what each trial of it was and came to."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from minilm_cache.evaluate.tasks import TASKS, Task
from minilm_cache.settings import FrozenSettings, ModelSettings
from minilm_cache.storage_schema.identity import canonical_sha256

Lr = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TRIAL_FILE = "trial.json"


class EvaluateConfig(ModelSettings):
    """Settings of an evaluation on downstream tasks."""

    group = "Evaluation"
    task: Annotated[tuple[str, ...], Field(min_length=1)]
    """Task: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli, squad, squad2, xnli, xnli-translate-train or
    mlqa; may be repeated."""
    data: str
    """Folder in the official layout, or a folder of such folders; `hf` or `hf:ID` for a repository of the
    hub."""
    grid: Literal["none", "paper"] = "none"
    """Settings to try: one (`none`), or the learning rates and epochs that MiniLM searched over (`paper`)."""
    lr: tuple[Lr, ...] = ()
    """Peak learning rate; may be repeated. None means 3e-5, and 6e-5 for SQuAD."""
    epochs: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Passes over the training set; may be repeated. None means 3, and 2 for MLQA."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples per step. None means 32, as in the papers."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of trials of each setting, with seeds 0, 1, ..."""
    max_length: Annotated[int, Field(ge=16, le=2**16)] | None = None
    """Most tokens of an example. None means 128, and 384 for questions with contexts."""
    max_train: Annotated[int, Field(ge=1)] | None = None
    """Most training examples, drawn once for all models. None means all of them."""
    max_dev: Annotated[int, Field(ge=1)] | None = None
    """Most examples of each dev set. None means all of them."""
    untrained: bool = False
    """Evaluate each model's shape with random weights, too."""
    predict: bool = False
    """Predict test sets without labels, too, for a benchmark's server."""
    keep_models: bool = False
    """Keep the fine-tuned models."""
    card: bool = False
    """Write the scores into the README.md of models that are folders."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products."""

    @field_validator("task")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = next((name for name in value if name not in TASKS), None)
        if unknown is not None:
            raise ValueError(f"there is no task {unknown}; there are {', '.join(TASKS)}")
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _grid_or_own(self) -> "EvaluateConfig":
        if self.grid == "paper" and (self.lr or self.epochs):
            raise ValueError("--grid paper names learning rates and epochs; leave out --lr and --epochs")
        return self

    def settings(self, task: Task) -> list[tuple[float, int]]:
        """Return the learning rates and epochs that are tried of a task."""
        default = (3e-5,) if len(task.recipe.lrs) > 1 else task.recipe.lrs
        lrs = task.recipe.lrs if self.grid == "paper" else self.lr or default
        epochs = task.recipe.epochs if self.grid == "paper" else self.epochs or (task.recipe.epochs[0],)
        return [(lr, number) for lr in dict.fromkeys(lrs) for number in dict.fromkeys(epochs)]


class SpeedConfig(ModelSettings):
    """Settings of a comparison of speeds."""

    group = "Measurement"
    batch_size: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1, 32)
    """Sequences of a forward pass; may be repeated."""
    length: Annotated[tuple[Annotated[int, Field(ge=4, le=2**16)], ...], Field(min_length=1)] = (32, 128)
    """Tokens of each sequence; may be repeated."""
    turns: Annotated[int, Field(ge=1)] = 10
    """Passes of each model that are measured, taken in turns."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights in torch."""
    onnx: Path | None = None
    """Folder to export models to as ONNX, which are measured, too. None means no export."""


class EmbeddingsConfig(ModelSettings):
    """Settings of a comparison of embeddings."""

    group = "Comparison"
    data: str
    """Folder of STS-B in GLUE's layout, or a folder of such folders; `hf` or `hf:ID` for the hub."""
    max_pairs: Annotated[int, Field(ge=2)] | None = None
    """Most pairs of the dev set. None means all of them."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Most tokens of a text."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Texts of a forward pass."""
    save: Path | None = None
    """Folder to write each model to as a sentence-transformer. None means that none is written."""
    mteb: tuple[str, ...] = ()
    """Task of the Massive Text Embedding Benchmark, like STS12; may be repeated."""


class TrialIdentity(FrozenSettings):
    """What two trials must have in common to be the same one."""

    task: str
    track: str
    """Language that it is trained on; empty where there is but one."""
    data_sha256: str
    model_sha256: str
    """Of its weights and configuration."""
    tokenizer_sha256: str
    """Of its words and rules, and of what it hands to a model."""
    untrained: bool
    """Weights are drawn by the seed, and only the shape is the model's."""
    lr: float
    epochs: int
    batch_size: int
    seed: int
    max_length: int
    precision: Literal["float32", "bfloat16"]

    def digest(self) -> str:
        """Return what the name of its folder ends with, whatever its model is called."""
        return canonical_sha256(self.model_dump(mode="json"))[:12]

    def name(self, slug: str) -> str:
        """Return the name of its folder, that of its model given."""
        what = f"{slug}-untrained" if self.untrained else slug
        track = f"-{self.track}" if self.track else ""
        return f"{what}{track}-lr{self.lr:g}-e{self.epochs}-s{self.seed}-{self.digest()}"


class TrialRecord(FrozenSettings):
    """A trial and its scores, between 0 and 100."""

    identity: TrialIdentity
    model: str
    num_train: int
    num_scored: dict[str, int]
    """Examples of each set that has scores."""
    train_s: float
    scores: dict[str, dict[str, float]]
    """By set and metric; empty where the loss was no number in the end."""
    headline: float | None
    """What settings are chosen by: the mean over dev sets; none: it diverged."""
    versions: dict[str, str]
    """Of the libraries that trained and scored it."""
