"""Losses that train a student from a cache. Each says which relations it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.errors import InvalidConfigError
from minilm_cache.relations import Vectors, key_mask, relation_kl, relation_scores, split_heads
from minilm_cache.storage_schema.manifest import CacheManifest, RelationKind
from minilm_cache.train.batches import StudentBatch


class Losses(NamedTuple):
    """What an objective says of a batch."""

    total: Float[Tensor, ""]
    """What the gradient is taken of."""
    parts: Mapping[RelationKind, Float[Tensor, ""]]
    """KL(teacher || student) of each relation, nats, mean over relation heads and valid rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The sum over relations of KL(teacher || student), mean over relation heads and valid rows, nats.

    `minilm`: L = L_AT + L_VR, attention distributions and value relations of the last layer (MiniLM, Wang et
    al. 2020, arXiv 2002.10957, eq. 10). `minilmv2`: query, key and value relations, heads split anew
    (MiniLMv2, Wang et al. 2021, arXiv 2012.15828). The student sees every column that is not padding; where
    the teacher's own mask hid columns, its rows have no mass there.
    """

    relations: tuple[RelationKind, ...]
    """Relations that the cache must serve."""
    relation_heads: int | None
    """Relation heads that teacher's and student's vectors are split into; none: their attention heads."""

    def __call__(self, vectors: Vectors, batch: StudentBatch) -> Losses:
        """Return the loss of a student's last-layer vectors."""
        mask = key_mask(batch.lengths, batch.ids.shape[1])[:, None, None, :]
        split = vectors if self.relation_heads is None else split_heads(vectors, self.relation_heads)
        parts = {
            kind: relation_kl(relation_scores(split, kind, mask), batch.targets[kind], batch.lengths)
            for kind in self.relations
        }
        return Losses(torch.stack(list(parts.values())).sum(), parts)


RELATIONS: dict[str, tuple[RelationKind, ...]] = {
    "minilm": (RelationKind.ATTENTION, RelationKind.VALUE),
    "minilmv2": (RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE),
}


def choose_objective(
    name: str, relation_heads: int | None, kinds: Sequence[RelationKind], manifest: CacheManifest
) -> Objective:
    """Return an objective that a cache of these relations can serve.

    Raises:
        InvalidConfigError: it needs relations that the cache does not hold, or heads that do not fit.
    """
    relations = RELATIONS[name]
    missing = [kind for kind in relations if kind not in kinds]
    if missing:
        raise InvalidConfigError(
            f"--objective {name} needs the {' and '.join(missing)} relation, which a cache of codec "
            f"{manifest.identity.codec.name} does not hold. Dump one with --codec vectors."
        )
    if name != "minilmv2":
        return Objective(relations=relations, relation_heads=None)
    heads = relation_heads or manifest.identity.relation_heads
    assert manifest.calibration is not None
    width = manifest.identity.relation_heads * manifest.calibration.head_size
    if width % heads:
        raise InvalidConfigError(
            f"--relation-heads {heads}: the teacher's width {width} does not divide by it. Take a divisor."
        )
    return Objective(relations=relations, relation_heads=heads)
