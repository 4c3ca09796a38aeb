"""How library code reports progress. The caller decides whether and where it is shown."""

from collections.abc import Callable
from threading import Event
from typing import Final, Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receiver of progress: one task at a time, counted in a single unit."""

    def start(self, task: str, total: int, unit: str) -> None:
        """Begin a task of `total` units."""
        ...

    def advance(self, amount: int, detail: str = "") -> None:
        """Report that `amount` more units are done; `detail`, like a loss, is shown next to their rate."""
        ...

    def note(self, message: str) -> None:
        """Show one line to the user."""
        ...


class Silent:
    """Receiver of progress that shows nothing."""

    def start(self, task: str, total: int, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int, detail: str = "") -> None:
        """Do nothing."""

    def note(self, message: str) -> None:
        """Do nothing."""


ShouldStop = Callable[[], bool]
"""Called between steps. True means that the work keeps what is finished and raises InterruptedRunError."""


_STOP: Final = Event()
"""Set while the process has been asked to stop. Requests to stores, which wait deep below, look at it."""


def request_stop() -> None:
    """Note that this process was asked to stop; it may be called by a signal handler."""
    _STOP.set()


def forget_stop() -> None:
    """Note that what was asked to stop is over."""
    _STOP.clear()


def is_stop_requested() -> bool:
    """Return whether this process was asked to stop."""
    return _STOP.is_set()


def never_stop() -> bool:
    """Return False, so that the work continues to its end."""
    return False
