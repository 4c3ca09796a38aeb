"""How many threads are worth starting."""

import os


def own_cores() -> int:
    """Return the cores that this process may use; processes of torchrun share those of a machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores // max(1, int(local) if local.isdecimal() else 1))
