"""How close students are to the teacher on sequences that no student was trained on, stored or live."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.base import Losses
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.relations.loss import CPU_LIMITS, scores_bytes
from minilm_cache.relations.scores import DenseRows, LayerRelations, Targets, mean_row_entropy, split_heads
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest

MAX_SEQUENCES = 256
"""Most held-out sequences that an evaluation reads."""

_COMPARED_TEXTS: Final = 64
_COMPARED_TOKENS: Final = 2**17
"""Most held-out texts, and tokens, of a batch whose vectors are compared with each other."""

HeldOutLosses = dict[str, float]
"""Mean of each part of an objective; the part of a relation is KL(teacher || student), nats."""


_LEAST_COMPARED: Final = 2
"""Texts that can be compared with each other."""


def batch_size(wanted: WantedTargets, manifest: CacheManifest, most: int) -> int:
    """Return the sequences of a batch: `most`, or fewer where a relation's scores would be too large."""
    if not (wanted.kinds or wanted.vectors):
        return most
    heads = wanted.relation_heads or manifest.identity.relation_heads
    fitting = CPU_LIMITS.scores_bytes // scores_bytes(1, heads, manifest.identity.packing.max_length)
    return max(1, min(most, fitting))


def compared_texts(manifest: CacheManifest) -> int:
    """Return the held-out texts of a batch whose vectors are compared with each other, at least two.

    They do not depend on `--batch-size`, since losses by `similarity` depend on how many texts there are.
    """
    return max(
        _LEAST_COMPARED, min(_COMPARED_TEXTS, _COMPARED_TOKENS // manifest.identity.packing.max_length)
    )


def without_lone(size: int, num_sequences: int) -> int:
    """Return a size of batches that leaves no batch of one, whose text has no other to be compared with."""
    while size > _LEAST_COMPARED and num_sequences % size == 1:
        size -= 1
    return size


@torch.no_grad()
def held_out_losses(
    evaluators: Sequence[Callable[[StudentBatch], Losses]], batches: Iterable[StudentBatch]
) -> list[HeldOutLosses]:
    """Return the mean losses of every student over batches; each batch is decoded once for all students.

    Args:
        evaluators: for each student, a function that returns its losses on a batch.
        batches: held-out sequences.
    """
    sums: list[HeldOutLosses] = [{} for _ in evaluators]
    counts: list[dict[str, int]] = [{} for _ in evaluators]
    for batch in batches:
        for evaluate, total, count in zip(evaluators, sums, counts, strict=True):
            losses = evaluate(batch)
            for name, part in losses.parts.items():
                number = batch.counts[losses.units[name]]
                total[name] = total.get(name, 0.0) + float(part) * number
                count[name] = count.get(name, 0) + number
    return [
        {name: value / max(count[name], 1) for name, value in total.items()}
        for total, count in zip(sums, counts, strict=True)
    ]


def with_live_targets(
    batches: Iterable[StudentBatch], teacher: Teacher, wanted: WantedTargets
) -> Iterator[StudentBatch]:
    """Yield the same batches with the teacher's dense relations, from a forward pass for each batch.

    Args:
        batches: sequences; their targets are replaced.
        teacher: the teacher.
        wanted: which relations of which layers, and how many relation heads. Without layers, those that the
            teacher was loaded with are compared.
    """
    for batch in batches:
        signals = teacher.relations(batch.inputs, wanted.layers or None)
        yield replace(batch, targets=tuple(_targets(signal, wanted) for signal in signals))


def _targets(signal: LayerRelations, wanted: WantedTargets) -> dict[RelationKind, Targets]:
    if wanted.relation_heads is not None:
        signal = LayerRelations(split_heads(signal.vectors, wanted.relation_heads), signal.lengths)
    probs = {kind: signal.probs(kind) for kind in wanted.kinds}
    return {
        kind: Targets(
            DenseRows(rows, is_causal=signal.vectors.is_causal), mean_row_entropy(rows, signal.lengths)
        )
        for kind, rows in probs.items()
    }
