"""Objects of .jsonl files, line by line: a line that cannot be read is named."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from minilm_cache.corpus.formats import kind_of
from minilm_cache.errors import CorpusError, first_line
from minilm_cache.store.durable import open_regular

MAX_LINE: Final = 2**28
"""Most characters of a line of records: each is held in memory as a whole."""
SHOWN_COLUMNS: Final = 20
"""Most names of columns that a message shows."""


def json_names(file: Path) -> list[str]:
    """Return the names of the columns of all records, some at most."""
    names: dict[str, None] = {}
    for _, row in json_objects(file):
        names |= dict.fromkeys(row)
        if len(names) >= SHOWN_COLUMNS:
            break
    return list(names)


def json_objects(file: Path, *columns: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each record of a .jsonl file is, in words, and the record.

    A file that is one array of objects is read, too. Of these columns, no record may have two values.
    """
    with open_regular(file, follow_links=True) as content:
        opened = io.TextIOWrapper(content, encoding="utf-8-sig")
        for number, line in enumerate(iter(lambda: opened.readline(MAX_LINE), ""), 1):
            if len(line) >= MAX_LINE:
                raise CorpusError(
                    f"corpus {file}: line {number} has more than {MAX_LINE >> 20} million characters. "
                    "Write one record a line."
                )
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith("["):
                yield from _array(file, line + opened.read(MAX_LINE), columns)
                return
            where = f"line {number}"
            doubtful = [name for name in columns if line.count(f'"{name}"') > 1 or "\\u" in line]
            row = _value(file, line, where=where, columns=doubtful)
            if not isinstance(row, dict):
                raise CorpusError(
                    f"corpus {file}: {where} holds {kind_of(row)}, where a record with a text should be. "
                    "Write one object a line."
                )
            _refuse_two_values(file, row, doubtful, where=where)
            yield where, row


def _array(file: Path, content: str, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if len(content) >= MAX_LINE:
        raise CorpusError(f"corpus {file} is one long JSON array. Write one object a line.")
    rows = _value(file, content, where="the array", columns=columns)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise CorpusError(
                f"corpus {file}: element {number} of its array (counted from 0) holds {kind_of(row)}, where "
                'a record like {"text": "..."} should be. Write one object a line.'
            )
        _refuse_two_values(file, row, columns, where=f"element {number}")
        yield f"element {number}", row


def _value(file: Path, text: str, *, where: str, columns: Sequence[str]) -> Any:  # noqa: ANN401 - of JSON
    """Return a value of JSON; with columns, its objects say what stands in them twice, which takes longer."""
    try:
        return json.loads(text, object_pairs_hook=_Record if columns else None)
    except RecursionError as error:
        raise CorpusError(
            f"cannot read corpus {file}: {where} is nested too deep. Fix it or remove it."
        ) from error
    except ValueError as error:
        raise CorpusError(
            f"cannot read corpus {file}: {where} is not JSON: {first_line(error)}. Fix it or remove it."
        ) from error


class _Record(dict[str, Any]):
    """An object of JSON, and the names that stand in it twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.doubled = {name for name in self if names.count(name) > 1} if len(self) < len(names) else set()


def _refuse_two_values(file: Path, row: Mapping[str, Any], columns: Sequence[str], *, where: str) -> None:
    """Raise CorpusError if a record has a column twice: only one of the two values could be read."""
    doubled = next((name for name in columns if isinstance(row, _Record) and name in row.doubled), None)
    if doubled is not None:
        raise CorpusError(f"corpus {file}: {where} has column {doubled!r} twice. Keep one of the two.")
