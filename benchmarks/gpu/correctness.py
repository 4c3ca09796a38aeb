"""What a device computes against a CPU, and compiled or replayed students against others, in float32."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.inputs import Bench
from benchmarks.loops import CPU, graphs_for, stream_of, trainers_of
from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.run import dump_cache
from minilm_cache.objectives.batch import UNITS
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.graph import Graphs

CODECS = ("topk", "vectors", "dense")
STEPS = 20
"""Steps that students are trained for."""


def correctness(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield, for each codec, how far a device is from a CPU."""
    length = min(bench.sizes.lengths)
    for codec in CODECS:
        caches = {}
        for device in (CPU, bench.device):
            path = bench.folder / f"checked-{codec}-{device.type}"
            config = bench.config(
                codec, length, tokens=min(2**13, bench.sizes.tokens), device=device, precision="float32"
            )
            dump_cache(config, out=path, session=Session(bench.folder))
            caches[device.type] = open_cache(path)
        yield {
            "codec": codec,
            "equal_stored_values": _equal_values(caches["cpu"], caches[bench.device.type]),
            **_step_differences(bench, caches["cpu"]),
        }


def compiled(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield how far compiled students of one run are, after some steps, from those that are not compiled.

    On a GPU their graphs are replayed, and write their gradients into the same memory.
    `graphs_not_replayed` is the number of graphs for which the compiler chose otherwise.
    """
    yield {**_compared(bench, compiled=True), "graphs_not_replayed": counters["inductor"]["cudagraph_skips"]}


def replayed(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield how far students of one run whose steps are replayed as graphs are from others, on a GPU.

    Nothing is yielded for devices without graphs.
    """
    graphs = graphs_for(bench.device)
    if graphs is not None:
        row = _compared(bench, graphs=graphs)
        yield {**row, "graphs_are_used": graphs.are_used, "places": graphs.num_places}


def _compared(bench: Bench, *, compiled: bool = False, graphs: Graphs | None = None) -> dict[str, Any]:
    """Return how far students are, after some steps, from those that take them kernel by kernel."""
    arch = (*bench.sizes.arch[:2], f"{bench.sizes.arch[0]}:s1")
    cache = bench.cache("topk", min(bench.sizes.lengths))
    plain = _last_losses(bench, cache, arch)
    other = _last_losses(bench, cache, arch, compiled=compiled, graphs=graphs)
    return {
        "students": arch,
        "steps": STEPS,
        "loss_relative_differences": [
            abs(found - expected) / expected for found, expected in zip(other, plain, strict=True)
        ],
    }


def _last_losses(
    bench: Bench, cache: Cache, arch: tuple[str, ...], *, compiled: bool = False, graphs: Graphs | None = None
) -> list[float]:
    """Return the loss of each student of a run in its last step."""
    config = TrainConfig(
        arch=arch,
        batch_size=8,
        warmup=0.0,
        max_grad_norm=1.0,
        dropout="none",
        precision="float32",
        compiled=compiled,
    )
    wanted = choose_objective(config, cache, arch=arch).wanted
    trainers = trainers_of(cache, config, bench.device, graphs=graphs)
    with closing(stream_of(cache, config, wanted, device=bench.device, graphs=graphs)) as batches:
        for step in range(STEPS):
            batch = next(batches)
            losses = [float(trainer.step(batch, step).total) for trainer in trainers]
            if step == STEPS // 2:
                with torch.no_grad():
                    for trainer in trainers:
                        trainer.evaluate(batch)
    return losses


def _equal_values(first: Cache, second: Cache) -> dict[str, float]:
    """Return the share of stored numbers that are equal, by array."""
    shares: dict[str, list[tuple[int, int]]] = {}
    for shard in range(len(first.reader.ranges)):
        for own, other in zip(first.reader.segments_of(shard), second.reader.segments_of(shard), strict=True):
            for path, rows in own.rows.items():
                equal = int(np.count_nonzero(rows == other.rows[path]))
                shares.setdefault(path, []).append((equal, rows.size))
    return {
        path: round(sum(equal for equal, _ in parts) / sum(size for _, size in parts), 6)
        for path, parts in shares.items()
    }


def _step_differences(bench: Bench, cache: Cache) -> dict[str, float]:
    """Return relative differences of the loss and of the gradient of one step from the same cache."""
    config = TrainConfig(
        arch=bench.sizes.arch[:1], batch_size=8, dropout="none", precision="float32", device=bench.device.type
    )
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    losses, gradients = [], []
    for device in (CPU, bench.device):
        (trainer,) = trainers_of(cache, config, device)
        with closing(stream_of(cache, config, wanted, device=device)) as batches:
            batch = next(batches)
            trainer.begin(0)
            trainer.learn(batch, 0, dict.fromkeys(UNITS, 1.0))
        parts = [weight.grad.flatten().cpu() for weight in trainer.trained if weight.grad is not None]
        gradients.append(torch.cat(parts))
        losses.append(float(trainer.update().total))
    far = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    return {
        "loss_relative_difference": abs(losses[1] - losses[0]) / losses[0],
        "gradient_relative_difference": float(far),
    }
