"""Settings of an objective, which `train`, `chain` and `study` share. Nothing here imports torch."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from minilm_cache.errors import InvalidConfigError
from minilm_cache.objectives.spec import (
    OBJECTIVES,
    OF_LABELS,
    OF_MASKS,
    Form,
    LayerMap,
    Needs,
    ObjectiveName,
    ObjectiveSpec,
    joined_names,
    parts_of,
    spec_of,
    why_not_at_once,
)
from minilm_cache.settings import FrozenSettings, option_of
from minilm_cache.storage_schema.identity import CacheIdentity, RelationKind
from minilm_cache.storage_schema.states import LABELS, LOGITS, POOLED, SignalName, StateFamily, StatesIdentity

EMBEDDING_LOSSES: Final = ("cosine", "mse", "similarity", "centred", "neighbours")
"""What objective `embedding` can compare."""


_MOST_WEIGHT: Final = 1e4
"""Greatest weight of one of them."""


def known_losses(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return losses of `embedding` as they are.

    Raises:
        ValueError: one is unknown, comes twice, or has no positive weight.
    """
    names = [text.partition("=")[0] for text in given]
    for name, text in zip(names, given, strict=True):
        _, equals, weight = text.partition("=")
        is_number = not equals or re.fullmatch(r"\d*\.?\d+", weight) is not None
        if name not in EMBEDDING_LOSSES or not is_number or not 0 < float(weight or 1) <= _MOST_WEIGHT:
            raise ValueError(
                f"give {', '.join(EMBEDDING_LOSSES)}, with a weight like similarity=10 (at most "
                f"{_MOST_WEIGHT:g}) or without"
            )
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice")
    return given


class Shown(NamedTuple):
    """How a setting is shown where it is not the default; part of its field."""

    slug: str
    """Form of a value in names of passes of a study."""
    words: str | None = None
    """Form of a value in tables. None means that tables have it elsewhere."""
    joint: str = ""
    """What joins several values in tables."""


class ObjectiveFields(FrozenSettings):
    """What students learn: settings of a training, and a part of what identifies a run."""

    group = "Objective"
    objective: ObjectiveName = Field(
        "minilm",
        description=f"What students learn: {', '.join(OBJECTIVES)} (docs/objectives.md). Repeat it, with "
        "weights like minilm=1 and embedding=0.5, for several at once.",
    )
    relation_heads: Annotated[
        Annotated[int, Field(ge=1, le=1024)] | None, Shown("h{}", "{} relation heads")
    ] = None
    """Relation heads of objective `minilmv2`. None means the heads of the teacher's attention."""
    value_relation: Annotated[bool, Shown("novr", "no value relation")] = True
    """Learn the value relation, too (objective `minilm`)."""
    query_key_relations: Annotated[bool, Shown("qk", "query and key relations")] = False
    """Learn query and key relations, too (objective `minilm`)."""
    form: Annotated[Form | None, Shown("{}")] = None
    """Which loss to use where the code of a paper's authors differs from its equations: that of the code
    (`authors`) or of the equations (`paper`). None means `authors`; other objectives have no such choice."""
    patience: Annotated[Annotated[float, Field(ge=0, le=1e6)] | None, Shown("b{:g}", "patience {}")] = None
    """Weight beta of the patient loss of `bert-pkd`. None means 500, or 100 with `--form paper`."""
    temperature: Annotated[
        Annotated[float, Field(ge=1e-3, le=100)] | None, Shown("t{:g}", "temperature {}")
    ] = None
    """What logits are divided by before they are compared, for `bert-pkd`, `tinybert-prediction` and
    `listwise`, and cosines for `--loss neighbours`. None means 10 for `bert-pkd` (1 with `--form paper`), a
    third of the deviation of the teacher's cosines for `neighbours`, and otherwise 1."""
    teacher_temperature: Annotated[
        Annotated[float, Field(ge=1e-3, le=100)] | None, Shown("tt{:g}", "teacher's temperature {}")
    ] = None
    """What the teacher's scores are divided by for `listwise`. None means the value of `--temperature`."""
    encoder: Annotated[Literal["cross", "bi"] | None, Shown("{}", "{}-encoder")] = None
    """What students of pairs' scores are: a cross-encoder (`cross`), which reads both texts together, or a
    bi-encoder (`bi`), whose vectors of both have the score as their dot product. None means `bi` for
    `margin-mse`, and `cross` for all others."""
    ground_truth: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, Shown("g{:g}", "ground truth {}")] = (
        None
    )
    """Share of the true tokens in the targets of `mlm-kd`; the teacher's labels are the rest. None means
    0."""
    loss: Annotated[tuple[str, ...], AfterValidator(known_losses), Shown("{}", "{}", " and ")] = ()
    """What `embedding` compares: `cosine` of a vector with the teacher's, `centred` (the same less the mean
    of the teacher's vectors), `mse`, `similarity` (cosines of the batch's texts with each other) or
    `neighbours` (which of the cache's texts are near); with a weight like similarity=10; repeat it for
    several. None means cosine."""
    matryoshka: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**16)], ...],
        Field(max_length=16),
        Shown("m{}", "widths {}", ", "),
    ] = ()
    """Shorter width of `embedding`: this many first dimensions of a vector are trained to be an embedding,
    too. Repeat the option for several values."""
    also: Annotated[tuple[str, ...], Field(max_length=16), Shown("also-{}", "with {}", ", ")] = ()
    """Caches of other teachers over the same texts, whose vectors students of `embedding` learn together with
    this cache's. Repeat it for several. None means none."""
    own_labels: Annotated[str | None, Shown("labelled", "labels {}")] = None
    """Records of the cache's own text with their labels (.jsonl, .csv, .tsv, .parquet): students of
    `tinybert-prediction` and `score` learn these together with the teacher's predictions. A record may lack
    its label. None means none."""
    label_weight: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Shown("w{:g}", "label weight {}")] = (
        None
    )
    """Weight of a task's own labels in the loss, above 0 and at most 1; the teacher's predictions have the
    rest. None means 0.5 where `--own-labels` is given, and no labels in a chain."""
    layer_map: Annotated[LayerMap, Shown("{}", "layers: {}")] = "last"
    """Which layers of a student learn from which of the teacher; maps other than `last` need a cache of those
    layers. The default of `tinybert` and `bert-pkd` is `all`; of several objectives whose defaults differ it
    is `own`: each keeps its own."""
    teacher_layer: Annotated[Annotated[int, Field(ge=0, lt=1024)] | None, Shown("l{}")] = None
    """Layer of the teacher to learn from, counted from 0. None means the last layer in the cache."""

    @property
    def spec(self) -> ObjectiveSpec:
        """The row of the objective."""
        return spec_of(self.objective)

    def in_words(self) -> str:
        """Return the name of the objective and those of its settings that are not the defaults."""
        words = []
        for name in _IN_TABLES:
            value, shown = getattr(self, name), _shown(name)
            if name == "form":
                words += ["the paper's equations"] * (self.spec.has_forms and value != "authors")
            elif shown.words is not None and value != default_of(name):
                several = value
                if isinstance(value, tuple):  # of a cache, the end of its place or the beginning of its hash
                    several = shown.joint.join(Path(str(each)).name[:24] for each in value)
                elif name == "own_labels":
                    several = Path(value).name[:24]
                words.append(shown.words.format(several))
        return self.objective + (f" ({', '.join(words)})" if words else "")


def default_of(name: str) -> object:
    """Return the default of a setting of objectives."""
    return ObjectiveFields.model_fields[name].default


def _shown(name: str) -> Shown:
    """Return how a setting is shown: as its field says, or by its name and value."""
    shown = [each for each in ObjectiveFields.model_fields[name].metadata if isinstance(each, Shown)]
    return shown[0] if shown else Shown(f"{name}{{}}", f"{name.replace('_', ' ')} {{}}")


_SETTINGS: Final = tuple(name for name in ObjectiveFields.model_fields if name != "objective")
_IN_TABLES: Final = tuple(dict.fromkeys((*_SETTINGS[: _SETTINGS.index("form")], "layer_map", *_SETTINGS)))
"""Settings in the order of tables."""


def slug_forms() -> dict[str, str]:
    """Return the forms of settings in names, in their order there; `first` stands before the layers."""
    forms = {name: _shown(name).slug for name in _SETTINGS}
    last = {name: forms.pop(name) for name in ("layer_map", "teacher_layer")}
    return {**forms, "first": "", **last}


def named_spec(name: object) -> ObjectiveSpec | None:
    """Return the row of what was given as `--objective`. None means that it is no objective."""
    try:
        return spec_of(str(joined_names(name)))
    except ValueError:
        return None


class ObjectiveConfig(ObjectiveFields):
    """What students learn: the settings that `train`, `chain` and `study` share."""

    first: ObjectiveName | None = None
    """Objective that students learn before this one, from the same cache, like minilm before embedding, with
    the defaults of its own objective and a rate of 1e-3. None means none."""
    first_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of `--first`, in batches of the same size. None means the value of `--steps`."""
    label_column: Annotated[str, Field(min_length=1, max_length=256)] = "label"
    """Column of `--own-labels` with the labels: names or numbers of the teacher's classes, or values if it
    gives one number."""

    @property
    def is_authors(self) -> bool:
        """Whether the loss is that of the authors' code, and not the paper's equation."""
        return self.form == "authors"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults_of_the_objective(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in the layer map and the form of the objective where none is given."""
        name = values.get("objective") or "minilm"
        spec = named_spec(name)
        if spec is None:  # the check of the field says what is wrong
            return values
        layer_map, form = values.get("layer_map"), values.get("form")
        if layer_map is not None and layer_map not in spec.maps and layer_map in get_args(LayerMap):
            raise ValueError(f"--layer-map {layer_map} does not go with --objective {spec.name}")
        if form is not None and not spec.has_forms:
            having = ", ".join(sorted(spec.name for spec in OBJECTIVES.values() if spec.has_forms))
            raise ValueError(f"--form does not go with --objective {spec.name}; it goes with {having}")
        return {
            **values,
            "layer_map": spec.maps[0] if layer_map is None else layer_map,
            "form": ("authors" if spec.has_forms else None) if form is None else form,
        }

    @property
    def each(self) -> tuple["ObjectiveConfig", ...]:
        """The settings of each objective alone, where several are learned at once; else these.

        Raises:
            pydantic.ValidationError: a setting does not go with one of them.
        """
        names = list(parts_of(self.objective))
        if len(names) == 1:
            return (self,)
        every = {option for spec in OBJECTIVES.values() for option in spec.options}
        values = {option: getattr(self, option) for option in every}
        return tuple(
            ObjectiveConfig.model_validate(
                {
                    "objective": name,
                    **{option: values[option] for option in self._options_of(name)},
                    **({"form": self.form} if OBJECTIVES[name].has_forms else {}),
                    **({"layer_map": self.layer_map} if self.layer_map in OBJECTIVES[name].maps[1:] else {}),
                }
            )
            for name in names
        )

    def _options_of(self, name: str) -> frozenset[str]:
        """Return the options that an objective takes; of vectors only one loss has a temperature."""
        without = {"temperature"} if name == "embedding" and not self._compares_neighbours else set()
        return OBJECTIVES[name].options - without

    @property
    def _compares_neighbours(self) -> bool:
        return "neighbours" in [text.partition("=")[0] for text in self.loss]

    @model_validator(mode="after")
    def _options_go_with_each(self) -> "ObjectiveConfig":
        try:
            each = self.each
        except ValidationError as error:
            raise ValueError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from error
        needs = [(config.spec.needs, config.is_authors) for config in each]
        differing = {
            OF_MASKS: {need.labels or need.masked_hidden is not None for need, _ in needs},
            OF_LABELS: {need.all_labels and is_authors for need, is_authors in needs if need.labels},
        }
        if (why := why_not_at_once("+".join(config.objective for config in each), differing)) is not None:
            raise ValueError(why.rstrip("."))
        return self

    @model_validator(mode="after")
    def _labels_have_their_options(self) -> "ObjectiveConfig":
        if self.own_labels is None and self.given_options("label_weight", "label_column"):
            raise ValueError(
                "--label-weight and --label-column go with --own-labels (in chain, --label-weight goes with "
                "--task), and only with it"
            )
        if self.own_labels is not None and self.temperature not in (None, 1):
            raise ValueError(
                "--temperature goes with a teacher's answers alone, not with labels; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _temperature_is_of_one_thing(self) -> "ObjectiveConfig":
        takers = [name for name in parts_of(self.objective) if "temperature" in OBJECTIVES[name].options]
        if self.temperature is None or "embedding" not in takers:
            return self
        if len(takers) == 1 and not self._compares_neighbours:
            raise ValueError("--temperature goes with --loss neighbours, and only with it")
        if len(takers) > 1 and self._compares_neighbours:
            raise ValueError(
                "--temperature is one number, and --loss neighbours needs another one than answers do; leave "
                "it out, or learn one after the other: --first"
            )
        return self

    @model_validator(mode="after")
    def _options_go_with_the_objective(self) -> "ObjectiveConfig":
        every = {option for spec in OBJECTIVES.values() for option in spec.options}
        for name in sorted(every - self.spec.options):
            if getattr(self, name) != type(self).model_fields[name].default:
                having = " and ".join(spec.name for spec in OBJECTIVES.values() if name in spec.options)
                flag = "--no-value-relation" if name == "value_relation" else option_of(name)
                only = "them" if " and " in having else "it"
                raise ValueError(f"{flag} goes with --objective {having}, and only with {only}")
        if len(set(self.matryoshka)) < len(self.matryoshka):
            raise ValueError("--matryoshka is given twice with one width")
        if self.also and self.matryoshka:
            raise ValueError("--matryoshka goes with the vectors of one teacher; leave out --also")
        if self.first_steps is not None and self.first is None:
            raise ValueError("--first-steps goes with --first, and only with it")
        if self.first is not None and parts_of(self.first) == parts_of(self.objective):
            raise ValueError(f"--first {self.first} is the objective itself; give another, or leave it out")
        if self.teacher_layer is not None and not self.spec.one_layer:
            raise ValueError(f"--teacher-layer does not go with --objective {self.objective}")
        if self.layer_map != "last" and self.teacher_layer is not None:
            raise ValueError("--teacher-layer goes with --layer-map last, and only with it")
        return self


def relations_of(
    objective: str, *, value_relation: bool = True, query_key_relations: bool = False
) -> tuple[RelationKind, ...]:
    """Return the relations by which an objective compares students with the teacher."""
    if objective == "minilmv2":
        return (RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE)
    kinds = [RelationKind.ATTENTION]
    if value_relation:
        kinds.append(RelationKind.VALUE)
    if query_key_relations:
        kinds += [RelationKind.QUERY, RelationKind.KEY]
    return tuple(kinds)


_OTHER_OBJECTIVE = "If it holds pooled vectors, take --objective embedding. "


def split_into(objective: str, relation_heads: int | None, teacher_heads: int) -> int | None:
    """Return the relation heads that an objective splits vectors into.

    Args:
        objective: name of the objective.
        relation_heads: requested number of relation heads. None means as many as the teacher's heads.
        teacher_heads: heads of the teacher's attention.

    Returns:
        Number of relation heads. None means that the objective compares attention heads as they are.
    """
    return relation_heads or teacher_heads if "minilmv2" in parts_of(objective) else None


def check_codec(config: ObjectiveConfig, codec: str) -> None:
    """Raise InvalidConfigError for an objective that needs something that no cache of this codec holds."""
    if codec == "vectors":
        return
    stored = set() if codec == "none" else {RelationKind.ATTENTION, RelationKind.VALUE}
    missing = []
    if config.spec.is_relational:
        kinds = relations_of(
            config.objective,
            value_relation=config.value_relation,
            query_key_relations=config.query_key_relations,
        )
        missing = [kind for kind in kinds if kind not in stored]
    what = f"the {' and '.join(missing)} relation" if missing else "queries, keys and values"
    if missing or config.spec.needs.vectors:
        raise InvalidConfigError(
            f"--objective {config.objective} needs {what}, which a cache of codec {codec} does not hold. "
            f"{_OTHER_OBJECTIVE if codec == 'none' else ''}Dump one with --codec vectors{flags_of(config)}."
        )


def held_signals(stored: StatesIdentity | None) -> tuple[SignalName, ...]:
    """Return what a cache holds in addition to relations; masked sequences without labels are no labels."""
    if stored is None:
        return ()
    return tuple(name for name in stored.names if name != LABELS or stored.labels is not None)


def check_states(config: ObjectiveConfig, stored: StatesIdentity | None) -> None:
    """Raise InvalidConfigError for an objective that needs a kind of states of which a cache holds none."""
    objective, needs, held = config.objective, config.spec.needs, held_signals(stored)
    check_pooled(config, stored)
    if stored is not None and stored.pooled is not None:
        shorter_widths(config, stored.pooled.width)
    kinds = {name.signal for name in held}
    missing = [words for kind, words in _states_of(needs).items() if kind not in kinds]
    if missing:
        raise _lacking(objective, missing)


def check_pooled(config: ObjectiveConfig, stored: StatesIdentity | None) -> None:
    """Raise InvalidConfigError for an objective that needs pooled vectors where none are held."""
    if config.spec.needs.pooled and POOLED not in held_signals(stored):
        raise InvalidConfigError(
            f"--objective {config.objective} needs pooled vectors, which this cache does not hold. Dump one "
            f"with --for {config.objective}, or with --for minilm,{config.objective} to keep relations."
        )


SCORE, MARGIN_MSE, LISTWISE, RANKNET = "score", "margin-mse", "listwise", "ranknet"
"""Objectives of the scores that a teacher gives to pairs of texts."""
COMPARING: Final = (MARGIN_MSE, LISTWISE, RANKNET)
"""Those of them that compare the documents of a query."""


def is_bi_encoder(config: ObjectiveConfig) -> bool:
    """Return whether a student of scores reads each text alone."""
    return (config.encoder or ("bi" if config.objective == MARGIN_MSE else "cross")) == "bi"


def check_scores(config: ObjectiveConfig, identity: CacheIdentity) -> None:
    """Raise InvalidConfigError if a cache has not the pairs or groups that an objective of scores needs."""
    name = config.objective
    if name not in (SCORE, *COMPARING):
        return
    is_bi, is_grouped = is_bi_encoder(config), name in COMPARING
    if identity.packing.pair is None and (is_bi or is_grouped):
        raise InvalidConfigError(
            f"--objective {name} needs scores of pairs of texts, and this cache holds single texts. Dump one "
            "with --pair-columns and --logits."
        )
    if is_grouped and not identity.corpus.groups:
        raise InvalidConfigError(
            f"--objective {name} compares the documents of a query, and the records of this cache are single "
            "pairs. Dump records of queries with several documents (--pair-columns query,documents), or take "
            "--objective score."
        )
    classes = identity.num_classes
    if classes is not None and classes > 1 and (is_bi or is_grouped):
        raise InvalidConfigError(
            f"--objective {name} takes a teacher that gives one score, and this one answers with {classes} "
            "classes. Take --objective score or tinybert-prediction, as a cross-encoder."
        )


def check_logits(config: ObjectiveConfig, stored: StatesIdentity | None) -> None:
    """Raise InvalidConfigError for an objective that needs logits of a cache that holds none."""
    if config.spec.needs.logits and LOGITS not in held_signals(stored):
        raise _lacking(config.objective, ["logits (--logits)"])


def _lacking(objective: str, states: Iterable[str]) -> InvalidConfigError:
    return InvalidConfigError(
        f"--objective {objective} needs states that this cache does not hold: {', '.join(states)}. Add them: "
        f"`minilm-cache dump` with the settings of this cache, --add THIS-CACHE and --for {objective}."
    )


def shorter_widths(config: ObjectiveConfig, width: int) -> tuple[int, ...]:
    """Return the shorter widths at which vectors are compared, too, the greatest one first.

    Args:
        config: settings of the objective.
        width: width of a cache's pooled vectors.

    Raises:
        InvalidConfigError: one is not below it.
    """
    widths = tuple(sorted(set(config.matryoshka), reverse=True))
    if widths and widths[0] >= width:
        raise InvalidConfigError(
            f"--matryoshka {widths[0]}: the vectors of this cache have {width} dimensions. Give fewer."
        )
    return widths


def _states_of(needs: Needs) -> dict[str, str]:
    """Return the kinds of states that an objective needs, and their names for people."""
    asked: dict[str, tuple[str, bool]] = {
        StateFamily.HIDDEN: ("hidden states (--hidden)", needs.hidden is not None),
        StateFamily.MASKED: (
            "hidden states of masked sequences (--masked-hidden)",
            needs.masked_hidden is not None,
        ),
        StateFamily.FIRST: ("hidden states of first tokens (--first-hidden)", needs.first is not None),
        LABELS.signal: ("soft labels (--labels)", needs.labels),
        # Objectives of scores say more: which pairs or groups they need, too.
        LOGITS.signal: ("logits (--logits)", needs.logits and needs.relations),
        **{name: (f"signal {name}", True) for name in needs.signals},
    }
    return {kind: words for kind, (words, is_asked) in asked.items() if is_asked}


def check_layers(
    config: ObjectiveConfig, wanted: Iterable[int], *, held: Sequence[int], codec: str, place: str
) -> None:
    """Raise InvalidConfigError for layers that a cache does not hold, naming what would dump them.

    Args:
        config: settings of the objective.
        wanted: layers of the teacher that it learns from.
        held: layers that the cache holds.
        codec: codec of the cache.
        place: folder or URL of the cache.
    """
    wanted = tuple(wanted)
    missing = [str(layer) for layer in wanted if layer not in held]
    if not missing:
        return
    needs = f"needs layer {', '.join(missing)} of the teacher"
    problem = f"--objective {config.objective} {needs}"
    if config.teacher_layer is not None:
        problem = f"--teacher-layer {config.teacher_layer}"
    elif config.layer_map != "last":
        problem = f"--layer-map {config.layer_map} {needs}"
    every = ",".join(map(str, sorted({*held, *wanted})))
    added = f" --add {place}" if codec == "vectors" else ""
    raise InvalidConfigError(
        f"{problem}: the cache holds layer {', '.join(map(str, held))}. Choose one of them, or dump a cache "
        f"with --codec vectors --layers {every}{flags_of(config)}{added}."
    )


def flags_of(config: ObjectiveConfig) -> str:
    """Return the option of a dump for an objective that needs more than the last layer's relations."""
    return "" if config.spec.is_relational else f" --for {config.objective}"
