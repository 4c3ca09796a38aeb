"""Trains one student: its model, its objective, its optimizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from minilm_cache.models.arch import StudentShape
from minilm_cache.models.device import CPU, draw_faster, has_bfloat16, seed_draws
from minilm_cache.models.load import lists_of_layers
from minilm_cache.models.tap import Head, Reading, TappedModel
from minilm_cache.objectives.base import Losses, StudentObjective
from minilm_cache.objectives.batch import UNITS, StudentBatch, Unit
from minilm_cache.objectives.check import Objective
from minilm_cache.relations.loss import Method
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.graph import Graphs, Replayed
from minilm_cache.train.ranks import Ranks

_PROJECTIONS_PART = 2**32 - 1
"""Number that no part of a step has: the seed of an objective's own weights is made with it."""


class StudentTrainer:
    """Trains one student; students of a run share nothing but their batches."""

    def __init__(
        self,
        shape: StudentShape,
        model: TappedModel,
        *,
        config: TrainConfig,
        objective: Objective,
        steps: int,
        ranks: Ranks,
        graphs: Graphs | None = None,
    ) -> None:
        """Begin at step 0.

        Args:
            shape: shape of the student; its `arch` is the student's name.
            model: the student with its initial weights, on its device.
            config: settings of the run.
            objective: the objective of the run.
            steps: optimizer steps of the whole run; the learning rate depends on it.
            ranks: the processes of the run.
            graphs: graphs that take steps. None means that a device is given kernel by kernel.
        """
        self.shape = shape
        self.model = model
        self._seed = config.seed if shape.seed is None else shape.seed
        torch.manual_seed(_part_seed(self._seed, 0, _PROJECTIONS_PART))
        student_objective = objective.of(model).to(ranks.device)
        self.learner = Learner(model, student_objective)
        needs = student_objective.needs
        model.freeze_unused(needs.tap)
        if config.frozen == "embeddings":
            model.model.get_input_embeddings().weight.requires_grad_(False)
        if config.gradient_checkpointing:
            self.model.checkpoint_layers()
        if config.compiled:
            # Each length, and with queries each number of texts, would be recorded anew and kept.
            replays = graphs is None and replays_graphs(config, ranks.device) and not objective.wanted.queries
            self.model.compile_forward(needs.head, taps_layers=bool(needs.layers), replays=replays)
        else:
            draw_faster(self.model)
        self.model.eval()  # new modules included, so that the model's own mode is that of all of them
        self._parallel = ranks.parallel(self.learner)
        self._ranks = ranks
        self._config = config
        self._steps = steps
        self._taken: dict[str, Tensor] = {}
        self._graphs = graphs
        self._steps_at: dict[int, Replayed[Losses]] = {}
        self.trained = [weight for weight in self.learner.parameters() if weight.requires_grad]
        self._rate = None if graphs is None else torch.tensor(config.lr, device=ranks.device)
        self.optimizer = _adamw(
            self.trained, config.weight_decay, config.lr if self._rate is None else self._rate
        )

    @property
    def num_parameters(self) -> int:
        """Number of weights that the student is saved with: of its model, and of the map of its vectors."""
        pooler = self.learner.objective.sentence_pooler
        maps = () if pooler is None else pooler.parameters()
        return sum(weight.numel() for weight in (*self.model.parameters(), *maps))

    @property
    def settings_of_layers(self) -> dict[str, list[Any]]:
        """Settings of the student's configuration that have an entry for each layer."""
        config = self.model.model.config
        return lists_of_layers(config.to_dict(), config.num_hidden_layers)

    def step(self, batch: StudentBatch, step: int) -> Losses:
        """Take one optimizer step on a batch that is a whole step."""
        self.begin(step)
        if self._graphs is not None and batch.place is not None:
            return self._at_place(batch, step, self._graphs)
        self.learn(batch, step, dict.fromkeys(UNITS, 1.0))
        return self.update()

    def begin(self, step: int) -> None:
        """Set the learning rate of a step, and clear the losses of the previous one."""
        rate = learning_rate(self._config, step, self._steps)
        if self._rate is not None:
            self._rate.fill_(rate)
        for group in self.optimizer.param_groups if self._rate is None else ():
            group["lr"] = rate
        drops = self._config.dropout == "teacher"
        if self.model.training != drops:  # to set the mode of all modules takes as long as tens of kernels
            self.model.train(drops)
        if self._config.gradient_checkpointing:
            self.model.train_checkpointed()
        self._taken = {}

    def learn(self, batch: StudentBatch, step: int, shares: Mapping[Unit, float]) -> None:
        """Add the gradient of a part of a step.

        Dropout is drawn from (seed, step, part) alone, so that it does not depend on whether the run was
        resumed, on its other students, or on which process computes the part.

        Args:
            batch: the part of the step.
            step: number of the step, counted from 0.
            shares: share of the step's tokens, sequences, ... (summed over all processes) that this part has.
        """

        def add() -> None:
            seed_draws(_part_seed(self._seed, step, batch.part), self._ranks.device)
            if self._graphs is not None:
                self._begin_anew()
            self._add_gradient(batch, shares)

        add() if self._graphs is None else self._graphs.with_memory(add)

    def _begin_anew(self) -> None:
        """Forget what a step of one part has done before it was interrupted."""
        self.optimizer.zero_grad(set_to_none=True)
        self._taken = {}

    def _add_gradient(self, batch: StudentBatch, shares: Mapping[Unit, float]) -> None:
        with self._ranks.without_sync(self._parallel, when=not batch.ends_step):
            losses = self._losses(self._parallel, batch, method=None, shares=shares)
            # DistributedDataParallel takes the mean of gradients over processes; this makes it their sum.
            (losses.total * self._ranks.num_data).backward()
        for name, part in losses.parts.items():
            self._taken[name] = self._taken.get(name, 0.0) + part.detach()

    def update(self) -> Losses:
        """Take the optimizer's step and free the gradients; return the losses that the parts add up to."""
        if self._config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self._config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.learner.objective.losses(self._taken)

    def _at_place(self, batch: StudentBatch, step: int, graphs: Graphs) -> Losses:
        """Take a step on a batch of a place, by the graph of the place."""
        assert batch.place is not None
        if batch.place not in self._steps_at:
            self._steps_at[batch.place] = Replayed(graphs)
        seed = _part_seed(self._seed, step, batch.part)
        losses = self._steps_at[batch.place](
            lambda: self._whole(batch),
            prepare=lambda: torch.manual_seed(seed),
            weights=lambda: [weight.detach() for weight in self.trained],
            state=lambda: [*self._moments(), *self.learner.buffers()],
        )
        return losses.copied()

    def _moments(self) -> list[Tensor]:
        return [value for moments in self.optimizer.state.values() for value in moments.values()]

    def _whole(self, batch: StudentBatch) -> Losses:
        """Take a step on a batch that is a whole step, from its forward pass to the new weights."""
        self._begin_anew()
        self._add_gradient(batch, dict.fromkeys(UNITS, 1.0))
        return self.update()

    def is_finite(self) -> bool:
        """Return whether no trained weight is NaN or infinite."""
        return bool(torch.stack([weight.isfinite().all() for weight in self.trained]).all())

    def loss_of(self, parts: Mapping[str, float] | None) -> float | None:
        """Return the loss that parts add up to, weighted as in training. None means no parts."""
        return None if parts is None else self.learner.objective.total_of(parts)

    @torch.no_grad()
    def outputs(self, batches: Iterable[StudentBatch]) -> Iterator[tuple[Reading, StudentBatch]]:
        """Yield the student's outputs on batches without dropout, and the batches."""
        self.model.eval()
        for batch in batches:
            yield read(self.model, self.learner.objective, batch), batch

    def evaluate(self, batch: StudentBatch) -> Losses:
        """Return the losses on a batch without dropout; values are exact for sequences of any length."""
        self.model.eval()
        return self._losses(self.learner, batch, method="dense")

    def _losses(
        self,
        learner: nn.Module,
        batch: StudentBatch,
        *,
        method: Method | None,
        shares: Mapping[Unit, float] | None = None,
    ) -> Losses:
        device = batch.inputs.ids.device
        is_rounded = precision_of(self._config, device) == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=is_rounded):
            losses: Losses = learner(batch, method, shares)
            return losses


class Learner(nn.Module):
    """A student and its objective as one module, so that their gradients are averaged together."""

    def __init__(self, model: TappedModel, objective: StudentObjective) -> None:
        """Join a model, which must be tapped as the objective needs, and its objective."""
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(
        self, batch: StudentBatch, method: Method | None = None, shares: Mapping[Unit, float] | None = None
    ) -> Losses:
        """Return the losses of a batch.

        Args:
            batch: a batch.
            method: form of `relation_loss`. None means the form that suits the size.
            shares: share of the step's tokens, sequences, ... that the batch has. None means all of them.
        """
        parts = self.objective(read(self.model, self.objective, batch), batch, method)
        return self.objective.losses(parts, shares)


def read(model: TappedModel, objective: StudentObjective, batch: StudentBatch) -> Reading:
    """Return a student's outputs on a batch, with tokens masked if the objective needs that."""
    needs, masked = objective.needs, batch.signals.masked
    if needs.is_masked and masked is not None:
        places = masked.with_labels if needs.all_labels else masked.places
        return model(batch.inputs.with_ids(masked.ids), needs.tap, places)  # type: ignore[no-any-return]
    return model(batch.inputs, needs.tap)  # type: ignore[no-any-return]


def precision_of(config: TrainConfig, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return the precision of a run on a device."""
    return config.precision or ("bfloat16" if device.type == "cuda" else "float32")


def faster_option(
    config: TrainConfig, device: torch.device, head: Head | None, *, has_graphs: bool
) -> str | None:
    """Return what to say about an option that trains faster on a device. None means that there is none."""
    is_eager = not (config.compiled or config.gradient_checkpointing or has_graphs)
    if is_eager and head != "tokens" and replays_graphs(config, device):
        return "students that are small for this GPU train about twice as fast with --compile"
    if device == CPU and config.precision is None and has_bfloat16():
        return "this CPU trains in about half the time with --precision bfloat16"
    return None


def replays_graphs(config: TrainConfig, device: torch.device) -> bool:
    """Return whether compiled students are replayed as graphs of CUDA: where steps have one part.

    Gradients of a graph that is replayed last until the next forward pass of any such graph, so a student
    must use its own before the next student, or the next part of its step, begins.
    """
    return device.type == "cuda" and config.accumulate == 1


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, which rises linearly over the warmup, then falls linearly to 0."""
    rise = round(config.warmup * steps)
    if step < rise:
        return config.lr * (step + 1) / rise
    return config.lr * (steps - step) / (steps - rise)


def _adamw(trained: Sequence[nn.Parameter], weight_decay: float, rate: float | Tensor) -> torch.optim.AdamW:
    """Return the optimizer of weights; vectors, such as biases, do not decay.

    The rate is a tensor where steps are replayed by a graph, which reads it from memory.
    """
    matrices = [weight for weight in trained if weight.ndim > 1]
    vectors = [weight for weight in trained if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=True, capturable=isinstance(rate, Tensor))
    # The first steps are taken without a recording, of which it would warn each user.
    optimizer._warned_capturable_if_run_uncaptured = True  # noqa: SLF001 - no public setting has it
    return optimizer


def _part_seed(seed: int, step: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, step, part]).generate_state(1, np.uint64)[0])
