"""`score`, `margin-mse`, `listwise`, `ranknet`: the scores that a teacher gives to pairs of texts.

A student is a cross-encoder, which reads both texts of a pair together and answers with the score, or a
bi-encoder, which reads each text alone: the score is then the dot product of the vectors of both. Pairs with
the same first text, a query, are a group; a loss that compares pairs with each other compares those of a
group, as far as a batch holds it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.pooling import SentencePooler
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
from minilm_cache.objectives.config import (
    LISTWISE,
    MARGIN_MSE,
    RANKNET,
    SCORE,
    ObjectiveConfig,
    check_scores,
    is_bi_encoder,
)
from minilm_cache.relations.loss import Method
from minilm_cache.storage_schema.states import LOGITS


class Scores(NamedTuple):
    """Scores of the pairs of a batch."""

    student: Float[Tensor, " pairs"]
    teacher: Float[Tensor, " pairs"]
    queries: Int[Tensor, " pairs"]
    """Number of the group of each pair, from 0 on without gaps."""

    @property
    def members(self) -> Bool[Tensor, "groups pairs"]:
        """True where a pair belongs to a group."""
        groups = torch.arange(int(self.queries.max()) + 1, device=self.queries.device)
        return self.queries == groups[:, None]


def margin_mse(scores: Scores) -> Float[Tensor, ""]:
    """Return the squared error of margins, as both say how far the first pair of a group is above another.

    It is the mean over the other pairs of a group, then over groups, weighted by their pairs (Hofstaetter et
    al. 2020, arXiv 2010.02666, equation 3). A group of one pair adds nothing.
    """
    members = scores.members
    first = members.int().argmax(1)[scores.queries]
    errors = (scores.student[first] - scores.student) - (scores.teacher[first] - scores.teacher)
    size = members.sum(1)[scores.queries]
    return (errors.square() * size / (size - 1).clamp(min=1)).mean()


def listwise(scores: Scores, temperature: float, teacher_temperature: float) -> Float[Tensor, ""]:
    """Return KL(teacher || student) of the softmax over the pairs of a group, nats.

    It is the mean over groups, weighted by their pairs, times the square of the student's temperature (Lin et
    al. 2020, arXiv 2010.11386, section 3.2).

    Args:
        scores: scores of both.
        temperature: what the student's scores are divided by.
        teacher_temperature: what the teacher's scores are divided by.
    """
    members = scores.members
    mine, theirs = (
        (values / divisor).expand(members.shape).masked_fill(~members, -torch.inf).log_softmax(1)
        for values, divisor in ((scores.student, temperature), (scores.teacher, teacher_temperature))
    )
    # Outside a group both are -infinity, and their difference is not a number.
    terms = torch.where(members, theirs.exp() * (theirs - mine).masked_fill(~members, 0.0), 0.0)
    return (terms.sum(1) * members.sum(1)).sum() / len(scores.student) * temperature**2


def ranknet(scores: Scores) -> Float[Tensor, ""]:
    """Return the logistic loss of which pair of a group is the better one for the teacher, nats.

    It is the mean over all two pairs of a group that the teacher tells apart, then over groups, weighted by
    their pairs (Burges et al. 2005, "Learning to rank using gradient descent", equation 3 with the teacher's
    order for certain).
    """
    students = scores.student[:, None] - scores.student
    is_better = (scores.queries[:, None] == scores.queries) & (scores.teacher[:, None] - scores.teacher > 0)
    losses = (F.softplus(-students) * is_better).sum(1)
    members = scores.members
    compared = (members * is_better.sum(1)).sum(1).clamp(min=1)
    return ((members * losses).sum(1) / compared * members.sum(1)).sum() / len(scores.student)


class ScoresObjective(StudentObjective):
    """Compares the scores of pairs, a student's with the teacher's, both before any activation.

    The only part is named after the objective. `score` is their squared error, for teachers with several
    classes the mean over these, too; the others are the functions of their names.
    """

    def __init__(
        self, name: str, loss: Callable[[Scores], Float[Tensor, ""]] | None, *, last_layer: int | None
    ) -> None:
        """Compare scores.

        Args:
            name: name of the objective.
            loss: what compares the pairs of groups. None means the squared error of each pair.
            last_layer: for a bi-encoder, the number of its last hidden state. None means a cross-encoder.
        """
        super().__init__()
        self._name, self._loss, self._last = name, loss, last_layer
        self._pooler = None if last_layer is None else SentencePooler("mean", normalize=False)
        hidden = () if last_layer is None else (last_layer,)
        self.needs = StudentNeeds(hidden=hidden, head="sequences" if last_layer is None else None)
        self.units: Mapping[str, Unit] = MappingProxyType({name: "sequences"})

    @property
    def sentence_pooler(self) -> SentencePooler | None:
        """What makes one vector of a text, for a bi-encoder. None means a cross-encoder."""
        return self._pooler

    @property
    def similarity(self) -> Literal["dot"] | None:
        """Name of the function of two vectors that is the score. None means a cross-encoder."""
        return None if self._pooler is None else "dot"

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss of a batch of pairs, in the order of the batch."""
        del method
        with torch.autocast(batch.inputs.ids.device.type, enabled=False):
            teacher, student = batch.signals[LOGITS].float(), self._scores(reading, batch)
            if self._loss is None:
                return {self._name: (student - teacher).square().mean()}
            assert batch.queries is not None
            return {self._name: self._loss(Scores(student[:, 0], teacher[:, 0], batch.queries))}

    def _scores(self, reading: Reading, batch: StudentBatch) -> Float[Tensor, "pairs classes"]:
        if self._pooler is None or self._last is None:
            assert reading.logits is not None
            return reading.logits.float()
        assert batch.queries is not None
        vectors = self._pooler(reading.hidden[self._last], batch.inputs.lengths)
        documents: Tensor = vectors[len(vectors) - len(batch.queries) :]
        products: Tensor = vectors[batch.queries] * documents
        return products.sum(1, keepdim=True)


class ScoresOfPairs(ObjectiveKind):
    """Logits of a teacher that reads pairs of texts."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the logits, and what of the groups is needed.

        Raises:
            InvalidConfigError: the cache holds no pairs, or the teacher answers with several numbers.
        """
        identity = request.cache.manifest.identity
        check_scores(request.config, identity)
        is_bi, is_grouped = is_bi_encoder(request.config), request.config.objective != SCORE
        classes = identity.num_classes or 1
        if request.labels is not None and classes > 1:
            raise InvalidConfigError(
                f"--own-labels: this teacher answers with {classes} classes. Take --objective "
                "tinybert-prediction, which learns their distribution."
            )
        return WantedTargets(
            kinds=(),
            signals=(LOGITS,),
            queries=is_bi or is_grouped,
            groups=is_grouped,
            apart=is_bi,
            labels=request.labels,
        )

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> ScoresObjective:
        """Return the objective of a student of any shape."""
        return ScoresObjective(
            request.config.objective,
            _loss(request.config),
            last_layer=student.num_layers if wanted.apart else None,
        )


def _loss(config: ObjectiveConfig) -> Callable[[Scores], Float[Tensor, ""]] | None:
    """Return the loss of an objective. None means the squared error of each pair."""
    temperature = config.temperature or 1.0
    teacher_temperature = config.teacher_temperature or temperature
    losses: Mapping[str, Callable[[Scores], Float[Tensor, ""]]] = {
        MARGIN_MSE: margin_mse,
        RANKNET: ranknet,
        LISTWISE: lambda scores: listwise(scores, temperature, teacher_temperature),
    }
    return losses.get(config.objective)
