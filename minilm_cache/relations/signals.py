"""What a teacher gives in addition to relations: numbers, and labels of masked tokens. Pure torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from minilm_cache.relations.transfer import pin, send
from minilm_cache.storage_schema.states import SignalName


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


def places_of(tokens: Bool[Tensor, "batch length"]) -> Int[Tensor, " _"]:
    """Return the places of tokens in their batch as one row: number of the sequence * length + position."""
    return tokens.flatten().nonzero(as_tuple=True)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSequences:
    """Sequences as they are read with some of their tokens masked."""

    ids: Int[Tensor, "batch length"]
    """Token ids as read, padded."""
    chosen: Bool[Tensor, "batch length"]
    """True at tokens that are to be predicted: they are read masked, replaced or unchanged."""
    places: Int[Tensor, " chosen"]
    """Places of the chosen tokens in `ids` as one row, ascending: sequence * length + position."""
    with_labels: Int[Tensor, " labelled"]
    """Places of the tokens that have labels: the chosen tokens or all."""
    label_counts: tuple[int, ...]
    """Number of tokens that have labels in each sequence."""
    labels: Labels | None = None
    """Labels of the tokens that have some, row by row of the batch. None means that there are none."""
    temperature: float = 1.0
    """Number that the teacher's logits were divided by before the softmax of the labels."""

    @classmethod
    def of(
        cls,
        ids: Int[Tensor, "batch length"],
        chosen: Bool[Tensor, "batch length"],
        labelled: Bool[Tensor, "batch length"] | None = None,
    ) -> "MaskedSequences":
        """Return sequences of the CPU, still without labels; a GPU would have to be waited for.

        Args:
            ids: token ids as read.
            chosen: True at tokens that are to be predicted.
            labelled: True at tokens that will have labels. None means the chosen tokens.
        """
        with_labels = chosen if labelled is None else labelled
        return cls(
            ids=ids,
            chosen=chosen,
            places=places_of(chosen),
            with_labels=places_of(with_labels),
            label_counts=tuple(with_labels.sum(-1).tolist()),
        )

    def to(self, device: torch.device) -> "MaskedSequences":
        """Return the same sequences on a device, without waiting for it."""
        return self._with(lambda part: send(part, device))

    def pinned_for(self, device: torch.device) -> "MaskedSequences":
        """Return the same sequences in memory from which `to` need not copy them first."""
        return self._with(lambda part: pin(part, device))

    def _with(self, moved: Callable[[Tensor], Tensor]) -> "MaskedSequences":
        return replace(
            self,
            ids=moved(self.ids),
            chosen=moved(self.chosen),
            places=moved(self.places),
            with_labels=moved(self.with_labels),
            labels=self.labels and type(self.labels)(*map(moved, self.labels)),
        )

    def of_chosen(self, values: Shaped[Tensor, "labelled ..."]) -> Shaped[Tensor, "chosen ..."]:
        """Return the rows of the chosen tokens, of values at all tokens with labels."""
        if len(self.with_labels) == len(self.places):  # the chosen tokens always have labels
            return values
        return values.index_select(0, torch.searchsorted(self.with_labels, self.places))

    def labels_at_chosen(self) -> Labels | None:
        """Return the labels of the chosen tokens only."""
        if self.labels is None:
            return None
        return type(self.labels)(*map(self.of_chosen, self.labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What a teacher gives for a batch in addition to relations, as far as it was requested."""

    values: Mapping[SignalName, Float[Tensor, "batch ..."]] = field(default_factory=dict)
    """Numbers of every token, `(batch, length, width)`, or of every sequence, `(batch, width)`."""
    masked: MaskedSequences | None = None
    """Sequences as they are read with tokens masked. None means not requested."""
    reading: int = 0
    """Number of the masked reading that the signals belong to, counted from 0."""

    def __getitem__(self, name: SignalName) -> Float[Tensor, "batch ..."]:
        """Return the numbers of a signal that was requested."""
        return self.values[name]

    def __contains__(self, name: SignalName) -> bool:
        """Return whether a signal of numbers was requested."""
        return name in self.values


def soft_labels(logits: Float[Tensor, "chosen vocabulary"], temperature: float) -> DenseLabels:
    """Return the distributions that logits give at a temperature, float32."""
    return DenseLabels(torch.softmax(logits.float() / temperature, -1))
