"""Fidelity of a dump: the bytes on disk compared with the teacher, run again on held-out sequences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from minilm_cache.cache import Cache, CachedSequence
from minilm_cache.dump.reading import SequenceReader, sequences_at_once
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import RowTargets, SparseRows, to_dense
from minilm_cache.relations.signals import DenseLabels, MaskedSequences, Signals, expected
from minilm_cache.session import Session
from minilm_cache.signals.table import SIGNALS, masked_part, value_signal
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import Fidelity, LayerFidelity, StateFidelity
from minilm_cache.storage_schema.states import LABELS, plain_path

MAX_SEQUENCES = 64
LEAST_PROBABILITY = 2.0**-24
"""Smallest float16 number above 0: teacher probabilities below it count as 0 in KL(teacher || stored)."""


@dataclass(slots=True)
class _Sums:
    """Sums over heads and valid rows."""

    rows: int = 0
    kl_teacher_to_stored: float = 0.0
    kl_stored_to_teacher: float = 0.0
    mass_kept: float = 0.0
    cross_entropy_bias: float = 0.0

    def add(
        self,
        teacher: Float[Tensor, "heads query key"],
        stored: Float[Tensor, "heads query key"],
        kept: Bool[Tensor, "heads query key"],
    ) -> None:
        """Add one sequence without padding."""
        likely = teacher.where(teacher >= LEAST_PROBABILITY, 0)
        # A log of zero weighs nothing where its factor is zero, and makes a KL infinite where it is not.
        log_teacher = teacher.clamp(min=torch.finfo(teacher.dtype).tiny).log()
        self.rows += teacher.shape[0] * teacher.shape[1]
        # Both sums of probabilities are 1 but for rounding; with them a KL of rounded rows is never negative.
        excess = stored - teacher
        forward = torch.where(likely > 0, likely * (likely / stored).log(), 0) + excess
        self.kl_teacher_to_stored += float(forward.sum())
        backward = torch.special.xlogy(stored, stored) - stored * log_teacher - excess
        self.kl_stored_to_teacher += float(backward.sum())
        self.mass_kept += float(teacher[kept].sum())
        self.cross_entropy_bias += float((excess * log_teacher).sum())

    def fidelity(self) -> Fidelity:
        """Return the means."""
        forward = self.kl_teacher_to_stored / self.rows
        return Fidelity(
            kl_teacher_to_stored=forward if math.isfinite(forward) else None,
            kl_stored_to_teacher=self.kl_stored_to_teacher / self.rows,
            mass_kept=self.mass_kept / self.rows,
            cross_entropy_bias=self.cross_entropy_bias / self.rows,
        )


def audit_sequences(num_train: int, num_sequences: int, most: int = MAX_SEQUENCES) -> range:
    """Return the numbers of the sequences to audit: held-out ones, or the last one where none is held out."""
    first = min(num_train, num_sequences - 1)
    return range(first, min(first + most, num_sequences))


def audit(
    cache: Cache,
    teacher: Teacher,
    *,
    numbers: Sequence[int],
    batch_size: int,
    session: Session,
    stored: Mapping[int, CachedSequence] | None = None,
) -> tuple[LayerFidelity, ...]:
    """Run the teacher again on some sequences and compare each layer with what was stored.

    Args:
        cache: the cache; without layers, nothing is compared.
        teacher: the teacher.
        numbers: numbers of the sequences.
        batch_size: sequences per forward pass of the teacher.
        session: its progress shows sequences done.
        stored: sequences to compare with, by their numbers. None means those of the cache.

    Raises:
        CacheCorruptError: a shard is damaged.
    """
    layers, pair = cache.layers, cache.manifest.identity.packing.pair
    if not layers:
        return ()
    batch_size = teacher.at_once(batch_size)
    kinds = (RelationKind.ATTENTION, RelationKind.VALUE)
    sums = {(layer, kind): _Sums() for layer in layers for kind in kinds}
    for start in range(0, len(numbers), batch_size):
        source: Cache | Mapping[int, CachedSequence] = cache if stored is None else stored
        sequences = [source[number] for number in numbers[start : start + batch_size]]
        rows = [sequence.input_ids for sequence in sequences]
        inputs = Inputs.of(rows, teacher.tokenizer.pad_token_id).paired(pair)
        signals = teacher.relations(inputs, layers)
        for layer, signal in zip(layers, signals, strict=True):
            for kind in kinds:
                for at, sequence in enumerate(sequences):
                    length = len(sequence.input_ids)
                    live = signal.probs(kind)[at, :, :length, :length].cpu()
                    kept = _kept_columns(sequence.target_rows(kind, layer), length)
                    sums[layer, kind].add(live, sequence.relation(kind, layer), kept)
        session.progress.advance(len(sequences))
    return tuple(
        LayerFidelity(layer=layer, relations={kind: sums[layer, kind].fidelity() for kind in kinds})
        for layer in layers
    )


def _kept_columns(rows: RowTargets, length: int) -> Bool[Tensor, "heads query key"]:
    """Return the columns that have an entry of their own."""
    if not isinstance(rows, SparseRows):
        kept: Tensor = to_dense(rows, torch.tensor([length]), length)[0] > 0
        return kept
    kept = torch.zeros((*rows.index.shape[:-1], length))
    return kept.scatter_add_(-1, rows.index, (rows.weight > 0).float())[0] > 0


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
        teacher, stored = teacher.cpu().double(), stored.cpu().double()
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

    Signals that are not registered in this process are left out.

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
    batch_size = reader.teacher.at_once(sequences_at_once(cache.manifest.identity, batch_size))
    registered = tuple(name for name in codec.everything if name.signal in SIGNALS)
    errors: dict[str, _ErrorSums] = {}
    bias: list[Tensor] = []
    for start in range(0, len(numbers), batch_size):
        batch = numbers[start : start + batch_size]
        sequences = [cache[number] for number in batch]
        pad_token = reader.teacher.tokenizer.pad_token_id
        inputs = Inputs.of([sequence.input_ids for sequence in sequences], pad_token)
        inputs = inputs.paired(cache.manifest.identity.packing.pair)
        for reading in range(codec.parameters.num_readings):
            wanted = registered if reading == 0 else masked_part(registered)
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
        for name in registered
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
