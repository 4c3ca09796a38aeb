"""The table of objectives: each has one row here, and one module next to this one.

Rows are read by `dump --for` (what a cache must hold), `train` (which options and layer maps go with an
objective), `study`, `info`, model cards and the documentation. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from minilm_cache.settings import FrozenSettings

LayerMap = Literal["last", "last-two", "first-last", "all", "top", "bottom"]
Which = Literal["last", "all"]
"""Which of the teacher's layers, or of its hidden states."""
Form = Literal["authors", "paper"]
"""Whose loss is computed: that of the authors' code, or that of the paper's equations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a cache must hold for an objective, in addition to the last layer's relations, which all hold."""

    vectors: bool = False
    """Queries, keys and values: codec `vectors`."""
    layers: Which = "last"
    """Layers of the teacher."""
    hidden: Which | None = None
    """Hidden states of every token. None means that they are not needed."""
    masked_hidden: Which | None = None
    """Hidden states of every token of sequences that are read with tokens masked. None means that they
    are not needed."""
    first: Which | None = None
    """Hidden states of each sequence's first token, [CLS]. None means that they are not needed."""
    labels: bool = False
    """Soft labels of masked tokens."""
    all_labels: bool = False
    """Soft labels of all tokens of the masked sequences, not of masked tokens alone."""
    temperature: float = 1.0
    """Temperature of the labels, unless `--label-temperature` says otherwise."""
    logits: bool = False
    """Logits of a teacher that classifies sequences."""

    def with_(self, other: "Needs") -> "Needs":
        """Return what a cache must hold to serve both."""
        return Needs(
            vectors=self.vectors or other.vectors,
            layers=_both(self.layers, other.layers) or "last",
            hidden=_both(self.hidden, other.hidden),
            masked_hidden=_both(self.masked_hidden, other.masked_hidden),
            first=_both(self.first, other.first),
            labels=self.labels or other.labels,
            all_labels=self.all_labels or other.all_labels,
            temperature=max(self.temperature, other.temperature),
            logits=self.logits or other.logits,
        )

    def settings(self) -> dict[str, object]:
        """Return the settings of a dump that stores this, by name, without those at their defaults."""
        settings: dict[str, object] = {
            "codec": "vectors" if self.vectors else None,
            "layers": "all" if self.layers == "all" else None,
            "hidden": self.hidden,
            "masked_hidden": self.masked_hidden,
            "first_hidden": self.first,
            "labels": self.labels or None,
            "label_tokens": "all" if self.all_labels else None,
            "label_temperature": self.temperature if self.labels else None,
            "logits": self.logits or None,
        }
        return {name: value for name, value in settings.items() if value is not None}


def _both(first: Which | None, second: Which | None) -> Which | None:
    return "all" if "all" in (first, second) else first or second


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A recipe for a training."""

    settings: Mapping[str, Any]
    """Settings of `TrainConfig`, by name, without the objective."""
    source: str
    """Where the settings are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """One objective, without its computation."""

    name: str
    """Name of the objective, as `--objective` takes it."""
    kind: str
    """Where its `ObjectiveKind` is: `package.module:Class`, imported when a training needs it."""
    needs: Needs = field(default_factory=Needs)
    """What a cache must hold for it."""
    learns_from: str
    """What students learn from, in words, for cards. `{layers}` stands for the layers of the teacher."""
    untrained: str | None = None
    """Which of a student's layers the loss does not reach. None means that it reaches all of them."""
    maps: tuple[LayerMap, ...] = ("last",)
    """Layer maps that go with it, its default first."""
    one_layer: bool = False
    """Whether it learns from one layer of the teacher, unless a map says otherwise."""
    options: frozenset[str] = frozenset()
    """Fields of `ObjectiveConfig` that only some objectives have, and that this one has."""
    has_forms: bool = False
    """Whether its authors published code that differs from the equations of their paper."""
    compares_heads: bool = False
    """Whether it compares heads with heads, so that students need the teacher's number of them."""
    is_relational: bool = False
    """Whether all parts of its loss are relations, and so its held-out figures KLs in nats."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    """Recipes, by name."""

    def describes_layers(self, layer_map: str, teacher_layer: int | None) -> str:
        """Return what students of a run learned from.

        Args:
            layer_map: the layer map of the run.
            teacher_layer: the one layer of the teacher, counted from 0. None means the layers of the map.
        """
        if teacher_layer is None:
            return self.learns_from.format(layers=f"layers of a teacher mapped to their own (`{layer_map}`)")
        return self.learns_from.format(layers=f"layer {teacher_layer} of a teacher, counted from 0")


_PACKAGE: Final = "minilm_cache.objectives"
_ALL_MAPS: Final[tuple[LayerMap, ...]] = get_args(LayerMap)
_LAST_LAYER_UNTRAINED: Final = "The student's last layer behind its queries, keys and values is untrained."
_LONG_TRAINING: Final = {"steps": 400_000, "warmup": 0.01, "weight_decay": 0.01}
"""Settings of a training of 400,000 steps; the learning rate rises over the first 4,000."""

OBJECTIVES: Final[dict[str, ObjectiveSpec]] = {}
"""Every objective, by its name."""


def register_objective(spec: ObjectiveSpec) -> None:
    """Add an objective, or replace the objective of the same name."""
    OBJECTIVES[spec.name] = spec


for _spec in (
    ObjectiveSpec(
        name="minilm",
        kind=f"{_PACKAGE}.relations:Relations",
        learns_from="{layers}",
        untrained=_LAST_LAYER_UNTRAINED,
        maps=_ALL_MAPS,
        one_layer=True,
        options=frozenset({"value_relation", "query_key_relations"}),
        compares_heads=True,
        is_relational=True,
        presets={
            "minilm-6x768": Preset(
                settings={**_LONG_TRAINING, "batch_size": 1024, "lr": 5e-4},
                source="MiniLM (arXiv 2002.10957) for students of 6 layers of width 768",
            ),
            "minilm": Preset(
                settings={**_LONG_TRAINING, "batch_size": 256, "lr": 3e-4},
                source="MiniLM (arXiv 2002.10957) for all other students",
            ),
        },
    ),
    ObjectiveSpec(
        name="minilmv2",
        kind=f"{_PACKAGE}.relations:Relations",
        needs=Needs(vectors=True),
        learns_from="{layers}",
        untrained=_LAST_LAYER_UNTRAINED,
        maps=_ALL_MAPS,
        one_layer=True,
        options=frozenset({"relation_heads"}),
        compares_heads=True,
        is_relational=True,
        presets={
            "minilmv2": Preset(
                settings={**_LONG_TRAINING, "relation_heads": 48, "batch_size": 256, "lr": 6e-4},
                source="MiniLMv2 (arXiv 2012.15828) for teachers of width 768, as its public "
                "reimplementations train",
            ),
            "minilmv2-large": Preset(
                settings={**_LONG_TRAINING, "relation_heads": 64, "batch_size": 256, "lr": 6e-4},
                source="MiniLMv2 for teachers of width 1024; the teacher's layer is the dump's `--layers`, "
                "the 21st of BERT-large and the 19th of RoBERTa-large and XLM-R-large, which count as 20 "
                "and 18 here",
            ),
        },
    ),
    ObjectiveSpec(
        name="value-mse",
        kind=f"{_PACKAGE}.value_mse:ValueMse",
        needs=Needs(vectors=True),
        learns_from="{layers}",
        untrained=_LAST_LAYER_UNTRAINED,
        one_layer=True,
        compares_heads=True,
    ),
    ObjectiveSpec(
        name="hidden-mse",
        kind=f"{_PACKAGE}.hidden_mse:HiddenMse",
        needs=Needs(hidden="last"),
        learns_from="{layers}",
        one_layer=True,
        compares_heads=True,
    ),
    ObjectiveSpec(
        name="tinybert",
        kind=f"{_PACKAGE}.tinybert:TinyBert",
        needs=Needs(vectors=True, layers="all", hidden="all"),
        learns_from="{layers}",
        maps=("all", "top", "bottom", "last", "last-two", "first-last"),
        has_forms=True,
        compares_heads=True,
    ),
    ObjectiveSpec(
        name="tinybert-prediction",
        kind=f"{_PACKAGE}.tinybert:Prediction",
        needs=Needs(logits=True),
        learns_from="the answers of a teacher",
        options=frozenset({"temperature"}),
        has_forms=True,
    ),
    ObjectiveSpec(
        name="distilbert",
        kind=f"{_PACKAGE}.distilbert:DistilBert",
        needs=Needs(masked_hidden="last", labels=True, all_labels=True, temperature=2.0),
        learns_from="what a teacher says of masked tokens",
        has_forms=True,
    ),
    ObjectiveSpec(
        name="mlm-kd",
        kind=f"{_PACKAGE}.mlm_kd:MlmKd",
        needs=Needs(labels=True),
        learns_from="what a teacher says of masked tokens",
        options=frozenset({"ground_truth"}),
    ),
    ObjectiveSpec(
        name="bert-pkd",
        kind=f"{_PACKAGE}.bert_pkd:BertPkd",
        needs=Needs(first="all"),
        learns_from="{layers}",
        untrained="The student's last layer is untrained, unless it learned answers, too.",
        maps=("all", "top", "bottom"),
        options=frozenset({"patience", "temperature"}),
        has_forms=True,
    ),
    ObjectiveSpec(
        name="mobilebert",
        kind=f"{_PACKAGE}.mobilebert:MobileBert",
        needs=Needs(vectors=True, layers="all", hidden="all"),
        learns_from="every layer of a teacher",
        has_forms=True,
        compares_heads=True,
    ),
):
    register_objective(_spec)


def known_objective(name: str) -> str:
    """Return the name of an objective as it is.

    Raises:
        ValueError: there is no objective of this name.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"there is no objective {name}; take {', '.join(OBJECTIVES)}")
    return name


ObjectiveName = Annotated[str, AfterValidator(known_objective)]


def objective_names(names: object) -> tuple[str, ...]:
    """Return names of objectives from a text like `minilm,tinybert`, or from a list.

    Raises:
        ValueError: `names` is neither a text nor a list.
    """
    if not isinstance(names, str | list | tuple):
        raise ValueError(f"--for {names}: give objectives with commas between them, like minilm,tinybert")  # noqa: TRY004 - pydantic wants it
    given = [names] if isinstance(names, str) else names
    return tuple(part.strip() for name in given for part in str(name).split(","))


def needs_of(objectives: Sequence[str]) -> Needs:
    """Return what a cache must hold to serve several objectives.

    Raises:
        ValueError: there is no objective of one of these names.
    """
    needs = Needs()
    for name in objectives:
        needs = needs.with_(OBJECTIVES[known_objective(name)].needs)
    return needs


class ObjectiveConfig(FrozenSettings):
    """What students learn: the settings that `train`, `chain` and `study` share."""

    group = "Objective"
    objective: ObjectiveName = Field(
        "minilm", description=f"What students learn: {', '.join(OBJECTIVES)} (docs/objectives.md)."
    )
    relation_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Relation heads of objective `minilmv2`. None means the heads of the teacher's attention."""
    value_relation: bool = True
    """Learn the value relation, too (objective `minilm`)."""
    query_key_relations: bool = False
    """Learn query and key relations, too (objective `minilm`)."""
    form: Form | None = None
    """Whose loss to compute where the code of a paper's authors differs from its equations: the code
    (`authors`) or the equations (`paper`). None means `authors`, or nothing where there is no difference."""
    patience: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Weight beta of the patient loss of `bert-pkd`. None means 500, or 100 with `--form paper`."""
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """What logits are divided by before they are compared, for `bert-pkd` and `tinybert-prediction`. None
    means 10 for `bert-pkd` (1 with `--form paper`) and 1 for `tinybert-prediction`."""
    ground_truth: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the true tokens in the targets of `mlm-kd`; the teacher's labels are the rest. None means
    0."""
    layer_map: LayerMap = "last"
    """Which layers of a student learn from which of the teacher; maps other than `last` need a cache of those
    layers. The default of `tinybert` and `bert-pkd` is `all`."""
    teacher_layer: Annotated[int, Field(ge=0, lt=1024)] | None = None
    """Layer of the teacher to learn from, counted from 0. None means the last layer in the cache."""

    @property
    def spec(self) -> ObjectiveSpec:
        """The row of the objective."""
        return OBJECTIVES[self.objective]

    @property
    def is_authors(self) -> bool:
        """Whether the loss is that of the authors' code, and not the paper's equation."""
        return self.form == "authors"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults_of_the_objective(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in the layer map and the form of the objective where none is given."""
        name = values.get("objective") or "minilm"
        spec = OBJECTIVES.get(name) if isinstance(name, str) else None
        if spec is None:  # the check of the field names the objectives that exist
            return values
        layer_map, form = values.get("layer_map"), values.get("form")
        if layer_map is not None and layer_map not in spec.maps and layer_map in get_args(LayerMap):
            raise ValueError(f"--layer-map {layer_map} does not go with --objective {name}")
        if form is not None and not spec.has_forms:
            having = ", ".join(sorted(spec.name for spec in OBJECTIVES.values() if spec.has_forms))
            raise ValueError(f"--form does not go with --objective {name}; it goes with {having}")
        return {
            **values,
            "layer_map": spec.maps[0] if layer_map is None else layer_map,
            "form": ("authors" if spec.has_forms else None) if form is None else form,
        }

    @model_validator(mode="after")
    def _options_go_with_the_objective(self) -> "ObjectiveConfig":
        every = {option for spec in OBJECTIVES.values() for option in spec.options}
        for name in sorted(every - self.spec.options):
            if getattr(self, name) != type(self).model_fields[name].default:
                having = " and ".join(spec.name for spec in OBJECTIVES.values() if name in spec.options)
                flag = "--no-value-relation" if name == "value_relation" else f"--{name.replace('_', '-')}"
                only = "them" if " and " in having else "it"
                raise ValueError(f"{flag} goes with --objective {having}, and only with {only}")
        if self.teacher_layer is not None and not self.spec.one_layer:
            raise ValueError(f"--teacher-layer does not go with --objective {self.objective}")
        if self.layer_map != "last" and self.teacher_layer is not None:
            raise ValueError("--teacher-layer goes with --layer-map last, and only with it")
        return self
