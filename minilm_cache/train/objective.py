"""Losses that train a student from a cache. Each says which relations it needs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.errors import InvalidConfigError
from minilm_cache.relations import Vectors, key_mask, relation_kl, relation_scores
from minilm_cache.storage_schema.manifest import RelationKind
from minilm_cache.train.batches import StudentBatch


class Losses(NamedTuple):
    """What an objective says of a batch."""

    total: Float[Tensor, ""]
    """What the gradient is taken of."""
    parts: Mapping[RelationKind, Float[Tensor, ""]]
    """KL(teacher || student) of each relation, nats, mean over relation heads and valid rows."""


@runtime_checkable
class Objective(Protocol):
    """A loss."""

    @property
    def relations(self) -> tuple[RelationKind, ...]:
        """Relations that the cache must hold."""
        ...

    def __call__(self, vectors: Vectors, batch: StudentBatch) -> Losses:
        """Return the loss of a student's last-layer vectors."""
        ...


class MiniLM:
    """L = L_AT + L_VR, attention distributions and value relations of the last layer.

    MiniLM (Wang et al. 2020, arXiv 2002.10957), eq. 10. The student sees every column that is not padding,
    in both relations; where the teacher's own mask hid columns, its rows have no mass there.
    """

    relations = (RelationKind.ATTENTION, RelationKind.VALUE)

    def __call__(self, vectors: Vectors, batch: StudentBatch) -> Losses:
        """Return the sum over relations of KL(teacher || student), nats."""
        mask = key_mask(batch.lengths, batch.ids.shape[1])[:, None, None, :]
        parts = {
            kind: relation_kl(relation_scores(vectors, kind, mask), batch.targets[kind], batch.lengths)
            for kind in self.relations
        }
        return Losses(torch.stack(list(parts.values())).sum(), parts)


OBJECTIVES: dict[str, type[Objective]] = {"minilm": MiniLM}


def choose_objective(name: str, kinds: Sequence[RelationKind]) -> Objective:
    """Return an objective that a cache of these relations can serve.

    Raises:
        InvalidConfigError: it is unknown, or needs relations that the cache does not hold.
    """
    if name not in OBJECTIVES:
        raise InvalidConfigError(f"--objective {name} is unknown; known are {', '.join(OBJECTIVES)}.")
    objective = OBJECTIVES[name]()
    missing = [kind for kind in objective.relations if kind not in kinds]
    if missing:
        raise InvalidConfigError(
            f"--objective {name} needs the {' and '.join(missing)} relation, which this cache does not hold. "
            "Dump a cache with it."
        )
    return objective
