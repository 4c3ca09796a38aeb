"""Tables of examples: .tsv as benchmarks publish it (no quoting), .jsonl, and data sets of the hub."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import datasets
from datasets.exceptions import DatasetsError

from minilm_cache.corpus.arrow_cache import arrow_cache
from minilm_cache.errors import CorpusError, first_line

HUB: Final = "hf"
Columns = Mapping[str, Sequence[object]]
"""Values by the name of their column."""

_ENDINGS: Final = (".tsv", ".jsonl")
_MAX_BROKEN: Final = 1e-3
"""Share of a training set's rows that may lack columns and are left out: QQP's is known for a few."""
_LOADING_ERRORS: Final = (DatasetsError, OSError, ValueError, RuntimeError)


def data_source(data: str) -> tuple[Path | None, str | None]:
    """Return the folder that `--data` names, or none and the repository on the hub: none, the usual one."""
    if data == HUB or data.startswith(f"{HUB}:"):
        return None, data.partition(":")[2] or None
    return Path(data), None


def find_file(folder: Path, stem: str) -> Path | None:
    """Return the file of a set, as .tsv or .jsonl; none: it is not there."""
    return next((file for ending in _ENDINGS if (file := folder / f"{stem}{ending}").is_file()), None)


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file, empty ones at its end left out.

    Raises:
        CorpusError: it is empty, or no text.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {file}: {first_line(error)}. Fetch it again.") from error
    if not text.strip():
        raise CorpusError(f"{file} is empty. Fetch it again.")
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]


def read_json(text: str, where: str) -> Any:  # noqa: ANN401 - whatever it holds
    """Return a JSON document.

    Raises:
        CorpusError: it is none.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorpusError(
            f"cannot read {where} as JSON: {first_line(error)}. Fetch the file again."
        ) from error


def read_table(
    file: Path, columns: Sequence[str] = (), *, note: Callable[[str], None] | None = None
) -> Columns:
    """Return the columns of a file.

    Args:
        file: .tsv or .jsonl.
        columns: names, of a .tsv whose first line is no header.
        note: told of rows of another width that are left out, at most one in a thousand; none: none are.

    Raises:
        CorpusError: it is empty, or no such file.
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
            f"{file}: {num_broken} of {len(rows)} rows have not {len(names)} columns; the first, row {at}, "
            f"has {len(first)}. Is it the file of another task, or no .tsv?"
        )
    if note is not None and num_broken:
        note(f"{file}: {num_broken} of {len(rows)} rows have not {len(names)} columns and are left out")
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
    """Return a split of a data set of the hub, classes by their names; none: it has no such split.

    Args:
        identifier: of the repository.
        configuration: of the data set; one that has but one has that.
        split: its name.

    Raises:
        CorpusError: the hub does not give it.
    """
    datasets.disable_progress_bars()
    try:
        names = datasets.get_dataset_config_names(identifier)
        chosen = names[0] if len(names) == 1 else configuration
        found = datasets.load_dataset(identifier, chosen, cache_dir=arrow_cache(Path(identifier)))
    except _LOADING_ERRORS as error:
        raise CorpusError(
            f"cannot load {identifier} ({configuration}) from the hub: {first_line(error)}. "
            "Give a folder in the official layout: --data DIR."
        ) from error
    if split not in found:
        return None
    return {
        name: _words(found[split].features[name], values) for name, values in found[split].to_dict().items()
    }


def _words(feature: object, values: Sequence[object]) -> Sequence[object]:
    """Return classes by their names; one that is not published has none."""
    if not isinstance(feature, datasets.ClassLabel):
        return values
    return [None if value in (None, -1) else feature.names[value] for value in values]
