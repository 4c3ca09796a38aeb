"""`mlm-kd`: the teacher's distribution over the vocabulary at masked tokens."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minilm_cache.loss import Method
from minilm_cache.states import WantedStates, expected
from minilm_cache.tap import Reading
from minilm_cache.train.batches import StudentBatch, WantedTargets
from minilm_cache.train.objectives.base import (
    Asked,
    Losses,
    ObjectiveKind,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    summed,
)


class MaskedObjective(StudentObjective):
    """L = t^2 CE(softmax(z^T / t), softmax(z^S / t)) at masked tokens (Hinton et al. 2015, arXiv 1503.02531).

    The soft-label distillation that MiniLM's tables 2 and 3 call MLM-KD. t is the cache's, that its labels
    were drawn at. Labels are entries whose expectation is the distribution, so the cross-entropy and its
    gradient are unbiased; its least value is the entropy of the teacher's distribution, not 0.
    """

    needs = StudentNeeds(head="tokens", is_masked=True)

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Losses:
        """Return the loss; its part is the cross-entropy `soft_labels`, nats."""
        del method
        soft, temperature = soft_label_loss(reading, batch)
        return summed({"soft_labels": soft}, {"soft_labels": temperature**2})


class MlmKd(ObjectiveKind):
    """Soft labels of masked tokens."""

    def wanted(self, asked: Asked) -> WantedTargets:
        """Return masked sequences and their labels."""
        del asked
        return WantedTargets(kinds=(), states=WantedStates(masked=True))

    def build(self, asked: Asked, wanted: WantedTargets, student: StudentFacts) -> MaskedObjective:
        """Return the objective, the same for all students."""
        del asked, wanted, student
        return MaskedObjective()


def soft_label_loss(reading: Reading, batch: StudentBatch) -> tuple[Float[Tensor, ""], float]:
    """Return the mean cross-entropy under the labels, nats, and the temperature of both sides."""
    masked = batch.states.masked
    assert reading.logits is not None
    assert masked is not None
    assert masked.labels is not None
    with torch.autocast(reading.logits.device.type, enabled=False):
        logs = (reading.logits.float() / masked.temperature).log_softmax(-1)
        return -expected(masked.labels, logs).mean(), masked.temperature


def masked_token_loss(reading: Reading, batch: StudentBatch) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the tokens that were masked, nats."""
    masked = batch.states.masked
    assert reading.logits is not None
    assert masked is not None
    with torch.autocast(reading.logits.device.type, enabled=False):
        return F.cross_entropy(reading.logits.float(), batch.ids[masked.chosen])
