"""What an evaluation is told, and what each trial of it was and came to."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from minilm_cache.config import FrozenSettings
from minilm_cache.evaluate.tasks import TASKS, Task
from minilm_cache.storage_schema.identity import canonical_sha256

Lr = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TRIAL_FILE = "trial.json"


class EvaluateConfig(FrozenSettings):
    """Everything that an evaluation is told."""

    task: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of tasks."""
    data: str
    """Folder in the official layout, `hf`, or `hf:ID` for another repository of the usual one's columns."""
    grid: Literal["none", "paper"] = "none"
    """Settings that are tried: one, or those that papers search over."""
    lr: tuple[Lr, ...] = ()
    """Peak learning rates; none: 3e-5, of SQuAD 6e-5, or the paper's grid."""
    epochs: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Passes over the training set; none: 3, or the paper's grid."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples per step; none: 32, as the papers have it."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Trials of each setting, with seeds 0, 1, ..."""
    max_length: Annotated[int, Field(ge=16, le=2**16)] | None = None
    """Tokens at most; none: 128, of SQuAD and MLQA 384."""
    max_train: Annotated[int, Field(ge=1)] | None = None
    """Training examples at most, drawn once for all; none: all."""
    max_dev: Annotated[int, Field(ge=1)] | None = None
    """Examples of each dev set at most; none: all."""
    untrained: bool = False
    """Evaluate each model's shape with weights drawn anew, too."""
    predict: bool = False
    """Write predictions of test sets without labels, too, as a benchmark's server wants them."""
    keep_models: bool = False
    """Keep the fine-tuned models."""
    card: bool = False
    """Write the scores into the cards of models that are folders."""
    precision: Literal["float32", "bfloat16"] = "float32"
    revision: str | None = None
    """Revision of a model from the hub."""
    device: str | None = None
    """cpu or cuda; none: a GPU where there is one."""

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
