"""Losses that train a student from a cache. Each says which relations it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.config import TrainConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.loss import Method, relation_loss
from minilm_cache.relations import Vectors, split_heads
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.batches import StudentBatch, WantedTargets


class Losses(NamedTuple):
    """What an objective says of a batch."""

    total: Float[Tensor, ""]
    """What the gradient is taken of."""
    parts: Mapping[RelationKind, Float[Tensor, ""]]
    """KL(teacher || student) of each relation, nats, mean over relation heads and valid rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The sum over relations of KL(teacher || student), mean over relation heads and valid rows, nats.

    `minilm`: L = L_AT + L_VR, attention distributions and value relations of one layer of the teacher, its
    last where nothing else is asked for (MiniLM, Wang et al. 2020, arXiv 2002.10957, eq. 10).
    `minilmv2`: query, key and value relations, heads split anew (MiniLMv2, Wang et al. 2021, arXiv
    2012.15828). The student sees every column that is not padding; where the teacher's own mask hid
    columns, its rows have no mass there.
    """

    wanted: WantedTargets
    """What the cache must serve; the student's vectors are split into as many relation heads."""

    def __call__(self, vectors: Vectors, batch: StudentBatch, method: Method | None = None) -> Losses:
        """Return the loss of a student's last-layer vectors, in a form of `relation_loss`."""
        heads = self.wanted.relation_heads
        split = vectors if heads is None else split_heads(vectors, heads)
        parts = {
            kind: relation_loss(split, kind, batch.targets[kind], batch.lengths, method)
            for kind in self.wanted.kinds
        }
        return Losses(torch.stack(list(parts.values())).sum(), parts)


RELATIONS: dict[str, tuple[RelationKind, ...]] = {
    "minilm": (RelationKind.ATTENTION, RelationKind.VALUE),
    "minilmv2": (RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE),
}


def check_codec(objective: str, codec: str) -> None:
    """Raise InvalidConfigError for an objective that needs relations no cache of this codec holds."""
    stored = set(RelationKind) if codec == "vectors" else {RelationKind.ATTENTION, RelationKind.VALUE}
    missing = [kind for kind in RELATIONS[objective] if kind not in stored]
    if missing:
        raise InvalidConfigError(
            f"--objective {objective} needs the {' and '.join(missing)} relation, which a cache of codec "
            f"{codec} does not hold. Dump one with --codec vectors."
        )


def choose_objective(config: TrainConfig, cache: Cache) -> Objective:
    """Return the objective that a run asks for, if the cache can serve it.

    Raises:
        InvalidConfigError: the cache does not hold the layer or the relations, or heads do not fit.
    """
    manifest, name, layer = cache.manifest, config.objective, config.teacher_layer
    if layer is None:
        layer = cache.layers[-1]
    elif layer not in cache.layers:
        raise InvalidConfigError(
            f"--teacher-layer {layer}: the cache holds layer {', '.join(map(str, cache.layers))}. Choose "
            "one of them, or dump a cache with --codec vectors --layers."
        )
    check_codec(name, manifest.identity.codec.name)
    relations = RELATIONS[name]
    if name != "minilmv2":
        return Objective(wanted=WantedTargets(kinds=relations, layer=layer))
    heads = config.relation_heads or manifest.identity.relation_heads
    assert manifest.calibration is not None
    width = manifest.identity.relation_heads * manifest.calibration.of_layer(layer).head_size
    if width % heads:
        raise InvalidConfigError(
            f"--relation-heads {heads}: the teacher's width {width} does not divide by it. Take a divisor."
        )
    return Objective(wanted=WantedTargets(kinds=relations, relation_heads=heads, layer=layer))
