"""Every objective learns as it did when its curve was stored, and its parts are what their units say."""

import json
from itertools import islice

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
from tests.golden.curves import ARCH, FILE, OF_CLASSES, TRAINED, curve, make_world
from tests.support import World

CPU = torch.device("cpu")
BAND = 0.5
"""Greatest distance from a stored curve, as a share of what was learned: processors round otherwise."""
LEAST = 1e-3
"""The same as a share of the loss, for objectives that these random texts teach hardly anything."""


@pytest.fixture(scope="module", params=[False, True], ids=["words", "classes"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world whose cache serves half of the objectives."""
    return make_world(tmp_path_factory.mktemp("world"), classes=request.param)


def served(world: World) -> list[str]:
    """Return the objectives that a world serves."""
    states = open_cache(world.root / "cache").manifest.identity.states
    is_of_classes = states is not None and states.num_classes is not None
    return sorted(name for name in TRAINED if (name in OF_CLASSES) == is_of_classes)


def test_every_objective_learns_along_its_stored_curve(world: World) -> None:
    stored = json.loads(FILE.read_text())
    assert sorted(stored) == sorted(TRAINED)
    for objective in served(world):
        found, expected = curve(world, objective), stored[objective]
        band = BAND * abs(expected[0] - expected[-1]) + LEAST * expected[0]
        assert found == pytest.approx(expected, abs=band), objective


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


def test_parts_of_a_step_add_up_to_the_step_for_every_objective(world: World) -> None:
    """Four sequences at once, or two and two: the same losses, and the same gradient."""
    for objective in served(world):
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
