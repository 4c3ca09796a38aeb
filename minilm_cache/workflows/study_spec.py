"""Reads STUDY.yaml, the settings of a study, and reports every mistake with its line and key."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

from pydantic import Field, ValidationError

from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import CorpusError, InvalidConfigError, TeacherError
from minilm_cache.evaluate.settings import EvaluateConfig, is_own_task
from minilm_cache.models.arch import num_layers_of
from minilm_cache.objectives.config import ObjectiveConfig, check_codec, default_of, slug_forms
from minilm_cache.objectives.spec import Which, joined_names, known_objective
from minilm_cache.settings import FrozenSettings, WrittenSettings
from minilm_cache.store.urls import is_url
from minilm_cache.train.config import (
    FROM_TEACHER,
    RANDOM,
    TrainConfig,
    refuse_no_beginning,
    with_first,
    with_preset,
)
from minilm_cache.train.folder import VIA, arch_slug
from minilm_cache.workflows.config import NEEDS_OF_CHAINS, RUNS
from minilm_cache.workflows.study_pass import Assistant, Pass
from minilm_cache.workflows.study_source import PATHS_OF_DUMPS, Location, Source

_NAME: Final = re.compile(r"[a-z][a-z0-9._-]{0,31}")
ASSISTANT: Final = "-assistant"
"""End of the label of an assistant's training."""
_PATHS: Final = ("init", "init_teacher", "vocab")
"""Settings of a training that may be paths."""
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
"""Settings of a training that a study varies, and where the document must give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveChoice:
    """An objective of a study, with its settings."""

    settings: Mapping[str, Any]
    """Settings of `ObjectiveConfig` that were given, by name."""
    arch: tuple[str, ...] | None = None
    """Shapes of its own, for an objective that needs them. None means those of the study."""

    @property
    def name(self) -> str:
        """The name of the objective."""
        return str(self.settings["objective"])

    def __str__(self) -> str:
        """Return the choice as errors show it."""
        return self.slug

    @property
    def slug(self) -> str:
        """The choice as part of a path."""
        given = self.settings
        parts = [self.name]
        for name, form in slug_forms().items():
            if name == "first" and name in given:
                parts.append(f"after-{given['first']}{given.get('first_steps', '')}")
            elif isinstance(given.get(name), tuple):
                parts += [form.format(Path(str(each)).name.replace("=", "")) for each in given[name]]
            elif name in given and (name == "layer_map" or given[name] != default_of(name)):
                parts.append(form.format(given[name]))
        return "-".join(parts)


class StudyDocument(WrittenSettings):
    """The keys of STUDY.yaml."""

    dump: dict[str, Any] = Field(default_factory=dict)
    """Settings of `DumpConfig` that all caches share: teacher, corpus, max_length, ... Without `for`, caches
    hold what the objectives need."""
    caches: dict[str, dict[str, Any]] = Field(default={"cache": {}}, min_length=1)
    """Further settings of a dump, or `{cache: FOLDER-OR-URL}` for an existing cache, by name of the cache.
    Without names there is one cache, with the settings of `dump`."""
    arch: Annotated[tuple[str, ...], Field(min_length=1)]
    objective: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None
    """Names of objectives, or settings of `ObjectiveConfig`, with `arch` for shapes of their own. None means
    the preset's objective, or else minilm."""
    seed: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    init: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """What students begin with, as `--init` of `train`: each value is trained. None means that of `train`."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Settings of `TrainConfig` that all trainings share, and `preset`."""
    price_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Price of the machine for an hour, in any currency. None means that the table has no costs."""
    agreement_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of `mlm-kd` that every student takes in addition, so that all of them predict masked tokens; this
    needs caches with labels. None means that agreement on masked tokens is not measured."""
    assistants: tuple[str, ...] = ()
    """Shapes of assistants. Each learns from every cache that the study dumps, by the first objective and
    seed whose students can be teachers; students of objectives about relations or vectors of texts then also
    learn from what it computes."""
    evaluate: dict[str, Any] | None = None
    """Settings of `EvaluateConfig` (task, data, seeds, ...) by which teacher and students are fine-tuned and
    scored. None means that they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study with valid settings, which are not yet compared with teacher and caches."""

    source: Source
    teacher: tuple[str, str | None] | None
    """Name and revision of the teacher that runs again, to compare students with it. None means that students
    are compared with what the caches hold."""
    arch: tuple[str, ...]
    caches: Mapping[str, DumpConfig | str]
    """Settings of a dump, or folder or URL of an existing cache, by name of the cache."""
    passes: tuple[Pass, ...]
    price_per_hour: float | None
    agreement_steps: int | None
    assistants: tuple[Assistant, ...] = ()
    evaluation: EvaluateConfig | None = None
    """How teacher and students are scored. None means that they are not."""

    def grown(self, folder: Path) -> "Study":
        """Return the study with a pass for the students that its folder has, and one for the others.

        Args:
            folder: folder of the study.
        """
        passes = [each for planned in self.passes for each in planned.grown(folder / RUNS)]
        return replace(self, passes=tuple(passes))

    @property
    def made(self) -> dict[str, Assistant]:
        """The assistants by the names of their caches."""
        return {assistant.name: assistant for assistant in self.assistants}

    @contextmanager
    def located(self, location: Location) -> Iterator[None]:
        """Turn errors of settings and of texts into errors at a line of the document.

        Args:
            location: keys that lead to what the settings come from.
        """
        try:
            yield
        except (CorpusError, InvalidConfigError, TeacherError) as error:
            self.source.fail(location, str(error))

    def refuse_arch(self, arch: str, problem: str) -> NoReturn:
        """Raise InvalidConfigError at the line of a shape: that of the study, or of an objective's own."""
        self.source.fail(("arch", self.arch.index(arch)) if arch in self.arch else ("objective",), problem)


def read_study(path: str | Path) -> Study:
    """Read STUDY.yaml.

    Raises:
        InvalidConfigError: a setting is invalid; the message has the line and key of the first mistake.
    """
    source = Source(Path(path))
    document = source.check(StudyDocument, _with_names(source), {"": ()})
    choices = _choices(source, document)
    _check_lists(source, document, choices)
    trainings = [
        _training(source, document, choice=choice, index=index, seed=document.seed[0], init=None)
        for index, choice in enumerate(choices)
    ]
    caches = {name: _cache(source, document, name=name, trainings=trainings) for name in document.caches}
    _check_labels(source, document, caches)
    passes = []
    for name, cache in caches.items():
        planned = list(_passes(source, document, cache=name, choices=choices))
        if isinstance(cache, DumpConfig):
            for each in planned:
                _check_fits(source, _location(document, name), config=each.config, cache=cache)
        passes += planned
    assistants = _assistants(source, document, caches=caches, passes=passes)
    for assistant in assistants:
        fitting = [
            each for each in passes if each.cache == assistant.teacher and not _not_of_a_chain(each.config)
        ]
        for each in fitting:
            label = f"{assistant.name}{each.label.removeprefix(each.cache)}"
            passes.append(replace(each, cache=assistant.name, label=label))
    return Study(
        source=source,
        teacher=_teacher(source, document),
        arch=document.arch,
        caches=caches,
        passes=tuple(passes),
        price_per_hour=document.price_per_hour,
        agreement_steps=document.agreement_steps,
        assistants=assistants,
        evaluation=_evaluation(source, document),
    )


def _passes(
    source: Source, document: StudyDocument, *, cache: str, choices: Sequence[ObjectiveChoice]
) -> Iterator[Pass]:
    """Yield the passes of a cache: one for each objective, each start and each seed."""
    for index, choice in enumerate(choices):
        for init, seed in product(document.init or (None,), document.seed):
            begun = "" if init is None else f"-{Path(init).name}"
            config = _training(source, document, choice=choice, index=index, seed=seed, init=init)
            written = {**document.train, **({} if init is None else {"init": init}), **choice.settings}
            yield Pass(
                cache=cache,
                label=f"{cache}-{choice.slug}{begun}-s{seed}",
                config=config,
                written=_paths(source, config, written),
            )


def _paths(source: Source, config: TrainConfig, written: Mapping[str, Any]) -> dict[str, object]:
    """Return the paths among the settings of a training, as the document has them."""
    resolved = {
        name: written[name]
        for name in _PATHS
        if isinstance(written.get(name), str) and getattr(config, name) == str(source.resolve(written[name]))
    }
    return resolved | {name: written[name] for name in ("also", "own_labels") if name in written}


def _not_of_a_chain(config: TrainConfig) -> str | None:
    """Return what students lack that are teachers, or learn from an assistant. None means nothing."""
    is_own = config.init in (None, RANDOM, *FROM_TEACHER)
    of_last = all(
        each.spec.needs in NEEDS_OF_CHAINS and each.layer_map == "last" for each in with_first(config)
    )
    if not of_last or config.teacher_layer is not None:
        return "an objective about relations or vectors of texts of the last layer"
    if config.vocab is not None:
        return "students with all pieces of the teacher (leave vocab out, and trim the last ones)"
    if not is_own or config.init_teacher is not None:
        return "students that begin with random weights or those of the teacher they learn from (init)"
    return "one teacher (leave also out)" if config.also else None


def _assistants(
    source: Source, document: StudyDocument, *, caches: Mapping[str, DumpConfig | str], passes: Sequence[Pass]
) -> tuple[Assistant, ...]:
    """Return the assistants between the caches that a study dumps and its students."""
    if not document.assistants:
        return ()
    if document.agreement_steps is not None:
        source.fail(("assistants",), "caches of assistants hold no labels; leave out agreement_steps")
    named = next((name for name in document.caches if VIA in name), None)
    if named is not None:
        source.fail(("caches", named), f"caches of assistants have names with {VIA}; choose another name")
    dumped = [name for name, cache in caches.items() if isinstance(cache, DumpConfig)]
    lacking = {each.label: _not_of_a_chain(each.config) for each in passes if each.cache in dumped}
    fitting = [each for each in passes if each.cache in dumped and lacking[each.label] is None]
    if not fitting:
        needed = next(filter(None, lacking.values()), "a cache that the study dumps")
        source.fail(("assistants",), f"an assistant needs {needed}")
    assistants = []
    for name, arch in product(dict.fromkeys(each.cache for each in fitting), document.assistants):
        of_cache = [each for each in fitting if each.cache == name]
        # An assistant that learned relations alone has no vectors of texts for others to learn.
        first = next((each for each in of_cache if each.config.spec.needs.pooled), of_cache[0])
        values = {**dict(first.config), "arch": (arch,)}
        config = source.check(TrainConfig, values, {"": ("assistants",)})
        training = replace(first, label=f"{first.label}{ASSISTANT}", config=config)
        cache = f"{name}{VIA}{arch_slug(arch)}-{training.name.rpartition('-')[2]}"
        assistants.append(Assistant(name=cache, teacher=name, training=training))
    return tuple(assistants)


def _evaluation(source: Source, document: StudyDocument) -> EvaluateConfig | None:
    """Return how teacher and students are scored; paths are relative to the document."""
    if document.evaluate is None:
        return None
    if document.dump.get("teacher") is None:
        source.fail(("evaluate",), "students are compared with a teacher; give it under dump")
    values = dict(document.evaluate)
    unfit = next((key for key in ("as_is", "card", "revision", "untrained") if key in values), None)
    if unfit is not None:
        source.fail(("evaluate", unfit), "a study fine-tunes its teacher and its students; leave it out")
    tasks = values.get("task")
    if not isinstance(tasks, str | list) or not all(isinstance(task, str) for task in tasks):
        source.fail(("evaluate",), "name tasks, as {task: [sst2], data: FOLDER}")
    names = [tasks] if isinstance(tasks, str) else tasks
    values["task"] = [str(source.resolve(task)) if is_own_task(task) else task for task in names]
    for key in {"data", "dev"} & values.keys():
        values[key] = _existing(source, ("evaluate", key), str(values[key]))
    return source.check(EvaluateConfig, values, dict.fromkeys((*values, ""), ("evaluate",)))


def _existing(source: Source, location: Location, given: str) -> str:
    """Return a path of the document, which must exist; what names the hub stays as it is."""
    if given == "hf" or given.startswith("hf:"):
        return given
    if not source.resolve(given).exists():
        source.fail(location, f"{source.resolve(given)} does not exist")
    return str(source.resolve(given))


def _choices(source: Source, document: StudyDocument) -> list[ObjectiveChoice]:
    """Return the objectives of a study, each checked by itself."""
    if document.objective is None:
        return [ObjectiveChoice(settings={"objective": _preset_objective(source, document)})]
    choices = []
    for index, given in enumerate(document.objective):
        values = {"objective": given} if isinstance(given, str) else given
        location: Location = ("objective", index)
        if isinstance(values, dict):
            values = {**values, "objective": joined_names(values.get("objective"))}
        if not isinstance(values, dict) or not isinstance(values.get("objective"), str):
            source.fail(location, "give the name of an objective, as {objective: NAME}")
        try:
            known_objective(values["objective"])
        except ValueError as error:
            source.fail(location, str(error))
        shapes = {"arch": values.get("arch")}
        arch = source.check(_Shapes, shapes, {"arch": location, "": location}).arch
        settings = {name: value for name, value in values.items() if name != "arch" and value is not None}
        checked = source.check(ObjectiveConfig, settings, {"": location} | dict.fromkeys(settings, location))
        chosen = {name: getattr(checked, name) for name in settings if _says_something(checked, name)}
        choices.append(ObjectiveChoice(settings=chosen, arch=arch))
    return choices


def _says_something(config: ObjectiveConfig, name: str) -> bool:
    """Return whether a setting is part of a choice: it is not what the objective has by default anyway."""
    is_named = name in {"objective", "layer_map", "form"}  # as paths of studies have always named them
    return is_named or getattr(config, name) != ObjectiveConfig.model_fields[name].default


class _Shapes(FrozenSettings):
    """Shapes that are given with an objective, in a class that checks them."""

    arch: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


def _check_lists(source: Source, document: StudyDocument, choices: Sequence[ObjectiveChoice]) -> None:
    """Refuse texts that are no shapes, seeds within shapes, and values that a list holds twice."""
    shapes: list[tuple[Location, str]] = [(("arch", index), arch) for index, arch in enumerate(document.arch)]
    shapes += [(("assistants", index), arch) for index, arch in enumerate(document.assistants)]
    for index, choice in enumerate(choices):
        shapes += [(("objective", index), arch) for arch in choice.arch or ()]
    for location, arch in shapes:
        if re.search(r":s\d", arch):
            source.fail(location, "give seeds under seed")
        try:
            num_layers_of(arch)
        except InvalidConfigError as error:
            source.fail(location, str(error))
    inits = document.init or ()
    if inits and "init" in document.train:
        source.fail(("train", "init"), "a study varies this; give it under init alone")
    lists = {
        "arch": document.arch,
        "seed": document.seed,
        "objective": choices,
        "init": inits,
        "assistants": document.assistants,
    }
    for key, values in lists.items():
        for index, value in enumerate(values):
            if value in values[:index]:
                source.fail((key, index), f"{value} is given twice")


def _check_labels(source: Source, document: StudyDocument, caches: Mapping[str, DumpConfig | str]) -> None:
    """Refuse a measurement of agreement without a teacher, or on caches without labels."""
    if document.agreement_steps is not None and not isinstance(document.dump.get("teacher"), str):
        source.fail(("agreement_steps",), "students are compared with a teacher; give it under dump")
    if document.agreement_steps is not None and document.train.get("vocab") is not None:
        problem = "masked tokens are pieces of the teacher's, which students with vocab lack; leave this out"
        source.fail(("agreement_steps",), problem)
    unlabelled = [
        name for name, cache in caches.items() if isinstance(cache, DumpConfig) and not cache.labels
    ]
    if document.agreement_steps is not None and unlabelled:
        source.fail(("agreement_steps",), f"cache {unlabelled[0]} will hold no labels; give {{labels: true}}")


def _with_names(source: Source) -> dict[str, Any]:
    """Return the content of the document, and refuse keys that are not strings."""
    for key in source.content:
        if not isinstance(key, str):
            source.fail((str(key),), "a key must be a word")
    return dict(source.content)


def _location(document: StudyDocument, name: str) -> Location:
    """Return where the document has the settings of a cache."""
    return ("caches", name) if "caches" in document.model_fields_set else ("dump",)


def _cache(
    source: Source, document: StudyDocument, *, name: str, trainings: Sequence[TrainConfig]
) -> DumpConfig | str:
    """Return the settings of a cache's dump, or the folder or URL of a cache that exists.

    A dump without `for` serves the trainings.
    """
    location = _location(document, name)
    if not _NAME.fullmatch(name):
        source.fail(
            location, "a name begins with a letter and has at most 32 characters of a to z, 0 to 9 and . _ -"
        )
    settings = document.caches[name]
    if "cache" in settings:
        place = settings["cache"]
        if len(settings) > 1 or not isinstance(place, str):
            source.fail(location, "give an existing cache as {cache: FOLDER-OR-URL}, without other keys")
        return place if is_url(place) else str(source.resolve(place))
    for key in _NOT_IN_DUMP:
        for base, given in ((("dump",), document.dump), (location, settings)):
            if key in given:
                source.fail(
                    (*base, key), "a study dumps in one process; dump by hand, then give {cache: FOLDER}"
                )
    values = source.with_paths({**document.dump, **settings}, *PATHS_OF_DUMPS)
    locate: dict[str, Location] = dict.fromkeys(document.dump, ("dump",))
    locate |= dict.fromkeys(settings, location)
    locate = {"teacher": ("dump",), **locate, "": location}
    learned = [each for training in trainings for each in with_first(training)]
    with suppress(ValidationError):  # settings like `pooling` are none without what `for` asks for
        config = DumpConfig(**values)
        if "for" in values or not any(_lacking(each, config) for each in learned):
            return config
    served = dict.fromkeys(each.objective for training in learned for each in training.each)
    return source.check(DumpConfig, {"for": list(served), **values}, locate)


def _training(
    source: Source,
    document: StudyDocument,
    *,
    choice: ObjectiveChoice,
    index: int,
    seed: int,
    init: str | None,
) -> TrainConfig:
    """Return the settings of one training: of the document, its preset, one objective, seed and start."""
    for key, place in _NOT_IN_TRAIN.items():
        if key in document.train:
            source.fail(("train", key), f"a study varies this; give it under {place}")
    given = source.with_paths(document.train, *_PATHS)
    preset = _preset(source, given.pop("preset", None))
    if init is not None:
        given |= source.with_paths({"init": init}, "init")
    values = with_preset(preset, {**given, **source.with_caches(choice.settings)})
    locate: dict[str, Location] = dict.fromkeys(given, ("train",))
    locate |= dict.fromkeys(choice.settings, ("objective", index))
    locate |= {"": ("train",), "arch": (), "seed": (), "init": ("init",)}
    arch = choice.arch or document.arch
    values = {"keep_checkpoints": 0, **values, "arch": arch, "seed": seed}
    config = source.check(TrainConfig, values, locate)
    try:
        refuse_no_beginning(config.init)
    except InvalidConfigError as error:
        source.fail(("train", "init") if init is None else ("init",), str(error))
    return config


def _preset(source: Source, name: object) -> str | None:
    """Return the name of a preset, checked. None means that no preset is given."""
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
    """Return name and revision of the teacher. None means that all caches of the study do not share one."""
    name = document.dump.get("teacher")
    if not isinstance(name, str):
        return None
    return source.with_paths(document.dump, "teacher")["teacher"], document.dump.get("revision")


def _check_fits(source: Source, location: Location, *, config: TrainConfig, cache: DumpConfig) -> None:
    """Refuse a cache that will not hold what an objective needs."""
    for first in with_first(config)[:-1]:
        _check_fits(source, location, config=first, cache=cache)
    try:
        for each in config.each:
            check_codec(each, cache.codec)
    except InvalidConfigError as error:
        source.fail(location, str(error))
    takes_several = any(each.spec.is_relational and each.layer_map != "last" for each in config.each)
    if takes_several and cache.layers == "last":
        source.fail(location, f"layer_map {config.layer_map} needs several layers; give {{layers: all}}")
    missing = _lacking(config, cache)
    if missing:
        given = [name for name in missing if name in cache.model_fields_set and getattr(cache, name)]
        remedy = f"give {{for: [{config.objective}]}}{' in place of ' * bool(given)}{' and '.join(given)}"
        off = [name for name in missing if name in cache.model_fields_set and not getattr(cache, name)]
        if off:
            remedy = f"leave out {' and '.join(off)}"
        elif cache.serve and not given:
            remedy = f"add {config.objective} to `for`, or leave `for` out to store what all objectives need"
        needs = f"objective {config.objective} needs {' and '.join(missing)}"
        source.fail(location, f"{needs}, which this cache will not hold; {remedy}")


def _lacking(config: TrainConfig, cache: DumpConfig) -> list[str]:
    """Return the settings of a dump that lack for a training."""
    needs = config.spec.needs
    takes_all = config.layer_map != "last" or config.spec.maps == ("last",)

    def lacks(wanted: Which | None, stored: object) -> bool:
        """Return whether no layer is stored, or the last one alone where all are wanted."""
        return wanted is not None and (stored is None or (wanted == "all" and takes_all and stored == "last"))

    lacking = {
        "layers": lacks(needs.layers, cache.layers),
        "hidden": lacks(needs.hidden, cache.hidden),
        "masked_hidden": lacks(needs.masked_hidden, cache.masked_hidden),
        "first_hidden": lacks(needs.first, cache.first_hidden),
        "labels": needs.labels and not cache.labels,
        "label_tokens": needs.all_labels and config.form == "authors" and cache.label_tokens != "all",
        "logits": needs.logits and not cache.logits,
        "pooled": needs.pooled and not cache.pooled,
        "signal": not set(needs.signals) <= set(cache.signal),
    }
    return [name for name, is_missing in lacking.items() if is_missing]
