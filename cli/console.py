"""The only place that prints: results on stdout, progress and messages on stderr."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_STDERR = 2
_PIPE_WIDTH = 240
_AS_WRITTEN: Final[Mapping[str, Any]] = {"markup": False, "emoji": False, "highlight": False}
"""Names of files, columns and repositories hold brackets and colons: `hf:ID:CONFIG` is no picture."""
_PLAIN_PERIOD_S = 30.0
"""Seconds between lines of progress where stderr is not a terminal."""


class TerminalProgress:
    """Progress on stderr: a bar with units per second and time left, or a line now and then in a log."""

    def __init__(self) -> None:
        """Show nothing yet."""
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
        """Begin a task; the one before it is over."""
        self._finish_task()
        self._unit = unit
        self._task = self._bar.add_task(task, total=total, unit=unit)
        self._shown_at = time.monotonic()

    def advance(self, amount: int) -> None:
        """Tell of units done."""
        if self._task is None:
            return
        self._bar.advance(self._task, amount)
        if self._bar.disable and time.monotonic() - self._shown_at >= _PLAIN_PERIOD_S:
            self._shown_at = time.monotonic()
            self._print_line()

    def note(self, message: str) -> None:
        """Tell one line, after that of a task that is over."""
        if self._task is not None and self._bar.tasks[-1].finished:
            self._finish_task()
        self._say(message)

    def _say(self, message: str) -> None:
        self._console.print(_printable(message), soft_wrap=True)

    def _finish_task(self) -> None:
        if self._task is not None and self._bar.disable and self._bar.tasks[-1].total:
            self._print_line()
        self._task = None

    def _print_line(self) -> None:
        task = self._bar.tasks[-1]
        left = task.time_remaining
        ending = "" if left is None else f", {int(left // 60)}:{int(left % 60):02d} left"
        self._say(f"{task.description}: {task.percentage:.0f}% ({_rate(task)}{ending})")

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
    return f"{task.completed:,.0f} {unit}, {task.completed / elapsed:,.0f} {unit}/s"


def _printable(text: str) -> str:
    """Return text whose control characters are spelled out: names in a cache or a store may be anybody's."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def print_json(document: object) -> None:
    """Print the one JSON object of a command."""
    print(json.dumps(document))  # noqa: T201 - stdout is where results go


def print_pairs(pairs: dict[str, object]) -> None:
    """Print names and values, one pair a line; values are never wrapped."""
    width = max(map(len, pairs))
    for name, value in pairs.items():
        print(f"{name:<{width}}  {_printable(str(value))}")  # noqa: T201 - likewise


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns but the first are set to the right."""
    print(f"\n{title}")  # noqa: T201 - likewise; a table's own title would be cut to its width
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_printable, row))
    # Nothing is ever cut off: in a pipe there is room, and a narrow terminal gets more lines.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(file=sys.stdout, width=width, **_AS_WRITTEN).print(table)


def print_from_signal(message: str) -> None:
    """Print one line from a signal handler, where nothing that holds a lock may be called."""
    os.write(_STDERR, f"{message}\n".encode())


def print_error(message: str) -> None:
    """Print one line about what went wrong."""
    line = _printable(" ".join(message.split()))
    Console(stderr=True, **_AS_WRITTEN).print(f"error: {line}", soft_wrap=True)
