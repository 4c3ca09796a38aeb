"""Ways of training that benchmarks time against each other."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModel

from benchmarks.online import UsualOnlineTrainer
from minilm_cache.cache import Cache
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.graph import Graphs, recorder_for
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer

CPU = torch.device("cpu")
TURNS = 3


def graphs_for(device: torch.device) -> Graphs | None:
    """Return graphs of steps on a device. None means that it has none."""
    recorder = recorder_for(device)
    return None if recorder is None else Graphs(recorder=recorder, say=print)


def stream_of(
    cache: Cache,
    config: TrainConfig,
    wanted: WantedTargets,
    *,
    device: torch.device = CPU,
    graphs: Graphs | None = None,
) -> Any:  # noqa: ANN401 - a generator
    """Return the batches of a run, read from disk."""
    reader = BatchReader(cache, wanted, pad_token=0, device=device, graphs=graphs)
    return reader.train_batches(plan_steps(config, cache.reader), 0)


def trainers_of(
    cache: Cache, config: TrainConfig, device: torch.device = CPU, *, graphs: Graphs | None = None
) -> list[StudentTrainer]:
    """Return trainers of new students."""
    heads = cache.manifest.identity.relation_heads
    shapes = [parse_arch(arch, heads) for arch in config.arch]
    return build_trainers(
        config,
        cache,
        shapes=shapes,
        objective=choose_objective(config, cache, arch=config.arch),
        steps=10**6,
        ranks=Ranks.alone(device),
        graphs=graphs,
    )


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rates(
    ways: dict[str, Callable[[], int]],
    seconds: float,
    *,
    turns: int = TURNS,
    warmups: int = 1,
    device: torch.device = CPU,
) -> dict[str, float]:
    """Return the tokens per second of each way, medians over turns of about `seconds` each."""
    rates_by_way: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(warmups):
            way()
    for _ in range(turns):
        for name, way in ways.items():
            synchronize(device)
            started, tokens = time.perf_counter(), 0
            while time.perf_counter() - started < seconds:
                tokens += way()
            synchronize(device)
            rates_by_way[name].append(tokens / (time.perf_counter() - started))
    return {name: median(values) for name, values in rates_by_way.items()}


def offline(trainers: list[StudentTrainer], batches: Iterator[StudentBatch]) -> Callable[[], int]:
    """Return a function that trains the students on the next batch, and returns the batch's tokens."""

    def step() -> int:
        batch = next(batches)
        for trainer in trainers:
            trainer.step(batch, 0)
        return batch.num_tokens

    return step


def usual(
    teacher: Path,
    cache: Cache,
    *,
    config: TrainConfig,
    batches: Iterator[StudentBatch],
    device: torch.device = CPU,
) -> Callable[[], int]:
    """Return a function that trains each student on the next batch with a live teacher of its own."""
    heads = cache.manifest.identity.relation_heads
    loops = []
    for trainer in trainers_of(cache, config):
        student = AutoModel.from_config(trainer.model.model.config, attn_implementation="eager")
        loops.append(UsualOnlineTrainer(teacher, student, heads, device=device))

    def step() -> int:
        batch = next(batches)
        for loop in loops:
            loop.step(batch)
        return batch.num_tokens

    return step
