"""How many threads are worth starting."""

import os


def machine_cores() -> int:
    """Return the cores of this machine that this process may use, if other processes leave them to it."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def own_cores() -> int:
    """Return the cores that this process may use; processes of torchrun share those of a machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, machine_cores() // max(1, int(local) if local.isdecimal() else 1))
