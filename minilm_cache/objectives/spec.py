"""The table of objectives: each has one row here, and one module next to this one.

Rows are read by `dump --for` (what a cache must hold), `train` (which options and layer maps go with an
objective), `study`, `info`, model cards and the documentation. Nothing here imports torch.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BeforeValidator

from minilm_cache.wording import did_you_mean

LayerMap = Literal["last", "last-two", "first-last", "all", "top", "bottom", "own"]
Which = Literal["last", "all"]
"""Which of the teacher's layers, or of its hidden states."""
Form = Literal["authors", "paper"]
"""Whose loss is computed: that of the authors' code, or that of the paper's equations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a cache must hold for an objective."""

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
    pooled: bool = False
    """One vector of each sequence, and each text as a sequence of its own."""
    signals: tuple[str, ...] = ()
    """Names of registered signals."""
    relations: bool = True
    """The last layer's relations. They are stored for every objective that is not content with other things,
    so that the cache serves `minilm`, too."""

    @property
    def of_tokens(self) -> bool:
        """Whether something that is learned belongs to single tokens."""
        return bool(self.relations or self.vectors or self.hidden or self.masked_hidden or self.labels)

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
            pooled=self.pooled or other.pooled,
            signals=tuple(dict.fromkeys((*self.signals, *other.signals))),
            relations=self.relations or other.relations,
        )

    def settings(self) -> dict[str, object]:
        """Return the settings of a dump that stores this, by name, without those at their defaults."""
        settings: dict[str, object] = {
            "codec": "vectors" if self.vectors else None if self.relations else "none",
            "layers": "all" if self.layers == "all" else None,
            "hidden": self.hidden,
            "masked_hidden": self.masked_hidden,
            "first_hidden": self.first,
            "labels": self.labels or None,
            "label_tokens": "all" if self.all_labels else None,
            "label_temperature": self.temperature if self.labels else None,
            "logits": self.logits or None,
            "pooled": self.pooled or None,
            "signal": self.signals or None,
            "packing": "records" if self.pooled else None,
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
    stops_early: bool = False
    """Whether students compute nothing behind the queries, keys and values of their last layer."""
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
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `TrainConfig`, by name, whose defaults are other ones for this objective."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    """Recipes, by name."""

    def describes_layers(self, layer_map: str, teacher_layer: int | None) -> str:
        """Return what students of a run learned from.

        Args:
            layer_map: the layer map of the run.
            teacher_layer: the one layer of the teacher, counted from 0. None means the layers of the map.
        """
        if teacher_layer is None and layer_map == _OWN:
            return self.learns_from.format(layers="the layers of a teacher that each objective maps to")
        if teacher_layer is None:
            return self.learns_from.format(layers=f"layers of a teacher mapped to their own (`{layer_map}`)")
        return self.learns_from.format(layers=f"layer {teacher_layer} of a teacher, counted from 0")


_MOST_WEIGHT: Final = 1e4
_PACKAGE: Final = "minilm_cache.objectives"
_OWN: Final = "own"
"""Layer map of several objectives at once: each has its own default."""
_ALL_MAPS: Final[tuple[LayerMap, ...]] = tuple(name for name in get_args(LayerMap) if name != _OWN)
_LAST_LAYER_UNTRAINED: Final = "The student's last layer behind its queries, keys and values is untrained."
_LONG_TRAINING: Final = {"steps": 400_000, "warmup": 0.01, "weight_decay": 0.01}
"""Settings of a training of 400,000 steps; the learning rate rises over the first 4,000."""

_OF_GROUPS: Final[Mapping[str, Any]] = {"batch_size": 64, "dropout": "none", "batches": "by-query"}
"""Recipe of objectives that compare the pairs of a query."""

_OF_LABELS: Final = ("own_labels", "label_column", "label_weight")
"""Options of objectives of answers that a task's own labels can be mixed into."""

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
        stops_early=True,
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
        stops_early=True,
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
        kind=f"{_PACKAGE}.relations:ValueMse",
        needs=Needs(vectors=True),
        learns_from="{layers}",
        untrained=_LAST_LAYER_UNTRAINED,
        stops_early=True,
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
        options=frozenset({"temperature", *_OF_LABELS}),
        has_forms=True,
    ),
    *(
        ObjectiveSpec(
            name=_name,
            kind=f"{_PACKAGE}.scores:ScoresOfPairs",
            needs=Needs(logits=True, relations=False),
            learns_from="the scores of a teacher",
            options=frozenset({"encoder", *_options}),
            recipe={} if _name == "score" else _OF_GROUPS,
        )
        for _name, _options in {
            "score": _OF_LABELS,
            "margin-mse": (),
            "listwise": ("temperature", "teacher_temperature"),
            "ranknet": (),
        }.items()
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
        name="embedding",
        kind=f"{_PACKAGE}.embedding:Embedding",
        needs=Needs(pooled=True, relations=False),
        learns_from="a teacher's vectors of texts",
        options=frozenset({"also", "loss", "matryoshka", "temperature"}),
        recipe={"batch_size": 64, "dropout": "none", "batches": "by-length"},
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


def parts_of(name: str) -> dict[str, float]:
    """Return the objectives of a name, with their weights.

    Args:
        name: one objective, or several with + or a comma between them and weights, like
            `minilm+embedding=0.5`. A weight that is not given is 1.

    Raises:
        ValueError: there is no objective of one of these names, one comes twice, or a weight is no positive
            number.
    """
    weights: dict[str, float] = {}
    for text in name.replace(",", "+").split("+"):
        objective, separator, weight = (part.strip() for part in text.partition("="))
        if objective not in OBJECTIVES:
            meant = did_you_mean(objective, OBJECTIVES)
            raise ValueError(f"there is no objective {objective}{meant}; there are {', '.join(OBJECTIVES)}")
        if objective in weights:
            raise ValueError(f"objective {objective} is given twice")
        is_number = re.fullmatch(r"\d*\.?\d+", weight) is not None
        if separator and not (is_number and 1 / _MOST_WEIGHT <= float(weight) <= _MOST_WEIGHT):
            raise ValueError(
                f"the weight {weight!r} of objective {objective} is not a number from {1 / _MOST_WEIGHT:g} "
                f"to {_MOST_WEIGHT:g}; write it like {objective}=0.5"
            )
        weights[objective] = float(weight) if separator else 1.0
    if len(weights) == 1 and set(weights.values()) != {1.0}:
        raise ValueError(f"{name}: a weight says how much one of several objectives counts; leave it out")
    return weights


def known_objective(name: str) -> str:
    """Return the name of an objective, or of several that are learned at once, like `minilm+embedding=0.5`.

    Raises:
        ValueError: same as for `parts_of`.
    """
    return "+".join(
        objective if weight == 1 else f"{objective}={weight:.10g}"
        for objective, weight in parts_of(name).items()
    )


def spec_of(name: str) -> ObjectiveSpec:
    """Return the row of an objective, or one that says what several need together.

    Raises:
        ValueError: same as for `parts_of`.
    """
    specs = [OBJECTIVES[objective] for objective in parts_of(name)]
    if len(specs) == 1:
        return specs[0]
    recipes = [spec.recipe for spec in reversed(specs)]
    return ObjectiveSpec(
        name=known_objective(name),
        kind=f"{_PACKAGE}.together:TogetherKind",
        needs=functools.reduce(Needs.with_, [spec.needs for spec in specs]),
        learns_from=" and ".join(dict.fromkeys(spec.learns_from for spec in specs)),
        untrained=specs[0].untrained if all(spec.untrained for spec in specs) else None,
        stops_early=all(spec.stops_early for spec in specs),
        maps=_common_maps(specs),
        options=frozenset().union(*(spec.options for spec in specs)),
        has_forms=any(spec.has_forms for spec in specs),
        compares_heads=any(spec.compares_heads for spec in specs),
        recipe=functools.reduce(lambda first, second: {**first, **second}, recipes),
    )


def _common_maps(specs: Sequence[ObjectiveSpec]) -> tuple[LayerMap, ...]:
    """Return the layer maps that go with all of several objectives that have any, their default first.

    Where defaults differ, the default is that each keeps its own, whichever comes first.
    """
    mapped = [spec.maps for spec in specs if len(spec.maps) > 1]
    if not mapped:
        return ("last",)
    common = tuple(name for name in mapped[0] if all(name in maps for maps in mapped))
    return common if len({maps[0] for maps in mapped}) == 1 else (_OWN, *common)


def why_not_at_once(name: str, needs: Mapping[str, Collection[object]]) -> str | None:
    """Return why objectives cannot be learned at once. None means that they can.

    Args:
        name: names of the objectives, joined.
        needs: what each of them needs of a student, by what is wrong if this is not the same for all.
    """
    differing = next((what for what, kinds in needs.items() if len(kinds) > 1), None)
    if differing is None:
        return None
    remedy = "Take one after the other: --first."
    return f"--objective {name}: {differing}, so they cannot be learned at once. {remedy}"


OF_MASKS: Final = "some read sequences with masked tokens and some do not"
OF_LABELS: Final = "some predict masked tokens and some all of them"


def joined_names(names: object) -> object:
    """Return a list of names with weights as one name; anything else stays."""
    return "+".join(map(str, names)) if isinstance(names, list | tuple) else names


class Repeated(NamedTuple):
    """Says that an option may be repeated on the command line, though its setting is one text."""


ObjectiveName = Annotated[str, BeforeValidator(joined_names), AfterValidator(known_objective), Repeated()]


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
    needs = [spec_of(name).needs for name in objectives]
    return functools.reduce(Needs.with_, needs) if needs else Needs()
