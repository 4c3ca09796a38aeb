"""Settings: frozen models, validated whenever they are made or changed; and the folder of caches and runs.

A field states its type, its bounds and its default, and the docstring below it is its help text: commands
derive their options from these (`minilm_cache.cli.options`). The class that declares a field is its group in
`--help`.
"""

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from os import PathLike
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from minilm_cache.errors import InvalidConfigError
from minilm_cache.storage_schema.identity import MAX_TOKENS
from minilm_cache.wording import did_you_mean

Settings = TypeVar("Settings", bound="FrozenSettings")
DEFAULT_LOCAL_BYTES = 2**34
"""Bytes of shards of a cache at a URL that are kept on a machine."""


_NUMBER: Final = re.compile(
    r"(?P<digits>[+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)(?P<factor>[kMG]?)"
)
_MOST: Final = 2**63 - 1
"""Greatest whole number of a setting."""
_FACTORS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def whole_number(text: str) -> int:
    """Return the number that a user typed, which may end with k, M or G (thousands, millions, billions).

    Raises:
        ValueError: the text is no whole number.
    """
    typed = _NUMBER.fullmatch(text)
    number = Decimal(typed["digits"]) * _FACTORS[typed["factor"]] if typed else Decimal("0.5")
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number. Write it like 20000, 20_000, 20k, 1.5M or 2G.")
    return int(number)


def refuse_unreadable(texts: Iterable[str]) -> None:
    """Raise InvalidConfigError for a text of a command line whose bytes are no UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidConfigError(
                f"{text[:40]!a} is no text in UTF-8. Check the encoding of the terminal or of the script."
            ) from error


def decimal_number(text: str) -> float:
    """Return the number with a fraction that a user typed, which may end with k, M or G.

    Raises:
        ValueError: the text is not a number.
    """
    if typed := _NUMBER.fullmatch(text):
        return float(Decimal(typed["digits"]) * _FACTORS[typed["factor"]])
    with suppress(ValueError):
        if "_" not in text:
            return float(text)
    raise ValueError(f"{text!r} is not a number. Write it like 0.001 or 1e-3.")


def _kind(annotation: Any) -> Any:  # noqa: ANN401 - any type of a field
    """Return the type of a field without its bounds, and without None."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return _kind(parts[0]) if len(parts) == 1 else annotation
    return annotation


def _read(kind: Any, given: object) -> object:  # noqa: ANN401 - any type of a field
    """Return a value as people write it as the value that it stands for: `20k`, or one shape of several."""
    if isinstance(given, PathLike) and (kind is str or get_origin(kind) is tuple):
        given = str(given)
    if kind in (int, float) and isinstance(given, bool):
        return str(given)  # which is refused: it would be 1 or 0
    if kind is int and isinstance(given, str):
        with suppress(ValueError):  # the check of the field says what is wrong
            return whole_number(given)
    if get_origin(kind) is not tuple or isinstance(given, bool):
        return given
    inner = _kind(get_args(kind)[0])
    is_one = isinstance(given, str) and "," not in given and inner in (str, int, float)
    if is_one or (isinstance(given, int | float) and inner in (int, float)):
        return (_read(inner, given),)
    return type(given)(_read(inner, each) for each in given) if isinstance(given, list | tuple) else given


class FrozenSettings(BaseModel):
    """Base of settings: frozen, unknown names refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_by_alias=True,
        validate_by_name=True,
    )
    group: ClassVar[str] = "Options"
    """Heading in `--help` of the options that this class declares."""

    @field_validator("*")
    @classmethod
    def _has_no_endless_number(cls, value: object) -> object:
        """Refuse a whole number that nothing can be counted up to."""
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, int) and number > _MOST for number in numbers):
            raise ValueError(f"give at most {_MOST:,}")
        return value

    def with_changes(self: Settings, **changes: object) -> Settings:
        """Return these settings with some of them changed, validated again.

        Raises:
            InvalidConfigError: a value is out of range, or settings contradict each other.
        """
        return validated(type(self), dict(self) | changes)

    def given_options(self, *names: str) -> list[str]:
        """Return the options of those of some settings that are not their defaults."""
        fields = type(self).model_fields
        return [option_of(name) for name in names if getattr(self, name) != fields[name].default]


class WrittenSettings(FrozenSettings):
    """Base of settings that people write in Python, in documents and on the command line.

    A number may be a text like `20k`, and one value may stand for a list of one.
    """

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        kinds = {name: _kind(field.annotation) for name, field in cls.model_fields.items()}
        return {name: _read(kinds[name], value) if name in kinds else value for name, value in values.items()}


class DeviceSettings(WrittenSettings):
    """Where to compute."""

    group = "Computing"
    device: str | None = None
    """torch device to compute on. None means a GPU where there is one."""


class RevisionSettings(WrittenSettings):
    """Models from a hub."""

    group = "Model"
    revision: str | None = None
    """Revision of a model from the hub. None means its main branch."""


class NamedTeacherSettings(RevisionSettings):
    """Which teacher is read."""

    teacher: str
    """The teacher: `mini`, `bert-base`, `bert-large`, `xlm-r-base`, a folder, or a hub id."""


class TeacherSettings(NamedTeacherSettings, DeviceSettings):
    """Which teacher is read, and where it runs."""


class ModelSettings(RevisionSettings, DeviceSettings):
    """Models from a hub, and where to run them."""


TEXTS_OR_PAIRS: Final = "--text-column and --pair-columns both name the texts: give one of them"


class ColumnSettings(WrittenSettings):
    """Where the text of records is."""

    group = "Text"
    text_column: str | None = None
    """Column of the records that holds the text. Several with plus signs between them, like title+body, are
    one text together; with commas, like question,answer, each is a document. None means `text`."""
    documents: Literal["paragraphs", "lines"] = "paragraphs"
    """What is a document in .txt files: the text between empty lines (`paragraphs`), or a line (`lines`)."""

    @model_validator(mode="after")
    def _texts_or_pairs(self) -> "ColumnSettings":
        if self.text_column is not None and getattr(self, "pair_columns", None) is not None:
            raise ValueError(TEXTS_OR_PAIRS)
        return self


class CorpusSettings(ColumnSettings):
    """Which text is read."""

    corpus: Annotated[str, Field(min_length=1)] = "python-docs"
    """The text: `python-docs`, a .txt, .md, .jsonl, .csv, .tsv or .parquet file, a folder, or
    `hf:ID[:CONFIG][:SPLIT]`."""


class PromptSettings(CorpusSettings):
    """What a model reads of each record beside, or before, its text."""

    pair_columns: Annotated[str, Field(min_length=3, max_length=512)] | None = None
    """Columns of the two texts of a pair, like question,sentence. The model reads both together, and the
    longer text is cut first. For a query with several documents give the columns of these, like
    query,pos+neg; for a folder in BEIR's layout, query,positive+negative. None means that each document is
    one text."""
    prompt: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Words to put before every text, like "query: ". None means the prompt that `--prompt-name` selects."""
    prompt_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the teacher's prompt to put before every text, such as `query` or `document`, or `none` for no
    prompt. None means the teacher's default prompt, which most do not have."""
    role_column: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Column of records with the name of each text's prompt, such as `query` or `document`; empty means no
    prompt. None means that all texts get the same."""

    @model_validator(mode="after")
    def _says_once_what_stands_before_texts(self) -> "PromptSettings":
        given = self.given_options("prompt", "prompt_name", "role_column")
        if given and self.pair_columns is not None:
            raise ValueError(
                f"{given[0]} goes with --packing records, and not with --pair-columns: a prompt is about one "
                "document"
            )
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("--prompt and --prompt-name both say what stands before texts: give one of them")
        if self.role_column is not None and (self.prompt or self.prompt_name):
            raise ValueError(
                "--role-column says what stands before each text: leave out --prompt and --prompt-name"
            )
        return self


class SequenceSettings(CorpusSettings):
    """How much of a text is read, in sequences of which length."""

    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Maximum tokens of a sequence, special tokens included."""
    max_tokens: Annotated[int, Field(ge=4, le=MAX_TOKENS)] | None = None
    """Maximum tokens to read in all. None means the whole corpus."""

    @model_validator(mode="after")
    def _holds_a_sequence(self) -> "SequenceSettings":
        if self.max_tokens is not None and self.max_tokens < self.max_length:
            raise ValueError(
                f"--max-tokens {self.max_tokens} is below --max-length {self.max_length}: not one sequence"
            )
        return self


def refuse_other_kind(config: object, kind: type[FrozenSettings]) -> None:
    """Raise InvalidConfigError for settings that are no object of their class, like a dictionary."""
    if not isinstance(config, kind):
        raise InvalidConfigError(
            f"the settings are a {type(config).__name__}, and a {kind.__name__} is needed: "
            f"{kind.__name__}(...), with the settings by their names."
        )


def validated(
    model: type[Settings], values: Mapping[str, Any], options: Mapping[str, str] = MappingProxyType({})
) -> Settings:
    """Build settings from values by name.

    Args:
        model: class of the settings.
        values: the values.
        options: names of options, without dashes, of settings whose options are called otherwise.

    Raises:
        InvalidConfigError: a value is out of range, or settings contradict each other. The message names the
            option.
    """
    try:
        return model(**values)
    except ValidationError as error:
        problem, message = first_problem(error, model)
        if not problem["loc"]:
            raise InvalidConfigError(message + ".") from error
        name = str(problem["loc"][0])
        option = option_of(options.get(name, name))
        message = message[0].lower() + message[1:]
        given = problem["input"]
        value = ", ".join(map(str, given)) if isinstance(given, tuple | list) else given
        raise InvalidConfigError(f"{option} {value}: {message}.") from error


_WANTED: Final = {
    "greater_than_equal": "give at least {ge}",
    "greater_than": "give more than {gt}",
    "less_than_equal": "give at most {le}",
    "less_than": "give less than {lt}",
    "finite_number": "give a finite number",
    "int_type": "give a whole number",
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_type": "give a number",
    "float_parsing": "give a number",
    "bool_type": "give true or false",
    "bool_parsing": "give true or false",
    "string_type": "give a text",
    "string_unicode": "no text in UTF-8. Rename the file, or set PYTHONUTF8=1 if its name is UTF-8",
    "string_too_short": "too short: its length must be at least {min_length}",
    "string_too_long": "too long: its length may be at most {max_length}",
    "literal_error": "give {expected}",
    "tuple_type": "give a list",
    "too_short": "give at least {min_length}",
    "dict_type": "give a mapping of names to settings",
}
"""What to give instead, by the type of pydantic's error."""


def first_problem(error: ValidationError, model: type[BaseModel]) -> tuple[ErrorDetails, str]:
    """Return the mistake to show of several, and what is wrong.

    An unknown name comes before a required one, which it may stand for.
    """
    problems = error.errors(include_url=False)
    unknown = next((problem for problem in problems if problem["type"] == "extra_forbidden"), None)
    if unknown is None:
        words = _WANTED.get(problems[0]["type"])
        if words is not None:
            return problems[0], words.format(**problems[0].get("ctx", {}))
        message = problems[0]["msg"].removeprefix("Value error, ")
        return problems[0], message.removesuffix(".")  # whoever shows it ends the sentence
    return unknown, "there is no such setting" + did_you_mean(str(unknown["loc"][-1]), model.model_fields)


def option_of(name: str) -> str:
    """Return the option of a setting, like `--max-length`."""
    return f"--{name.replace('_', '-')}"


def flag_of(name: str, field: FieldInfo) -> str:
    """Return the option of a field, like `--max-length`; a switch that is on by default has `/--no-...`."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    flag = str(extra.get("flag", option_of(field.alias or name)))
    return f"{flag}/--no-{flag.removeprefix('--')}" if field.default is True else flag


def option_words(flag: str, value: object) -> list[str]:
    """Return an option and its value as words, repeated for several; an empty list if it is not set."""
    name = flag if flag.startswith("--") else option_of(flag)
    if isinstance(value, bool):
        return [name] if value or name.startswith("--no-") else []
    if isinstance(value, (tuple, list)):
        return [word for part in value for word in (name, str(part))]
    return [] if value is None else [name, str(value)]


_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+:/")
"""Beginning of a URL; `Path` leaves one of two slashes."""


def looks_like_url(place: str | Path) -> bool:
    """Return whether a place is a URL, also one that was made into a path."""
    return _URL.match(str(place)) is not None


def refuse_url(place: str | Path, option: str = "--out") -> None:
    """Raise InvalidConfigError for a URL where a folder or file of this machine is wanted."""
    if looks_like_url(place):
        raise InvalidConfigError(
            f"{option} {place}: this is a URL, and what is written here is written to this machine. Give a "
            "folder. `minilm-cache dump --out URL` and `push` write caches into a store."
        )


NO_HOME: Final = (
    "this user has no home folder: HOME is not set, and passwd has no entry. Set MINILM_CACHE_HOME "
    "to a folder that you may write to."
)


def cache_home() -> Path:
    """Return the folder of caches and runs: MINILM_CACHE_HOME, or `~/.cache/minilm-cache` without it.

    Raises:
        InvalidConfigError: MINILM_CACHE_HOME is a URL or names a home that does not exist, or is not set and
            the user has no home.
    """
    given = os.environ.get("MINILM_CACHE_HOME")
    if given and "://" in given:
        raise InvalidConfigError("MINILM_CACHE_HOME is a URL. Give a folder of this machine.")
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "minilm-cache"
    except RuntimeError as error:
        if given:
            raise InvalidConfigError(
                f"MINILM_CACHE_HOME is {given}: there is no such home folder. Give the whole path."
            ) from error
        raise InvalidConfigError(NO_HOME) from error


class TokenizeConfig(NamedTeacherSettings, PromptSettings):
    """Settings of `minilm-cache tokenize`."""

    group = "Computing"
    processes: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise at the same time. None means one for each core of the machine, or of the
    cluster."""
    engine: Literal["ray"] | None = None
    """`ray` tokenises on the cluster that RAY_ADDRESS names, or on a local one; its machines need a common
    file system. None means this machine."""


class TruncateConfig(NamedTeacherSettings):
    """Settings of `truncate`: a teacher and the layers of it to keep."""

    group = "Layers"
    layers: str
    """Layers to keep, counted from 0, with commas between them, like 0,1,2."""


OF_TEXTS: Final = "texts"
OF_CACHE: Final = "cache"
"""Values of `--vocab`: all pieces of the texts that are given, or of a cache's training sequences."""


class Asked(NamedTuple):
    """What `--vocab` asks for."""

    most: int | None
    """Most pieces that are kept. None means no limit."""
    file: Path | None
    """File of pieces, one a line, or folder of a model that has them. None means that a text says which ones
    are kept."""


def number_of_pieces(value: str) -> int | None:
    """Return the number that a text like 8000 or 8k stands for. None means that it is none above 0."""
    with suppress(ValueError):
        number = whole_number(value)
        return number if number > 0 else None
    return None


def asked_vocabulary(value: str) -> Asked:
    """Return what a value of `--vocab` asks for: a number like 8000 or 8k, a file, or another word.

    Raises:
        InvalidConfigError: there is no such file, or no such folder of a model.
    """
    number = number_of_pieces(value)
    if number is not None:
        return Asked(number, None)
    if value in (OF_TEXTS, OF_CACHE):
        return Asked(None, None)
    file = Path(value)
    if not file.is_file() and not (file / "tokenizer.json").is_file():
        problem = "this folder is no model" if file.is_dir() else "there is no such file"
        raise InvalidConfigError(
            f"--vocab {value}: {problem}. Give a number of pieces like 8k, a file that lists one "
            "a line, or the folder of a model that has them, such as RUN/students/3x384."
        )
    return Asked(None, file)


class TrimConfig(RevisionSettings, CorpusSettings):
    """Settings of `trim`: a model, and the text whose pieces it keeps."""

    group = "Vocabulary"
    model: str
    """The model: `mini`, a folder such as RUN/students/3x384, or a hub id."""
    vocab: str = "texts"
    """Pieces to keep: all that the text has (`texts`), a number like 8k for the most frequent ones, a file
    with one a line, or the folder of a model that has them."""

    @model_validator(mode="after")
    def _keeps_pieces_of_texts(self) -> "TrimConfig":
        if self.vocab == OF_CACHE:
            raise ValueError("--vocab cache goes with train. Give texts, a number of pieces, or a file")
        return self


class SliceConfig(NamedTeacherSettings, CorpusSettings):
    """Settings of `slice`: a teacher, the shape to cut, and the text that the cut is fitted to."""

    group = "Slice"
    arch: str
    """Shape of the student, `LAYERSxHIDDEN[:ffN][:hN][:eN]`, at most as deep and as wide as the teacher."""
    layers: str | None = None
    """The teacher's layers that are cut, counted from 0, like 0,2,5. None means evenly spaced ones, the last
    included."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Maximum tokens of a sequence of the text, special tokens included."""
