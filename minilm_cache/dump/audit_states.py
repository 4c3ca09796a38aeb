"""Fidelity of states: the bytes on disk compared with the teacher, run again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.dump.reading import SequenceReader, sequences_at_once
from minilm_cache.models.inputs import Inputs
from minilm_cache.relations.signals import DenseLabels, MaskedSequences, Signals, expected
from minilm_cache.session import Session
from minilm_cache.signals.table import masked_part, value_signal
from minilm_cache.storage_schema.measured import StateFidelity
from minilm_cache.storage_schema.states import LABELS, plain_path

_SEQUENCE_AXES: Final = 2
"""Axes of the values of a signal with one row a sequence."""


@dataclass(slots=True)
class _ErrorSums:
    """Sums over rows, for a relative error."""

    is_centred: bool
    """True divides by the variance. False divides by the squares, for rows that hardly differ between
    sequences, and for pooled vectors."""
    num_rows: int = 0
    total: Tensor | float = 0.0
    squares: float = 0.0
    errors: float = 0.0
    cosines: float = 0.0

    def add(self, teacher: Tensor, stored: Tensor) -> None:
        """Add rows of the teacher and the same rows as stored, both `(rows, width)`."""
        teacher, stored = teacher.double().cpu(), stored.double().cpu()
        self.num_rows += len(teacher)
        self.total = self.total + teacher.sum(0)
        self.squares += float(teacher.square().sum())
        self.errors += float((stored - teacher).square().sum())
        self.cosines += float(F.cosine_similarity(stored, teacher, dim=-1).sum())

    @property
    def relative_error(self) -> float:
        """Square root of the squared error divided by the variance, or by the squares."""
        assert isinstance(self.total, Tensor)
        mean = float(self.total.square().sum()) / self.num_rows if self.is_centred else 0.0
        return math.sqrt(self.errors / max(self.squares - mean, 1e-30))

    @property
    def cosine(self) -> float:
        """Mean cosine of stored rows with the teacher's."""
        return self.cosines / self.num_rows


def audit_states(
    cache: Cache, reader: SequenceReader, *, numbers: Sequence[int], batch_size: int, session: Session
) -> tuple[StateFidelity, ...]:
    """Run the teacher again on some sequences and compare with the states that were stored.

    Args:
        cache: cache that is complete except for its seal.
        reader: reader with the teacher.
        numbers: numbers of the sequences.
        batch_size: sequences per forward pass of the teacher.
        session: its progress shows sequences done.

    Raises:
        CacheCorruptError: a shard is damaged.
    """
    codec = cache.signals_codec
    if codec is None:
        return ()
    batch_size = sequences_at_once(cache.manifest.identity, batch_size)
    errors: dict[str, _ErrorSums] = {}
    bias: list[Tensor] = []
    for start in range(0, len(numbers), batch_size):
        batch = numbers[start : start + batch_size]
        sequences = [cache[number] for number in batch]
        pad_token = reader.teacher.tokenizer.pad_token_id
        inputs = Inputs.of([sequence.input_ids for sequence in sequences], pad_token)
        for reading in range(codec.parameters.num_readings):
            wanted = codec.everything if reading == 0 else masked_part(codec.everything)
            _, output = reader.read(inputs, numbers=batch, layers=(), wanted=wanted, reading=reading)
            for at, sequence in enumerate(sequences):
                _compare(
                    output, sequence.states(reading), at=at, length=int(inputs.lengths[at]), errors=errors
                )
            if output.masked is not None and output.masked.labels is not None:
                stored = [sequence.states(reading).masked for sequence in sequences]
                bias.append(_bias(output.masked, [masked for masked in stored if masked is not None]))
        session.progress.advance(len(batch))
    shares = _bytes_per_token(cache, codec.parameters.paths)
    return tuple(
        StateFidelity(
            path=name.folder,
            bytes_per_token=shares[name.folder],
            relative_error=errors[name.folder].relative_error if name.folder in errors else None,
            cross_entropy_bias=float(torch.cat(bias).mean()) if name == LABELS and bias else None,
            cosine=errors[name.folder].cosine if name != LABELS and value_signal(name).has_cosine else None,
        )
        for name in codec.everything
    )


def _compare(
    output: Signals, stored: Signals, *, at: int, length: int, errors: dict[str, _ErrorSums]
) -> None:
    """Add the sequence at one place of a batch to the errors of its signals."""
    for name, values in output.values.items():
        is_one_row = values.ndim == _SEQUENCE_AXES
        teacher_rows = values[at][None] if is_one_row else values[at, :length]
        stored_rows = stored[name] if is_one_row else stored[name][0]
        is_centred = value_signal(name).is_centred
        errors.setdefault(name.folder, _ErrorSums(is_centred=is_centred)).add(teacher_rows, stored_rows)


def _bias(output: MaskedSequences, stored: Sequence[MaskedSequences]) -> Tensor:
    """Return sum_j (stored_j - teacher_j) log teacher_j of each token with labels."""
    assert isinstance(output.labels, DenseLabels)
    probs = output.labels.probs.cpu()
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    expected_logs, first = [], 0
    for sequence in stored:
        assert sequence.labels is not None
        count = len(sequence.with_labels)
        expected_logs.append(expected(sequence.labels, logs[first : first + count]))
        first += count
    return torch.cat(expected_logs) - (probs * logs).sum(-1)


def _bytes_per_token(cache: Cache, paths: Sequence[str]) -> dict[str, float]:
    """Return the bytes per token that the shard files of each array, or group of arrays, take."""
    sizes = cache.reader.records.bytes_by_name().items()
    return {
        path: sum(size for name, size in sizes if f"{plain_path(name)}/".startswith(f"{path}/"))
        / cache.manifest.num_tokens
        for path in paths
    }
