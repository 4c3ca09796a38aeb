"""`bert-pkd`: the directions of intermediate hidden states at [CLS]."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F

from minilm_cache.errors import InvalidConfigError
from minilm_cache.loss import Method
from minilm_cache.states import WantedStates
from minilm_cache.storage_schema.states import StateFamily, StateName
from minilm_cache.tap import Reading
from minilm_cache.train.batches import StudentBatch, Unit, WantedTargets
from minilm_cache.train.objectives.base import (
    Asked,
    ObjectiveKind,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    same_width,
)
from minilm_cache.train.objectives.layers import LayerPair, pairs_of
from minilm_cache.train.objectives.tinybert import soft_cross_entropy
from minilm_cache.train.student import num_layers_of

PATIENCE = 100.0
"""Weight of the patient loss, among those that the paper searches (10, 100, 500, 1000)."""


class PatientObjective(StudentObjective):
    """L = L_DS + beta L_PT (Patient KD, Sun et al. 2019, arXiv 1908.09355, eqs. 4, 7 and 8, with alpha = 1).

    L_PT is the squared distance of hidden states of [CLS], each divided by its length, mean over sequences
    and pairs of intermediate layers (the last layers are left out, as in the paper: the answers come from
    them). L_DS, the cross-entropy under the teacher's answers, is there where the cache has its logits: from
    a teacher that is not fine-tuned only L_PT remains. The paper's cross-entropy of the task's own labels is
    what fine-tuning does afterwards.
    """

    weights: Mapping[str, float] = MappingProxyType({"patient": PATIENCE})
    units: Mapping[str, Unit] = MappingProxyType({"patient": "sequences", "prediction": "sequences"})

    def __init__(self, pairs: Sequence[LayerPair], *, logits: bool) -> None:
        """Compare these pairs of layers."""
        super().__init__()
        self._pairs = tuple(pairs)
        self.needs = StudentNeeds(
            hidden=tuple(pair.student + 1 for pair in pairs), head="sequences" if logits else None
        )

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are `patient` and, with logits, `prediction`, nats."""
        del method
        with torch.autocast(batch.ids.device.type, enabled=False):
            away = [
                (
                    F.normalize(reading.hidden[pair.student + 1][:, 0].float(), dim=-1)
                    - F.normalize(
                        batch.states.hidden[StateName(StateFamily.FIRST, pair.teacher + 1)].float(), dim=-1
                    )
                )
                .square()
                .sum(-1)
                .mean()
                for pair in self._pairs
            ]
        parts = {"patient": torch.stack(away).mean()}
        if reading.logits is not None and batch.states.logits is not None:
            parts["prediction"] = soft_cross_entropy(reading.logits, batch.states.logits)
        return parts


class BertPkd(ObjectiveKind):
    """Hidden states of [CLS] of intermediate layers, and logits where there are some."""

    def wanted(self, asked: Asked) -> WantedTargets:
        """Return those of the layers that students are mapped to."""
        depths = {num_layers_of(arch) for arch in asked.config.arch}
        layers = sorted({pair.teacher for depth in depths for pair in _intermediate(asked, depth)})
        names = tuple(StateName(StateFamily.FIRST, layer + 1) for layer in layers)
        return WantedTargets(kinds=(), states=WantedStates(hidden=names, logits=_has_logits(asked)))

    def build(self, asked: Asked, wanted: WantedTargets, student: StudentFacts) -> PatientObjective:
        """Return the objective of a student as wide as the teacher."""
        del wanted
        same_width("bert-pkd", student, asked.teacher)
        return PatientObjective(_intermediate(asked, student.num_layers), logits=_has_logits(asked))


def _intermediate(asked: Asked, num_layers: int) -> list[LayerPair]:
    pairs = pairs_of(asked, num_layers)[:-1]
    if not pairs:
        raise InvalidConfigError(
            "--objective bert-pkd compares intermediate layers, and a student or its --layer-map "
            f"{asked.config.layer_map} has none. Take students of 2 layers or more."
        )
    return pairs


def _has_logits(asked: Asked) -> bool:
    states = asked.cache.manifest.identity.states
    return states is not None and states.num_classes is not None
