"""A batch of sequences for students, with the teacher's targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from jaxtyping import Int
from torch import Tensor

from minilm_cache.models.inputs import Inputs
from minilm_cache.objectives.labelled import OwnLabels
from minilm_cache.objectives.several import OtherTeachers
from minilm_cache.relations.scores import Targets, Vectors, WantedRelations
from minilm_cache.relations.signals import Signals
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import SignalName

Unit = Literal["tokens", "chosen", "sequences", "pairs"]
"""What a loss is a mean over: tokens, those chosen to be masked, sequences, pairs of a sequence's tokens."""
UNITS: Final[tuple[Unit, ...]] = get_args(Unit)
Counts = Mapping[Unit, int]
"""Number of tokens, chosen tokens, sequences and pairs of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentBatch:
    """Sequences and the teacher's targets for them, on one device."""

    inputs: Inputs
    """What students read, without masked tokens."""
    counts: Counts
    """Number of units in this part of a step."""
    part: int
    """Number of this part in the step, among the parts of all processes."""
    step_counts: Counts
    """Number of units in all parts of the step that this process takes."""
    ends_step: bool
    """True for the last part of the step that this process takes."""
    targets: tuple[Mapping[RelationKind, Targets], ...]
    """Relations of each layer of `WantedTargets.layers`, in order."""
    vectors: tuple[Vectors, ...] = ()
    """The teacher's queries, keys and values of the same layers. Empty if they are not wanted."""
    queries: Int[Tensor, " batch"] | None = None
    """Number of the query (the first text) of each pair, from 0 on in the order of the batch. None means that
    they are not wanted. Where texts are wanted apart, `inputs` are the queries by number, then the second
    text of each pair."""
    signals: Signals = field(default_factory=Signals)
    """What else the teacher gives, as far as it is wanted."""
    place: int | None = None
    """Number of the place in memory where all tensors of this batch are, until the next batch with this
    number comes there. None means that the batch has its own memory."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences, without padding."""
        return self.counts["tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTargets:
    """What students need from the teacher."""

    kinds: tuple[RelationKind, ...]
    """Relations. Empty means that no relations are needed."""
    relation_heads: int | None = None
    """Relation heads to split vectors into. None means the heads of the teacher's attention."""
    layers: tuple[int, ...] = ()
    """Layers of the teacher, ascending, counted from 0. Empty means the last layer that the cache holds."""
    vectors: bool = False
    """True: queries, keys and values of these layers are needed, too."""
    signals: tuple[SignalName, ...] = ()
    """What is needed in addition to relations and vectors."""
    queries: bool = False
    """True: which pairs of texts have the same first text."""
    groups: bool = False
    """True: the documents of a query are compared, so a query with one document teaches nothing."""
    apart: bool = False
    """True: students read the texts of pairs apart, each as a sequence of its own."""
    others: OtherTeachers | None = field(default=None, compare=False)
    """Teachers whose vectors are joined with the cache's. None means that there are none."""
    labels: OwnLabels | None = field(default=None, compare=False)
    """Labels that are mixed into the cache's answers. None means that there are none."""

    @property
    def also(self) -> tuple[str, ...]:
        """Fingerprints of the caches of other teachers."""
        return () if self.others is None else self.others.fingerprints

    @property
    def beside(self) -> tuple[OtherTeachers | OwnLabels, ...]:
        """What is joined with signals of the cache, by the number of a sequence."""
        return tuple(each for each in (self.others, self.labels) if each is not None)

    @property
    def relations(self) -> WantedRelations:
        """The relations that are needed of each layer."""
        return WantedRelations(self.kinds, self.relation_heads)
