"""`mobilebert`: feature maps and attention, layer by layer, for students with bottlenecks."""

from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    ModelSizes,
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    same_width,
    token_mse,
)
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.relations.loss import Method, relation_loss
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import SignalName, StateFamily

AUTHORS_WEIGHTS: Final = {"feature_map_mse": 100.0, "mean_mse": 5000.0, "variance_l1": 5.0}
"""Weights that the README of the authors' code gives; the weight of attention is 1."""
_EPSILON: Final = 1e-12
"""Number that the authors' normalisation adds to a variance."""


class MobileBertObjective(StudentObjective):
    """L = 1/L sum over layers of (L_FMT + L_AT) (MobileBERT, Sun et al. 2020, arXiv 2004.02984, section 3.4).

    L_FMT is the mean squared error of the output hidden states of a layer (eq. 1), L_AT the KL of its
    attention distributions, mean over heads and rows (eq. 2). Student and teacher have as many layers, each
    as wide between layers: a student of `LxH:bN` has bottlenecks of width N inside. All layers learn
    together, the paper's joint transfer; its pre-training distillation is `mlm-kd --ground-truth 0.5`, begun
    from this student (`--init`).

    `authors`, their published code and the weights of its README: both feature maps are normalised over their
    dimensions, without scale or bias, before they are compared, and weigh 100; the squared difference of
    their means over dimensions weighs 5000, the absolute difference of their variances 5, attention 1. (Their
    code compares the mean and variance of each layer with those of all the teacher's layers, by a name in the
    plural where one layer's was meant; here each is compared with its own.) `paper`: the plain squared error,
    weight 1.
    """

    def __init__(self, num_layers: int, *, is_authors: bool) -> None:
        """Compare every layer of a student with the same layer of the teacher."""
        super().__init__()
        self._is_authors = is_authors
        self.weights = AUTHORS_WEIGHTS if is_authors else {}
        self.needs = StudentNeeds(layers=tuple(range(num_layers)), hidden=tuple(range(1, num_layers + 1)))

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss, means over layers.

        Parts are `feature_map_mse` and `attention`, nats, and of form `authors` `mean_mse` and `variance_l1`.
        """
        valid = batch.inputs.valid
        pairs = [(reading.hidden[number], batch.signals[_state(number)]) for number in self.needs.hidden]
        layers = [
            feature_maps(student, teacher, valid, is_authors=self._is_authors) for student, teacher in pairs
        ]
        maps = {name: torch.stack([layer[name] for layer in layers]).mean() for name in layers[0]}
        attention = [
            relation_loss(
                vectors,
                RelationKind.ATTENTION,
                targets=targets[RelationKind.ATTENTION],
                lengths=batch.inputs.lengths,
                method=method,
            )
            for vectors, targets in zip(reading.vectors, batch.targets, strict=True)
        ]
        return {**maps, "attention": torch.stack(attention).mean()}


def feature_maps(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    valid: Bool[Tensor, "batch length"],
    *,
    is_authors: bool,
) -> dict[str, Float[Tensor, ""]]:
    """Return how far the output hidden states of one layer are from the teacher's, by part of the loss."""
    if not is_authors:
        return {"feature_map_mse": token_mse(student, teacher, valid)}
    with torch.autocast(student.device.type, enabled=False):
        student, teacher = student.float(), teacher.float()
        width = student.shape[-1:]
        normed, normed_teacher = (F.layer_norm(part, width, eps=_EPSILON) for part in (student, teacher))
        differences = (student.var(-1, correction=0) - teacher.var(-1, correction=0)).abs()
        return {
            "feature_map_mse": token_mse(normed, normed_teacher, valid),
            "mean_mse": token_mse(student.mean(-1, keepdim=True), teacher.mean(-1, keepdim=True), valid),
            "variance_l1": (differences * valid).sum() / valid.sum(),
        }


class MobileBert(ObjectiveKind):
    """Attention distributions and output hidden states of every layer."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the attention distributions and the hidden states of all layers."""
        depth = request.teacher.num_layers
        return WantedTargets(
            kinds=(RelationKind.ATTENTION,),
            layers=tuple(range(depth)),
            signals=tuple(_state(number) for number in range(1, depth + 1)),
        )

    def check_shape(self, config: ObjectiveConfig, student: ModelSizes, teacher: ModelSizes) -> None:
        """Raise InvalidConfigError unless it is as deep, and as wide between layers, as the teacher."""
        del config
        same_width("mobilebert", student, teacher)
        if student.num_layers != teacher.num_layers:
            raise InvalidConfigError(
                f"--objective mobilebert compares layer with layer: the student has {student.num_layers}, "
                f"the teacher {teacher.num_layers}. Take as many, with bottlenecks: "
                f"{teacher.num_layers}x{teacher.hidden_size}:b{teacher.hidden_size // 4}."
            )

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> MobileBertObjective:
        """Return the objective of a student."""
        del wanted
        return MobileBertObjective(student.num_layers, is_authors=request.config.is_authors)


def _state(number: int) -> SignalName:
    return SignalName(StateFamily.HIDDEN, number)
