"""Fidelity of a dump: the bytes on disk compared with the teacher, run again on held-out sequences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from minilm_cache.cache import Cache, CachedSequence
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.rows import RowTargets, SparseRows, to_dense
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.measured import Fidelity, LayerFidelity

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


@dataclass(slots=True, kw_only=True)
class Audit:
    """Result of an audit."""

    num_sequences: int
    fidelity: tuple[LayerFidelity, ...]


def audit_sequences(cache: Cache) -> range:
    """Return the numbers of the sequences to audit: held-out ones, or the last one where none is held out."""
    first = min(cache.manifest.num_train, len(cache) - 1)
    return range(first, min(first + MAX_SEQUENCES, len(cache)))


def audit(
    stored: Callable[[int], CachedSequence],
    teacher: Teacher,
    layers: Sequence[int],
    *,
    numbers: Sequence[int],
    batch_size: int,
    session: Session,
) -> Audit:
    """Run the teacher again on some sequences and compare with what was stored.

    Args:
        stored: function that returns a stored sequence by its number.
        teacher: the teacher.
        layers: layers to compare; without any, nothing is compared.
        numbers: numbers of the sequences.
        batch_size: sequences per forward pass of the teacher.
        session: its progress shows sequences done.

    Raises:
        CacheCorruptError: a shard is damaged.
    """
    if not layers:
        return Audit(num_sequences=len(numbers), fidelity=())
    kinds = (RelationKind.ATTENTION, RelationKind.VALUE)
    sums = {(layer, kind): _Sums() for layer in layers for kind in kinds}
    for start in range(0, len(numbers), batch_size):
        sequences = [stored(number) for number in numbers[start : start + batch_size]]
        rows = [sequence.input_ids for sequence in sequences]
        signals = teacher.relations(Inputs.of(rows, teacher.tokenizer.pad_token_id), layers)
        for layer, signal in zip(layers, signals, strict=True):
            for kind in kinds:
                for at, sequence in enumerate(sequences):
                    length = len(sequence.input_ids)
                    live = signal.probs(kind)[at, :, :length, :length].cpu()
                    kept = _kept_columns(sequence.target_rows(kind, layer), length)
                    sums[layer, kind].add(live, sequence.relation(kind, layer), kept)
        session.progress.advance(len(sequences))
    return Audit(
        num_sequences=len(numbers),
        fidelity=tuple(
            LayerFidelity(layer=layer, relations={kind: sums[layer, kind].fidelity() for kind in kinds})
            for layer in layers
        ),
    )


def _kept_columns(rows: RowTargets, length: int) -> Bool[Tensor, "heads query key"]:
    """Return the columns that have an entry of their own."""
    if not isinstance(rows, SparseRows):
        kept: Tensor = to_dense(rows, torch.tensor([length]), length)[0] > 0
        return kept
    kept = torch.zeros((*rows.index.shape[:-1], length))
    return kept.scatter_add_(-1, rows.index, (rows.weight > 0).float())[0] > 0
