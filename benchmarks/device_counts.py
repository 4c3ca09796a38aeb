"""Count what a training step and a batch of a dump launch on a device, and how often they wait for it.

    python -m benchmarks.device_counts

No GPU is needed: the device is the tests' pretend accelerator, which computes on the CPU. It counts an
operation as one kernel, so a GPU, which fuses some of them, launches fewer. Copies from the device to the CPU
that a batch of a dump waits for are counted as one wait.
"""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu.inputs import Bench, Sizes, prepare
from benchmarks.loops import stream_of, trainers_of
from benchmarks.report import write_result
from minilm_cache.cache import open_cache
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.load import load_model
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session, Silent
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.graph import Graphs
from tests.accelerator import NAME, Counts, accelerator, register
from tests.replay import Replayer

CODECS = ("topk", "vectors", "dense")
ARCH, BATCH, LENGTH = "3x384", 32, 128
REPLAYED = 9
"""Steps until the last one is replayed: decoding and then the step are recorded and checked before."""
SIZES = Sizes(
    teacher={
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    tokens=2**15,
    dump_tokens=2**15,
    arch=(ARCH,),
    batch_sizes=(BATCH,),
    lengths=(LENGTH,),
    seconds=0,
)


class _CountBatches(Silent):
    """Notes what each batch of a dump does."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._is_dump = False
        self.batches: list[dict[str, int]] = []

    def start(self, task: str, total: int, unit: str) -> None:
        """Begin a task."""
        del total, unit
        self._is_dump = task == "dump"
        self._counts.clear()

    def advance(self, amount: int, detail: str = "") -> None:
        """Report a batch."""
        del amount, detail
        if self._is_dump:
            self.batches.append(_totals(self._counts))
            self._counts.clear()


def main() -> None:
    """Count for every codec, and write the result."""
    torch.set_num_threads(1)
    result: dict[str, object] = {"teacher": "6 layers of width 384, random weights", "student": ARCH}
    result |= {"batch": BATCH, "length": LENGTH}
    with TemporaryDirectory() as folder:
        register()
        bench = prepare(Path(folder), torch.device(NAME), SIZES)
        load_model(bench.teacher)  # transformers leaves buffers empty if it loads its first model in a mode
        for codec in CODECS:
            counted = {
                "batch_of_a_dump": _dump(bench, codec),
                "training_step": _step(bench, codec),
                "step_as_a_graph": _step(bench, codec, replays=True),
            }
            result[codec] = counted
    write_result("device_counts", result)


def _dump(bench: Bench, codec: str) -> dict[str, int]:
    with accelerator() as (device, counts):
        config = bench.config(codec, LENGTH, tokens=SIZES.tokens, device=device)
        progress = _CountBatches(counts)
        dump_cache(config, out=bench.folder / codec, session=Session(bench.folder, progress=progress))
    return progress.batches[2]  # the first ones make constants that stay on the device


def _step(bench: Bench, codec: str, *, replays: bool = False) -> dict[str, int]:
    cache = open_cache(bench.folder / codec)
    config = TrainConfig(arch=(ARCH,), batch_size=BATCH, precision="float32")
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    with accelerator() as (device, counts):
        graphs = Graphs(recorder=Replayer(counts), say=print) if replays else None
        (trainer,) = trainers_of(cache, config, device, graphs=graphs)
        with closing(stream_of(cache, config, wanted, device=device, graphs=graphs)) as batches:
            for _ in range(REPLAYED if replays else 3):
                counts.clear()
                batch = next(batches)
                decoded = counts.kernels.total()
                trainer.step(batch, 0)
        return {**_totals(counts), "kernels_of_decoding": decoded}


def _totals(counts: Counts) -> dict[str, int]:
    return {"waits": counts.waits.total(), "kernels": counts.kernels.total()}


if __name__ == "__main__":
    main()
