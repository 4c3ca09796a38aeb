"""Ctrl-C and SIGTERM end a run at its next step, with its state kept; a second one ends it at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from minilm_cache.cli.console import print_from_signal
from minilm_cache.progress import ShouldStop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signal() -> Iterator[ShouldStop]:
    """Yield what a run asks between steps; while the block runs, signals make it true."""
    asked = False
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        asked = True
        signal.signal(number, signal.default_int_handler)
        print_from_signal("stopping after this step; once more to stop at once")

    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
