"""Ctrl-C or SIGTERM stops a run after its current step and keeps its state; a second one stops it at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from minilm_cache.cli.console import print_from_signal
from minilm_cache.progress import ShouldStop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signal() -> Iterator[ShouldStop]:
    """Yield a function that returns True once a signal has requested a stop, while the block runs."""
    is_requested = False
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        del frame
        is_requested = True
        signal.signal(number, signal.default_int_handler)
        print_from_signal("stopping after this step; interrupt again to stop at once")

    for number in _SIGNALS:
        signal.signal(number, request_stop)
    try:
        yield lambda: is_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
