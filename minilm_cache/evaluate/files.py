"""Read tables of examples: .tsv as benchmarks publish it (no quoting), .jsonl, and data sets of the hub."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import datasets
from datasets.exceptions import DatasetsError

from minilm_cache.corpus.load import arrow_cache
from minilm_cache.corpus.records import columns_of, read_rows
from minilm_cache.errors import CorpusError, InvalidConfigError, first_line
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.evaluate.tasks import OWN_GENERATION, OWN_TEXTS, TASKS, Task
from minilm_cache.store.durable import bounded_bytes

HUB: Final = "hf"
Columns = Mapping[str, Sequence[object]]
"""Values of each column by its name."""

_MAX_BYTES: Final = 2**32
_MAX_BROKEN: Final = 1e-3
"""Largest share of a training set's rows that may lack columns and are left out. QQP has a few of them."""
_LOADING_ERRORS: Final = (DatasetsError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the data of a task are, and which of them to read."""

    folder: Path | None
    """Folder in the official layout, or one that holds it under the task's name. None means the hub."""
    hub: str | None
    """Repository on the hub, with the same columns as the usual one. None means the usual one."""
    tests: bool
    """Whether to read test sets, too, that are read only where they are asked for."""
    note: Callable[[str], None]
    """Shows a message to the user."""


def data_source(data: str) -> tuple[Path | None, str | None]:
    """Return the folder and the repository on the hub that `--data` names.

    A folder of None means the hub. A repository of None means the usual one of the task.
    """
    if data == HUB or data.startswith(f"{HUB}:"):
        return None, data.partition(":")[2] or None
    return Path(data), None


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file without the empty lines at its end.

    Raises:
        CorpusError: it cannot be read, is empty, or is not UTF-8.
    """
    try:
        text = bounded_bytes(file, _MAX_BYTES, follow_links=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {file}: {first_line(error)}. Fetch it again.") from error
    if not text.strip():
        raise CorpusError(f"{file} is empty. Fetch it again.")
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]


def read_json(text: str, where: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON document.

    Args:
        text: the document.
        where: name of the file, and line if it has several, for the error message.

    Raises:
        CorpusError: it is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"cannot read {where} as JSON: {first_line(error)}. Fetch the file again."
        ) from error


def read_text(value: object, where: str, remedy: str = "Fetch the file again") -> str:
    """Return a value after checking that it is a text that can be written as UTF-8.

    Args:
        value: value of a file.
        where: place of the value, for the error message.
        remedy: what helps, for the error message.

    Raises:
        CorpusError: it is not such a text.
    """
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise CorpusError(f"{where}: {str(value)[:40]!a} is not a text. {remedy}.")


def generation_columns(file: Path, config: EvaluateConfig) -> tuple[list[str], str] | None:
    """Return the columns of sources and of texts to generate in a task of one's own.

    None means that the file has labels.

    Raises:
        InvalidConfigError: options for labels and for texts to generate are given.
        CorpusError: the file is damaged.
    """
    given = [part.strip() for part in config.text_columns.split(",")]
    fields = type(config).model_fields
    of_labels = config.given_options("label_column", "metric")
    if config.target_column is not None:
        if of_labels:
            raise InvalidConfigError(
                f"{of_labels[0]} is about labels, and --target-column about texts to generate. Leave one out."
            )
        return given, config.target_column
    sources = ["src"] if config.text_columns == fields["text_columns"].default else given
    found = columns_of(file) if not of_labels and file.is_file() else []
    return (sources, "tgt") if {*sources, "tgt"} <= {*found} and config.label_column not in found else None


def task_like(name: str, config: EvaluateConfig) -> Task:
    """Return a task, or for a file of one's own one of its kind, with that kind's recipe.

    Raises:
        InvalidConfigError: options for labels and for texts to generate are given.
        CorpusError: the file is damaged.
    """
    if name in TASKS:
        return TASKS[name]
    return OWN_TEXTS if generation_columns(Path(name), config) is None else OWN_GENERATION


def check_own_columns(file: Path, config: EvaluateConfig, like: Path | None = None) -> None:
    """Raise CorpusError if a file of a task of one's own does not exist, is damaged, or lacks a column.

    Args:
        file: the file.
        config: its columns.
        like: file of the task's training texts, which says of what kind it is. None means the file itself.

    Raises:
        InvalidConfigError: options for labels and for texts to generate are given.
        CorpusError: see above.
    """
    columns = generation_columns(like or file, config)
    if columns is None:
        texts = [part.strip() for part in config.text_columns.split(",")]
        answer, option = config.label_column, "--label-column"
    else:
        (texts, answer), option = columns, "--target-column"
    next(own_rows(file, texts, "--text-columns"), None)
    next(own_rows(file, [answer], option), None)


def own_rows(
    file: Path, columns: Sequence[str], options: str, *, named: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each record of a file of one's own is, in words, and its values of some columns.

    Args:
        file: a .csv, .tsv, .jsonl or .parquet file.
        columns: names of the columns.
        options: options of the command that name columns, for messages.
        named: what stands before the name of a file that does not exist, such as an option.

    Raises:
        CorpusError: the file does not exist or is damaged, lacks a column, or has no records.
    """
    if not file.is_file():
        raise CorpusError(f"{named}{file} is not a file. Give a .csv, .tsv, .jsonl or .parquet file.")
    is_empty = True
    for where, row in read_rows(file, columns, options):
        is_empty = False
        yield f"{file}, {where}", row
    if is_empty:
        raise CorpusError(f"{named}{file} has no records. Add some, or name another file.")


def read_own_text(value: object, where: str) -> str:
    """Return a text of a file of one's own, which must say something; errors: see `read_text`."""
    text = read_text(value, where, "Write it as a text, or name another column with --text-columns")
    if not text.strip():
        raise CorpusError(f"{where}: a text is empty. Remove the record.")
    return text


def read_table(
    file: Path, columns: Sequence[str] = (), *, note: Callable[[str], None] | None = None
) -> Columns:
    """Return the columns of a file.

    Args:
        file: .tsv or .jsonl file.
        columns: names of the columns of a .tsv file without a header. Empty means that its first line is the
            header.
        note: shows how many rows were left out because they have too few or too many columns; at most one in
            a thousand may be. None means that such a row is an error.

    Raises:
        CorpusError: it is empty or damaged, or it is not a table.
    """
    lines = read_lines(file)
    if file.suffix == ".jsonl":
        return _read_jsonl(file, lines)
    rows = [line.split("\t") for line in lines]
    names = list(columns) or rows.pop(0)
    if not rows:
        raise CorpusError(f"{file} holds no example. Fetch it again.")
    whole = [row for row in rows if len(row) == len(names)]
    num_broken = len(rows) - len(whole)
    if num_broken > (0 if note is None else _MAX_BROKEN * len(rows)):
        at, first = next((at, row) for at, row in enumerate(rows, 1) if len(row) != len(names))
        raise CorpusError(
            f"{file}: {num_broken} of {len(rows)} rows do not have {len(names)} columns; the first, row {at},"
            f" has {len(first)}. It may be the file of another task, or no .tsv file: give the right --data."
        )
    if note is not None and num_broken:
        note(f"{file}: {num_broken} of {len(rows)} rows do not have {len(names)} columns and are left out")
    return {name: [row[at] for row in whole] for at, name in enumerate(names)}


def _read_jsonl(file: Path, lines: Sequence[str]) -> Columns:
    rows = []
    for number, line in enumerate(lines, 1):
        row = read_json(line, f"{file}, line {number},")
        if not isinstance(row, dict):
            raise CorpusError(f"{file}, line {number}: not a JSON object. Fetch it again.")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def load_hub(identifier: str, configuration: str, split: str) -> Columns | None:
    """Return a split of a data set of the hub, with classes by their names.

    Args:
        identifier: repository of the data set.
        configuration: configuration of the data set. It is ignored if the data set has only one.
        split: name of the split.

    Returns:
        The columns of the split. None means that the data set has no such split.

    Raises:
        CorpusError: the data set cannot be loaded from the hub.
    """
    datasets.disable_progress_bars()
    try:
        names = datasets.get_dataset_config_names(identifier)
        chosen = names[0] if len(names) == 1 else configuration
        splits = datasets.load_dataset(identifier, chosen, cache_dir=arrow_cache(Path(identifier)))
    except _LOADING_ERRORS as error:
        raise CorpusError(
            f"cannot load {identifier} ({configuration}) from the hub: {first_line(error)}. "
            "Give a folder in the official layout: --data DIR."
        ) from error
    if split not in splits:
        return None
    rows = splits[split]
    return {name: _class_names(rows.features[name], values) for name, values in rows.to_dict().items()}


def _class_names(feature: object, values: Sequence[object]) -> Sequence[object]:
    """Return the names of classes, None for labels that are not published; other values stay as they are."""
    if not isinstance(feature, datasets.ClassLabel):
        return values
    return [None if value in (None, -1) else feature.names[value] for value in values]
