"""`tinybert`: attention scores, hidden states and embeddings; `tinybert-prediction`: answers of a classifier.

TinyBERT (Jiao et al. 2020, arXiv 1909.10351). General distillation is `tinybert` from a cache of a
pre-trained teacher. The task-specific stage is `tinybert` from a cache of a fine-tuned teacher over augmented
text, then `tinybert-prediction` from the same cache, begun from the student of the first (`--init`).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    LayerPair,
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    mapped_layers,
    pairs_of,
    token_mse,
)
from minilm_cache.objectives.batch import StudentBatch, Unit, WantedTargets
from minilm_cache.relations.loss import Method
from minilm_cache.relations.scores import Vectors, column_mask, key_mask, row_mask, widened
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import LOGITS, SignalName, StateFamily


class TinyBertObjective(StudentObjective):
    """L = L_embd + sum over pairs of layers of (L_hidn + L_attn), eq. 11 without its prediction layer.

    L_attn = 1/h sum_i MSE(A_i^S, A_i^T) over heads (eq. 7), A the attention scores before the softmax;
    L_hidn = MSE(H^S W_h, H^T) (eq. 8); L_embd = MSE(E^S W_e, E^T) (eq. 9). W_h, one for all layers, and W_e
    are learned with the student. The authors' code has one learned map with a bias for both layers and
    embeddings; the form `paper` has two matrices. Squared errors are means over what is not padding: rows and
    columns of scores, tokens and dimensions of states (the authors' means count padding, too).
    """

    def __init__(
        self,
        wanted: WantedTargets,
        pairs: Sequence[LayerPair],
        *,
        student: StudentFacts,
        teacher_width: int,
        shared: bool,
    ) -> None:
        """Compare these pairs of layers, and the outputs of the embeddings.

        Args:
            wanted: what the cache serves.
            pairs: pairs of layers.
            student: facts of the student.
            teacher_width: width of the teacher's hidden states.
            shared: True: one map with a bias serves layers and embeddings. False: each has its own matrix.
        """
        super().__init__()
        self.units = {"attention_mse": "pairs"}
        self._pairs = tuple(pairs)
        self._targets = tuple(wanted.layers.index(pair.teacher) for pair in pairs)
        self.needs = StudentNeeds(
            layers=tuple(pair.student for pair in pairs), hidden=(0, *(pair.student + 1 for pair in pairs))
        )
        self.hidden_projection = nn.Linear(student.hidden_size, teacher_width, bias=shared)
        self.embedding_projection = (
            None if shared else nn.Linear(student.hidden_size, teacher_width, bias=False)
        )

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are `embedding_mse`, `hidden_mse` and `attention_mse`, sums over layers."""
        del method
        valid, teacher = batch.inputs.valid, batch.signals
        project = self.embedding_projection or self.hidden_projection
        embedding = token_mse(project(reading.hidden[0]), teacher[SignalName(StateFamily.HIDDEN, 0)], valid)
        hidden = [
            token_mse(
                self.hidden_projection(reading.hidden[pair.student + 1]),
                teacher[SignalName(StateFamily.HIDDEN, pair.teacher + 1)],
                valid,
            )
            for pair in self._pairs
        ]
        attention = [
            score_mse(vectors, batch.vectors[target], batch.inputs.lengths)
            for vectors, target in zip(reading.vectors, self._targets, strict=True)
        ]
        return {
            "embedding_mse": embedding,
            "hidden_mse": torch.stack(hidden).sum(),
            "attention_mse": torch.stack(attention).sum(),
        }


class TinyBert(ObjectiveKind):
    """Vectors of the mapped layers, and the output hidden states of these layers and of the embeddings."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the vectors and the hidden states of the layers that students are mapped to."""
        layers = mapped_layers(request)
        names = [SignalName(StateFamily.HIDDEN, number) for number in (0, *(layer + 1 for layer in layers))]
        return WantedTargets(kinds=(), layers=layers, vectors=True, signals=tuple(names))

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> TinyBertObjective:
        """Return the objective of a student of this shape."""
        pairs = pairs_of(request, student.num_layers)
        width = request.teacher.hidden_size
        return TinyBertObjective(
            wanted, pairs, student=student, teacher_width=width, shared=request.config.is_authors
        )


class PredictionObjective(StudentObjective):
    """L_pred = CE(z^T / t, z^S / t), t = 1 (eq. 10): soft cross-entropy of a classifier's logits, nats.

    The authors' code takes the mean over classes, too: their loss is this one divided by the classes. Of a
    teacher that gives one number it is the squared error, as the authors compare regressions.
    """

    needs = StudentNeeds(head="sequences")
    units: Mapping[str, Unit] = MappingProxyType({"prediction": "sequences"})

    def __init__(self, temperature: float, divisor: int) -> None:
        """Compare logits at a temperature, and divide the loss by `divisor`."""
        super().__init__()
        self._temperature = temperature
        self.weights = {"prediction": 1 / divisor}

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; its only part is `prediction`, nats."""
        del method
        assert reading.logits is not None
        return {"prediction": answer_loss(reading.logits, batch.signals[LOGITS], self._temperature)}


class Prediction(ObjectiveKind):
    """Logits of a teacher that classifies sequences."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the logits.

        Raises:
            InvalidConfigError: there is a temperature, and the teacher answers with one number.
        """
        refuse_needless_temperature(request)
        return WantedTargets(kinds=(), signals=(LOGITS,), labels=request.labels)

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> PredictionObjective:
        """Return the objective, the same for all students."""
        del wanted, student
        classes = (request.cache.manifest.identity.num_classes or 1) if request.config.is_authors else 1
        return PredictionObjective(request.config.temperature or 1.0, classes)


def refuse_needless_temperature(request: ObjectiveRequest) -> None:
    """Raise InvalidConfigError for a temperature where no distribution over classes is compared."""
    temperature = request.config.temperature
    num_classes = request.cache.manifest.identity.num_classes
    if temperature is not None and num_classes in (None, 1):
        why = (
            "this cache has no logits"
            if num_classes is None
            else "the teacher answers with one number, which is compared by its squared error"
        )
        raise InvalidConfigError(f"--temperature {temperature:g}: {why}. Leave it out.")


def answer_loss(
    student: Float[Tensor, "batch classes"], teacher: Float[Tensor, "batch classes"], temperature: float
) -> Float[Tensor, ""]:
    """Return how far answers are apart, mean of rows: nats, or the squared error of a single number."""
    if teacher.shape[1] == 1:
        with torch.autocast(student.device.type, enabled=False):
            return (student.float() - teacher.float()).square().mean()
    return soft_cross_entropy(student, teacher, temperature)


def soft_cross_entropy(
    student: Float[Tensor, "batch classes"], teacher: Float[Tensor, "batch classes"], temperature: float
) -> Float[Tensor, ""]:
    """Return the cross-entropy of a student's logits under the teacher's distribution, nats, mean of rows.

    Both are divided by the temperature first.
    """
    with torch.autocast(student.device.type, enabled=False):
        target = (teacher.float() / temperature).softmax(-1)
        return -(target * (student.float() / temperature).log_softmax(-1)).sum(-1).mean()


def score_mse(student: Vectors, teacher: Vectors, lengths: Tensor) -> Float[Tensor, ""]:
    """Return the mean squared error of attention scores over heads, rows and columns, padding left out.

    Columns that neither model's sliding window shows add nothing, as masked ones do in the authors' code, and
    count.
    """
    with torch.autocast(student.query.device.type, enabled=False):
        student_scores, teacher_scores = (
            (widened(vectors.query) * vectors.scaling) @ widened(vectors.key).mT
            for vectors in (student, teacher)
        )
        length = student_scores.shape[-1]
        columns = column_mask(lengths, length, is_causal=teacher.is_causal)
        both = (key_mask(lengths, length)[:, None, :, None] & columns).expand_as(student_scores)
        seen, attention = both, RelationKind.ATTENTION
        if student.is_windowed or teacher.is_windowed:
            seen = both & (row_mask(teacher, attention, lengths) | row_mask(student, attention, lengths))
        return ((student_scores - teacher_scores).square() * seen).sum() / both.sum()
