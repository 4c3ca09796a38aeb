"""`value-mse`: the values themselves in place of the value relation."""

from jaxtyping import Float
from torch import Tensor, nn

from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    token_mse,
    valid_tokens,
)
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.layers import mapped_layers
from minilm_cache.relations.loss import Method, relation_loss
from minilm_cache.relations.scores import Vectors
from minilm_cache.storage_schema.identity import RelationKind


class ValueObjective(StudentObjective):
    """L = L_AT + MSE(V_S W, V_T): the ablation of MiniLM's table 6 (arXiv 2002.10957).

    L_AT is eq. 6, the KL of attention distributions. V are the values of a token, all heads side by side; W,
    from the student's width to the teacher's, is learned with the student. The squared error is a mean over
    valid tokens and dimensions.
    """

    def __init__(self, student: StudentFacts, teacher_width: int) -> None:
        """Compare the values of the student's last layer with the teacher's, which have this width."""
        super().__init__()
        self.needs = StudentNeeds(layers=(student.num_layers - 1,))
        self.projection = nn.Linear(student.vector_width, teacher_width, bias=False)

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts are `attention`, nats, and `value_mse`."""
        (student,), (teacher,) = reading.vectors, batch.vectors
        attention = batch.targets[0][RelationKind.ATTENTION]
        error = token_mse(self.projection(side_by_side(student)), side_by_side(teacher), valid_tokens(batch))
        kl = relation_loss(
            student, RelationKind.ATTENTION, targets=attention, lengths=batch.inputs.lengths, method=method
        )
        return {"attention": kl, "value_mse": error}


class ValueMse(ObjectiveKind):
    """Attention distributions and values of one layer."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the attention distributions and the vectors of one layer."""
        return WantedTargets(kinds=(RelationKind.ATTENTION,), layers=mapped_layers(request), vectors=True)

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> ValueObjective:
        """Return the objective of a student of this width."""
        manifest = request.cache.manifest
        assert manifest.calibration is not None
        head_size = manifest.calibration.of_layer(wanted.layers[0]).head_size
        return ValueObjective(student, manifest.identity.relation_heads * head_size)


def side_by_side(vectors: Vectors) -> Float[Tensor, "batch length width"]:
    """Return the values of each token, all heads side by side."""
    return vectors.value.transpose(1, 2).flatten(2)
