"""STUDY.yaml: what is asked of a study, every mistake told with its line and key."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.objectives.check import check_codec
from minilm_cache.objectives.spec import ObjectiveConfig
from minilm_cache.settings import FrozenSettings
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.store.remote import is_url
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.presets import with_preset
from minilm_cache.workflows.study_source import Location, Source

_NAME: Final = re.compile(r"[a-z][a-z0-9._-]{0,31}")
_NOT_IN_DUMP: Final = ("rank", "world_size")
_NOT_IN_TRAIN: Final = {
    "arch": "arch",
    "seed": "seed",
    **{
        name: f"objective, as {{objective: NAME, {name}: VALUE}}"
        for name in ObjectiveConfig.model_fields
        if name not in ("objective", "teacher_layer")
    },
    "objective": "objective",
}
"""Settings of a training that a study varies, and where they belong."""
_LATER: Final = ("form", "patience", "temperature", "ground_truth")
"""Settings of a training that the first releases did not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveChoice:
    """An objective of a study."""

    settings: Mapping[str, Any]
    """Settings of `ObjectiveConfig` that were given, by name."""
    arch: tuple[str, ...] | None = None
    """Shapes of its own, for an objective that needs them. None means those of the study."""

    @property
    def name(self) -> str:
        """The name of the objective."""
        return str(self.settings["objective"])

    @property
    def slug(self) -> str:
        """The choice as part of a path."""
        given = self.settings
        parts = [self.name]
        if "relation_heads" in given:
            parts.append(f"h{given['relation_heads']}")
        parts += ["novr"] * (given.get("value_relation") is False) + ["qk"] * (
            given.get("query_key_relations") is True
        )
        if "form" in given:
            parts.append(given["form"])
        for letter, name in (("b", "patience"), ("t", "temperature"), ("g", "ground_truth")):
            if name in given:
                parts.append(f"{letter}{given[name]:g}")
        if "layer_map" in given:
            parts.append(given["layer_map"])
        if "teacher_layer" in given:
            parts.append(f"l{given['teacher_layer']}")
        return "-".join(parts)


class StudyDocument(FrozenSettings):
    """The keys of STUDY.yaml."""

    dump: dict[str, Any] = Field(default_factory=dict)
    """Settings of `DumpConfig` that all caches share: teacher, corpus, max_length, ..."""
    caches: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """Name to further settings of a dump, or to `{cache: FOLDER-OR-URL}`, a cache that is there."""
    arch: Annotated[tuple[str, ...], Field(min_length=1)]
    objective: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=1)] | None = None
    """Names of objectives, or settings of `ObjectiveConfig`, with `arch` for shapes of their own. None means
    the preset's objective, or else minilm."""
    seed: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    train: dict[str, Any] = Field(default_factory=dict)
    """Settings of `TrainConfig` that all trainings share, and `preset`."""
    price_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of the machine, in any currency: the table then has a column of costs."""
    agreement_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of `mlm-kd` that every student then takes, so that all can be asked for masked tokens; their
    caches have labels. None: they are not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Students that train together: those of one cache, one objective and one seed."""

    cache: str
    name: str
    config: TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study whose settings are valid, each by itself."""

    source: Source
    teacher: tuple[str, str | None] | None
    """Name and revision of what students are compared with, run anew; none: what the caches hold."""
    arch: tuple[str, ...]
    caches: Mapping[str, DumpConfig | str]
    """Name to what is dumped, or to where the cache lies."""
    passes: tuple[Pass, ...]
    price_per_hour: float | None
    agreement_steps: int | None


def read_study(path: Path) -> Study:
    """Read STUDY.yaml.

    Raises:
        InvalidConfigError: the first mistake, with its line and key.
    """
    source = Source(path)
    document = source.check(StudyDocument, _with_names(source), {"": ()})
    caches = {name: _cache(source, document, name) for name in document.caches}
    _check_labels(source, document, caches)
    choices = _choices(source, document)
    _check_lists(source, document, choices)
    passes = []
    for name, cache in caches.items():
        for at, choice in enumerate(choices):
            for seed in document.seed:
                config = _training(source, document, choice=choice, at=at, seed=seed)
                if isinstance(cache, DumpConfig):
                    _check_fits(source, ("caches", name), config=config, cache=cache)
                content = config.model_dump(mode="json", exclude={"device", "checkpoint_steps"})
                # Settings that came later name a pass only where they say something: older passes stay.
                content = {
                    key: value for key, value in content.items() if value is not None or key not in _LATER
                }
                slug = f"{name}-{choice.slug}-s{seed}-{canonical_sha256(content)[:8]}"
                passes.append(Pass(cache=name, name=slug, config=config))
    return Study(
        source=source,
        teacher=_teacher(source, document),
        arch=document.arch,
        caches=caches,
        passes=tuple(passes),
        price_per_hour=document.price_per_hour,
        agreement_steps=document.agreement_steps,
    )


def _choices(source: Source, document: StudyDocument) -> list[ObjectiveChoice]:
    """Return the objectives of a study, each checked by itself."""
    if document.objective is None:
        return [ObjectiveChoice(settings={"objective": _preset_objective(source, document)})]
    choices = []
    for at, given in enumerate(document.objective):
        values = {"objective": given} if isinstance(given, str) else given
        location: Location = ("objective", at)
        if values.get("objective") is None:
            source.fail(location, "give the name of an objective, as {objective: NAME}")
        shapes = {"arch": values.get("arch")}
        arch = source.check(_Shapes, shapes, {"arch": location, "": location}).arch
        settings = {name: value for name, value in values.items() if name != "arch" and value is not None}
        source.check(ObjectiveConfig, settings, {"": location} | dict.fromkeys(settings, location))
        choices.append(ObjectiveChoice(settings=settings, arch=arch))
    return choices


class _Shapes(FrozenSettings):
    arch: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


def _check_lists(source: Source, document: StudyDocument, choices: Sequence[ObjectiveChoice]) -> None:
    shapes: list[tuple[Location, str]] = [(("arch", at), arch) for at, arch in enumerate(document.arch)]
    shapes += [(("objective", at), arch) for at, one in enumerate(choices) for arch in one.arch or ()]
    for location, arch in shapes:
        if re.search(r":s\d", arch):
            source.fail(location, "seeds are given under seed")
    for key, values in (("arch", document.arch), ("seed", document.seed), ("objective", choices)):
        for at, value in enumerate(values):
            if value in values[:at]:
                source.fail((key, at), f"{value} is given twice")


def _check_labels(source: Source, document: StudyDocument, caches: Mapping[str, DumpConfig | str]) -> None:
    if document.agreement_steps is not None and not isinstance(document.dump.get("teacher"), str):
        source.fail(("agreement_steps",), "students are compared with a teacher; give it under dump")
    unlabelled = [name for name, one in caches.items() if isinstance(one, DumpConfig) and not one.labels]
    if document.agreement_steps is not None and unlabelled:
        source.fail(("agreement_steps",), f"cache {unlabelled[0]} will hold no labels; give {{labels: true}}")


def _with_names(source: Source) -> dict[str, Any]:
    """Return the document, its keys checked to be words."""
    for key in source.content:
        if not isinstance(key, str):
            source.fail((str(key),), "keys are words")
    return dict(source.content)


def _cache(source: Source, document: StudyDocument, name: str) -> DumpConfig | str:
    location: Location = ("caches", name)
    if not _NAME.fullmatch(name):
        source.fail(location, "a name has at most 32 of a to z, 0 to 9, and . _ - after the first")
    own = document.caches[name]
    if "cache" in own:
        if len(own) > 1 or not isinstance(own["cache"], str):
            source.fail(location, "a cache that is there is {cache: FOLDER-OR-URL}, and nothing else")
        return own["cache"] if is_url(own["cache"]) else str(source.resolve(own["cache"]))
    for key in _NOT_IN_DUMP:
        for base, given in ((("dump",), document.dump), (location, own)):
            if key in given:
                source.fail(
                    (*base, key), "a study dumps in one process; dump by hand, then give {cache: FOLDER}"
                )
    values = {**document.dump, **own}
    for key in ("teacher", "corpus"):
        if isinstance(values.get(key), str) and source.resolve(values[key]).exists():
            values[key] = str(source.resolve(values[key]))
    locate = dict.fromkeys(own, location) | {key: ("dump",) for key in document.dump if key not in own}
    return source.check(DumpConfig, values, {"teacher": ("dump",), **locate, "": location})


def _training(
    source: Source, document: StudyDocument, *, choice: ObjectiveChoice, at: int, seed: int
) -> TrainConfig:
    for key, place in _NOT_IN_TRAIN.items():
        if key in document.train:
            source.fail(("train", key), f"a study varies this; give it under {place}")
    given = dict(document.train)
    preset = _preset(source, given.pop("preset", None))
    values = with_preset(preset, {**given, **choice.settings})
    locate: dict[str, Location] = dict.fromkeys(given, ("train",))
    locate |= dict.fromkeys(choice.settings, ("objective", at))
    locate |= {"": ("train",), "arch": (), "seed": ()}
    arch = choice.arch or document.arch
    return source.check(TrainConfig, {**values, "arch": arch, "seed": seed}, locate)


def _preset(source: Source, name: object) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str):
        source.fail(("train", "preset"), "a preset is a name")
    try:
        with_preset(name, {})
    except InvalidConfigError as error:
        source.fail(("train", "preset"), str(error))
    return name


def _preset_objective(source: Source, document: StudyDocument) -> str:
    """Return the objective of the preset, or else minilm."""
    preset = _preset(source, document.train.get("preset"))
    return str(with_preset(preset, {}).get("objective", "minilm"))


def _teacher(source: Source, document: StudyDocument) -> tuple[str, str | None] | None:
    name = document.dump.get("teacher")
    if not isinstance(name, str):
        return None
    path = source.resolve(name)
    return str(path) if path.is_dir() else name, document.dump.get("revision")


def _check_fits(source: Source, location: Location, *, config: TrainConfig, cache: DumpConfig) -> None:
    try:
        check_codec(config, cache.codec)
    except InvalidConfigError as error:
        source.fail(location, str(error))
    needs = config.spec.needs
    lacks = {
        "hidden": needs.hidden and cache.hidden is None,
        "masked_hidden": needs.masked_hidden and cache.masked_hidden is None,
        "first_hidden": needs.first and cache.first_hidden is None,
        "labels": needs.labels and not cache.labels,
        "label_tokens": needs.all_labels and config.form == "authors" and cache.label_tokens != "all",
        "logits": needs.logits and not cache.logits,
    }
    missing = [name for name, is_missing in lacks.items() if is_missing]
    if missing:
        source.fail(
            location,
            f"objective {config.objective} needs {' and '.join(missing)}, which this cache will not hold; "
            f"give {{for: [{config.objective}]}}",
        )
