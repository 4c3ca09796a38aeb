"""One student in training: its model, its optimizer, its step."""

import numpy as np
import torch

from minilm_cache.config import TrainConfig
from minilm_cache.tap import TappedModel
from minilm_cache.train.batches import StudentBatch
from minilm_cache.train.objective import Losses, Objective
from minilm_cache.train.student import StudentShape


class StudentTrainer:
    """Trains one student; students of a run share nothing but their batches."""

    def __init__(
        self, shape: StudentShape, model: TappedModel, config: TrainConfig, objective: Objective, steps: int
    ) -> None:
        """Begin at step 0.

        Args:
            shape: of the student; its arch names it.
            model: the student with its initial weights, on its device.
            config: settings of the run.
            objective: what it learns.
            steps: of the whole run; the learning rate depends on it.
        """
        self.shape = shape
        self.model = model
        self._config = config
        self._objective = objective
        self._steps = steps
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        others = [weight for weight in model.parameters() if weight.ndim <= 1]
        # Parameters behind the tap get no gradient, and AdamW leaves alone what has none.
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.lr,
            fused=True,
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the whole student."""
        return sum(weight.numel() for weight in self.model.parameters())

    def step(self, batch: StudentBatch, step: int) -> Losses:
        """Take one optimizer step.

        Dropout is drawn from (seed, step) alone, so that a run that is resumed, or that trains several
        students, draws the same.
        """
        torch.manual_seed(_step_seed(self._config.seed, step))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step, self._steps)
        self.model.train()
        losses = self.losses(batch)
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        self.optimizer.step()
        return Losses(losses.total.detach(), {kind: part.detach() for kind, part in losses.parts.items()})

    def losses(self, batch: StudentBatch) -> Losses:
        """Return the objective on a batch, under bfloat16 autocast on a GPU."""
        mask = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.lengths[:, None]
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=batch.ids.is_cuda):
            (vectors,) = self.model(batch.ids, mask.to(torch.int64))
            return self._objective(vectors, batch)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear rise over the warmup, then a linear fall towards 0."""
    rise = round(config.warmup * steps)
    if step < rise:
        return config.lr * (step + 1) / rise
    return config.lr * (steps - step) / (steps - rise)


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])
