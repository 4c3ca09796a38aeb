"""The only module that prints: results on stdout, progress and messages on stderr."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_STDERR = 2
_LONGEST_NAME = 48
"""Most characters of a first column that is not broken over lines, so that names can be copied."""
_LONGEST_FIGURE = 16
"""Most characters of a cell after the names that is not broken over lines."""
_PIPE_WIDTH = 240
_LEAST_WIDTH = 40
"""Columns that a table takes where a terminal says that it has fewer, or none."""
_AS_WRITTEN: Final[Mapping[str, Any]] = {"markup": False, "emoji": False, "highlight": False}
"""Prints names as they are: rich would read colons as emoji and brackets as markup, as in `hf:ID:CONFIG`."""
_PLAIN_PERIOD_S = 30.0
"""Seconds between lines of progress where stderr is not a terminal."""


class TerminalProgress:
    """Progress on stderr: on a terminal a bar with units per second and time left, else a line every 30 s."""

    def __init__(self) -> None:
        """Prepare progress; `shown` shows it."""
        self._console = Console(stderr=True, **_AS_WRITTEN)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            _RateColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._unit = ""
        self._shown_at = 0.0

    def start(self, task: str, total: int, unit: str) -> None:
        """Begin a task of `total` units, and end the task before it."""
        self._finish_task()
        self._unit = unit
        self._task = self._bar.add_task(_printable(task), total=total, unit=unit, detail="")
        self._shown_at = time.monotonic()

    def advance(self, amount: int, detail: str = "") -> None:
        """Show that `amount` more units are done; `detail` is shown next to their rate."""
        if self._task is None:
            return
        self._bar.update(self._task, advance=amount, detail=_printable(detail))
        if self._bar.disable and time.monotonic() - self._shown_at >= _PLAIN_PERIOD_S:
            self._shown_at = time.monotonic()
            self._print_line()

    def note(self, message: str) -> None:
        """Print one line, after the last line of a finished task."""
        if self._task is not None and self._bar.tasks[-1].finished:
            self._finish_task()
        self._print(message)

    def _print(self, message: str) -> None:
        self._console.print(_printable(message), soft_wrap=True)

    def _finish_task(self) -> None:
        if self._task is not None and self._bar.disable and self._bar.tasks[-1].total:
            self._print_line()
        self._task = None

    def _print_line(self) -> None:
        task = self._bar.tasks[-1]
        left = task.time_remaining
        ending = "" if left is None or task.finished else f", {int(left // 60)}:{int(left % 60):02d} left"
        self._print(f"{task.description}: {task.percentage:.0f}% ({_rate(task)}{ending})")

    @contextmanager
    def shown(self) -> Iterator["TerminalProgress"]:
        """Show progress while the block runs."""
        with self._bar:
            yield self
            self._finish_task()


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_rate(task))


def _rate(task: Task) -> str:
    elapsed = task.finished_time or task.elapsed
    unit = task.fields["unit"]
    if not elapsed:
        return f"0 {unit}"
    detail = f", {task.fields['detail']}" if task.fields["detail"] else ""
    return f"{_amount(task.completed, unit)}, {_amount(task.completed / elapsed, unit)}/s{detail}"


def _amount(number: int | float, unit: str) -> str:
    """Return a number with its unit, which ends with s unless it is one."""
    if unit == "bytes":
        return decimal(round(number))
    text = f"{number:,.0f}"
    return f"{text} {unit.removesuffix('s') if text == '1' else unit}"


def _printable(text: str) -> str:
    """Return text with escaped control characters, because names in a cache or a store cannot be trusted."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def print_json(document: object) -> None:
    """Print a result of paths, dataclasses and models as JSON; NaN and infinity, which it lacks, are null."""
    plain = to_jsonable_python(document)  # models keep infinity, whatever the mode
    finite = to_jsonable_python(plain, inf_nan_mode="null")
    print(json.dumps(finite))  # noqa: T201 - stdout is where results go


def print_text(text: str) -> None:
    """Print a text that a model generated on a line of its own."""
    print(_printable(text))  # noqa: T201 - stdout is where results go


def print_pairs(pairs: dict[str, object]) -> None:
    """Print names and values, one pair per line; long values are not wrapped."""
    shown = {_printable(name): value for name, value in pairs.items()}
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"{name:<{width}}  {_printable(str(value))}")  # noqa: T201 - stdout is where results go


def print_notes(lines: Iterable[str]) -> None:
    """Print what readers of a result must know, a line each."""
    for line in lines:
        print_pairs({"note": line})


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1
) -> None:
    """Print a table; columns after the first `num_names` are aligned to the right."""
    # rich would cut a title to the width of the table, so the title is printed here.
    print(f"\n{_printable(title)}")  # noqa: T201 - stdout is where results go
    table = Table()
    for number, column in enumerate(columns):
        is_name = number == 0 and all(len(row[0]) <= _LONGEST_NAME for row in rows)
        is_figure = number >= num_names
        cells = [len(_printable(row[number])) for row in rows if number < len(row)]
        table.add_column(
            _printable(column),
            justify="right" if is_figure else "left",
            overflow="fold",
            no_wrap=is_name,
            min_width=min(max(cells, default=0), _LONGEST_FIGURE) if is_figure else None,
        )
    for row in rows:
        table.add_row(*map(_printable, row))
    # Nothing is cut off: a pipe gets a wide table, and a narrow terminal gets more lines.
    is_named = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = max(Console().width, _LEAST_WIDTH) if is_named else _PIPE_WIDTH
    Console(file=sys.stdout, width=width, **_AS_WRITTEN).print(table, crop=False)


def print_from_signal(message: str) -> None:
    """Print one line from a signal handler, which must not call anything that takes a lock."""
    os.write(_STDERR, f"{message}\n".encode())


def print_error(message: str) -> None:
    """Print one line that says what went wrong."""
    line = _printable(" ".join(message.split()))
    Console(stderr=True, **_AS_WRITTEN).print(f"error: {line}", soft_wrap=True)
