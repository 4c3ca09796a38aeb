"""How close students are to the teacher on sequences that nobody was trained on."""

from collections.abc import Callable, Iterable, Sequence

import torch

from minilm_cache.loss import MAX_SCORES_BYTES, scores_bytes
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.train.batches import StudentBatch, WantedTargets
from minilm_cache.train.objective import Losses

MAX_SEQUENCES = 256

HeldOutKL = dict[RelationKind, float]
"""KL(teacher || student) of each relation, nats, mean over relation heads and valid rows."""


def batch_size(wanted: WantedTargets, manifest: CacheManifest, most: int) -> int:
    """Return sequences of a batch, `most` or as few as keep a relation's scores in bounds."""
    heads = wanted.relation_heads or manifest.identity.relation_heads
    fitting = MAX_SCORES_BYTES // scores_bytes(1, heads, manifest.identity.packing.max_length)
    return max(1, min(most, fitting))


@torch.no_grad()
def held_out_kl(
    looks: Sequence[Callable[[StudentBatch], Losses]], batches: Iterable[StudentBatch]
) -> list[HeldOutKL]:
    """Return every student's mean KL over the batches, as its look tells; each is decoded once for all."""
    sums: list[HeldOutKL] = [{} for _ in looks]
    num_tokens = 0
    for batch in batches:
        num_tokens += batch.num_tokens
        for look, total in zip(looks, sums, strict=True):
            for kind, part in look(batch).parts.items():
                total[kind] = total.get(kind, 0.0) + float(part) * batch.num_tokens
    return [{kind: value / num_tokens for kind, value in total.items()} for total in sums]
