"""How library code tells of its progress; who shows it, and where, is the caller's business."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receiver of progress: one task at a time, counted in one unit."""

    def start(self, task: str, total: int, unit: str) -> None:
        """Begin a task of `total` units."""
        ...

    def advance(self, amount: int) -> None:
        """Tell that `amount` more units are done."""
        ...

    def note(self, message: str) -> None:
        """Tell one line that the user should know."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, task: str, total: int, unit: str) -> None:
        """Begin a task."""

    def advance(self, amount: int) -> None:
        """Tell of units done."""

    def note(self, message: str) -> None:
        """Tell one line."""


ShouldStop = Callable[[], bool]
"""Asked between steps; True means: keep what is finished and raise InterruptedRunError."""


def never_stop() -> bool:
    """Go on to the end."""
    return False
