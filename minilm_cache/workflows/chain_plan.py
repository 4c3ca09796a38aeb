"""What a chain consists of: its stages, its folder, and what its settings must be before the first stage."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import IdentityMismatchError, InvalidConfigError
from minilm_cache.models.load import read_config
from minilm_cache.models.locate import locate_teacher
from minilm_cache.objectives.config import check_codec, split_into
from minilm_cache.objectives.several import check_also
from minilm_cache.settings import Settings, WrittenSettings, first_problem, validated
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.upgrades import (
    DUMPS_OF_CHAINS,
    KEPT_IN_NAMES,
    TRAININGS_OF_CHAINS,
    defaults_of_later,
    without_defaults,
)
from minilm_cache.store.durable import bounded_bytes
from minilm_cache.train.config import (
    FROM_TEACHER,
    RANDOM,
    TrainConfig,
    check_parts,
    first_config,
    with_preset,
    without_replaced,
)
from minilm_cache.train.folder import TEACHER_CACHE, RunFolder, arch_slug
from minilm_cache.train.ranks import refuse_ranks
from minilm_cache.wording import differing_values
from minilm_cache.workflows.config import (
    CACHES,
    NEEDS_OF_CHAINS,
    NOT_OF_A_CHAIN,
    RENAMED,
    RUNS,
    SETTINGS_FILE,
    ChainConfig,
    naming_settings,
    refuse_lacking,
    refuse_other_objective,
)
from minilm_cache.workflows.stages import (
    cache_state,
    check_student,
    check_training,
    refuse_foreign,
    run_state,
)
from minilm_cache.workflows.study_source import PATHS_OF_DUMPS, Source

_MAX_SLUG: Final = 64
Way = Literal["assistant", "via assistants", "direct"]
_NOT_IDENTIFYING: Final[dict[str, Any]] = {
    "compare_direct": True,
    "dump": {"device": True, "batch_size": True, "compiled": True, "keep_weights": True, "check": True},
    "train": {"arch": True, "device": True, "checkpoint_steps": True, "init_layers": True},
}
"""Settings that may differ between commands for the same chain; for example, students may be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One dump or one training."""

    does: Literal["dump", "train"]
    path: Path
    """Folder of the cache or the run."""
    source: str
    """Teacher that is dumped, or cache that is trained from."""
    arch: tuple[str, ...] = ()
    """Shapes of the students that are trained; empty for a dump."""
    way: Way = "assistant"
    """Role of these students in the chain."""

    def state(self) -> str:
        """Return how far the stage is: `to do`, `unfinished`, the number of shards written, or `complete`.

        Raises:
            MiniLMCacheError: the cache or the run is damaged.
        """
        return cache_state(self.path) if self.does == "dump" else run_state(self.path)


class ChainDocument(WrittenSettings):
    """The keys of CHAIN.yaml; options of the command replace what it says."""

    dump: dict[str, Any] = Field(default_factory=dict)
    """Settings of `DumpConfig`: teacher, corpus, max_length, ..."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Settings of `TrainConfig`: arch, objective, steps, ..., and `preset`."""
    assistants: tuple[str, ...] = ()
    """Shapes of the assistants."""
    compare_direct: bool = False
    """Also train the students directly from the teacher, to compare them."""


def read_chain(
    path: Path | None,
    *,
    chain: Mapping[str, Any],
    dump: Mapping[str, Any],
    train: Mapping[str, Any],
    preset: str | None,
) -> tuple[ChainConfig, str | None]:
    """Return the settings of a chain, and the name of their preset, from a document and options.

    Args:
        path: file of the document. None means that options say everything.
        chain: options of the chain, by field of `ChainConfig`.
        dump: options of its dumps, by field of `DumpConfig`.
        train: options of its trainings, by field of `TrainConfig`.
        preset: preset that is given as an option. None means that of the document, if it has one.

    Raises:
        InvalidConfigError: a setting is missing or invalid; the message names the option, or the document's
            line.
    """
    source = None if path is None else Source(path)
    document = ChainDocument() if source is None else source.check(ChainDocument, source.content, {"": ()})
    stated = dict(document.train) if source is None else source.with_caches(document.train)
    named = preset or stated.pop("preset", None)
    stated.pop("preset", None)
    if named is not None and not isinstance(named, str):
        raise InvalidConfigError(f"{path}, train.preset: a preset is a name.")

    assistants = document.assistants or chain.get("assistants", ())
    refuse_lacking(dump={**document.dump, **dump}, train={**stated, **train}, assistants=assistants)

    for key in NOT_OF_A_CHAIN & document.dump.keys():
        assert source is not None
        source.fail(("dump", key), "a chain sets this itself; leave it out")
    recipe = with_preset(named, {**without_replaced(stated, train), **train})
    stated = {name: value for name, value in recipe.items() if name not in train}
    training = _settings(source, TrainConfig, "train", stated=stated, given=train)
    served = {"for": (training.objective, training.first or training.objective)}
    left = {name: value for name, value in document.dump.items() if name not in dump}
    own = {} if source is None else source.with_paths(left, *PATHS_OF_DUMPS)
    dumping = _settings(
        source,
        DumpConfig,
        "dump",
        stated={**(served if training.spec.needs.pooled else {}), **own},
        given=dump,
    )
    shapes = {"assistants": document.assistants, "compare_direct": document.compare_direct}
    given = {name: value for name, value in shapes.items() if value}
    return validated(ChainConfig, {**given, **chain, "dump": dumping, "train": training}), named


def _settings(
    source: Source | None,
    model: type[Settings],
    section: str,
    *,
    stated: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Settings:
    """Build settings of a document's section and of options, which replace what the document says.

    Raises:
        InvalidConfigError: a value is invalid; the message names the line of the document, or the option.
    """
    values = {**stated, **given}
    try:
        return model(**values)
    except ValidationError as error:
        place = first_problem(error, model)[0]["loc"]
        if source is None or (place and place[0] in given):
            return validated(model, values, RENAMED if section == "dump" else {})
        return source.check(model, values, {"": (section,)})


def chain_folder(config: ChainConfig, home: Path) -> Path:
    """Return the default folder of a chain, which is named after its settings."""
    shapes = _slug(config.assistants)
    folder, earlier = (
        home / "chains" / f"{shapes}-{canonical_sha256(chain_settings(config, kept))[:12]}"
        for kept in KEPT_IN_NAMES
    )
    return earlier if earlier.exists() and not folder.exists() else folder


def chain_settings(config: ChainConfig, kept: int = 0) -> dict[str, Any]:
    """Return the settings that identify a chain.

    Args:
        config: settings of the chain.
        kept: one of `KEPT_IN_NAMES`.
    """
    settings = config.model_dump(mode="json", exclude=_NOT_IDENTIFYING)
    # A chain is the same one wherever its folders lie, and a URL may hold a secret.
    settings["train"]["also"] = [Path(place).name for place in settings["train"]["also"]]
    dump = without_defaults(settings["dump"], defaults_of_later(DumpConfig, DUMPS_OF_CHAINS))
    train = naming_settings(settings["train"], TRAININGS_OF_CHAINS, kept)
    return settings | {"train": train, "dump": dump}


def _slug(arch: Sequence[str]) -> str:
    """Return shapes as part of a path; a long list is cut and gets a hash that identifies it."""
    joined = "_".join(map(arch_slug, arch))
    return joined if len(joined) <= _MAX_SLUG else f"{joined[:_MAX_SLUG]}-{canonical_sha256(list(arch))[:8]}"


def stages(config: ChainConfig, folder: Path) -> tuple[Stage, ...]:
    """Return the stages of a chain, in order."""
    caches, runs = folder / CACHES, folder / RUNS
    first = caches / TEACHER_CACHE
    planned = [Stage(does="dump", path=first, source=config.dump.teacher)]
    for number, assistant in enumerate(config.assistants, 1):
        name = f"{number}-{arch_slug(assistant)}"
        last = planned[-1].path
        planned += [
            Stage(does="train", path=runs / name, source=str(last), arch=(assistant,)),
            Stage(
                does="dump", path=caches / name, source=str(RunFolder(path=runs / name).student(assistant))
            ),
        ]
    shapes = _slug(config.train.arch)
    arch, last = config.train.arch, planned[-1].path
    ways: list[tuple[Path, Path, Way]] = [(runs / f"students-{shapes}", last, "via assistants")]
    if config.compare_direct:
        ways.append((runs / f"direct-{shapes}", first, "direct"))
    planned += [
        Stage(does="train", path=path, source=str(cache), arch=arch, way=way) for path, cache, way in ways
    ]
    return tuple(planned)


def check_chain(config: ChainConfig, folder: Path, *, here: bool = True) -> ChainConfig:
    """Check the settings of all stages before the first one runs.

    Args:
        config: what to dump and train.
        folder: folder of the chain.
        here: whether this machine runs the stages, so that it must have their device.

    Returns:
        The settings, with the number of relation heads that every stage splits into filled in.

    Raises:
        InvalidConfigError: a shape does not fit the teacher's heads or family, or the objective does not fit
            the codec.
        IdentityMismatchError: the folder holds another chain.
        TeacherError: the teacher cannot be found or read.
    """
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    check_parts(config.train, int(num_ranks) if num_ranks.isdecimal() else 1)
    for each in config.train.each:
        check_codec(each, config.dump.codec)
    if config.train.first is not None:
        _check_first(config)
    refuse_other_objective(config.train)
    _check_init(config.train)
    check_also(config.train.also, home=None)
    if config.train.layer_map != "last":
        raise InvalidConfigError("a chain's students learn from last layers. Leave out --layer-map.")
    source = locate_teacher(config.dump.teacher, config.dump.revision, without_weights=True)
    teacher = read_config(source.folder)
    check_training(config.train, config.dump, depth=teacher.num_hidden_layers, here=here)
    heads = teacher.num_attention_heads
    teachers = [teacher] if config.compare_direct else []
    for arch in config.assistants:
        teacher = check_student(config.train, arch, teacher, heads=heads, is_assistant=True, here=here)
    for last, arch in product([*teachers, teacher], config.train.arch):
        check_student(config.train, arch, last, heads=heads, here=here)
    split = split_into(config.train.objective, config.train.relation_heads, heads)
    checked = config.with_changes(train=config.train.with_changes(relation_heads=split))
    _check_folder(checked, folder)
    return checked


def _check_first(config: ChainConfig) -> None:
    """Raise InvalidConfigError for a first objective that the caches of a chain do not serve."""
    refuse_ranks("--first", "`chain --dry-run` shows")
    first = first_config(config.train)
    check_codec(first, config.dump.codec)
    if first.spec.needs not in NEEDS_OF_CHAINS:
        raise InvalidConfigError(
            f"--first {first.objective}: a chain's caches do not hold what it needs. Leave it out, or dump "
            f"and train stage by stage (dump --for {first.objective},{config.train.objective})."
        )
    if first.spec.needs.pooled and not config.train.spec.needs.pooled:
        raise InvalidConfigError(
            f"--first {first.objective}: assistants that learn {config.train.objective} last give no vectors "
            "to learn from. Exchange --first and --objective."
        )


def _check_init(config: TrainConfig) -> None:
    """Raise InvalidConfigError for initial weights that do not fit every stage of a chain."""
    if config.init not in (None, RANDOM, *FROM_TEACHER):
        raise InvalidConfigError(
            f"--init {config.init}: the stages of a chain have different teachers, and no folder fits all of "
            f"them. Give {RANDOM} or {', '.join(FROM_TEACHER)}, or dump and train stage by stage."
        )
    if config.also:
        raise InvalidConfigError(
            "--also: a chain's stages have one teacher each, and its students are compared with the first "
            "one. Leave it out, or dump and train stage by stage."
        )
    if config.vocab is not None:
        raise InvalidConfigError(
            "--vocab: students of a chain are teachers, too, and need the pieces of the first one. Leave it "
            "out, and trim the last students with `minilm-cache trim`."
        )
    if given := config.given_options("init_layers", "init_teacher"):
        raise InvalidConfigError(
            f"{given[0]}: each stage of a chain takes its students from its own teacher. Leave it out, or "
            "dump and train stage by stage."
        )


def _check_folder(config: ChainConfig, folder: Path) -> None:
    """Raise IdentityMismatchError where a folder holds a chain of other settings, or something else."""
    file = folder / SETTINGS_FILE
    if not file.exists():
        refuse_foreign(folder, "chain", own=(CACHES, RUNS))
        own = {stage.path for stage in stages(config, folder)}
        there = (path for name in (CACHES, RUNS) for path in (folder / name).glob("[!.]*"))
        other = next((path for path in there if path not in own), None)
        if other is not None:
            raise IdentityMismatchError(
                f"{folder} holds something else than this chain ({other.relative_to(folder)}). Choose "
                "another --out."
            )
        return
    try:
        stored = TypeAdapter(dict[str, object]).validate_json(bounded_bytes(file, 2**20))
    except (OSError, ValueError) as error:
        raise IdentityMismatchError(f"{file} is damaged. Choose another --out.") from error
    differing = [", ".join(differing_values(stored, chain_settings(config, kept))) for kept in KEPT_IN_NAMES]
    if all(differing):
        raise IdentityMismatchError(
            f"{folder} holds another chain, which differs in {min(differing, key=len)}. Choose another --out."
        )
