"""`distilbert`: soft labels, masked tokens and the direction of hidden states."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
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
)
from minilm_cache.objectives.batch import StudentBatch, Unit, WantedTargets
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.mlm_kd import masked_token_loss, soft_label_loss, temperature_of
from minilm_cache.relations.loss import Method
from minilm_cache.storage_schema.states import LABELS, SignalName, StateFamily

SOFT, MASKED, COSINE = 5.0, 2.0, 1.0
"""Weights of the three losses in the authors' training."""


class DistilBertObjective(StudentObjective):
    """L = 5 t^2 L_ce + 2 L_mlm + L_cos (DistilBERT, Sanh et al. 2019, arXiv 1910.01108, section 3).

    L_ce is the cross-entropy under the teacher's soft labels, both at temperature t (2 in the paper; the
    cache's here), L_mlm that of the masked tokens themselves, L_cos one minus the cosine of the last hidden
    states, mean over valid tokens. All of them read the sequence masked. The authors' code takes L_ce at
    every token that is not padding (`restrict_ce_to_mask` is off) and subtracts the teacher's entropy, which
    has no gradient; the form `paper` takes it at masked tokens alone. The student begins with every other
    layer of the teacher: `--init teacher-layers`.
    """

    def __init__(
        self, student: StudentFacts, name: SignalName, temperature: float, *, everywhere: bool
    ) -> None:
        """Compare the student's last hidden state with one of the teacher's.

        Args:
            student: facts of the student.
            name: the teacher's hidden state to compare with.
            temperature: temperature of the labels.
            everywhere: True: soft labels are compared at all tokens. False: at masked tokens alone.
        """
        super().__init__()
        self._everywhere = everywhere
        self.units: Mapping[str, Unit] = {
            "soft_labels": "tokens" if everywhere else "chosen",
            "masked_lm": "chosen",
        }
        self.weights = {"soft_labels": SOFT * temperature**2, "masked_lm": MASKED, "cosine": COSINE}
        self.needs = StudentNeeds(
            hidden=(student.num_layers,), head="tokens", is_masked=True, all_labels=everywhere
        )
        self._name = name

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are `soft_labels` and `masked_lm`, nats, and `cosine`."""
        del method
        cosine = _cosine(reading.hidden[self.needs.hidden[0]], batch.signals[self._name], batch.inputs.valid)
        return {
            "soft_labels": soft_label_loss(reading, batch, everywhere=self._everywhere),
            "masked_lm": masked_token_loss(reading, batch, everywhere=self._everywhere),
            "cosine": cosine,
        }


class DistilBert(ObjectiveKind):
    """Soft labels, and the last hidden states of the masked sequence."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the masked sequences, and the teacher's labels and last hidden states for them.

        Raises:
            InvalidConfigError: the cache has labels of masked tokens alone, and the form needs all of them.
        """
        labels = request.cache.manifest.identity.labels
        if request.config.is_authors and labels is not None and labels.tokens != "all":
            raise InvalidConfigError(
                "--objective distilbert compares soft labels of all tokens, as its authors' code does, and "
                "this cache has those of masked tokens alone. Take --form paper, or dump with --label-tokens "
                "all."
            )
        return WantedTargets(kinds=(), signals=(_last(request), LABELS))

    def check_shape(self, config: ObjectiveConfig, student: ModelSizes, teacher: ModelSizes) -> None:
        """Raise InvalidConfigError unless it is as wide as the teacher."""
        del config
        same_width("distilbert", student, teacher)

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> DistilBertObjective:
        """Return the objective of a student."""
        del wanted
        return DistilBertObjective(
            student, _last(request), temperature_of(request), everywhere=request.config.is_authors
        )


def _last(request: ObjectiveRequest) -> SignalName:
    return SignalName(StateFamily.MASKED, request.teacher.num_layers)


def _cosine(student: Tensor, teacher: Tensor, valid: Tensor) -> Float[Tensor, ""]:
    """Return one minus the cosine of hidden states, mean over valid tokens."""
    with torch.autocast(student.device.type, enabled=False):
        distances = 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)
        return (distances * valid).sum() / valid.sum()
