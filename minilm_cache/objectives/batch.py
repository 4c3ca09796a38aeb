"""A batch of sequences for students, and what the teacher says about them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from jaxtyping import Int
from torch import Tensor

from minilm_cache.relations.rows import Targets, WantedRelations
from minilm_cache.relations.scores import Vectors
from minilm_cache.relations.states import States, WantedStates
from minilm_cache.storage_schema.identity import RelationKind

Unit = Literal["tokens", "chosen", "sequences", "pairs"]
"""What a loss is a mean over: tokens, those chosen to be masked, sequences, pairs of a sequence's tokens."""
UNITS: Final[tuple[Unit, ...]] = get_args(Unit)
Counts = Mapping[Unit, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentBatch:
    """Sequences and what the teacher says about them, on one device."""

    ids: Int[Tensor, "batch length"]
    """Token ids, padded."""
    lengths: Int[Tensor, " batch"]
    """Tokens of each sequence."""
    counts: Counts
    """What is in this part of a step."""
    part: int
    """Its number, of all processes."""
    step_counts: Counts
    """What is in all parts that this process takes of the step."""
    ends_step: bool
    """True for the last of them."""
    targets: tuple[Mapping[RelationKind, Targets], ...]
    """One for each layer of `WantedTargets.layers`, in order."""
    vectors: tuple[Vectors, ...] = ()
    """Likewise, where they are wanted."""
    states: States = field(default_factory=States)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.counts["tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTargets:
    """What a student is to be told of the teacher."""

    kinds: tuple[RelationKind, ...]
    """Relations; none: token ids are all that is wanted."""
    relation_heads: int | None = None
    """Heads to split vectors into; none: those of the teacher's attention."""
    layers: tuple[int, ...] = ()
    """Of the teacher, ascending; none: the last that the cache holds."""
    vectors: bool = False
    """Queries, keys and values of these layers, too."""
    states: WantedStates = field(default_factory=WantedStates)

    @property
    def relations(self) -> WantedRelations:
        """The relations wanted of each layer."""
        return WantedRelations(self.kinds, self.relation_heads)
