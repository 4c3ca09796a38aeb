"""`bert-pkd`: the directions of intermediate hidden states at [CLS]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import num_layers_of
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    LayerPair,
    ModelSizes,
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    pairs_of,
    same_width,
)
from minilm_cache.objectives.batch import StudentBatch, Unit, WantedTargets
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.tinybert import answer_loss, refuse_needless_temperature
from minilm_cache.relations.loss import Method
from minilm_cache.storage_schema.states import LOGITS, SignalName, StateFamily

ALPHA = 0.7
"""Weight of L_DS, which compares answers, in the authors' run; the rest is the weight of the task's labels,
which no cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Weights and normalisation of the loss."""

    is_authors: bool
    """True: the loss of the authors' code. False: the paper's equations."""
    weight: float
    """Weight beta of L_PT."""
    temperature: float
    """Temperature: logits are divided by it."""

    @classmethod
    def of(cls, config: ObjectiveConfig) -> "Patience":
        """Return the settings of a run; those left open are as in the authors' run, or as in the paper."""
        is_authors = config.is_authors
        weight, temperature = (500.0, 10.0) if is_authors else (100.0, 1.0)
        return cls(
            is_authors=is_authors,
            weight=weight if config.patience is None else config.patience,
            temperature=config.temperature or temperature,
        )


class PatientObjective(StudentObjective):
    """L = alpha L_DS + beta L_PT (Patient KD, Sun et al. 2019, arXiv 1908.09355, eqs. 4, 7 and 8).

    L_PT compares hidden states of [CLS], each divided by its length, at pairs of intermediate layers (the
    last layers are left out, as in the paper: the answers come from them). L_DS compares answers, where the
    cache has the teacher's logits: from a teacher that is not fine-tuned only L_PT remains. The cross-entropy
    of the task's own labels is what fine-tuning does afterwards.

    `authors`, their published code: L_PT is a mean squared error, over dimensions, too, so beta = 500 weighs
    as it does in their grid (10, 100, 500, 1000); L_DS is T^2 times the mean over sequences and classes of
    the KL of answers at temperature T = 10, with alpha = 0.7. `paper`: L_PT sums over dimensions (eq. 7),
    L_DS is the cross-entropy at T = 1 (eq. 4), alpha = 1, beta = 100.
    """

    units: Mapping[str, Unit] = MappingProxyType({"patient": "sequences", "prediction": "sequences"})

    def __init__(self, pairs: Sequence[LayerPair], patience: Patience, num_classes: int | None) -> None:
        """Compare pairs of layers, and answers.

        Args:
            pairs: pairs of layers whose hidden states are compared.
            patience: weights and normalisation of the loss.
            num_classes: classes of the teacher's answers. None means that answers are not compared.
        """
        super().__init__()
        self._pairs, self._patience = tuple(pairs), patience
        square = 1.0 if num_classes == 1 else patience.temperature**2  # a squared error has no temperature
        answers = ALPHA * square / (num_classes or 1) if patience.is_authors else square
        self.weights = {"patient": patience.weight, "prediction": answers}
        self.needs = StudentNeeds(
            hidden=tuple(pair.student + 1 for pair in pairs),
            head=None if num_classes is None else "sequences",
        )

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are `patient` and, with logits, `prediction`, nats, means over sequences."""
        del method
        with torch.autocast(batch.inputs.ids.device.type, enabled=False):
            squared_differences = [
                (
                    F.normalize(reading.hidden[pair.student + 1][:, 0].float(), dim=-1)
                    - F.normalize(
                        batch.signals[SignalName(StateFamily.FIRST, pair.teacher + 1)].float(), dim=-1
                    )
                ).square()
                for pair in self._pairs
            ]
            squares = torch.stack(squared_differences)
            patient = squares.mean() if self._patience.is_authors else squares.sum(-1).mean()
        parts = {"patient": patient}
        student = reading.logits
        if student is not None and LOGITS in batch.signals:
            teacher = batch.signals[LOGITS]
            temperature = self._patience.temperature
            parts["prediction"] = answer_loss(student, teacher, temperature)
            if self._patience.is_authors:
                parts["prediction"] = parts["prediction"] - answer_loss(teacher, teacher, temperature)
        return parts


class BertPkd(ObjectiveKind):
    """Hidden states of [CLS] after intermediate layers, and logits if the cache has them."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the hidden states of the layers that students are mapped to, and logits.

        Raises:
            InvalidConfigError: there is a temperature, and the teacher answers with one number or the cache
                has no logits; or nothing has a weight.
        """
        refuse_needless_temperature(request)
        if request.config.patience == 0 and request.cache.manifest.identity.num_classes is None:
            raise InvalidConfigError(
                "--patience 0 leaves nothing to learn from a cache without logits. Give a weight above 0, or "
                "add logits: dump --add CACHE --logits."
            )
        depths = {num_layers_of(arch) for arch in request.arch}
        layers = sorted({pair.teacher for depth in depths for pair in _intermediate_pairs(request, depth)})
        names = tuple(SignalName(StateFamily.FIRST, layer + 1) for layer in layers)
        return WantedTargets(
            kinds=(),
            signals=(*names, *([LOGITS] if request.cache.manifest.identity.num_classes is not None else [])),
        )

    def check_shape(self, config: ObjectiveConfig, student: ModelSizes, teacher: ModelSizes) -> None:
        """Raise InvalidConfigError unless it is as wide as the teacher, and of two layers or more."""
        super().check_shape(config, student, teacher)
        same_width("bert-pkd", student, teacher)
        _refuse_no_intermediate(config, student.num_layers)

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> PatientObjective:
        """Return the objective of a student."""
        del wanted
        return PatientObjective(
            _intermediate_pairs(request, student.num_layers),
            Patience.of(request.config),
            request.cache.manifest.identity.num_classes,
        )


def _intermediate_pairs(request: ObjectiveRequest, num_layers: int) -> list[LayerPair]:
    _refuse_no_intermediate(request.config, num_layers)
    return pairs_of(request, num_layers)[:-1]


def _refuse_no_intermediate(config: ObjectiveConfig, num_layers: int) -> None:
    if num_layers == 1:
        raise InvalidConfigError(
            f"--objective {config.objective} compares intermediate layers, and a student has one layer. Take "
            "students of 2 layers or more."
        )
