"""Base of all objectives: what they need of a cache and of a student, their loss, and maps of layers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from minilm_cache.cache import Cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import num_layers_of
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.tap import Head, Reading, Tap
from minilm_cache.objectives.batch import StudentBatch, Unit, WantedTargets
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.labelled import OwnLabels
from minilm_cache.objectives.several import OtherTeachers
from minilm_cache.objectives.spec import LayerMap
from minilm_cache.relations.loss import Method
from minilm_cache.storage_schema.identity import TeacherIdentity

Parts = Mapping[str, Float[Tensor, ""]]
"""Parts of a loss, by name. The part of a relation is KL(teacher || student), nats, mean over relation heads
and valid rows; each objective describes its other parts."""


class Losses(NamedTuple):
    """Losses of a student on a batch."""

    total: Float[Tensor, ""]
    """Weighted sum of the parts, which the gradient is taken of."""
    parts: Parts
    units: Mapping[str, Unit]
    """What each part is a mean over."""

    def copied(self) -> "Losses":
        """Return the same losses in memory of their own, which one kernel fills."""
        total, *parts = torch.stack([self.total, *self.parts.values()]).unbind()
        return Losses(total, dict(zip(self.parts, parts, strict=True)), self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveRequest:
    """The objective that a run requests, its students, and its cache."""

    config: ObjectiveConfig
    arch: tuple[str, ...]
    """Shapes of the students."""
    cache: Cache
    others: OtherTeachers | None = None
    """Further teachers, of other caches. None means that there are none."""
    labels: OwnLabels | None = None
    """Labels of a task of one's own. None means that there are none."""

    @property
    def teacher(self) -> TeacherIdentity:
        """Identity of the teacher that the cache was dumped from."""
        return self.cache.manifest.identity.teacher


@runtime_checkable
class ModelSizes(Protocol):
    """Sizes of a teacher or a student that objectives compare."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentFacts:
    """What an objective must know about a student."""

    num_layers: int
    hidden_size: int
    """Width of hidden states."""
    vector_width: int
    """Width of the values of a token, all heads together."""

    @classmethod
    def of(cls, config: PreTrainedConfig, num_layers: int) -> "StudentFacts":
        """Return the facts of a student from its configuration."""
        width = getattr(config, "true_hidden_size", config.hidden_size)
        return cls(num_layers=num_layers, hidden_size=config.hidden_size, vector_width=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentNeeds:
    """What an objective needs of a student's forward pass."""

    layers: tuple[int, ...] = ()
    """Layers whose vectors are compared, ascending, counted from 0."""
    hidden: tuple[int, ...] = ()
    """Hidden states that are compared; 0 is the output of the embeddings."""
    head: Head | None = None
    """Head whose logits are compared. None means no logits."""
    is_masked: bool = False
    """True: the student reads the masked sequences."""
    all_labels: bool = False
    """True: logits are needed at all tokens that have labels, not only at masked ones."""

    @property
    def tap(self) -> Tap:
        """What the forward pass returns."""
        return Tap(self.layers, self.hidden, self.head)


class StudentObjective(nn.Module, ABC):
    """An objective for students of one shape; its weights, if it has any, are trained with the student."""

    needs: StudentNeeds
    """What it needs of the student's forward pass."""
    weights: Mapping[str, float] = MappingProxyType({})
    """Weights of parts in the loss; 1 for parts that are not named."""
    units: Mapping[str, Unit] = MappingProxyType({})
    """What parts are means over; tokens for parts that are not named."""

    @property
    def compares_texts(self) -> bool:
        """Whether texts of a batch are compared with each other alone, so that one by itself has no loss."""
        return False

    @property
    def is_fitted(self) -> bool:
        """Whether the objective's own weights begin with a fit to the first sequences, by `fit`."""
        return False

    def fit(self, outputs: Iterable[tuple[Reading, StudentBatch]]) -> None:
        """Fit the objective's own weights to an untrained student, where `is_fitted` says so.

        Args:
            outputs: the student's outputs on some batches, and these batches.
        """

    @property
    def sentence_pooler(self) -> SentencePooler | None:
        """What makes one vector of a student's hidden states; it is saved with the student.

        None means that nothing is pooled.
        """
        return None

    @property
    def similarity(self) -> Literal["dot"] | None:
        """Name, in sentence-transformers, of the function that compares two vectors of a student.

        None means the cosine, or that there are no vectors.
        """
        return None

    @abstractmethod
    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the parts of the loss of a student on a batch.

        Args:
            reading: outputs of the student's forward pass.
            batch: sequences, and the teacher's targets.
            method: form of `relation_loss`. None means the form that suits the size.
        """

    def losses(self, parts: Parts, shares: Mapping[Unit, float] | None = None) -> Losses:
        """Return parts with their weighted sum.

        Args:
            parts: parts of the loss of a batch.
            shares: share of the step's tokens, sequences, ... that the batch has; each part is multiplied by
                the share of its unit. None means that the batch has all of them.
        """
        units: dict[str, Unit] = {name: self.units.get(name, "tokens") for name in parts}
        if shares is not None:
            parts = {name: part * shares[units[name]] for name, part in parts.items()}
        total = torch.stack([part * self.weights.get(name, 1.0) for name, part in parts.items()]).sum()
        return Losses(total, parts, units)

    def total_of(self, parts: Mapping[str, float]) -> float:
        """Return the weighted sum of parts."""
        return sum(value * self.weights.get(name, 1.0) for name, value in parts.items())


class ObjectiveKind(ABC):
    """One kind of objective: what it needs of a cache, and how it is built for a student."""

    @staticmethod
    def of(config: ObjectiveConfig) -> "ObjectiveKind":
        """Return the kind that settings name."""
        kind = resolve_name(config.spec.kind)()
        assert isinstance(kind, ObjectiveKind)
        return kind

    @abstractmethod
    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return what the cache must serve for it.

        Raises:
            InvalidConfigError: the cache cannot serve it.
        """

    def check_shape(self, config: ObjectiveConfig, student: ModelSizes, teacher: ModelSizes) -> None:
        """Raise InvalidConfigError for a student whose layers its layer map does not lead to."""
        if config.layer_map != "last":
            map_layers(config.layer_map, student.num_layers, teacher.num_layers)

    @abstractmethod
    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> StudentObjective:
        """Return the objective of a student whose shape was checked."""


def check_shape(config: ObjectiveConfig, student: ModelSizes, teacher: ModelSizes) -> None:
    """Raise InvalidConfigError for a student whose depth or width does not fit its teacher's.

    Args:
        config: settings of one objective, or of several at once.
        student: sizes of the student.
        teacher: sizes of the teacher, which need not have been dumped.
    """
    for each in config.each:
        ObjectiveKind.of(each).check_shape(each, student, teacher)


def token_mse(
    student: Float[Tensor, "batch length width"],
    teacher: Float[Tensor, "batch length width"],
    valid: Bool[Tensor, "batch length"],
) -> Float[Tensor, ""]:
    """Return the mean squared error over valid tokens and dimensions, float32."""
    with torch.autocast(student.device.type, enabled=False):
        squares = (student.float() - teacher.float()).square().mean(-1)
        return (squares * valid).sum() / valid.sum()


def same_width(what: str, student: ModelSizes, teacher: ModelSizes) -> None:
    """Raise InvalidConfigError for a student whose hidden states have another width than the teacher's."""
    if student.hidden_size != teacher.hidden_size:
        raise InvalidConfigError(
            f"--objective {what} compares hidden states as they are, and the student's width "
            f"{student.hidden_size} is not the teacher's {teacher.hidden_size}. Take students of that width, "
            "or hidden-mse or tinybert, which learn a projection."
        )


_MAPS_OF_TWO_LAYERS: Final = ("last-two", "first-last")


class LayerPair(NamedTuple):
    """A layer of a student, and the layer of the teacher that it learns from."""

    teacher: int
    """Layer of the teacher, counted from 0."""
    student: int
    """Layer of the student, counted from 0."""


def map_layers(layer_map: LayerMap, num_layers: int, num_teacher_layers: int) -> list[LayerPair]:
    """Return pairs of layers, ascending.

    `last`: the last of both (MiniLM's own). `last-two`, `first-last`: MiniLM's table 8. `all`: layer m of M
    learns from the teacher's layer m N / M of N, rounded, as TinyBERT maps them (Jiao et al. 2020, arXiv
    1909.10351, section 3.1); MiniLM's table 7. `top`, `bottom`: from the teacher's last, or first, M layers
    (TinyBERT, table 4).

    Raises:
        InvalidConfigError: the student has fewer layers than the map, or more than the teacher.
    """
    least = 2 if layer_map in _MAPS_OF_TWO_LAYERS else 1
    if not least <= num_layers <= num_teacher_layers:
        raise InvalidConfigError(
            f"--layer-map {layer_map} is for students of {least} to {num_teacher_layers} layers, and a "
            f"student has {num_layers}. Take another map or other shapes."
        )
    last = LayerPair(num_teacher_layers - 1, num_layers - 1)
    if layer_map == "last":
        return [last]
    if layer_map == "last-two":
        return [LayerPair(last.teacher - 1, last.student - 1), last]
    if layer_map == "first-last":
        return [LayerPair(0, 0), last]
    if layer_map == "top":
        return [LayerPair(num_teacher_layers - num_layers + layer, layer) for layer in range(num_layers)]
    if layer_map == "bottom":
        return [LayerPair(layer, layer) for layer in range(num_layers)]
    rounded = [math.floor((layer + 1) * num_teacher_layers / num_layers + 0.5) for layer in range(num_layers)]
    return [LayerPair(teacher - 1, student) for student, teacher in enumerate(rounded)]


def pairs_of(request: ObjectiveRequest, num_layers: int) -> list[LayerPair]:
    """Return the pairs of layers of a student with `num_layers` layers, ascending.

    Raises:
        InvalidConfigError: the student does not fit the map.
    """
    config, cache = request.config, request.cache
    if config.layer_map != "last":
        return map_layers(config.layer_map, num_layers, request.teacher.num_layers)
    layer = cache.manifest.identity.last_layer if config.teacher_layer is None else config.teacher_layer
    return [LayerPair(layer, num_layers - 1)]


def mapped_layers(request: ObjectiveRequest) -> tuple[int, ...]:
    """Return the teacher's layers that the students of a run learn from, ascending.

    Raises:
        InvalidConfigError: a student does not fit the map.
    """
    depths = {num_layers_of(arch) for arch in request.arch}
    return tuple(sorted({pair.teacher for depth in depths for pair in pairs_of(request, depth)}))
