"""`minilm`, `minilmv2` and `value-mse`: relations of one layer or of several."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.config import relations_of, split_into
from minilm_cache.relations.loss import Method, relation_loss
from minilm_cache.relations.scores import Vectors, split_heads
from minilm_cache.storage_schema.identity import RelationKind


class RelationObjective(StudentObjective):
    """The sum over relations of KL(teacher || student), mean over relation heads and valid rows, nats.

    `minilm`: L = L_AT + L_VR, attention distributions and value relations of one layer of the teacher, the
    last one by default (MiniLM, Wang et al. 2020, arXiv 2002.10957, eq. 10); without the value relation it is
    the ablation of table 5, with query and key relations the ablation of the authors' response.
    `minilmv2`: query, key and value relations, heads split anew (MiniLMv2, Wang et al. 2021, arXiv
    2012.15828). With a layer map other than `last` it is the mean over pairs of layers (tables 7 and 8 of
    MiniLM). The student sees every column that is not padding, or with a causal teacher those up to the row's
    own. Attention of a student's layer with a sliding window is compared on its window, and where the
    teacher's rows have mass.
    """

    def __init__(self, wanted: WantedTargets, pairs: Sequence[LayerPair]) -> None:
        """Compare pairs of layers.

        Args:
            wanted: what the cache serves.
            pairs: pairs of layers.
        """
        super().__init__()
        self.needs = StudentNeeds(layers=tuple(pair.student for pair in pairs))
        self._wanted = wanted
        self._targets = tuple(wanted.layers.index(pair.teacher) for pair in pairs)

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; each part is the KL of a relation, nats."""
        heads = self._wanted.relation_heads
        split = [vectors if heads is None else split_heads(vectors, heads) for vectors in reading.vectors]
        parts = {}
        for kind in self._wanted.kinds:
            losses = [
                relation_loss(
                    vectors,
                    kind,
                    targets=batch.targets[target][kind],
                    lengths=batch.inputs.lengths,
                    method=method,
                )
                for vectors, target in zip(split, self._targets, strict=True)
            ]
            parts[str(kind)] = torch.stack(losses).mean()
        return parts


class Relations(ObjectiveKind):
    """Objectives that compare nothing but relations."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the relations of the mapped layers."""
        config = request.config
        heads = split_into(
            config.objective, config.relation_heads, request.cache.manifest.identity.relation_heads
        )
        return WantedTargets(
            kinds=relations_of(
                config.objective,
                value_relation=config.value_relation,
                query_key_relations=config.query_key_relations,
            ),
            relation_heads=heads,
            layers=mapped_layers(request),
        )

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> RelationObjective:
        """Return the objective of a student of this depth."""
        return RelationObjective(wanted, pairs_of(request, student.num_layers))


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
        error = token_mse(self.projection(side_by_side(student)), side_by_side(teacher), batch.inputs.valid)
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
