"""The memory of a process while it works."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def peak() -> Iterator[dict[str, float]]:
    """Yield a dictionary that holds, after the block, the most memory that the block took, MiB.

    `anonymous_mib` is what a process holds. Pages of mapped files, which the system can drop, are not in it.
    """
    memory: dict[str, float] = {"anonymous_mib": 0.0, "mapped_mib": 0.0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            now = psutil.Process().memory_info()
            memory["anonymous_mib"] = max(memory["anonymous_mib"], round((now.rss - now.shared) / 2**20, 1))
            memory["mapped_mib"] = max(memory["mapped_mib"], round(now.shared / 2**20, 1))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()
