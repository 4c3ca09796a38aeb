"""Where `minilm-cache` starts: an interrupt is one line from the first moment, also while modules load."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from minilm_cache.errors import InterruptedRunError


def main() -> None:
    """Run the command that the process was started with."""
    _open_closed_streams()
    before = signal.signal(signal.SIGINT, _end)
    from minilm_cache.cli.main import run  # noqa: PLC0415 - what takes long enough to be interrupted
    from minilm_cache.session import has_abandoned_calls  # noqa: PLC0415 - with it

    signal.signal(signal.SIGINT, before)
    code = run(sys.argv[1:])
    if has_abandoned_calls():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Let what a process was started without, as by `2>&-`, lead nowhere.

    A file that the process, or one that it starts, opens would otherwise get what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the process with one line. Nothing is open yet that would have to be closed."""
    del number, frame
    os.write(sys.stderr.fileno(), b"error: interrupted before anything began.\n")
    os._exit(InterruptedRunError.exit_code)
