"""Settings of the two stages: frozen, validated once, units beside each field."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from minilm_cache.errors import InvalidConfigError
from minilm_cache.storage_schema.identity import MAX_LAYERS

LayerMap = Literal["last", "last-two", "first-last", "all"]
"""Which layers of a student learn from which of the teacher."""
Settings = TypeVar("Settings", bound="FrozenSettings")

MIN_SHARD_TOKENS = 64


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
    codec: Literal["topk", "vectors", "dense"] = "topk"
    k: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Entries per row of codec `topk`; none: 16."""
    select: Literal["pps", "largest"] | None = None
    """Of codec `topk`; none: pps."""
    tail: Literal["uniform", "renormalise"] | None = None
    """For select=largest; none: uniform."""
    layers: Literal["last", "all"] | tuple[int, ...] = "last"
    """Layers to tap, counted from 0; several only with codec `vectors`."""
    max_kl: Annotated[float, Field(gt=0, le=1)] | None = None
    """Mean KL of each relation that codec `vectors` may have, nats; none: 0.015."""
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

    @field_validator("layers", mode="before")
    @classmethod
    def _list_of_layers(cls, value: object) -> object:
        """Read `2,5,8`, and put layers in order."""
        if value in ("last", "all"):
            return value
        parts = value.split(",") if isinstance(value, str) else value
        numbers = [str(part).strip() for part in parts] if isinstance(parts, Sequence) else []
        if not all(number.isdecimal() and int(number) < MAX_LAYERS for number in numbers):
            numbers = []
        if not numbers or len(set(map(int, numbers))) < len(numbers):
            raise ValueError(
                f"give last, all, or different numbers from 0 to {MAX_LAYERS - 1} with commas between them, "
                "like 2,5,8"
            )
        return tuple(sorted(map(int, numbers)))

    @model_validator(mode="after")
    def _several_layers_go_with_vectors(self) -> "DumpConfig":
        several = self.layers == "all" or (self.layers != "last" and len(self.layers) > 1)
        if several and self.codec != "vectors":
            raise ValueError(f"several --layers go with --codec vectors, not with {self.codec}")
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
    objective: Literal["minilm", "minilmv2"] = "minilm"
    relation_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Of objective `minilmv2`; none: the heads of the teacher's attention."""
    value_relation: bool = True
    """Of objective `minilm`; false: attention distributions alone."""
    query_key_relations: bool = False
    """Of objective `minilm`: query and key relations beside the others."""
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
    """Streams of shards that a step's sequences come from; none: one for each process, or one where the
    cache has fewer shards to train on."""
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

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainConfig":
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
        raise InvalidConfigError(f"{option} {problem['input']}: {message}.") from error


def cache_home(override: str | None) -> Path:
    """Return the folder of caches and runs: the override, else `~/.cache/minilm-cache`."""
    return Path(override).expanduser() if override else Path.home() / ".cache" / "minilm-cache"
