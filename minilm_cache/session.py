"""What every piece of work runs in: the folder of caches and runs, who is shown progress, and what stops it.

The caller decides whether and where progress is shown.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from minilm_cache.errors import InterruptedRunError, StorageError
from minilm_cache.settings import cache_home, refuse_url

Result = TypeVar("Result")
Item = TypeVar("Item")
NOTHING_KEPT: Final = "interrupted: nothing is kept. Run the same command again."
"""Message of a stop after which everything begins anew."""


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


class Bars:
    """Receiver of progress that shows bars on stderr, for scripts and notebooks."""

    def __init__(self) -> None:
        """Begin without a bar."""
        self._bar: Any = None

    def start(self, task: str, total: int, unit: str) -> None:
        """Begin a bar, below those of earlier tasks."""
        from tqdm import tqdm  # noqa: PLC0415 - what shows nothing does not need it

        self._close()
        self._bar = tqdm(total=total, desc=task, unit=f" {unit}", unit_scale=total >= _MANY, mininterval=0.5)

    def advance(self, amount: int, detail: str = "") -> None:
        """Move the bar on."""
        if self._bar is not None:
            self._bar.set_postfix_str(detail, refresh=False)
            self._bar.update(min(amount, self._bar.total - self._bar.n))  # totals of tokens are estimates
            if self._bar.n >= self._bar.total:
                self._close()

    def note(self, message: str) -> None:
        """Show a line above the bar."""
        from tqdm import tqdm  # noqa: PLC0415 - what shows nothing does not need it

        tqdm.write(message, file=sys.stderr)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


_MANY: Final = 10_000
"""Units of a task that are counted in thousands."""
ShouldStop = Callable[[], bool]
"""Called between steps. True means that the work keeps what is finished and raises InterruptedRunError."""


_GRACE_S: Final = 5.0
"""Seconds after the wish to stop in which a call may end by itself."""
_STOP: Final[list[float]] = []
"""When this process was asked to stop. Requests to stores, which wait deep below, look at it."""


def request_stop() -> None:
    """Note that this process was asked to stop; it may be called by a signal handler."""
    _STOP.append(time.monotonic())


def forget_stop() -> None:
    """Note that what was asked to stop is over."""
    _STOP.clear()


def is_stop_overdue() -> bool:
    """Return whether this process was asked to stop some seconds ago; calls are no longer waited for."""
    return bool(_STOP) and time.monotonic() - _STOP[0] > _GRACE_S


def never_stop() -> bool:
    """Return False, so that the work continues to its end."""
    return False


class Session:
    """What a piece of work runs in; it goes as one argument from a command to whatever the command does."""

    def __init__(
        self,
        home: str | Path | None = None,
        *,
        progress: Progress | bool | None = None,
        should_stop: ShouldStop = never_stop,
    ) -> None:
        """Make a session.

        Args:
            home: folder of caches, runs and tokens. None means MINILM_CACHE_HOME, read when it is needed.
            progress: is shown what is done. True means bars on stderr; None and False mean that nothing is
                shown.
            should_stop: called between steps; True stops the work, which keeps what is finished.
        """
        if home is not None:
            refuse_url(home, "home")
        self._home = None if home is None else Path(home).expanduser()
        shown: Progress | None = Bars() if progress is True else progress or None
        self.progress = shown or Silent()
        self.should_stop = should_stop

    @property
    def home(self) -> Path:
        """Folder of caches, runs and tokens.

        Raises:
            InvalidConfigError: this user has none (`settings.cache_home`).
        """
        return cache_home() if self._home is None else self._home

    def stop_if_asked(self, message: str = NOTHING_KEPT) -> None:
        """Raise InterruptedRunError, with a message that says what is kept, if a stop was requested."""
        if self.should_stop():
            raise InterruptedRunError(message)

    def parts(
        self, items: Sequence[Item], size: int, message: str = NOTHING_KEPT
    ) -> Iterator[Sequence[Item]]:
        """Yield items in parts of `size`, and count each part as progress when it is done.

        Raises:
            InterruptedRunError: a stop was requested before a part; `message` says what is kept.
        """
        for start in range(0, len(items), size):
            self.stop_if_asked(message)
            part = items[start : start + size]
            yield part
            self.progress.advance(len(part))

    def with_absolute_home(self) -> "Session":
        """Return this session for work in any working folder."""
        return Session(self.home.absolute(), progress=self.progress, should_stop=self.should_stop)

    def with_progress(self, progress: Progress | None) -> "Session":
        """Return this session with another receiver of progress. None means that nothing is shown."""
        return Session(self._home, progress=progress, should_stop=self.should_stop)

    def of_worker(self) -> "Session":
        """Return the session of another process, which shows nothing and is stopped from outside."""
        return Session(self._home)


ALONE: Final = Session()
"""A session that shows nothing and is never stopped, with the home that MINILM_CACHE_HOME names."""


_POLL_S: Final = 0.2
_LOCK: Final = Lock()
_ABANDONED: Final[list[Future[object]]] = []


def has_abandoned_calls() -> bool:
    """Return whether a call goes on that nobody waits for, and that could end an exit by SIGABRT."""
    return any(not call.done() for call in _ABANDONED)


def awaited(
    call: Callable[[], Result], *, should_stop: ShouldStop, interrupted: str, most_s: float | None = None
) -> Result:
    """Make a call in a thread of its own, and wait for it.

    Args:
        call: what is called.
        should_stop: asked five times a second; True leaves the call to itself.
        interrupted: message of the error then.
        most_s: seconds that the call may take. None means any time.

    Raises:
        InterruptedRunError: a stop was requested.
        StorageError: it took longer than `most_s`.
    """
    answer: Future[Result] = Future()
    Thread(target=_answer, args=(call, answer), daemon=True).start()
    until = None if most_s is None else time.monotonic() + most_s
    try:
        while True:
            try:
                return answer.result(timeout=_POLL_S)
            except TimeoutError:
                if answer.done():  # just now, or by an error of this kind
                    return answer.result()
            if should_stop():
                raise InterruptedRunError(interrupted)
            if until is not None and time.monotonic() > until:
                raise StorageError(f"there was no answer in {most_s:.0f} s")
    finally:
        if not answer.done():
            with _LOCK:
                _ABANDONED[:] = [call for call in _ABANDONED if not call.done()]
                _ABANDONED.append(answer)  # type: ignore[arg-type] # its result is never read


def _answer(call: Callable[[], Result], answer: Future[Result]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
        answer.set_exception(error)
