"""A training's loop on a device: only losses that are due are waited for; students overwrite nothing."""

from typing import Any

import pytest
import torch

from minilm_cache.session import Session
from minilm_cache.train.loop import LOG_STEPS, TrainingLoop
from minilm_cache.train.run import train_students
from minilm_cache.train.trainer import StudentTrainer, replays_graphs
from tests.accelerator import accelerator
from tests.integration.train.test_train import settings
from tests.support import World


class Enough(Exception):  # noqa: N818 - not an error
    """Enough steps have been counted; weights of the pretend accelerator cannot be saved."""


def test_steps_between_two_looks_at_the_losses_wait_for_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.dump(codec="vectors", max_kl=0.01).path
    waits: dict[int, int] = {}
    real = TrainingLoop._step
    with accelerator() as (device, counts):

        def counting(self: TrainingLoop, *arguments: Any, **named: Any) -> int:
            counts.clear()
            tokens = real(self, *arguments, **named)
            waits[self.state.step] = counts.waits.total()
            if self.state.step == 2 * LOG_STEPS + 2:
                raise Enough
            return tokens

        monkeypatch.setattr(TrainingLoop, "_step", counting)
        config = settings(steps=60, device=str(device), checkpoint_steps=60, precision="float32")
        with pytest.raises(Enough):
            train_students(config, cache, out=world.root / "run", session=Session(world.home))

    # The first step makes constants that stay on the device.
    assert {step: number for step, number in waits.items() if number and step > 1} == {
        LOG_STEPS: 1,
        2 * LOG_STEPS: 1,
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_where_graphs_are_replayed_no_student_needs_the_gradients_of_another(
    world: World, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """A replayed graph writes its gradients where those of the student before it were."""
    world.dump()
    trainers: dict[str, StudentTrainer] = {}
    overwritten: list[bool] = []
    real = StudentTrainer.learn

    def learn(self: StudentTrainer, *arguments: Any) -> None:
        trainers[self.shape.arch] = self
        others = [trainer for trainer in trainers.values() if trainer is not self]
        overwritten.append(any(weight.grad is not None for other in others for weight in other.trained))
        real(self, *arguments)

    monkeypatch.setattr(StudentTrainer, "learn", learn)
    config = settings(steps=3, accumulate=accumulate)
    train_students(config, world.root / "cache", out=world.root / "run", session=Session(world.home))

    assert len(trainers) == 2
    assert any(overwritten) != replays_graphs(config, torch.device("cuda"))


@pytest.mark.parametrize(("dropout", "drops"), [("teacher", True), ("none", False)])
def test_every_module_of_a_student_drops_out_in_training_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, dropout: str, drops: bool
) -> None:
    """Modes are set only where they change, and modules are replaced by faster ones."""
    world.dump()
    in_training, in_evaluation = set[bool](), set[bool]()
    learn, evaluate = StudentTrainer.learn, StudentTrainer.evaluate

    def learning(self: StudentTrainer, *arguments: Any) -> None:
        in_training.update(module.training for module in self.model.modules())
        learn(self, *arguments)

    def evaluating(self: StudentTrainer, *arguments: Any) -> Any:
        losses = evaluate(self, *arguments)
        in_evaluation.update(module.training for module in self.model.modules())
        return losses

    monkeypatch.setattr(StudentTrainer, "learn", learning)
    monkeypatch.setattr(StudentTrainer, "evaluate", evaluating)
    config = settings(steps=4, eval_steps=2, dropout=dropout)
    train_students(config, world.root / "cache", out=world.root / "run", session=Session(world.home))

    assert in_training == {drops}
    assert in_evaluation == {False}
