"""An objective of one's own, in one file: its row, what it needs, and its loss."""

from torch import nn

from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
)
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.spec import Needs, ObjectiveSpec
from minilm_cache.relations.loss import Method
from minilm_cache.storage_schema.states import SignalName, StateFamily

TOY = ObjectiveSpec(
    name="toy",
    kind="tests.toy_objective:Toy",
    needs=Needs(first="last"),
    learns_from="the last state of a teacher's first token",
)


class ToyObjective(StudentObjective):
    """Mean squared error of the first token's last hidden state."""

    def __init__(self, student: StudentFacts, name: SignalName, teacher_width: int) -> None:
        """Compare the student's last hidden state with one of the teacher's."""
        super().__init__()
        self.needs = StudentNeeds(hidden=(student.num_layers,))
        self._name = name
        self.projection = nn.Linear(student.hidden_size, teacher_width, bias=False)

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; its only part is `toy`."""
        del method
        student = self.projection(reading.hidden[self.needs.hidden[0]][:, 0])
        return {"toy": (student - batch.signals[self._name]).square().mean()}


class Toy(ObjectiveKind):
    """What the cache must serve, and how the objective is made."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the state of the teacher's first token."""
        return WantedTargets(kinds=(), signals=(_state(request),))

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> StudentObjective:
        """Return the objective of a student of this width."""
        del wanted
        return ToyObjective(student, _state(request), request.teacher.hidden_size)


def _state(request: ObjectiveRequest) -> SignalName:
    return SignalName(StateFamily.FIRST, request.teacher.num_layers)
