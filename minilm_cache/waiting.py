"""Wait for a call of a library so that a stop interrupts it: no signal handler runs during the call."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Final, TypeVar

from minilm_cache.errors import InterruptedRunError, StorageError
from minilm_cache.progress import ShouldStop

Result = TypeVar("Result")
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
                if answer.done():
                    raise
            if should_stop():
                raise InterruptedRunError(interrupted)
            if until is not None and time.monotonic() > until:
                raise StorageError(f"there was no answer in {most_s:.0f} s")
    finally:
        if not answer.done():
            with _LOCK:
                _ABANDONED.append(answer)  # type: ignore[arg-type] # its result is never read


def _answer(call: Callable[[], Result], answer: Future[Result]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
        answer.set_exception(error)
