"""Ctrl-C or SIGTERM stops a run after its current step and keeps its state; a second one stops it at once.

Python runs a signal handler between two of its own instructions, so a call of a library that does not end
holds it up. A thread of its own therefore sees the signals, too, and ends the process where a second one
changes nothing.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from minilm_cache.cli.console import TerminalProgress, print_from_signal
from minilm_cache.cli.environment import quiet_libraries
from minilm_cache.errors import InterruptedRunError
from minilm_cache.session import Session, ShouldStop, forget_stop
from minilm_cache.session import request_stop as note_stop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 10.0
"""Seconds after a second signal until the process is ended, whatever it does."""


@contextmanager
def shown_session() -> Iterator[Session]:
    """Yield the session of a command that shows progress, and that a signal ends at once."""
    with TerminalProgress().shown() as progress:
        yield Session(progress=progress)


@contextmanager
def stoppable_session() -> Iterator[Session]:
    """Yield the session of a command that shows progress, and that stops after its step at a signal."""
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        yield Session(progress=progress, should_stop=should_stop)


@contextmanager
def quiet_session() -> Iterator[Session]:
    """Yield a stoppable session for a command that runs models, and keep libraries from printing."""
    quiet_libraries()
    with stoppable_session() as session:
        yield session


@contextmanager
def stop_on_signal() -> Iterator[ShouldStop]:
    """Yield a function that returns True once a signal has requested a stop, while the block runs."""
    is_requested = False
    forget_stop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        del frame
        is_requested = True
        note_stop()
        signal.signal(number, signal.default_int_handler)
        print_from_signal("stopping after this step; interrupt again to stop at once")

    for number in _SIGNALS:
        signal.signal(number, request_stop)
    try:
        with _ending_what_hangs():
            yield lambda: is_requested
    finally:
        forget_stop()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ending_what_hangs() -> Iterator[None]:
    """End the process some seconds after a second signal, also where no handler can run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(seen, over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(written)
        watcher.join()


def _forget_wakeup() -> None:
    """Keep a forked process from telling its parent of signals that are its own."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)


def _watch(seen: int, over: threading.Event) -> None:
    """Read numbers of signals until the other end is closed; two of them end the process after a while."""
    num_seen = 0
    while numbers := os.read(seen, 16):
        stops = sum(number in _SIGNALS for number in numbers)
        num_seen += stops
        if stops:
            note_stop()
        if num_seen > 1 and not over.wait(_PATIENCE_S):
            print_from_signal(
                "error: interrupted at once. What was written before is kept. The same command goes on, or "
                "begins anew."
            )
            os._exit(InterruptedRunError.exit_code)
    os.close(seen)
