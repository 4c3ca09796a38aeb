"""A teacher's output in addition to relations: hidden states, labels and logits. Pure torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minilm_cache.storage_schema.states import StateFamily, StateName


class DenseLabels(NamedTuple):
    """The teacher's distribution over the vocabulary at each labelled token."""

    probs: Float[Tensor, "chosen vocabulary"]


class SparseLabels(NamedTuple):
    """The same distributions as sampled entries; a token may come more than once."""

    token: Int[Tensor, "chosen entries"]
    weight: Float[Tensor, "chosen entries"]


Labels = DenseLabels | SparseLabels


def expected(labels: Labels, values: Float[Tensor, "chosen vocabulary"]) -> Float[Tensor, " chosen"]:
    """Return the expectation of values under each distribution."""
    if isinstance(labels, DenseLabels):
        return (labels.probs * values).sum(-1)
    return (labels.weight * values.gather(-1, labels.token)).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSequences:
    """Sequences as they are read with some of their tokens masked."""

    ids: Int[Tensor, "batch length"]
    """Token ids as read, padded."""
    chosen: Bool[Tensor, "batch length"]
    """True at tokens that are to be predicted: they are read masked, replaced or unchanged."""
    labelled: Bool[Tensor, "batch length"] | None = None
    """True at tokens that have labels. None means the chosen tokens."""
    labels: Labels | None = None
    """Labels of the tokens that have some, row by row of the batch. None means that there are none."""
    temperature: float = 1.0
    """Number that the teacher's logits were divided by before the softmax of the labels."""

    @property
    def with_labels(self) -> Bool[Tensor, "batch length"]:
        """True at tokens that have labels."""
        return self.chosen if self.labelled is None else self.labelled

    def labels_at_chosen(self) -> Labels | None:
        """Return the labels of the chosen tokens only."""
        if self.labels is None or self.labelled is None:
            return self.labels
        kept = self.chosen[self.labelled]
        return type(self.labels)(*(part[kept] for part in self.labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """A teacher's output for a batch in addition to relations, as far as it was requested."""

    hidden: Mapping[StateName, Float[Tensor, "batch ..."]] = field(default_factory=dict)
    """Hidden states, `(batch, length, hidden)`; those of family `first`, `(batch, hidden)`."""
    masked: MaskedSequences | None = None
    """Sequences as they are read with tokens masked. None means not requested."""
    logits: Float[Tensor, "batch classes"] | None = None
    """Logits of a teacher that classifies sequences. None means not requested."""
    reading: int = 0
    """Number of the masked reading that the states belong to, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedStates:
    """A request for states, in addition to relations."""

    hidden: tuple[StateName, ...] = ()
    masked: bool = False
    """Whether masked sequences are requested, with their labels where the cache has some."""
    logits: bool = False

    def __bool__(self) -> bool:
        """Return whether anything is requested."""
        return bool(self.hidden or self.masked or self.logits)

    def of_masked_reading(self) -> "WantedStates":
        """Return the part of the request that depends on which tokens are masked."""
        hidden = tuple(name for name in self.hidden if name.family is StateFamily.MASKED)
        return WantedStates(hidden=hidden, masked=self.masked)


def soft_labels(logits: Float[Tensor, "chosen vocabulary"], temperature: float) -> DenseLabels:
    """Return the distributions that logits give at a temperature, float32."""
    return DenseLabels(torch.softmax(logits.float() / temperature, -1))
