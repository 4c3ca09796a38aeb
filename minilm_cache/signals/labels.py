"""Masked readings of sequences, and the teacher's soft labels of their tokens.

Labels are an unbiased sample of the teacher's distribution (`codecs/sampling.py`), each kept weight within a
factor `weight_ratio`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS
from minilm_cache.codecs.sampling import (
    LAST_CODE,
    LogScale,
    SeededDraws,
    refuse_heavy_rows,
    sample_pps,
    share_remainder,
)
from minilm_cache.errors import CacheCorruptError
from minilm_cache.models.tap import Tap
from minilm_cache.relations.scores import key_mask
from minilm_cache.relations.signals import DenseLabels, MaskedSequences, SparseLabels
from minilm_cache.relations.transfer import send
from minilm_cache.signals.base import Signal
from minilm_cache.storage_schema.arrays import not_chosen
from minilm_cache.storage_schema.states import INDEX_PATH, READ_PATH, WEIGHT_PATH, SignalName, StatesIdentity

_LABEL_STREAM = 16
"""Random stream that labels are drawn from; relations use the streams below it."""


class Labels(Signal):
    """Which tokens are masked, and the teacher's distributions there."""

    is_masked: ClassVar[bool] = True
    option: ClassVar[str] = "--labels"

    def tap(self, name: SignalName, num_layers: int) -> Tap:
        """Return the head for masked tokens."""
        del name, num_layers
        return Tap(head="tokens")


@dataclass(frozen=True, slots=True)
class LabelsCodec:
    """How masked readings and labels are stored."""

    parameters: StatesIdentity
    vocab_size: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the arrays, in the first masked reading."""
        labels = (INDEX_PATH, WEIGHT_PATH) if self.parameters.labels is not None else ()
        return (READ_PATH, *labels)

    def encode(self, masked: MaskedSequences, sequences: Sequence[int], reading: int) -> dict[str, Tensor]:
        """Return the rows of a masked reading."""
        rows = {READ_PATH: masked.ids.masked_fill(~masked.chosen, not_chosen(self.vocab_size))}
        if self.parameters.labels is None or masked.labels is None:  # the caller requested none
            return rows
        assert isinstance(masked.labels, DenseLabels)
        probs, k = masked.labels.probs, self.parameters.labels.k
        draws = send(self._draws(masked.label_counts, sequences, reading), probs.device)
        scale = LogScale(ratio=self.parameters.labels.weight_ratio)
        entries = sample_pps(probs, k, draws=draws, scale=scale)
        for path, drawn in ((INDEX_PATH, entries.column), (WEIGHT_PATH, entries.code)):
            values = torch.zeros((masked.ids.numel(), k), dtype=torch.int32, device=probs.device)
            values.index_copy_(0, masked.with_labels, drawn.int())
            rows[path] = values.view(*masked.ids.shape, k)
        return rows

    def _draws(self, counts: Sequence[int], sequences: Sequence[int], reading: int) -> Tensor:
        """Return a uniform number for each labelled token, `(labelled, 1)`.

        They are a pure function of seed, sequence and reading.
        """
        assert self.parameters.masking is not None
        draws, numbers = SeededDraws(self.parameters.masking.seed), np.empty(sum(counts), np.float32)
        for end, sequence, count in zip(accumulate(counts), sequences, counts, strict=True):
            draws.fill(numbers[end - count : end], [0, reading, _LABEL_STREAM, sequence])
        return torch.from_numpy(numbers)[:, None]

    def check(self, rows: Mapping[str, Tensor]) -> None:
        """Raise CacheCorruptError for a masked reading, or labels, that `encode` never writes."""
        read = rows[READ_PATH].to(torch.int64)
        chosen = read.ne(not_chosen(self.vocab_size))
        if bool((chosen & (read >= self.vocab_size)).any()):
            raise CacheCorruptError(f"a masked reading holds a token id outside the vocabulary. {NOT_OURS}")
        if self.parameters.labels is None:
            return
        labelled = torch.ones_like(chosen) if self._are_everywhere else chosen
        index, code = (rows[path][labelled].to(torch.int64) for path in (INDEX_PATH, WEIGHT_PATH))
        if index.numel() and (int(index.amax()) >= self.vocab_size or int(code.amax()) > LAST_CODE):
            raise CacheCorruptError(
                f"a label holds a token id outside the vocabulary, or an invalid weight. {NOT_OURS}"
            )
        if not bool(code.eq(0).any(-1).all()):
            raise CacheCorruptError(f"a stored row has no slot. {NOT_OURS}")
        scale = LogScale(ratio=self.parameters.labels.weight_ratio)
        refuse_heavy_rows(code.to(torch.uint8).numpy(), scale)

    def decode(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> MaskedSequences:
        """Decode masked sequences and labels, on the CPU, which alone knows how many there are.

        Args:
            rows: path of an array to `(batch, length, ...)`, and `tokens`.
            lengths: valid positions of each sequence.
        """
        read, tokens = rows[READ_PATH].to(torch.int64), rows["tokens"].to(torch.int64)
        valid = key_mask(lengths, read.shape[1])
        chosen = read.ne(not_chosen(self.vocab_size)) & valid
        labels = self.parameters.labels
        masked = MaskedSequences.of(
            torch.where(chosen, read, tokens), chosen, labelled=valid if self._are_everywhere else None
        )
        if labels is None:
            return masked
        index, code = (
            rows[path].flatten(0, 1)[masked.with_labels].to(torch.int64) for path in (INDEX_PATH, WEIGHT_PATH)
        )
        weight = LogScale(ratio=labels.weight_ratio).value(code)
        entries = SparseLabels(index, share_remainder(code, weight))
        return replace(masked, labels=entries, temperature=labels.temperature)

    @property
    def _are_everywhere(self) -> bool:
        """Whether every token has labels, and not only the chosen ones."""
        return self.parameters.labels is not None and self.parameters.labels.tokens == "all"
