"""Read a batch with the teacher: its relations, and the states that a cache stores in addition to them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from minilm_cache.corpus.masking import Masker
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.tap import Head, Tap
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import TeacherSignal
from minilm_cache.relations.states import MaskedSequences, States, WantedStates, soft_labels
from minilm_cache.relations.transfer import send
from minilm_cache.storage_schema.identity import CacheIdentity, TeacherIdentity
from minilm_cache.storage_schema.states import POOLED, SoftLabels, StateFamily, StateName, StatesIdentity

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
        wanted: WantedStates,
        reading: int = 0,
    ) -> tuple[list[TeacherSignal], States]:
        """Return the teacher's output for a padded batch: one forward pass, and one more for masked tokens.

        Args:
            inputs: sequences, on the CPU.
            numbers: numbers of the sequences in the cache; they determine what is masked.
            layers: layers whose relations are returned.
            wanted: states to return.
            reading: number of the masked reading.

        Returns:
            Signals of `layers`, in their order, and the states.
        """
        plain = [name for name in wanted.hidden if name.family is not StateFamily.MASKED]
        head: Head | None = "sequences" if wanted.logits else None
        states, signals = States(reading=reading), list[TeacherSignal]()
        if layers or plain or head:
            plain_states, signals = self._read_plain(inputs, layers=layers, plain=plain, head=head)
            states = replace(plain_states, reading=reading)
        masked = [name for name in wanted.hidden if name.family is StateFamily.MASKED]
        if wanted.masked or masked:
            assert self.masker is not None
            labels = self.states.labels if self.states is not None and wanted.masked else None
            sequences = self.masker.mask(inputs, numbers, reading)
            if labels is not None and labels.tokens == "all":
                sequences = MaskedSequences.of(sequences.ids, sequences.chosen, labelled=inputs.valid)
            states = self._read_masked(states, sequences, inputs=inputs, names=masked, labels=labels)
        return signals, states

    def _read_plain(
        self,
        inputs: Inputs,
        *,
        layers: Sequence[int],
        plain: Sequence[StateName],
        head: Head | None,
    ) -> tuple[States, list[TeacherSignal]]:
        """Return the states and signals of sequences without masked tokens."""
        numbers = _numbers([name for name in plain if name != POOLED])
        if POOLED in plain:
            numbers = tuple(sorted({*numbers, self.teacher.num_layers}))
        output = self.teacher.read(inputs, Tap(tuple(layers), numbers, head))
        hidden = {name: self._state_of(name, output.hidden, inputs.lengths) for name in plain}
        return States(hidden=hidden, logits=output.logits), output.signals

    def _state_of(self, name: StateName, hidden: Mapping[int, Tensor], lengths: Tensor) -> Tensor:
        """Return the state that a name stands for, from the teacher's hidden states by number."""
        if name == POOLED:
            assert self.pooler is not None
            last = hidden[self.teacher.num_layers]
            return self.pooler(last, send(lengths, last.device))  # type: ignore[no-any-return]
        return hidden[name.number][:, 0] if name.family is StateFamily.FIRST else hidden[name.number]

    def _read_masked(
        self,
        states: States,
        masked: MaskedSequences,
        *,
        inputs: Inputs,
        names: Sequence[StateName],
        labels: SoftLabels | None,
    ) -> States:
        """Return `states` with those of masked sequences added, and their labels unless `labels` is None."""
        tap = Tap(hidden=_numbers(names), head="tokens" if labels is not None else None)
        output = self.teacher.read(inputs.with_ids(masked.ids), tap, masked.with_labels)
        masked = masked.to(self.teacher.device)
        if labels is not None and output.logits is not None:
            temperature = labels.temperature
            masked = replace(masked, labels=soft_labels(output.logits, temperature), temperature=temperature)
        hidden = {**states.hidden, **{name: output.hidden[name.number] for name in names}}
        return replace(states, hidden=hidden, masked=masked)


def _numbers(names: Sequence[StateName]) -> tuple[int, ...]:
    return tuple(sorted({name.number for name in names}))
