"""Read a batch with the teacher: its relations, and the states that a cache stores in addition to them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from minilm_cache.corpus.sequences import Masker
from minilm_cache.errors import TeacherError
from minilm_cache.models.device import CPU
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.tap import Tap
from minilm_cache.models.teacher import Teacher, TeacherReading
from minilm_cache.relations.scores import LayerRelations
from minilm_cache.relations.signals import MaskedSequences, Signals, soft_labels
from minilm_cache.signals.base import Taken
from minilm_cache.signals.table import masked_part, signal_of, value_signal
from minilm_cache.storage_schema.identity import CacheIdentity, TeacherIdentity
from minilm_cache.storage_schema.states import LABELS, SignalName, StatesIdentity

CPU_BATCH: Final = 32
"""Sequences per forward pass of a CPU."""
_MOST_BATCH: Final = 1024
_MEMORY_PART: Final = 4
"""A batch may take one part in so many of a GPU's free memory."""
_MATRICES: Final = 8
"""Matrices `(heads, length, length)` of float32 that exist at once: a relation and what is made of it."""
_ROWS: Final = 24
"""Rows as wide as hidden states that exist at once for each token of a layer, feed-forward units included."""
_MOST_PROBABILITIES: Final = 2**28
"""Most probabilities that the labels of a batch may have: 1 GiB as float32; the logits take 1 GiB more."""


def batch_size_for(teacher: TeacherIdentity, max_length: int, device: torch.device) -> int:
    """Return the sequences per forward pass that a device has memory for; on a CPU, more are not faster."""
    if device.type != "cuda":
        return CPU_BATCH
    free, _ = torch.cuda.mem_get_info(device)
    return batch_within(free // _MEMORY_PART, teacher, max_length)


def batch_within(num_bytes: int, teacher: TeacherIdentity, max_length: int) -> int:
    """Return the greatest power of two of sequences that a forward pass and its relations have memory for."""
    matrices = _MATRICES * teacher.num_heads * max_length**2
    rows = _ROWS * teacher.hidden_size * max_length
    fitting = max(1, num_bytes // (4 * (matrices + rows)))
    return min(_MOST_BATCH, 1 << (fitting.bit_length() - 1))


def sequences_at_once(identity: CacheIdentity, batch_size: int) -> int:
    """Return the sequences per forward pass: `batch_size`, or fewer where labels would not fit."""
    states = identity.states
    if states is None or states.labels is None or states.masking is None:
        return batch_size
    share = 1.0 if states.labels.tokens == "all" else states.masking.share
    per_sequence = math.ceil(share * identity.packing.max_length) * identity.teacher.vocab_size
    return max(1, min(batch_size, _MOST_PROBABILITIES // per_sequence))


def _refuse_not_finite(
    inputs: Inputs,
    numbers: Sequence[int],
    *,
    relations: Sequence[LayerRelations],
    values: Mapping[SignalName, Tensor],
) -> None:
    """Raise TeacherError where a teacher gives NaN or infinity for a sequence, padding left out."""
    valid, sums = inputs.valid, list[Tensor]()
    for layer in relations:
        sums += [part.sum((1, 3)) for part in layer.vectors[:3]]
    for value in values.values():
        if value.shape[:1] == valid.shape[:1]:  # not those of masked tokens alone
            of_tokens = value.ndim > valid.ndim and value.shape[:2] == valid.shape
            each = valid.shape if of_tokens else valid.shape[:1]
            sums.append(value.float().reshape(*each, -1).sum(-1))
    for total in sums:
        lost = ~total.isfinite().to(valid.device)
        lost = (lost & valid).any(1) if lost.ndim > 1 else lost
        if lost.any():
            number = numbers[int(lost.nonzero()[0])]
            raise TeacherError(
                f"the teacher gives NaN or infinity for sequence {number:,} of this text. Check its weights "
                "and --precision, or leave that text out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReader:
    """A teacher and how it reads masked sequences."""

    teacher: Teacher
    states: StatesIdentity | None
    """States that the cache stores. None means that it stores relations only."""
    masker: Masker | None
    """What masks tokens. None means that no state needs masked sequences."""
    pooler: SentencePooler | None = None
    """What pools hidden states. None means that no pooled vectors are stored."""

    @classmethod
    def of(cls, teacher: Teacher, states: StatesIdentity | None) -> "SequenceReader":
        """Return the reader for a cache of these states."""
        masking = None if states is None else states.masking
        masker = None if masking is None else Masker.of(masking, teacher.tokenizer)
        pooling = None if states is None else states.pooled
        pooler = None if pooling is None else teacher.pooler(pooling.mode)
        return cls(teacher=teacher, states=states, masker=masker, pooler=pooler)

    def read(
        self,
        inputs: Inputs,
        *,
        numbers: Sequence[int],
        layers: Sequence[int],
        wanted: Sequence[SignalName],
        reading: int = 0,
        waits: bool = False,
    ) -> tuple[list[LayerRelations], Signals]:
        """Return the teacher's output for a padded batch: one forward pass, and one more for masked tokens.

        Args:
            inputs: sequences, on the CPU.
            numbers: numbers of the sequences in the cache; they determine what is masked.
            layers: layers whose relations are returned.
            wanted: signals to return.
            reading: number of the masked reading.
            waits: whether any device is waited for, to look at what the teacher gives. False looks on a CPU
                alone; elsewhere, segments look at what arrives.

        Returns:
            Relations of `layers`, in their order, and the signals.

        Raises:
            TeacherError: a number that was looked at is NaN or infinite.
        """
        relations, signals = self._unchecked(
            inputs, numbers=numbers, layers=layers, wanted=wanted, reading=reading
        )
        if waits or self.teacher.device == CPU:
            _refuse_not_finite(inputs, numbers, relations=relations, values=signals.values)
        return relations, signals

    def _unchecked(
        self,
        inputs: Inputs,
        *,
        numbers: Sequence[int],
        layers: Sequence[int],
        wanted: Sequence[SignalName],
        reading: int,
    ) -> tuple[list[LayerRelations], Signals]:
        """Return what `read` returns, whatever numbers there are."""
        of_masked = masked_part(wanted)
        plain = [name for name in wanted if name not in of_masked]
        values, relations, masked = dict[SignalName, Tensor](), list[LayerRelations](), None
        if layers or plain:
            outputs, values = self._read(inputs, Tap(tuple(layers)), names=plain)
            relations = outputs.relations
        if of_masked:
            masked, masked_values = self._read_masked(inputs, numbers, names=of_masked, reading=reading)
            values = {**values, **masked_values}
        return relations, Signals(
            values=values, masked=masked if LABELS in of_masked else None, reading=reading
        )

    def _read(
        self, inputs: Inputs, tap: Tap, *, names: Sequence[SignalName], places: Tensor | None = None
    ) -> tuple[TeacherReading, dict[SignalName, Tensor]]:
        """Return a tap of one forward pass, and the values of signals, taken of the same pass."""
        num_layers = self.teacher.num_layers
        for name in names:
            tap = tap.with_(value_signal(name).tap(name, num_layers))
        outputs = self.teacher.read(inputs, tap, places)
        taken = Taken(outputs, inputs.to(self.teacher.device), num_layers, self.pooler)
        return outputs, {name: value_signal(name).values(name, taken) for name in names}

    def _read_masked(
        self, inputs: Inputs, numbers: Sequence[int], *, names: Sequence[SignalName], reading: int
    ) -> tuple[MaskedSequences, dict[SignalName, Tensor]]:
        """Return sequences with tokens masked, with labels if they are wanted, and the values of signals."""
        assert self.masker is not None
        labels = self.states.labels if self.states is not None and LABELS in names else None
        masked = self.masker.mask(inputs, numbers, reading)
        if labels is not None and labels.tokens == "all":
            masked = MaskedSequences.of(masked.ids, masked.chosen, labelled=inputs.valid)
        outputs, values = self._read(
            inputs.with_ids(masked.ids),
            Tap() if labels is None else signal_of(LABELS).tap(LABELS, self.teacher.num_layers),
            names=[name for name in names if name != LABELS],
            places=masked.with_labels,
        )
        masked = masked.to(self.teacher.device)
        if labels is not None and outputs.logits is not None:
            soft = soft_labels(outputs.logits, labels.temperature)
            masked = replace(masked, labels=soft, temperature=labels.temperature)
        return masked, values
