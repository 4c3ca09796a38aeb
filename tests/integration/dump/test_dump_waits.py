"""A dump waits for the device once a batch: shown on a pretend accelerator, which writes the same bytes."""

from pathlib import Path
from typing import Any

import pytest

from minilm_cache.dump.run import dump_cache
from minilm_cache.session import Session, Silent
from tests.accelerator import Counts, accelerator
from tests.support import World, save_teacher

MOST_WAITS = 2
KERNELS = {"topk": 420, "largest": 300, "dense": 200, "vectors": 150, "pooled": 120, "states": 900}
"""Most kernels that a batch may launch, teacher of three layers included."""
CACHES: dict[str, dict[str, Any]] = {
    "topk": {"codec": "topk"},
    "largest": {"codec": "topk", "select": "largest"},
    "dense": {"codec": "dense"},
    "vectors": {"codec": "vectors", "max_kl": 0.01},
    "pooled": {"for": "embedding", "pooling": "mean", "codec": "none"},
    "states": {"for": "minilm,mlm-kd,tinybert,bert-pkd", "codec": "vectors", "max_kl": 0.01},
}


class CountBatches(Silent):
    """Notes what each batch of a dump does."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.is_dump = False
        self.batches: list[tuple[int, int, str]] = []

    def start(self, task: str, total: int, unit: str) -> None:
        self.is_dump = task == "dump"
        self.counts.clear()

    def advance(self, amount: int, detail: str = "") -> None:
        if self.is_dump:
            totals = self.counts.waits.total(), self.counts.kernels.total(), str(self.counts)
            self.batches.append(totals)
            self.counts.clear()


def files_of(cache: Path) -> dict[str, bytes]:
    """Return the content of a cache's shards."""
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for path in sorted(cache.rglob("*"))
        if path.is_file() and ("c" in path.relative_to(cache).parts or path.suffix == ".parquet")
    }


@pytest.mark.parametrize("name", CACHES)
def test_a_batch_waits_at_most_twice_and_its_bytes_are_those_of_a_cpu(
    name: str, tmp_path: Path, world: World
) -> None:
    if name == "states":
        save_teacher(world.teacher, head="tokens")
    settings = CACHES[name]
    world.dump("plain", **settings)
    with accelerator() as (device, counts):
        progress = CountBatches(counts)
        config = world.config(**settings, device=str(device))
        dump_cache(config, out=world.root / "device", session=Session(world.home, progress=progress))

    assert len(progress.batches) > 5
    inner = progress.batches[1:]  # the first batch makes constants that stay on the device
    for waits, kernels, lines in inner:
        assert waits <= MOST_WAITS, lines
        assert kernels <= KERNELS[name], lines
    assert len(files_of(world.root / "plain")) > 3
    assert files_of(world.root / "device") == files_of(world.root / "plain")
