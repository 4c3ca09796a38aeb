"""How close students are to the teacher on sequences that nobody was trained on."""

from collections.abc import Callable, Iterable, Sequence

import torch

from minilm_cache.objectives.base import Losses
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.relations.loss import MAX_SCORES_BYTES, scores_bytes
from minilm_cache.storage_schema.manifest import CacheManifest

MAX_SEQUENCES = 256

HeldOutLosses = dict[str, float]
"""Means of an objective's parts; of a relation KL(teacher || student), nats."""


def batch_size(wanted: WantedTargets, manifest: CacheManifest, most: int) -> int:
    """Return sequences of a batch, `most` or as few as keep a relation's scores in bounds."""
    heads = wanted.relation_heads or manifest.identity.relation_heads
    fitting = MAX_SCORES_BYTES // scores_bytes(1, heads, manifest.identity.packing.max_length)
    return max(1, min(most, fitting))


@torch.no_grad()
def held_out_losses(
    looks: Sequence[Callable[[StudentBatch], Losses]], batches: Iterable[StudentBatch]
) -> list[HeldOutLosses]:
    """Return every student's mean losses over batches, as its look tells; each is decoded once for all."""
    sums: list[HeldOutLosses] = [{} for _ in looks]
    counts: list[dict[str, int]] = [{} for _ in looks]
    for batch in batches:
        for look, total, count in zip(looks, sums, counts, strict=True):
            losses = look(batch)
            for name, part in losses.parts.items():
                number = batch.counts[losses.units[name]]
                total[name] = total.get(name, 0.0) + float(part) * number
                count[name] = count.get(name, 0) + number
    return [
        {name: value / max(count[name], 1) for name, value in total.items()}
        for total, count in zip(sums, counts, strict=True)
    ]
