"""STUDY.yaml: what is asked of a study, every mistake told with its line and key."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from minilm_cache.config import DumpConfig, FrozenSettings, TrainConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.study.source import Location, Source
from minilm_cache.train.objective import check_codec
from minilm_cache.train.presets import with_preset

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_NOT_IN_DUMP: Final = ("rank", "world_size")
_NOT_IN_TRAIN: Final = {
    "arch": "arch",
    "objective": "objective",
    "relation_heads": "objective, as {objective: minilmv2, relation_heads: N}",
    "seed": "seed",
}
"""Settings of a training that a study varies, and where they belong."""


class ObjectiveChoice(FrozenSettings):
    """An objective and what belongs to it."""

    objective: str
    relation_heads: int | None = None

    @property
    def slug(self) -> str:
        """The choice as part of a path."""
        return self.objective if self.relation_heads is None else f"{self.objective}-h{self.relation_heads}"


class StudyDocument(FrozenSettings):
    """The keys of STUDY.yaml."""

    dump: dict[str, Any] = Field(default_factory=dict)
    """Settings of `DumpConfig` that all caches share: teacher, corpus, max_length, ..."""
    caches: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """Name to further settings of a dump, or to `{cache: FOLDER-OR-URL}`, a cache that is there."""
    arch: Annotated[tuple[str, ...], Field(min_length=1)]
    objective: Annotated[tuple[str | ObjectiveChoice, ...], Field(min_length=1)] = ("minilm",)
    seed: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    train: dict[str, Any] = Field(default_factory=dict)
    """Settings of `TrainConfig` that all trainings share, and `preset`."""
    price_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of the machine, in any currency: the table then has a column of costs."""


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
    arch: tuple[str, ...]
    caches: Mapping[str, DumpConfig | str]
    """Name to what is dumped, or to where the cache lies."""
    passes: tuple[Pass, ...]
    price_per_hour: float | None


def read_study(path: Path) -> Study:
    """Read STUDY.yaml.

    Raises:
        InvalidConfigError: the first mistake, with its line and key.
    """
    source = Source(path)
    document = source.check(StudyDocument, _with_names(source), {"": ()})
    caches = {name: _cache(source, document, name) for name in document.caches}
    choices = [
        one if isinstance(one, ObjectiveChoice) else ObjectiveChoice(objective=one)
        for one in document.objective
    ]
    for key, values in (("arch", document.arch), ("seed", document.seed), ("objective", choices)):
        for at, value in enumerate(values):
            if value in values[:at]:
                source.fail((key, at), f"{value} is given twice")
    passes = []
    for name, cache in caches.items():
        for at, choice in enumerate(choices):
            for seed in document.seed:
                config = _training(source, document, choice, at, seed)
                if isinstance(cache, DumpConfig):
                    _check_fits(source, ("caches", name), choice, cache)
                passes.append(Pass(cache=name, name=f"{name}-{choice.slug}-s{seed}", config=config))
    return Study(
        source=source,
        arch=document.arch,
        caches=caches,
        passes=tuple(passes),
        price_per_hour=document.price_per_hour,
    )


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
        return own["cache"]
    for key in _NOT_IN_DUMP:
        for base, given in ((("dump",), document.dump), (location, own)):
            if key in given:
                source.fail(
                    (*base, key), "a study dumps in one process; dump by hand, then give {cache: FOLDER}"
                )
    values = {**document.dump, **own}
    locate = dict.fromkeys(own, location) | {key: ("dump",) for key in document.dump if key not in own}
    return source.check(DumpConfig, values, {**locate, "teacher": ("dump",), "": location})


def _training(
    source: Source, document: StudyDocument, choice: ObjectiveChoice, at: int, seed: int
) -> TrainConfig:
    for key, place in _NOT_IN_TRAIN.items():
        if key in document.train:
            source.fail(("train", key), f"a study varies this; give it under {place}")
    given = dict(document.train)
    preset = given.pop("preset", None)
    try:
        values = with_preset(preset, {**given, "objective": choice.objective})
    except InvalidConfigError as error:
        source.fail(("train", "preset"), str(error))
    if choice.relation_heads is not None:
        values["relation_heads"] = choice.relation_heads
    locate: dict[str, Location] = dict.fromkeys(given, ("train",))
    locate |= {"": ("train",), "arch": (), "seed": (), "relation_heads": ("objective", at)}
    if choice.objective not in ("minilm", "minilmv2"):
        source.fail(("objective", at), f"there is no objective {choice.objective}; take minilm or minilmv2")
    return source.check(TrainConfig, {**values, "arch": document.arch, "seed": seed}, locate)


def _check_fits(source: Source, location: Location, choice: ObjectiveChoice, cache: DumpConfig) -> None:
    try:
        check_codec(choice.objective, cache.codec)
    except InvalidConfigError as error:
        source.fail(location, str(error))
