"""The parts of a step add up to the step, for every objective."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from minilm_cache.cache import open_cache
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.batch import UNITS
from minilm_cache.objectives.check import choose_objective
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.golden.curves import ARCH, KINDS, Kind, make_world, served
from tests.support import World

CPU = torch.device("cpu")


def trainer_of(world: World, objective: str) -> tuple[StudentTrainer, BatchReader]:
    """Return a student at its beginning, and a reader of what it learns from."""
    arch = ARCH.get(objective, "2x16")
    config = TrainConfig(
        arch=(arch,), objective=objective, batch_size=4, steps=1, device="cpu", dropout="none"
    )
    cache = open_cache(world.root / "cache")
    chosen = choose_objective(config, cache, arch=config.arch)
    shape = parse_arch(arch, 4, compares_heads=config.spec.compares_heads)
    (trainer,) = build_trainers(
        config, cache, shapes=[shape], objective=chosen, steps=1, ranks=Ranks.alone(CPU)
    )
    return trainer, BatchReader(cache, chosen.wanted, pad_token=0, device=CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_step_add_up_to_the_step_for_every_objective(tmp_path: Path, kind: Kind) -> None:
    """Four sequences at once, or two and two: the same losses, and the same gradient."""
    world = make_world(tmp_path, kind)
    for objective in served(kind):
        trainer, reader = trainer_of(world, objective)
        (whole,) = islice(reader.batches_of(range(4), 4), 1)
        gradients, losses = [], []
        for size in (4, 2):
            trainer.begin(0)
            for batch in reader.batches_of(range(4), size):
                shares = {unit: batch.counts[unit] / max(whole.counts[unit], 1) for unit in UNITS}
                trainer.learn(batch, 0, shares)
            gradients.append([weight.grad.clone() for weight in trainer.trained if weight.grad is not None])
            losses.append(trainer.learner.objective.losses(trainer._taken))
            trainer.optimizer.zero_grad(set_to_none=True)
        assert losses[0].parts.keys() == losses[1].parts.keys()
        for name, part in losses[0].parts.items():
            unit = trainer.learner.objective.units.get(name, "tokens")
            assert unit in UNITS
            torch.testing.assert_close(losses[1].parts[name], part, rtol=1e-4, atol=1e-6, msg=objective)
        for one, two in zip(*gradients, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5, msg=f"{objective}: gradient")
