"""Mutations of files, the same in every run.

Tests try some of them. `MINILM_CACHE_MUTATIONS=10000 pytest -k mutated` tries more.
"""

import os
import random
from collections.abc import Iterator


def mutations(seed: bytes, count: int, *, near_end: float = 0.0) -> Iterator[bytes]:
    """Yield contents of a file with one to four short parts replaced by other bytes, or by none.

    Args:
        seed: the content of the file.
        count: number of mutations; more where the environment asks for them.
        near_end: share of the parts that lie in the last 400 bytes, where some formats have their headers.
    """
    draw = random.Random(len(seed))
    for _ in range(max(count, int(os.environ.get("MINILM_CACHE_MUTATIONS", "0")))):
        content = bytearray(seed)
        for _ in range(draw.randint(1, 4)):
            is_near = draw.random() < near_end
            at = max(0, len(content) - draw.randint(1, 400)) if is_near else draw.randrange(len(content) + 1)
            new = bytes(draw.randrange(256) for _ in range(draw.randint(0, 3)))
            content[at : at + draw.randint(0, 3)] = new
        yield bytes(content)
