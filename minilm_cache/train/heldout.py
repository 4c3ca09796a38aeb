"""How close students are to the teacher on sequences that nobody was trained on."""

from collections.abc import Iterable, Sequence

import torch

from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.batches import StudentBatch
from minilm_cache.train.trainer import StudentTrainer

MAX_SEQUENCES = 256

HeldOutKL = dict[RelationKind, float]
"""KL(teacher || student) of each relation, nats, mean over relation heads and valid rows."""


@torch.no_grad()
def held_out_kl(trainers: Sequence[StudentTrainer], batches: Iterable[StudentBatch]) -> list[HeldOutKL]:
    """Return every student's mean KL over the batches; each batch is decoded once for all students."""
    sums: list[HeldOutKL] = [{} for _ in trainers]
    num_tokens = 0
    for batch in batches:
        num_tokens += batch.num_tokens
        for trainer, total in zip(trainers, sums, strict=True):
            trainer.model.eval()
            for kind, part in trainer.losses(batch).parts.items():
                total[kind] = total.get(kind, 0.0) + float(part) * batch.num_tokens
    return [{kind: value / num_tokens for kind, value in total.items()} for total in sums]
