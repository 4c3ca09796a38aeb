"""A training step never waits for the device: every codec and objective, on a pretend accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch

from minilm_cache.cache import Cache, open_cache
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.batch import UNITS, StudentBatch
from minilm_cache.objectives.check import choose_objective
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.accelerator import Counts, accelerator
from tests.integration.objectives.conftest import OF_WORDS, settings, world_for
from tests.support import World

KERNELS = {"topk": 330, "largest": 350, "dense": 330, "vectors": 330}
"""Most kernels that a step of `minilm` may launch with a student of two layers, by codec."""
CODECS: dict[str, dict[str, Any]] = {
    "topk": {"codec": "topk"},
    "largest": {"codec": "topk", "k": 6, "select": "largest"},
    "dense": {"codec": "dense"},
    "vectors": {"codec": "vectors"},
}


@contextmanager
def on_device(
    config: TrainConfig, cache: Cache
) -> Iterator[tuple[StudentTrainer, Iterator[StudentBatch], Counts]]:
    """Yield a student and its batches on the pretend accelerator."""
    with accelerator() as (device, counts):
        objective = choose_objective(config, cache, arch=config.arch)
        shape = parse_arch(config.arch[0], 4, compares_heads=config.spec.compares_heads)
        (trainer,) = build_trainers(
            config, cache, shapes=[shape], objective=objective, steps=60, ranks=Ranks.alone(device)
        )
        reader = BatchReader(cache, objective.wanted, pad_token=0, device=device)
        batches = reader.train_batches(plan_steps(config, cache.reader), 0)
        try:
            yield trainer, batches, counts
        finally:
            batches.close()


def take_step(trainer: StudentTrainer, batches: Iterator[StudentBatch]) -> None:
    """Take one step, as the loop does between two looks at the losses."""
    trainer.begin(0)
    trainer.learn(next(batches), 0, dict.fromkeys(UNITS, 1.0))
    trainer.update()


def counts_of_step(config: TrainConfig, cache: Cache) -> Counts:
    """Return what the third step does; the first ones make constants that stay on the device."""
    with on_device(config, cache) as (trainer, batches, counts):
        for _ in range(3):
            counts.clear()
            take_step(trainer, batches)
    return counts


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_of_relations_waits_for_nothing(codec: str, world: World) -> None:
    world.dump(**CODECS[codec])
    config = settings("minilm", precision="float32", max_grad_norm=1.0)
    counts = counts_of_step(config, open_cache(world.root / "cache"))

    assert not counts.waits, counts
    assert 100 < counts.kernels.total() <= KERNELS[codec], counts


@pytest.mark.parametrize("objective", [*OF_WORDS, "minilmv2", "tinybert-prediction"])
def test_a_step_of_any_objective_waits_for_nothing(objective: str, words: World, classes: World) -> None:
    world = world_for(objective, words, classes)
    counts = counts_of_step(settings(objective, precision="float32"), open_cache(world.root / "cache"))

    assert not counts.waits, counts


@pytest.mark.parametrize("objective", ["mlm-kd", "distilbert", "minilmv2"])
def test_a_step_of_padded_sequences_waits_for_nothing(objective: str, records: World) -> None:
    counts = counts_of_step(settings(objective, precision="bfloat16"), open_cache(records.root / "cache"))

    assert not counts.waits, counts


def test_a_device_computes_what_a_cpu_does(words: World) -> None:
    cache = open_cache(words.root / "cache")
    config = settings("minilm", precision="float32", dropout="none")
    with on_device(config, cache) as (trainer, batches, _):
        losses = [float(trainer.step(batch, 0).total) for batch in islice(batches, 3)]
    objective = choose_objective(config, cache, arch=config.arch)
    (trainer,) = build_trainers(
        config,
        cache,
        shapes=[parse_arch("2x16", 4)],
        objective=objective,
        steps=60,
        ranks=Ranks.alone(torch.device("cpu")),
    )
    reader = BatchReader(cache, objective.wanted, pad_token=0, device=torch.device("cpu"))
    plain = reader.train_batches(plan_steps(config, cache.reader), 0)
    expected = [float(trainer.step(batch, 0).total) for batch in islice(plain, 3)]
    plain.close()

    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_pretend_accelerator_counts_waits_and_refuses_mixed_devices() -> None:
    """A counter that never counts would let everything pass."""
    with accelerator() as (device, counts):
        values = torch.arange(6.0).to(device)
        assert counts.waits.total() == 1  # not from pinned memory
        assert values.sum().item() == 15
        assert bool((values > 2).any())
        assert values[values > 2].shape == (3,)
        assert counts.waits.total() == 4
        with pytest.raises(RuntimeError, match="mixes devices"):
            values + torch.ones(6)
        with pytest.raises(RuntimeError, match="unsigned integers"):
            torch.arange(6).to(torch.uint16).pin_memory().to(device, non_blocking=True)[values.long()]
        torch.ones(6).pin_memory().to(device, non_blocking=True)
        assert counts.waits.total() == 4
        assert "4 waits" in str(counts)
