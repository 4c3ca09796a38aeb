"""Run commands in processes of their own."""

import os
import subprocess


def run(command: list[str]) -> str:
    """Return what a command prints; it computes on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
