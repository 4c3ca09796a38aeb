"""Settings of workflows that run several dumps and trainings."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from minilm_cache.deploy.config import FormName
from minilm_cache.dump.config import DumpConfig, StateSettings
from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.settings import RECORDS, EvaluateConfig, is_own_task
from minilm_cache.models.decoding import DecodingOptions
from minilm_cache.objectives.spec import OBJECTIVES, Needs
from minilm_cache.settings import (
    OF_CACHE,
    CorpusSettings,
    FrozenSettings,
    ModelSettings,
    RevisionSettings,
    number_of_pieces,
    option_of,
    refuse_unreadable,
    validated,
)
from minilm_cache.storage_schema.upgrades import defaults_of_later, without_defaults
from minilm_cache.train.config import FROM_TEACHER, RANDOM, TrainConfig
from minilm_cache.wording import counted

ALL_PIECES: Final = "all"
"""Value of `--vocabularies` that means all pieces of the teacher's."""
_CHANGES_NO_STUDENT: Final[Mapping[str, Any]] = {
    name: TrainConfig.model_fields[name].default
    for name in ("max_hours", "tracker", "local_bytes", "gradient_checkpointing", "graph", "kernels")
}
"""Settings of a training that may differ between commands for the same students, with the values that chains
and studies are named with."""


def naming_settings(train: Mapping[str, Any], earlier: Collection[str], kept: int) -> dict[str, Any]:
    """Return the settings of a training that name a chain, or a pass of a study, as the first releases did.

    Args:
        train: settings of the training, as JSON.
        earlier: settings that the first releases had.
        kept: one of `KEPT_IN_NAMES`.
    """
    init = train["init"] or "random"
    settings = {**train, **_CHANGES_NO_STUDENT, "keep_checkpoints": kept, "init": init}
    return without_defaults(settings, defaults_of_later(TrainConfig, earlier))


NEEDS_OF_CHAINS: Final = (Needs(), Needs(vectors=True), Needs(pooled=True, relations=False))
"""Needs of objectives that learn relations or vectors of texts, which caches of a chain hold."""
CACHES: Final = "caches"
RUNS: Final = "runs"
"""Folders of a chain or a study."""
SETTINGS_FILE: Final = "settings.json"
"""File of the settings of a chain."""
NOT_OF_A_CHAIN: Final = frozenset({"rank", "world_size", "serve", "for", *StateSettings.model_fields}) - {
    "pooling",
    "min_cosine",
}
"""Settings of a dump that a chain sets itself: torchrun sets ranks, a cache stores what students learn."""


RENAMED: Final = {"batch_size": "dump_batch_size", "precision": "dump_precision"}
"""Options of a dump in a chain that trainings have, too."""


class ChainConfig(FrozenSettings):
    """Settings of a chain of teacher, assistants and students."""

    group = "Chain"
    dump: DumpConfig
    """Settings of the teacher's dump; assistants are dumped over the same sequences, with the same codec."""
    train: TrainConfig
    """Settings of the students' training; assistants are trained by the same recipe."""
    assistants: Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"flag": "--assistant"})]
    """Shape of an assistant; may be repeated, and then each assistant learns from the one before."""
    compare_direct: bool = False
    """Also train the students directly from the teacher, to compare them."""


def refuse_lacking(*, dump: Collection[str], train: Collection[str], assistants: Collection[str]) -> None:
    """Raise InvalidConfigError if a chain has no teacher, no shape of a student, or no assistant.

    Args:
        dump: names of the settings of `DumpConfig` that are given.
        train: names of the settings of `TrainConfig` that are given.
        assistants: shapes of the assistants.
    """
    given = {"--teacher": "teacher" in dump, "--arch": "arch" in train, "--assistant": bool(assistants)}
    for flag, is_given in given.items():
        if not is_given:
            raise InvalidConfigError(f"{flag} is missing. Give it, or a CHAIN.yaml that says it.")


def refuse_other_objective(config: TrainConfig) -> None:
    """Raise InvalidConfigError for an objective that needs more than the caches of a chain hold."""
    if config.spec.needs not in NEEDS_OF_CHAINS:
        fitting = " or ".join(name for name, spec in OBJECTIVES.items() if spec.needs in NEEDS_OF_CHAINS)
        raise InvalidConfigError(
            f"--objective {config.objective}: a chain's students learn relations or vectors of texts. Use "
            f"{fitting}, or dump and train stage by stage."
        )


class SearchTextConfig(CorpusSettings, RevisionSettings):
    """Settings of a search for texts."""

    group = "Search"
    top: Annotated[int, Field(ge=1, le=1000)] = 5
    """Texts that are shown for each question."""
    max_texts: Annotated[int, Field(ge=1)] | None = None
    """Most texts of the corpus that are searched, the first ones. None means all of them."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Most tokens that are read of a text or a question."""


class GenerateConfig(DecodingOptions, ModelSettings):
    """Settings of texts that are generated from texts."""

    group = "Sources"
    file: Path | None = None
    """File of the texts to generate from: .csv, .tsv, .jsonl or .parquet. None means that they are
    arguments."""
    text_columns: Annotated[str, Field(min_length=1, max_length=512)] = "src"
    """Column of the texts in the file, or of passages and answers, like src,answer."""
    answer: tuple[str, ...] = ()
    """Answer whose question is generated, one for each text that is an argument; may be repeated."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] | None = None
    """Most tokens of a text to generate from. None means what the model was tuned for."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Texts of a pass."""

    @model_validator(mode="after")
    def _has_columns_of_a_file(self) -> "GenerateConfig":
        if self.file is not None and self.file.suffix not in RECORDS:
            raise ValueError(f"--file {self.file}: give a file that ends with {', '.join(RECORDS)}")
        if self.file is None and self.text_columns != "src":
            raise ValueError("--text-columns goes with --file")
        if self.file is not None and self.answer:
            raise ValueError("--answer goes with texts; in a file it is a column: --text-columns src,answer")
        if not 1 <= len(self.text_columns.split(",")) <= 2:  # noqa: PLR2004 - a text or a pair
            raise ValueError(f"--text-columns {self.text_columns}: give one column, or two with a comma")
        return self

    @property
    def columns(self) -> list[str]:
        """Columns of the file."""
        return [part.strip() for part in self.text_columns.split(",")]

    def refuse_texts(self, texts: Sequence[str]) -> None:
        """Raise InvalidConfigError if there are no sources, or answers that are not one for each text.

        Args:
            texts: texts that are given beside these settings.
        """
        refuse_unreadable([*texts, *self.answer])
        if self.file is None and not texts:
            raise InvalidConfigError("give texts, or a file that has them: --file texts.jsonl")
        if self.file is not None and texts:
            raise InvalidConfigError(f"give texts or --file {self.file}, not both")
        if self.answer and len(self.answer) != len(texts):
            raise InvalidConfigError(
                f"--answer is given {counted(len(self.answer), 'time')} for {counted(len(texts), 'text')}. "
                "Give one for each."
            )


class TaskStageConfig(FrozenSettings):
    """Settings of a task stage, beside those of its dump and of its training."""

    group = "Task stage"
    task: str | None = None
    """Task of GLUE, like sst2, or a .csv, .tsv, .jsonl or .parquet file of labelled texts. Students learn the
    predictions of a teacher that was fine-tuned on it. None means a chain with assistants."""
    data: str | None = None
    """Folder of the task's published files, or a folder of such folders; `hf` or `hf:ID` for the hub. None
    means that `--task` is a file."""
    student: str | None = None
    """Folder of a student, or of a run, that training begins with. None means `--init`."""
    augment: str | None = None
    """Model with a head for masked tokens that makes copies of the texts with other words. None means no
    copies."""
    copies: Annotated[int, Field(ge=1, le=1000)] = 20
    """Copies of each text."""
    mine: str | None = None
    """Sentence encoder, like mini, that makes further pairs of a task's texts for the teacher to answer: the
    first text of each pair with second texts that are near it. It is worth most where labels are values; of
    classes, nearly all further pairs may have one, which a line then says. None means no further pairs."""
    mined: Annotated[int, Field(ge=1, le=30)] = 8
    """Further pairs of each first text."""
    intermediate: bool = False
    """Learn the teacher's layers before its predictions, as TinyBERT does; a token then takes about 2 kB."""
    max_train: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of training examples whose texts are taken, the same ones as by `evaluate`. None means
    all of them."""
    text_columns: str = "text"
    """Column of the texts of a task of your own, or of both texts of pairs, like question,answer."""
    label_column: str = "label"
    """Column of the labels of a task of your own."""
    dev: Path | None = None
    """File with the same columns that a task of your own is scored on."""


def numbers_of(text: str | None, option: str) -> list[int]:
    """Return the numbers that an option gives with commas between them, ascending; none for None.

    Raises:
        InvalidConfigError: it gives something else.
    """
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 2**16 for part in parts):
        raise InvalidConfigError(f"{option} {text}: give whole numbers with commas between them, like 2,4.")
    return sorted(set(map(int, parts)))


class SearchConfig(FrozenSettings):
    """Settings of a search for the best shape within a budget, beside those of the trainings."""

    group = "Budget"
    max_latency_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum milliseconds of a forward pass on the CPU of this machine, with as many threads as torch has.
    None means no limit."""
    speedup: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Minimum speed relative to the teacher in torch: 4 is four times as fast. None means no limit."""
    max_parameters: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of weights of a student, like 10M. None means no limit."""
    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """Maximum bytes of the file that is shipped, like 20M. None means no limit."""
    runtime: FormName = "torch"
    """What students will run in: forward passes are timed and bytes are counted in it. `export-model` writes
    the file, unless it is torch."""
    pass_texts: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Texts of a timed forward pass."""
    pass_length: Annotated[int, Field(ge=4, le=2**16)] | None = None
    """Tokens of each text of a timed forward pass. None means 128, or as many as the cache's sequences have
    at most, if these are fewer."""
    layers: str | None = None
    """Numbers of layers to try, with commas between them. None means 2, 3, 4, 6, 9 and 12, up to the
    teacher's."""
    widths: str | None = None
    """Widths to try. None means a quarter, a half, three quarters and the whole of the teacher's, as far as
    they are multiples of the heads."""
    feed_forward: str = "2,4"
    """Sizes of the feed-forward network to try, in multiples of the width."""
    embedding_widths: str | None = None
    """Widths of factorised embeddings to try beside whole ones, which are as wide as the student: narrow ones
    have fewer weights and bytes. None means whole ones alone."""
    vocabularies: str | None = None
    """Vocabularies to try, each in a training of its own, with commas between them: numbers of the teacher's
    pieces like 5k, `cache` for those that the cache's training sequences have, `all` for all of them. Small
    ones have fewer weights and bytes, and cut rare words into smaller parts. None means all."""
    every: bool = False
    """Also try shapes that are in no dimension larger than another one within the budget: the whole front of
    quality against speed, for more time. The default is to leave them out."""
    keep: Annotated[float, Field(gt=0, lt=1, json_schema_extra={"default": "a third"})] = 1 / 3
    """Share of the shapes that goes on after each round. Each round has 1/keep times the steps of the one
    before."""

    @model_validator(mode="after")
    def _has_a_budget(self) -> "SearchConfig":
        if self.max_latency_ms is not None and self.speedup is not None:
            raise ValueError("--max-latency-ms and --speedup both say how fast a student has to be: give one")
        if (self.max_latency_ms, self.speedup, self.max_parameters, self.max_bytes) == (None,) * 4:
            raise ValueError("give a budget: --max-latency-ms, --speedup, --max-parameters or --max-bytes")
        for name in ("layers", "widths", "feed_forward", "embedding_widths"):
            numbers_of(getattr(self, name), option_of(name))
        vocabularies_of(self)
        return self


def vocabularies_of(config: SearchConfig) -> list[str | None]:
    """Return the values of `--vocab` that a search tries. None means all of the teacher's pieces.

    Raises:
        InvalidConfigError: a value is neither a number of pieces nor a word for one, or it is given twice.
    """
    if config.vocabularies is None:
        return [None]
    names = [part.strip() for part in config.vocabularies.split(",")]
    numbers = [part if part in (ALL_PIECES, OF_CACHE) else number_of_pieces(part) for part in names]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise InvalidConfigError(
            f"--vocabularies {config.vocabularies}: give different numbers of pieces like 5k, {OF_CACHE} or "
            f"{ALL_PIECES}, with commas between them."
        )
    return [None if part == ALL_PIECES else str(part) for part in numbers]


@contextmanager
def about(option: str, own: str, count: int = -1) -> Iterator[None]:
    """Replace the name of an option of training by a search's own in error messages.

    Args:
        option: name of the option of training.
        own: what stands for it.
        count: places where it is replaced, from the left. -1 means all.
    """
    try:
        yield
    except InvalidConfigError as error:
        raise InvalidConfigError(str(error).replace(option, own, count)) from error


def refuse_of_one_shape(config: TrainConfig, layers: Sequence[int]) -> None:
    """Raise InvalidConfigError for a setting of a training that a search of many shapes does not have.

    A loss that covers other layers in students of other depths has no order among them.

    Args:
        config: settings of the training.
        layers: numbers of layers that are tried.
    """
    if len(layers) > 1 and (config.layer_map != "last" or config.spec.needs.layers == "all"):
        raise InvalidConfigError(
            f"--objective {config.objective} compares other layers in students of other depths, so that "
            f"their losses have no order. Give one number of --layers, such as {layers[0]}."
        )
    if config.init not in (None, RANDOM, *FROM_TEACHER):
        raise InvalidConfigError(
            f"--init {config.init} is one model, and a search has many shapes. Give slice, embeddings or "
            "random."
        )
    if config.vocab is not None:
        raise InvalidConfigError(
            "--vocab goes with train. A search tries numbers of pieces: --vocabularies 5k,all."
        )


_OF_OTHER_TEXTS: Final = (
    *("corpus", "text_column", "documents", "pair_columns", "packing", "codec", "logits"),
    *("prompt", "prompt_name", "role_column"),
)
"""Settings of a dump that say which texts it reads, or what of them is stored."""


def _refuse_lacking_of_task(dump: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    for name, stated, what in (
        ("teacher", dump, "a model that was fine-tuned on the task"),
        ("arch", train, "the student's shape, such as --arch 3x384"),
    ):
        if name not in stated:
            raise InvalidConfigError(f"--{name} is missing: {what}.")


def check_task_stage(
    config: TaskStageConfig,
    *,
    chain: Collection[str],
    dump: Mapping[str, Any],
    train: Mapping[str, Any],
    others: Mapping[str, object],
) -> None:
    """Raise InvalidConfigError for options that a task stage does not have, or that lack.

    Args:
        config: settings of the stage.
        chain: names of the settings of `ChainConfig` that are given.
        dump: settings of `DumpConfig` that are given.
        train: settings of `TrainConfig` that are given.
        others: further options of a chain of assistants, by name; None where they are not given.
    """
    if config.task is None:
        given = min(config.model_fields_set)
        raise InvalidConfigError(f"{option_of(given)} goes with --task, and only with it.")
    of_chains = [name for name, value in others.items() if value is not None]
    of_chains += ["--assistant" if name == "assistants" else option_of(name) for name in sorted(chain)]
    texts = [option_of(name) for name in _OF_OTHER_TEXTS if name in dump]
    learned = [option_of(name) for name in ("objective", "first") if name in train]
    if config.student is not None and "init" in train:
        learned.append("--init")
    for names, what in (
        (of_chains, "it goes with a chain of assistants, not with --task"),
        (texts, "--task takes the task's own texts as they are"),
        (learned, "--task and --student say what students learn and begin with"),
    ):
        if names:
            raise InvalidConfigError(f"{names[0]}: {what}. Leave it out.")
    _refuse_lacking_of_task(dump, train)
    if is_own_task(str(config.task)) and config.dev is None:
        raise InvalidConfigError(f"--task {config.task}: give --dev, the file that students are scored on.")
    if config.augment is not None and "label_weight" in train:
        raise InvalidConfigError("--label-weight: copies of texts have no labels. Leave out --augment.")
    for name, of in (("copies", "augment"), ("mined", "mine")):
        if getattr(config, of) is None and name in config.model_fields_set:
            raise InvalidConfigError(f"--{name} goes with --{of}, and only with it.")


def evaluation_of(config: TaskStageConfig, more: Mapping[str, Any]) -> EvaluateConfig:
    """Return the settings by which a task stage scores its students.

    Args:
        config: settings of the stage.
        more: further settings of the evaluation, by name.

    Raises:
        InvalidConfigError: there is no such task, or its data are not named.
    """
    settings: dict[str, Any] = {"task": (config.task,), "data": config.data, "as_is": True}
    given = config.model_dump(include={"text_columns", "label_column", "dev"}, exclude_defaults=True)
    return validated(EvaluateConfig, {**settings, **given, **more})
