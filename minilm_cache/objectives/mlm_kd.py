"""`mlm-kd`: the teacher's distribution over the vocabulary at masked tokens."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
)
from minilm_cache.objectives.batch import StudentBatch, Unit, WantedTargets
from minilm_cache.relations.loss import Method
from minilm_cache.relations.signals import expected
from minilm_cache.storage_schema.states import LABELS


class MaskedObjective(StudentObjective):
    """L = t^2 CE(softmax(z^T / t), softmax(z^S / t)) at masked tokens (Hinton et al. 2015, arXiv 1503.02531).

    The soft-label distillation that MiniLM's tables 2 and 3 call MLM-KD. t is the temperature at which the
    labels of the cache were drawn. With a share g of true tokens in the targets (`ground_truth`), the loss
    is (1 - g) t^2 L_soft + g L_mlm, the cross-entropy under a mixture of both, as MobileBERT's authors train
    with g = 0.5. Labels are entries whose expectation is the distribution, so the cross-entropy and its
    gradient are unbiased; its least value is the entropy of the teacher's distribution, not 0.
    """

    needs = StudentNeeds(head="tokens", is_masked=True)
    units: Mapping[str, Unit] = MappingProxyType({"soft_labels": "chosen", "masked_lm": "chosen"})

    def __init__(self, temperature: float, ground_truth: float = 0.0) -> None:
        """Weight the loss by its temperature, and mix in the true tokens.

        Args:
            temperature: temperature of the labels.
            ground_truth: share g of the true tokens in the targets.
        """
        super().__init__()
        self._ground_truth = ground_truth
        self.weights = {"soft_labels": (1 - ground_truth) * temperature**2, "masked_lm": ground_truth}

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are the cross-entropies `soft_labels` and, if mixed, `masked_lm`, nats."""
        del method
        parts = {"soft_labels": soft_label_loss(reading, batch)}
        if self._ground_truth:
            parts["masked_lm"] = masked_token_loss(reading, batch)
        return parts


class MlmKd(ObjectiveKind):
    """Soft labels of masked tokens."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the masked sequences and their labels."""
        del request
        return WantedTargets(kinds=(), signals=(LABELS,))

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> MaskedObjective:
        """Return the objective, the same for all students."""
        del wanted, student
        return MaskedObjective(temperature_of(request), request.config.ground_truth or 0.0)


def temperature_of(request: ObjectiveRequest) -> float:
    """Return the temperature that the labels of a cache were drawn at."""
    labels = request.cache.manifest.identity.labels
    assert labels is not None
    return labels.temperature


def soft_label_loss(reading: Reading, batch: StudentBatch, *, everywhere: bool = False) -> Float[Tensor, ""]:
    """Return the cross-entropy under the labels, nats, mean over tokens; 0 where there are none.

    Args:
        reading: the student's outputs, with logits at the tokens that the mean is over.
        batch: batch with labels.
        everywhere: True: these are all tokens that have labels. False: masked tokens alone.
    """
    masked = batch.signals.masked
    assert reading.logits is not None
    assert masked is not None
    labels = masked.labels if everywhere else masked.labels_at_chosen()
    assert labels is not None
    with torch.autocast(reading.logits.device.type, enabled=False):
        log_probs = (reading.logits.float() / masked.temperature).log_softmax(-1)
        return -expected(labels, log_probs).sum() / max(len(log_probs), 1)


def masked_token_loss(
    reading: Reading, batch: StudentBatch, *, everywhere: bool = False
) -> Float[Tensor, ""]:
    """Return the cross-entropy of masked tokens themselves, nats, mean over them; 0 where there are none.

    Args:
        reading: the student's outputs, with logits at masked tokens or at all tokens that have labels.
        batch: batch with masked sequences.
        everywhere: True: logits are at all tokens that have labels. False: at masked tokens alone.
    """
    masked = batch.signals.masked
    assert reading.logits is not None
    assert masked is not None
    logits = masked.of_chosen(reading.logits) if everywhere else reading.logits
    with torch.autocast(logits.device.type, enabled=False):
        tokens = batch.inputs.ids.flatten()[masked.places]
        return F.cross_entropy(logits.float(), tokens, reduction="sum") / max(len(tokens), 1)
