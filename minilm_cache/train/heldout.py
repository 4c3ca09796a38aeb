"""Measures how close students are to the teacher on sequences that no student was trained on."""

from collections.abc import Callable, Iterable, Sequence

import torch

from minilm_cache.objectives.base import Losses
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.relations.loss import CPU_LIMITS, scores_bytes
from minilm_cache.storage_schema.manifest import CacheManifest

MAX_SEQUENCES = 256
"""Most held-out sequences that an evaluation reads."""

HeldOutLosses = dict[str, float]
"""Mean of each part of an objective; the part of a relation is KL(teacher || student), nats."""


def batch_size(wanted: WantedTargets, manifest: CacheManifest, most: int) -> int:
    """Return the sequences of a batch: `most`, or fewer where a relation's scores would be too large."""
    heads = wanted.relation_heads or manifest.identity.relation_heads
    fitting = CPU_LIMITS.scores_bytes // scores_bytes(1, heads, manifest.identity.packing.max_length)
    return max(1, min(most, fitting))


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
