"""`mobilebert`: feature maps and attention, layer by layer, for students with bottlenecks."""

import torch

from minilm_cache.errors import InvalidConfigError
from minilm_cache.loss import Method, relation_loss
from minilm_cache.states import WantedStates
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import StateFamily, StateName
from minilm_cache.tap import Reading
from minilm_cache.train.batches import StudentBatch, WantedTargets
from minilm_cache.train.objectives.base import (
    Asked,
    ObjectiveKind,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    same_width,
    token_mse,
    valid_tokens,
)


class MobileBertObjective(StudentObjective):
    """L = 1/L sum over layers of (L_FMT + L_AT) (MobileBERT, Sun et al. 2020, arXiv 2004.02984, section 3.4).

    L_FMT is the mean squared error of the hidden states that a layer puts out (eq. 1), L_AT the KL of its
    attention distributions, mean over heads and rows (eq. 2). Student and teacher have as many layers, each
    as wide between layers: a student of `LxH:bN` has bottlenecks of width N inside. All layers learn
    together, the paper's joint transfer; its pre-training distillation is `mlm-kd`, begun from this student
    (`--init`).
    """

    def __init__(self, num_layers: int) -> None:
        """Compare every layer with its own."""
        super().__init__()
        self.needs = StudentNeeds(layers=tuple(range(num_layers)), hidden=tuple(range(1, num_layers + 1)))

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are `feature_map_mse` and `attention`, nats, means over layers."""
        valid = valid_tokens(batch)
        maps = [
            token_mse(reading.hidden[number], batch.states.hidden[_state(number)], valid)
            for number in self.needs.hidden
        ]
        attention = [
            relation_loss(own, RelationKind.ATTENTION, targets[RelationKind.ATTENTION], batch.lengths, method)
            for own, targets in zip(reading.vectors, batch.targets, strict=True)
        ]
        return {"feature_map_mse": torch.stack(maps).mean(), "attention": torch.stack(attention).mean()}


class MobileBert(ObjectiveKind):
    """Attention distributions of every layer, and the hidden states that they put out."""

    def wanted(self, asked: Asked) -> WantedTargets:
        """Return those of all layers."""
        depth = asked.teacher.num_layers
        return WantedTargets(
            kinds=(RelationKind.ATTENTION,),
            layers=tuple(range(depth)),
            states=WantedStates(hidden=tuple(_state(number) for number in range(1, depth + 1))),
        )

    def build(self, asked: Asked, wanted: WantedTargets, student: StudentFacts) -> MobileBertObjective:
        """Return the objective of a student as deep, and as wide between layers, as the teacher."""
        del wanted
        same_width("mobilebert", student, asked.teacher)
        if student.num_layers != asked.teacher.num_layers:
            raise InvalidConfigError(
                f"--objective mobilebert compares layer with layer: the student has {student.num_layers}, "
                f"the teacher {asked.teacher.num_layers}. Take as many, with bottlenecks: "
                f"{asked.teacher.num_layers}x{asked.teacher.hidden_size}:b{asked.teacher.hidden_size // 4}."
            )
        return MobileBertObjective(student.num_layers)


def _state(number: int) -> StateName:
    return StateName(StateFamily.HIDDEN, number)
