"""Losses that train a student from a cache. Each says which relations it needs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.config import LayerMap, TrainConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.loss import Method, relation_loss
from minilm_cache.relations import Vectors, split_heads
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.train.batches import StudentBatch, WantedTargets
from minilm_cache.train.student import num_layers_of


class Losses(NamedTuple):
    """What an objective says of a batch."""

    total: Float[Tensor, ""]
    """What the gradient is taken of."""
    parts: Mapping[RelationKind, Float[Tensor, ""]]
    """KL(teacher || student) of each relation, nats, mean over relation heads and valid rows."""


class LayerPair(NamedTuple):
    """What a student's layer learns from."""

    target: int
    """Position among `WantedTargets.layers`."""
    student: int
    """Layer of the student, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The sum over relations of KL(teacher || student), mean over relation heads and valid rows, nats.

    `minilm`: L = L_AT + L_VR, attention distributions and value relations of one layer of the teacher, its
    last where nothing else is asked for (MiniLM, Wang et al. 2020, arXiv 2002.10957, eq. 10); without the
    value relation it is the ablation of table 5, with query and key relations that of the authors' response.
    `minilmv2`: query, key and value relations, heads split anew (MiniLMv2, Wang et al. 2021, arXiv
    2012.15828). With a layer map other than `last` it is the mean over pairs of layers (tables 7 and 8 of
    MiniLM). The student sees every column that is not padding; where the teacher's own mask hid columns, its
    rows have no mass there.
    """

    wanted: WantedTargets
    """What the cache must serve; the student's vectors are split into as many relation heads."""
    layer_map: LayerMap = "last"
    num_teacher_layers: int = 0
    """All that the teacher has; 0: of no matter to the map."""

    def of(self, num_layers: int) -> "StudentObjective":
        """Return what a student of so many layers learns."""
        if self.layer_map == "last":
            return StudentObjective(wanted=self.wanted, pairs=(LayerPair(0, num_layers - 1),))
        pairs = map_layers(self.layer_map, num_layers, self.num_teacher_layers)
        places = {layer: place for place, layer in enumerate(self.wanted.layers)}
        return StudentObjective(
            wanted=self.wanted, pairs=tuple(LayerPair(places[teacher], own) for teacher, own in pairs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentObjective:
    """An objective for one depth of students."""

    wanted: WantedTargets
    pairs: tuple[LayerPair, ...]

    @property
    def student_layers(self) -> tuple[int, ...]:
        """Layers of the student whose vectors are compared, ascending."""
        return tuple(pair.student for pair in self.pairs)

    def __call__(
        self, vectors: Sequence[Vectors], batch: StudentBatch, method: Method | None = None
    ) -> Losses:
        """Return the loss of vectors of `student_layers`, in a form of `relation_loss`."""
        heads = self.wanted.relation_heads
        split = [one if heads is None else split_heads(one, heads) for one in vectors]
        parts = {}
        for kind in self.wanted.kinds:
            losses = [
                relation_loss(own, kind, batch.targets[pair.target][kind], batch.lengths, method)
                for own, pair in zip(split, self.pairs, strict=True)
            ]
            parts[kind] = torch.stack(losses).mean()
        return Losses(torch.stack(list(parts.values())).sum(), parts)


def map_layers(layer_map: LayerMap, num_layers: int, num_teacher_layers: int) -> list[tuple[int, int]]:
    """Return pairs of a teacher's and a student's layer, counted from 0, ascending.

    `last`: the last of both (MiniLM's own). `last-two`, `first-last`: MiniLM's table 8. `all`: layer m of M
    learns from the teacher's layer m N / M of N, rounded, as TinyBERT maps them (Jiao et al. 2020, arXiv
    1909.10351, section 3.1); MiniLM's table 7.

    Raises:
        InvalidConfigError: the student has fewer layers than the map, or more than the teacher.
    """
    least = 1 if layer_map in ("last", "all") else 2
    if not least <= num_layers <= num_teacher_layers:
        raise InvalidConfigError(
            f"--layer-map {layer_map} is for students of {least} to {num_teacher_layers} layers, and one has "
            f"{num_layers}. Take another map or other shapes."
        )
    last = (num_teacher_layers - 1, num_layers - 1)
    if layer_map == "last":
        return [last]
    if layer_map == "last-two":
        return [(last[0] - 1, last[1] - 1), last]
    if layer_map == "first-last":
        return [(0, 0), last]
    rounded = [math.floor((own + 1) * num_teacher_layers / num_layers + 0.5) for own in range(num_layers)]
    return [(teacher - 1, own) for own, teacher in enumerate(rounded)]


RELATIONS: dict[str, tuple[RelationKind, ...]] = {
    "minilm": (RelationKind.ATTENTION, RelationKind.VALUE),
    "minilmv2": (RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE),
}


def relations_of(config: TrainConfig) -> tuple[RelationKind, ...]:
    """Return the relations that students are compared by."""
    kinds = list(RELATIONS[config.objective])
    if not config.value_relation:
        kinds.remove(RelationKind.VALUE)
    if config.query_key_relations:
        kinds += [RelationKind.QUERY, RelationKind.KEY]
    return tuple(kinds)


def split_into(objective: str, relation_heads: int | None, teacher_heads: int) -> int | None:
    """Return the relation heads that an objective splits vectors into; none: it compares attention heads.

    Args:
        objective: its name.
        relation_heads: as asked for; none: the teacher's.
        teacher_heads: of the teacher's attention.
    """
    return relation_heads or teacher_heads if objective == "minilmv2" else None


def check_codec(config: TrainConfig, codec: str) -> None:
    """Raise InvalidConfigError for an objective that needs relations no cache of this codec holds."""
    stored = set(RelationKind) if codec == "vectors" else {RelationKind.ATTENTION, RelationKind.VALUE}
    missing = [kind for kind in relations_of(config) if kind not in stored]
    if missing:
        raise InvalidConfigError(
            f"--objective {config.objective} needs the {' and '.join(missing)} relation, which a cache of "
            f"codec {codec} does not hold. Dump one with --codec vectors."
        )


def choose_objective(config: TrainConfig, cache: Cache) -> Objective:
    """Return the objective that a run asks for, if the cache can serve it.

    Raises:
        InvalidConfigError: the cache does not hold the layers or the relations, or heads do not fit.
    """
    manifest = cache.manifest
    layers = _wanted_layers(config, cache)
    missing = [str(layer) for layer in layers if layer not in cache.layers]
    if missing:
        asked = f"--teacher-layer {config.teacher_layer}"
        if config.layer_map != "last":
            asked = f"--layer-map {config.layer_map} needs layer {', '.join(missing)} of the teacher"
        every = ",".join(map(str, sorted({*cache.layers, *layers})))
        raise InvalidConfigError(
            f"{asked}: the cache holds layer {', '.join(map(str, cache.layers))}. Choose one of them, or "
            f"dump a cache with --codec vectors --layers {every}."
        )
    check_codec(config, manifest.identity.codec.name)
    heads = split_into(config.objective, config.relation_heads, manifest.identity.relation_heads)
    if heads is not None:
        _check_relation_heads(heads, manifest, layers[-1])
    wanted = WantedTargets(kinds=relations_of(config), relation_heads=heads, layers=layers)
    return Objective(
        wanted=wanted,
        layer_map=config.layer_map,
        num_teacher_layers=manifest.identity.teacher.num_layers,
    )


def _wanted_layers(config: TrainConfig, cache: Cache) -> tuple[int, ...]:
    """Return the teacher's layers that students learn from, ascending, whatever the cache holds."""
    if config.layer_map == "last":
        return (cache.layers[-1] if config.teacher_layer is None else config.teacher_layer,)
    depth = cache.manifest.identity.teacher.num_layers
    students = {num_layers_of(arch) for arch in config.arch}
    pairs = [map_layers(config.layer_map, num_layers, depth) for num_layers in students]
    return tuple(sorted({teacher for found in pairs for teacher, _ in found}))


def _check_relation_heads(heads: int, manifest: CacheManifest, layer: int) -> None:
    assert manifest.calibration is not None
    width = manifest.identity.relation_heads * manifest.calibration.of_layer(layer).head_size
    if width % heads:
        raise InvalidConfigError(
            f"--relation-heads {heads}: the teacher's width {width} does not divide by it. Take a divisor."
        )
