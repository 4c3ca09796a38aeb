"""What a training step waits for: synchronisations, and the time of kernels and of calls."""

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.inputs import Bench
from benchmarks.gpu.training import CODEC
from benchmarks.loops import graphs_for, stream_of, synchronize, trainers_of
from minilm_cache.objectives.check import choose_objective
from minilm_cache.train.config import TrainConfig

STEPS = 8
WARMUPS = 2
"""Rounds of steps before any that is looked at."""
MOST = 8
"""Calls and kernels that are named."""


def profiling(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield what steps of the first shape wait for, with a small batch, where launches cost most.

    One row is for students whose steps are launched kernel by kernel, and on a GPU one for compiled ones and
    one for steps that are replayed as graphs.
    """
    is_gpu = bench.device.type == "cuda"
    for compiled, graph in ((False, False), (True, False), (False, True)) if is_gpu else ((False, False),):
        config = TrainConfig(
            arch=bench.sizes.arch[:1],
            batch_size=bench.sizes.batch_sizes[0],
            device=bench.device.type,
            compiled=compiled,
            graph=graph,
        )
        yield {"compiled": compiled, "graph": graph, "steps": STEPS, **_profile(bench, config)}


def _profile(bench: Bench, config: TrainConfig) -> dict[str, Any]:
    """Return what steps take and wait for; the profiler is not running while they are timed."""
    is_gpu = bench.device.type == "cuda"
    cache = bench.cache(CODEC, bench.sizes.lengths[0])
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    graphs = graphs_for(bench.device) if config.graph else None
    (trainer,) = trainers_of(cache, config, bench.device, graphs=graphs)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with closing(stream_of(cache, config, wanted, device=bench.device, graphs=graphs)) as batches:

        def steps() -> None:
            for _ in range(STEPS):
                trainer.step(next(batches), 0)
            synchronize(bench.device)

        for _ in range(WARMUPS):
            steps()
        waits = _synchronisations(steps) if is_gpu else None
        started = time.perf_counter()
        steps()
        seconds = (time.perf_counter() - started) / STEPS
        with profile(activities=activities) as profiled:
            steps()
    calls = profiled.key_averages()
    kernels = [
        event
        for event in profiled.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    on_device = sum(kernel.self_device_time_total for kernel in kernels) / 1e6 / STEPS
    slowest = sorted(calls, key=lambda call: -call.self_cpu_time_total)[:MOST]
    slowest_kernels = sorted(calls, key=lambda call: -call.self_device_time_total)[:MOST] if is_gpu else []
    return {
        "seconds_per_step": seconds,
        "kernels_per_step": round(len(kernels) / STEPS) if is_gpu else None,
        "share_of_time_that_the_device_computes": round(on_device / seconds, 3) if is_gpu else None,
        "waits": waits,
        "slowest_calls_ms": {call.key: round(call.self_cpu_time_total / 1e3, 2) for call in slowest},
        "slowest_kernels_ms": {
            call.key[:100]: round(call.self_device_time_total / 1e3, 2) for call in slowest_kernels
        },
    }


def _synchronisations(steps: Any) -> dict[str, int]:  # noqa: ANN401 - a function
    """Return how often a line of code waited for the GPU."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    lines = [f"{warning.filename.rpartition('/')[2]}:{warning.lineno}" for warning in caught]
    return dict(Counter(lines).most_common())
