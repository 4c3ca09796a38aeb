"""What a finished dump measures of itself: how faithful what it stored is, on sequences that are held out."""

from collections.abc import Collection
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from minilm_cache.storage_schema.base import StoredModel
from minilm_cache.storage_schema.identity import MAX_LAYERS, RelationKind

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Fidelity(StoredModel):
    """What was stored against what the teacher says, on held-out sequences read back from disk.

    Means over relation heads and valid rows, in nats.
    """

    kl_teacher_to_stored: Finite | None
    """KL(teacher || stored). None means infinite: a sparse row leaves out columns that the teacher has."""
    kl_stored_to_teacher: Finite
    """KL(stored || teacher)."""
    mass_kept: Finite
    """Probability that the teacher puts on the stored columns, 0 to 1."""
    cross_entropy_bias: Finite
    """Mean of sum_j (stored_j - teacher_j) log teacher_j; 0 in expectation if the codec is unbiased."""


def require_both(relations: Collection[RelationKind]) -> None:
    """Raise ValueError unless the relations are attention and value relation."""
    if set(relations) != {RelationKind.ATTENTION, RelationKind.VALUE}:
        raise ValueError("figures are not of attention and value relation")


class LayerFidelity(StoredModel):
    """Fidelity of one tapped layer."""

    layer: int = Field(ge=0, lt=1024)
    relations: dict[RelationKind, Fidelity]
    """Fidelity of the attention and of the value relation."""

    @model_validator(mode="after")
    def _covers_both_relations(self) -> "LayerFidelity":
        require_both(self.relations)
        return self


class StateFidelity(StoredModel):
    """How faithful something beside relations is, on held-out sequences read back from disk."""

    path: Annotated[str, Field(max_length=128)]
    """Path of its array, or of the group that contains its arrays."""
    bytes_per_token: float = Field(ge=0, allow_inf_nan=False)
    """Bytes of its shard files, per token of the cache."""
    relative_error: Finite | None = None
    """Square root of the squared error over the variance of the teacher's values. For first tokens and
    logits, which hardly differ from sequence to sequence, and for pooled vectors the squared values replace
    the variance. None for
    labels."""
    cross_entropy_bias: Finite | None = None
    """Mean of sum_j (stored_j - teacher_j) log teacher_j over labels, nats; 0 in expectation. None for
    everything but labels."""
    cosine: Finite | None = None
    """Mean cosine of stored vectors with the teacher's. None for everything but pooled vectors."""

    sections: ClassVar[frozenset[str]] = frozenset({"cosine"})


class Measured(StoredModel):
    """What a finished dump measured of itself."""

    bytes_per_token: float = Field(gt=0, allow_inf_nan=False)
    """Bytes of all shard files (arrays and sequence tables) per token."""
    total_bytes: int = Field(ge=0)
    """Bytes of all shard files."""
    fidelity_sequences: int = Field(ge=1)
    """Number of held-out sequences that the fidelity was measured on."""
    fidelity: Annotated[tuple[LayerFidelity, ...], Field(max_length=MAX_LAYERS)]
    """One entry for each tapped layer, in order; empty where no relations are stored."""
    states: Annotated[tuple[StateFidelity, ...], Field(max_length=1024)] = ()
    """One entry for each of `StatesIdentity.paths`, in order."""

    sections: ClassVar[frozenset[str]] = frozenset({"states"})
