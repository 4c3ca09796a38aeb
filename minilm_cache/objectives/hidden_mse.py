"""`hidden-mse`: the last hidden states in place of the value relation."""

from torch import nn

from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    mapped_layers,
    token_mse,
)
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.relations.loss import Method, relation_loss
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import SignalName, StateFamily


class HiddenObjective(StudentObjective):
    """L = L_AT + MSE(H_S W, H_T): the ablation of MiniLM's supplementary table 7 (arXiv 2002.10957).

    L_AT is eq. 6, the KL of attention distributions. H are the output hidden states of the last layers; W,
    from the student's width to the teacher's, is learned with the student. The squared error is a mean over
    valid tokens and dimensions.
    """

    def __init__(self, student: StudentFacts, name: SignalName, teacher_width: int) -> None:
        """Compare the student's last hidden state with one of the teacher's."""
        super().__init__()
        self.needs = StudentNeeds(layers=(student.num_layers - 1,), hidden=(student.num_layers,))
        self._name = name
        self.projection = nn.Linear(student.hidden_size, teacher_width, bias=False)

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are `attention`, nats, and `hidden_mse`."""
        attention = batch.targets[0][RelationKind.ATTENTION]
        kl = relation_loss(
            reading.vectors[0],
            RelationKind.ATTENTION,
            targets=attention,
            lengths=batch.inputs.lengths,
            method=method,
        )
        projected = self.projection(reading.hidden[self.needs.hidden[0]])
        error = token_mse(projected, batch.signals[self._name], batch.inputs.valid)
        return {"attention": kl, "hidden_mse": error}


class HiddenMse(ObjectiveKind):
    """Attention distributions of the last layer, and its output hidden states."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the attention distributions and the hidden states of the teacher's last layer."""
        return WantedTargets(
            kinds=(RelationKind.ATTENTION,), layers=mapped_layers(request), signals=(_last(request),)
        )

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> HiddenObjective:
        """Return the objective of a student of this width."""
        del wanted
        return HiddenObjective(student, _last(request), request.teacher.hidden_size)


def _last(request: ObjectiveRequest) -> SignalName:
    return SignalName(StateFamily.HIDDEN, mapped_layers(request)[-1] + 1)
