"""Tables of examples: .tsv as benchmarks publish it (no quoting), .jsonl, and data sets of the hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import datasets
from datasets.exceptions import DatasetsError

from minilm_cache.errors import CorpusError, first_line

HUB: Final = "hf"
Columns = Mapping[str, Sequence[object]]
"""Values by the name of their column."""

_ENDINGS: Final = (".tsv", ".jsonl")
_MAX_BROKEN: Final = 1e-3
"""Share of rows that may lack columns and are left out: QQP's training set is known for a few."""


def data_source(data: str) -> tuple[Path | None, str | None]:
    """Return the folder that `--data` names, or none and the repository on the hub: none, the usual one."""
    if data == HUB or data.startswith(f"{HUB}:"):
        return None, data.partition(":")[2] or None
    return Path(data), None


def find_file(folder: Path, stem: str) -> Path | None:
    """Return the file of a set, as .tsv or .jsonl; none: it is not there."""
    return next((file for ending in _ENDINGS if (file := folder / f"{stem}{ending}").is_file()), None)


def read_table(file: Path, columns: Sequence[str] = ()) -> Columns:
    """Return the columns of a file.

    Args:
        file: .tsv or .jsonl.
        columns: names, of a .tsv whose first line is no header.

    Raises:
        CorpusError: it is empty, or no such file.
    """
    if file.stat().st_size == 0:
        raise CorpusError(f"{file} is empty. Fetch it again.")
    found = _read_jsonl(file) if file.suffix == ".jsonl" else _read_tsv(file, columns)
    if not any(map(len, found.values())):
        raise CorpusError(f"{file} holds no example. Fetch it again.")
    return found


def _read_tsv(file: Path, columns: Sequence[str]) -> Columns:
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as lines:
            rows = [line.rstrip("\r\n").split("\t") for line in lines]
    except UnicodeDecodeError as error:
        raise CorpusError(f"cannot read {file}: {first_line(error)}. Fetch it again.") from error
    names = list(columns) or rows.pop(0)
    broken = [row for row in rows if len(row) != len(names)]
    if len(broken) > _MAX_BROKEN * len(rows):
        raise CorpusError(
            f"{file}: {len(broken)} of {len(rows)} rows have not {len(names)} columns, the first has "
            f"{len(broken[0])}. Is it the file of another task, or no .tsv?"
        )
    whole = [row for row in rows if len(row) == len(names)]
    return {name: [row[at] for row in whole] for at, name in enumerate(names)}


def _read_jsonl(file: Path) -> Columns:
    rows = []
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise CorpusError(f"{file}, line {number}: not a JSON object. Fetch it again.")
            rows.append(row)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorpusError(f"cannot read {file}: {first_line(error)}. Fetch it again.") from error
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def load_hub(identifier: str, configuration: str, split: str) -> Columns | None:
    """Return a split of a data set of the hub; none: it has no such split.

    Raises:
        CorpusError: the hub does not give it.
    """
    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(identifier, configuration)
    except (DatasetsError, OSError, ValueError) as error:
        raise CorpusError(
            f"cannot load {identifier} ({configuration}) from the hub: {first_line(error)}. "
            "Give a folder in the official layout: --data DIR."
        ) from error
    return found[split].to_dict() if split in found else None
