"""Settings of the two stages: frozen, validated once, units beside each field."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from minilm_cache.errors import InvalidConfigError
from minilm_cache.needs import FORMS, Form, ObjectiveName, needs_of, objective_names
from minilm_cache.storage_schema.identity import MAX_LAYERS
from minilm_cache.storage_schema.states import MAX_READINGS

LayerMap = Literal["last", "last-two", "first-last", "all", "top", "bottom"]
"""Which layers of a student learn from which of the teacher."""
Chosen = Literal["last", "all"] | tuple[int, ...]
"""The teacher's last layer or hidden state, all of them, or these."""
_MAPS: Final[dict[str, tuple[LayerMap, ...]]] = {
    "minilm": ("last", "last-two", "first-last", "all", "top", "bottom"),
    "minilmv2": ("last", "last-two", "first-last", "all", "top", "bottom"),
    "tinybert": ("all", "top", "bottom", "last", "last-two", "first-last"),
    "bert-pkd": ("all", "top", "bottom"),
}
"""Layer maps that an objective can have, its own first; others have the last."""
ONE_LAYER: Final = ("minilm", "minilmv2", "value-mse", "hidden-mse")
"""Objectives that learn from one layer of the teacher, unless a map says otherwise."""
_OF_OBJECTIVES: Final = {
    "patience": ("bert-pkd",),
    "temperature": ("bert-pkd", "tinybert-prediction"),
    "ground_truth": ("mlm-kd",),
}
"""Settings of a training that only some objectives have."""
Settings = TypeVar("Settings", bound="FrozenSettings")

MIN_SHARD_TOKENS = 64


def _in_order(value: object, most: int) -> object:
    """Return numbers given as `2,5,8` or as a list in order, and words as they are."""
    if value in ("last", "all", None):
        return value
    parts = value.split(",") if isinstance(value, str) else value
    numbers = [str(part).strip() for part in parts] if isinstance(parts, Sequence) else []
    if not all(number.isdecimal() and int(number) <= most for number in numbers):
        numbers = []
    if not numbers or len(set(map(int, numbers))) < len(numbers):
        raise ValueError(
            f"give last, all, or different numbers from 0 to {most} with commas between them, like 2,5,8"
        )
    return tuple(sorted(map(int, numbers)))


class FrozenSettings(BaseModel):
    """Base of settings: frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DumpConfig(FrozenSettings):
    """Everything that stage one is told."""

    teacher: str
    """`mini`, an alias, a folder or a hub id."""
    corpus: str = "python-docs"
    """`python-docs`, a file, a folder, or `hf:ID[:CONFIG][:SPLIT]`."""
    text_column: str | None = None
    """Column of the text in records; none: `text`."""
    packing: Literal["packed", "records"] = "packed"
    """Join documents to full length, or one sequence per document."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Tokens per sequence at most, special tokens counted."""
    max_tokens: Annotated[int, Field(ge=4)] | None = None
    """Tokens at most; none: the whole corpus."""
    codec: Literal["topk", "vectors", "dense"] = "vectors"
    """How relations are stored; `topk` where nothing but `k`, `select` or `tail` is given."""
    k: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Entries per row of codec `topk`; none: 16."""
    select: Literal["pps", "largest"] | None = None
    """Of codec `topk`; none: pps."""
    tail: Literal["uniform", "renormalise"] | None = None
    """For select=largest; none: uniform."""
    layers: Chosen = "last"
    """Layers to tap, counted from 0; several only with codec `vectors`."""
    max_kl: Annotated[float, Field(gt=0, le=1)] | None = None
    """Mean KL of each relation that codec `vectors` may have, nats; None means 0.005."""
    hidden: Chosen | None = None
    """Hidden states of every token to store; 0 is the output of the embeddings, n that of the n-th layer."""
    masked_hidden: Chosen | None = None
    """The same of sequences as they are read with tokens masked."""
    first_hidden: Chosen | None = None
    """Hidden states of each sequence's first token alone."""
    max_error: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Relative error that hidden states of every token may have; none: 0.1."""
    labels: bool = False
    """Soft labels of masked tokens."""
    label_tokens: Literal["masked", "all"] | None = None
    """Tokens that have soft labels: those that are masked, or all; None means masked."""
    maskings: Annotated[int, Field(ge=1, le=MAX_READINGS)] | None = None
    """Masked readings of each sequence, which the epochs of a training take in turn; None means 1."""
    label_k: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Entries of each label; none: 32."""
    label_temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """What the teacher's logits are divided by before the softmax of labels; none: 1."""
    logits: bool = False
    """Logits of a teacher that classifies sequences."""
    shard_tokens: Annotated[int, Field(ge=MIN_SHARD_TOKENS, le=2**26)] | None = None
    """Tokens per shard, a power of two; none: 2**18, less where that would decode to over 256 MiB."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Sequences per forward pass of the teacher."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the order of documents and of what `pps` draws."""
    rank: Annotated[int, Field(ge=0)] = 0
    world_size: Annotated[int, Field(ge=1)] = 1
    """This process writes the shards whose number is `rank` modulo `world_size`."""
    revision: str | None = None
    """Revision of a teacher from the hub."""
    device: str | None = None
    """torch device; none: a GPU where there is one."""

    @model_validator(mode="before")
    @classmethod
    def _for_objectives(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read `for`, objectives that the cache is to serve, as the settings that it asks for."""
        given = {name: value for name, value in values.items() if value is not None}
        needs = needs_of(objective_names(given.pop("for", ())))
        if "codec" not in given and not needs.vectors and {"k", "select", "tail"} & given.keys():
            given["codec"] = "topk"
        if given.get("codec", "vectors") != "vectors" and needs.vectors:
            raise ValueError(f"--for asks for codec vectors; leave out --codec {given['codec']}")
        settings = needs.settings()
        return settings | given

    @field_validator("layers", mode="before")
    @classmethod
    def _read_layers(cls, value: object) -> object:
        """Read `2,5,8`."""
        return _in_order(value, MAX_LAYERS - 1)

    @field_validator("hidden", "masked_hidden", "first_hidden", mode="before")
    @classmethod
    def _read_hidden(cls, value: object) -> object:
        """Read `0,3,6`."""
        return _in_order(value, MAX_LAYERS)

    @model_validator(mode="after")
    def _several_layers_go_with_vectors(self) -> "DumpConfig":
        several = self.layers == "all" or (self.layers != "last" and len(self.layers) > 1)
        if several and self.codec != "vectors":
            raise ValueError(f"several --layers go with --codec vectors, not with {self.codec}")
        return self

    @model_validator(mode="after")
    def _states_fit_together(self) -> "DumpConfig":
        for name in ("label_k", "label_temperature", "label_tokens"):
            if getattr(self, name) is not None and not self.labels:
                raise ValueError(f"--{name.replace('_', '-')} goes with --labels, and only with it")
        if self.maskings is not None and not (self.labels or self.masked_hidden is not None):
            raise ValueError("--maskings goes with --labels and --masked-hidden, and only with them")
        if self.max_error is not None and self.hidden is None and self.masked_hidden is None:
            raise ValueError("--max-error goes with --hidden and --masked-hidden, and only with them")
        if self.logits and self.packing != "records":
            raise ValueError("--logits goes with --packing records: an answer is about one document")
        if self.logits and (self.labels or self.masked_hidden is not None):
            raise ValueError(
                "--logits goes without --labels and --masked-hidden: a teacher that classifies sequences has "
                "no head for masked tokens"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "DumpConfig":
        for option in ("k", "select", "tail"):
            if self.codec != "topk" and getattr(self, option) is not None:
                raise ValueError(f"--{option} goes with --codec topk, not with {self.codec}")
        if self.codec != "vectors" and self.max_kl is not None:
            raise ValueError(f"--max-kl goes with --codec vectors, not with {self.codec}")
        if self.k is not None and self.k > self.max_length:
            raise ValueError(
                f"--k {self.k} is above --max-length {self.max_length}: a row has no more entries"
            )
        if self.max_tokens is not None and self.max_tokens < self.max_length:
            raise ValueError(
                f"--max-tokens {self.max_tokens} is below --max-length {self.max_length}: not one sequence"
            )
        if self.tail is not None and self.select != "largest":
            raise ValueError("--tail goes with --select largest, and only with it")
        if self.rank >= self.world_size:
            raise ValueError(f"--rank {self.rank} is not below --world-size {self.world_size}")
        if self.shard_tokens is not None and self.shard_tokens & (self.shard_tokens - 1):
            raise ValueError(f"--shard-tokens {self.shard_tokens} is not a power of two")
        if self.shard_tokens is not None and self.shard_tokens < self.max_length:
            raise ValueError(f"--shard-tokens {self.shard_tokens} is below --max-length {self.max_length}")
        return self


class TrainConfig(FrozenSettings):
    """Everything that stage two is told, the cache and the folder of the run apart."""

    arch: Annotated[tuple[str, ...], Field(min_length=1)]
    """Shapes of the students, all trained in one pass."""
    objective: ObjectiveName = "minilm"
    relation_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Of objective `minilmv2`; none: the heads of the teacher's attention."""
    value_relation: bool = True
    """Of objective `minilm`; false: attention distributions alone."""
    query_key_relations: bool = False
    """Of objective `minilm`: query and key relations beside the others."""
    form: Form | None = None
    """Whose loss it is where a paper's authors published code that differs from its equations: `authors` (the
    code) or `paper`; None means `authors`, or nothing for objectives without such a difference."""
    patience: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Weight beta of the patient loss of `bert-pkd`; None means 500, or 100 with `--form paper`."""
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """What logits are divided by before they are compared, for `bert-pkd` (None means 10, or 1 with `--form
    paper`) and `tinybert-prediction` (None means 1)."""
    ground_truth: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the tokens themselves in the targets of `mlm-kd`, the rest is the teacher's; None means 0."""
    layer_map: LayerMap = "last"
    """Which layers of a student learn from which of the teacher."""
    teacher_layer: Annotated[int, Field(ge=0, lt=1024)] | None = None
    """Layer of the teacher to learn from, counted from 0; none: the last that the cache holds."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the sequences; with neither steps nor epochs: 5 epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Sequences per step, of all processes."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Parts that each process cuts its sequences of a step into; their gradients are added."""
    streams: Annotated[int, Field(ge=1)] | None = None
    """Streams that an epoch's sequences are dealt to; None means one for each process."""
    place: Literal["data", "students"] = "data"
    """What processes divide among themselves."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Of matrix products; none: bfloat16 on a GPU, else float32. Relations and losses are always float32."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Greatest norm of a student's gradient; none: it is taken as it is."""
    gradient_checkpointing: bool = False
    """Compute activations inside layers again in the backward pass instead of keeping them."""
    compiled: bool = False
    """Compile layers by torch.compile."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the steps over which the learning rate rises; then it falls linearly to 0."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    init: str = "random"
    """What students begin with: `random`, `teacher-layers`, or the folder of a model or of a run."""
    init_teacher: str | None = None
    """Whose layers `teacher-layers` takes: a name, a folder or a hub id."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of initial weights, dropout and order."""
    buffer_shards: Annotated[int, Field(ge=1)] = 4
    """Shards whose sequences are shuffled together."""
    local_bytes: Annotated[int, Field(ge=1)] = 2**34
    """Of a cache at a URL: bytes of its shards that are kept on this machine."""
    checkpoint_steps: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=0)] = 0
    """Newest checkpoints that stay, after the run, too; 0: what resuming needs, and nothing afterwards."""
    eval_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between looks at the held-out KL, whose best weights become the student; none: at the end."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours of training after which a run stops and keeps its state."""
    tracker: Literal["none", "tensorboard", "trackio", "wandb", "mlflow"] = "none"
    """Shown beside the run's own log."""
    device: str | None = None
    """torch device; none: a GPU where there is one."""

    @model_validator(mode="before")
    @classmethod
    def _map_of_the_objective(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in the layer map that an objective has where none is given; some have none to choose."""
        objective, given = values.get("objective") or "minilm", values.get("layer_map")
        maps = _MAPS.get(objective, ("last",))
        if given is None:
            return {**values, "layer_map": maps[0]}
        if given not in maps and given in get_args(LayerMap):
            raise ValueError(f"--layer-map {given} does not go with --objective {objective}")
        return values

    @model_validator(mode="before")
    @classmethod
    def _form_of_the_objective(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in the form that an objective has where none is given."""
        objective = values.get("objective") or "minilm"
        if values.get("form") is None:
            return {**values, "form": "authors" if objective in FORMS else None}
        if objective not in FORMS:
            raise ValueError(
                f"--form does not go with --objective {objective}; it goes with {', '.join(sorted(FORMS))}"
            )
        return values

    @model_validator(mode="after")
    def _settings_are_the_objectives(self) -> "TrainConfig":
        for name, objectives in _OF_OBJECTIVES.items():
            if getattr(self, name) is not None and self.objective not in objectives:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} goes with --objective {' and '.join(objectives)}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainConfig":
        if self.teacher_layer is not None and self.objective not in ONE_LAYER:
            raise ValueError(f"--teacher-layer does not go with --objective {self.objective}")
        if (self.init == "teacher-layers") != (self.init_teacher is not None):
            raise ValueError("--init teacher-layers and --init-teacher go together")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("--steps and --epochs exclude each other")
        if self.relation_heads is not None and self.objective != "minilmv2":
            raise ValueError("--relation-heads goes with --objective minilmv2, and only with it")
        if self.objective != "minilm" and (self.query_key_relations or not self.value_relation):
            raise ValueError(
                "--no-value-relation and --query-key-relations go with --objective minilm, and only with it"
            )
        if self.layer_map != "last" and self.teacher_layer is not None:
            raise ValueError("--teacher-layer goes with --layer-map last, and only with it")
        if self.compiled and self.gradient_checkpointing:
            raise ValueError("--compile and --gradient-checkpointing exclude each other")
        doubled = sorted({arch for arch in self.arch if self.arch.count(arch) > 1})
        if doubled:
            raise ValueError(f"--arch {doubled[0]} is given twice")
        return self


class ChainConfig(FrozenSettings):
    """Everything that a chain of teacher, assistants and students is told."""

    dump: DumpConfig
    """Of the teacher; assistants are dumped over the same sequences, by the same codec."""
    assistants: Annotated[tuple[str, ...], Field(min_length=1)]
    """Shapes; each learns from the one before, the first from the teacher."""
    train: TrainConfig
    """Of the students at the end; assistants are trained by the same recipe."""
    compare_direct: bool = False
    """Train the students straight from the teacher, too."""


def make_config(model: type[Settings], **values: Any) -> Settings:  # noqa: ANN401 - values of any field
    """Build settings.

    Raises:
        InvalidConfigError: a value is out of range or settings contradict each other; names the option.
    """
    try:
        return model(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if not problem["loc"]:
            raise InvalidConfigError(problem["msg"].removeprefix("Value error, ") + ".") from error
        option = "--" + str(problem["loc"][0]).replace("_", "-")
        message = problem["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        given = problem["input"]
        value = ", ".join(map(str, given)) if isinstance(given, tuple | list) else given
        raise InvalidConfigError(f"{option} {value}: {message}.") from error


def cache_home(override: str | None) -> Path:
    """Return the folder of caches and runs: the override, else `~/.cache/minilm-cache`."""
    return Path(override).expanduser() if override else Path.home() / ".cache" / "minilm-cache"
