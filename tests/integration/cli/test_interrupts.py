"""An interrupt while modules load is one line, whichever module it meets."""

import subprocess
import sys

import pytest

START = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

from minilm_cache.cli import entry
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests with it ignored
sys.argv = ["minilm-cache", "dump", "--teacher", "mini"]
entry.main()
"""


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("typer", "error: interrupted before anything began.\n"),
        ("torch", "error: interrupted at once. What was written before is kept"),
    ],
)
def test_an_interrupt_of_the_start_is_one_line(module: str, line: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", START.format(module=module)], capture_output=True, text=True, check=False
    )

    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr.startswith(line)
    assert process.stderr.count("\n") == 1
