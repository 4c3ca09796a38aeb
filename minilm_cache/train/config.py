"""Settings of a training, apart from its cache and the folder of its run, and recipes by name."""

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import refuse_same_shapes
from minilm_cache.models.locate import CONFIG
from minilm_cache.objectives.config import COMPARING, ObjectiveConfig, named_spec
from minilm_cache.objectives.spec import OBJECTIVES, Preset
from minilm_cache.settings import DEFAULT_LOCAL_BYTES, DeviceSettings, FrozenSettings, validated
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.train.folder import is_run
from minilm_cache.wording import counted

RANDOM: Final = "random"
EMBEDDINGS: Final = "embeddings"
TEACHER_LAYERS: Final = "teacher-layers"
SLICE: Final = "slice"
FROM_TEACHER: Final = (SLICE, TEACHER_LAYERS, EMBEDDINGS)
"""Values of `--init` that need the weights of the teacher."""
DEFAULT_EPOCHS = 5.0
Batches = Literal["shuffled", "by-length", "by-query"]
"""Which sequences come together in batches."""
LEAST_STEPS = 300
"""Fewest steps of a training that is given neither steps nor epochs: students that are cut from a teacher
first get worse, and by then they are better."""


class StudentSettings(FrozenSettings):
    """Which students are trained."""

    group = "Students"
    arch: Annotated[tuple[str, ...], Field(min_length=1)]
    """Shape of a student, like `3x384` or `LAYERSxHIDDEN[:ffN][:hN][:eN][:bN][:sN]`: `ff` is the size of the
    feed-forward network, `h` the number of heads, `e` the width of the embeddings, `b` that of bottlenecks,
    `s` a seed. Repeat it for several students, which are trained in one pass."""


class RecipeSettings(FrozenSettings):
    """How students are optimised."""

    group = "Recipe"
    steps: Annotated[int, Field(ge=1, lt=2**53)] | None = None
    """Optimizer steps. None means as many as `--epochs` takes."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None,
        description=f"Passes over the sequences of the cache. None means {DEFAULT_EPOCHS:g}, or more "
        f"until there are {LEAST_STEPS} steps, unless `--steps` is given.",
    )
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Sequences per step, summed over all processes (default of `embedding`, and of objectives that compare
    the documents of a query: 64)."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the steps over which the learning rate rises; then it falls linearly to 0."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum norm of a student's gradient; longer ones are scaled down to it. None means no limit."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of initial weights, dropout and the order of batches."""
    dropout: Literal["teacher", "none"] = "teacher"
    """Dropout of students: as in the teacher's configuration, or none (default of `embedding`, and of
    objectives that compare the documents of a query). Students of relations end closer without it, too."""
    frozen: Literal["none", "embeddings"] = "none"
    """Weights that are not trained: `none`, or the word embeddings (`embeddings`). Freeze these where
    students begin with the teacher's: words that are rare in the text then keep their meaning."""
    batches: Batches = "shuffled"
    """How sequences come together in batches: at random, with others of about their length (`by-length`, the
    default of `embedding`), which saves padding, or pairs of texts with others of the same first text
    (`by-query`, the default of objectives that compare these)."""
    buffer_shards: Annotated[int, Field(ge=1)] = 4
    """Shards, or segments of large shards, whose sequences are shuffled together."""
    init: str | None = None
    """What students begin with: weights cut from the teacher (`slice`), whole layers of the teacher
    (`teacher-layers`), its embeddings alone (`embeddings`), `random` weights, or the folder of a model or of
    a run. None means slice where the teacher's weights are at hand and the shape can be cut, else random."""
    init_teacher: str | None = None
    """The teacher that students are cut from: a name, a folder or a hub id. With `--init slice` or
    `teacher-layers` it may be another model, a donor, whose tokenizer students then have. None means that the
    cache's teacher is looked for on this machine, and then in the cache."""
    init_layers: str | None = None
    """The teacher's layers that students begin with, counted from 0, like 0,2,5. None means evenly spaced
    ones, the last included."""

    vocab: str | None = None
    """Pieces of the teacher's vocabulary that students have: those of the cache's training sequences
    (`cache`), a number like 8k for the most frequent ones, a file with one a line, or the folder of a student
    that has them. None means all of them."""


class ComputeSettings(DeviceSettings):
    """Where and how steps are computed."""

    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of matrix products; weights, relations and losses are always float32. None means bfloat16 on
    a GPU, else float32; some CPUs train in about half the time with bfloat16."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Parts that each process cuts its share of a step into, to save memory; their gradients are added."""
    gradient_checkpointing: bool = False
    """Compute activations inside layers again in the backward pass instead of keeping them."""
    compiled: Annotated[bool, Field(json_schema_extra={"flag": "--compile"})] = False
    """Compile students by torch.compile: a GPU then launches a whole forward pass at once."""
    graph: bool = True
    """On a GPU, record each training step as a CUDA graph and replay it. Lengths of batches are rounded up to
    quarters of a power of two, so that few graphs are needed."""
    kernels: bool = True
    """On a GPU of NVIDIA, compare relations by fused kernels where they are faster."""
    place: Literal["data", "students"] = "data"
    """What the processes of torchrun divide: the sequences of each step (`data`), or the `students`."""
    streams: Annotated[int, Field(ge=1)] | None = None
    """Streams that an epoch's sequences are divided into. None means one for each process."""
    local_bytes: Annotated[int, Field(ge=1)] = DEFAULT_LOCAL_BYTES
    """Bytes of shards that are kept on this machine, of a cache at a URL; like 20G. The default is 16 GiB."""


class RunSettings(FrozenSettings):
    """What a run keeps and shows while it trains."""

    group = "Run"
    checkpoint_steps: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=0)] | None = None
    """Newest checkpoints that stay when the run is over. The last one lets the run go on, with more --steps
    and the same --out. None means 1, or 0 in chains and studies."""
    eval_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on held-out sequences; the best weights become the student. None means an
    evaluation at the end alone."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours of training after which a run stops with exit code 130 and keeps its state. None means no
    limit."""
    tracker: Literal["none", "tensorboard", "trackio", "wandb", "mlflow"] = "none"
    """Experiment tracker to report to, in addition to log.jsonl."""


class TrainConfig(StudentSettings, ObjectiveConfig, RecipeSettings, ComputeSettings, RunSettings):
    """Settings of a training: everything but the cache and the folder of the run."""

    @property
    def names_beginning(self) -> bool:
        """Whether a setting says what students begin with."""
        return (self.init, self.init_teacher, self.init_layers) != (None, None, None)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe_of_the_objective(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in the settings that the objective trains best with, where they are not given."""
        spec = named_spec(values.get("objective"))
        return values if spec is None else {**spec.recipe, **values}

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainConfig":
        given = self.given_options("init_teacher", "init_layers")
        if given and self.init not in (None, "slice", "teacher-layers", "embeddings"):
            raise ValueError(f"{given[0]} goes with --init slice, teacher-layers or embeddings")
        if self.init == "embeddings" and self.init_layers is not None:
            raise ValueError("--init-layers goes with --init slice or teacher-layers, not with embeddings")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("--steps and --epochs exclude each other")
        if self.compiled and self.gradient_checkpointing:
            raise ValueError("--compile and --gradient-checkpointing exclude each other")
        refuse_same_shapes(self.arch, self.seed)
        return self


def refuse_no_tracker(name: str) -> None:
    """Raise InvalidConfigError if the package of a tracker is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise InvalidConfigError(f"--tracker {name} is not installed. Install it: `pip install {name}`.")


def check_parts(config: TrainConfig, num_ranks: int = 1) -> None:
    """Raise InvalidConfigError for a batch that does not divide into the parts of a step.

    Texts are compared with those of the same part, so a part of one text would teach `similarity` nothing.
    """
    num_parts = config.accumulate * num_ranks
    if config.batch_size % num_parts:
        raise InvalidConfigError(
            f"--batch-size {config.batch_size} does not divide into {num_parts} parts (--accumulate times "
            f"the number of processes). Take a multiple of {num_parts}."
        )
    compares = ["--matryoshka"] * bool(config.matryoshka)
    compares += ["--loss similarity"] * any(text.startswith("similarity") for text in config.loss)
    compares += [f"--objective {each.objective}" for each in config.each if each.objective in COMPARING]
    if compares and config.batch_size == num_parts:
        raise InvalidConfigError(
            f"{compares[0]} compares the texts of a part of a step, and each part has one "
            f"({counted(num_parts, 'part')}). Take a larger --batch-size, or fewer --accumulate."
        )


_SMALL_BATCH: Final = 64
"""Largest batch that any cache may be trained with: defaults have to work on a handful of texts."""


def check_batch(config: TrainConfig, manifest: CacheManifest) -> None:
    """Raise InvalidConfigError for a batch that is larger than a cache."""
    most = max(manifest.num_train, _SMALL_BATCH)
    if config.batch_size > most:
        raise InvalidConfigError(
            f"--batch-size {config.batch_size}: the cache has {manifest.num_train} sequences to train on, "
            f"and a step that holds them several times teaches nothing. Take at most {most}."
        )


class CostConfig(FrozenSettings):
    """Trainings whose cost is estimated."""

    group = "Training to estimate"
    arch: tuple[str, ...] = ()
    """Shape of a student whose training is estimated, with --preset or --epochs; may be repeated. None means
    no estimate."""
    preset: str | None = None
    """Recipe that says how many steps of how many sequences a training takes. None means `--epochs`."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the corpus that a training takes. None means those of the recipe."""
    tflops: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] | None = None
    """Operations per second of the machine that the estimate is for, in 10^12. None means the rate that the
    teacher reaches here."""

    @model_validator(mode="after")
    def _of_students(self) -> "CostConfig":
        if not self.arch and (self.preset, self.epochs, self.tflops) != (None, None, None):
            raise ValueError("--preset, --epochs and --tflops go with --arch: give a shape, or none of them")
        if self.preset is not None and self.epochs is not None:
            raise ValueError("--preset and --epochs both say how long training is: give one of them")
        if self.arch and self.preset is None and self.epochs is None:
            raise ValueError("--arch goes with --preset or --epochs, which say how long training is")
        return self


def presets() -> dict[str, Preset]:
    """Return the recipes of all objectives, by name."""
    return {
        name: Preset(settings={"objective": spec.name, **preset.settings}, source=preset.source)
        for spec in OBJECTIVES.values()
        for name, preset in spec.presets.items()
    }


def with_preset(name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe, overridden by those that are given and not None.

    Args:
        name: name of the recipe. None means no recipe.
        given: settings of `TrainConfig`, by name.

    Raises:
        InvalidConfigError: there is no recipe of this name.
    """
    given = {option: value for option, value in given.items() if value is not None}
    settings = without_replaced({} if name is None else _preset(name).settings, given)
    spec = named_spec(given.get("objective", settings.get("objective", "minilm")))
    if spec is None or "relation_heads" not in spec.options:
        settings.pop("relation_heads", None)
    return settings | given


def without_replaced(settings: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return settings without the length of a training that another setting of its length replaces.

    Args:
        settings: settings of `TrainConfig`, by name.
        given: names of the settings that override them.
    """
    replaced = {other for one, other in (("steps", "epochs"), ("epochs", "steps")) if one in given}
    return {name: value for name, value in settings.items() if name not in replaced}


def describe_preset(name: str, config: TrainConfig) -> str:
    """Return one line about a recipe: its settings as `config` has them, and its source."""
    recipe = _preset(name)
    shown = {option: getattr(config, option) for option in ("epochs", *recipe.settings)}
    settings = ", ".join(f"{option} {value}" for option, value in shown.items() if value is not None)
    return f"preset {name}: {settings} ({recipe.source})"


def _preset(name: str) -> Preset:
    known = presets()
    if name not in known:
        raise InvalidConfigError(f"--preset {name}: give one of {', '.join(known)}.")
    return known[name]


def first_config(config: TrainConfig) -> TrainConfig:
    """Return the settings of what students learn first: its own objective and recipe, batches as they are."""
    own = ObjectiveConfig.model_fields
    shared = {name: value for name, value in dict(config).items() if name not in own and name != "lr"}
    shared |= {"vocab": None, "objective": config.first, "steps": config.first_steps or config.steps}
    if config.first_steps is not None:
        shared["epochs"] = None
    return validated(TrainConfig, shared)


def with_first(config: TrainConfig) -> list[TrainConfig]:
    """Return the settings of a training, after those of what students learn first, if there are any."""
    return [config] if config.first is None else [first_config(config), config]


def refuse_no_beginning(init: str | None) -> None:
    """Raise InvalidConfigError for an `--init` that is no kind of weights, no model and no run."""
    if init in (None, RANDOM, *FROM_TEACHER):
        return
    folder = Path(str(init))
    if not (folder / CONFIG).is_file() and not is_run(folder):
        problem = "it holds neither a model nor a run" if folder.is_dir() else "there is no such folder"
        raise InvalidConfigError(
            f"--init {init}: {problem}. Give {', '.join((RANDOM, *FROM_TEACHER))}, or the "
            "folder of a model or of a run."
        )
