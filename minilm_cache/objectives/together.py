"""Several objectives at once: the weighted sum of their losses on the same batches."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import tee
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    Losses,
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
)
from minilm_cache.objectives.batch import StudentBatch, Unit, WantedTargets
from minilm_cache.objectives.spec import OF_LABELS, OF_MASKS, parts_of, why_not_at_once
from minilm_cache.relations.loss import Method
from minilm_cache.storage_schema.states import LOGITS

_Value = TypeVar("_Value")


class _Part(NamedTuple):
    """One of the objectives."""

    name: str
    weight: float
    layers: tuple[int, ...]
    """Places of its layers of the teacher among those of all objectives."""
    needs_vectors: bool
    """Whether it compares the teacher's queries, keys and values."""


class Together(StudentObjective):
    """The weighted sum of several objectives. Parts of its loss are named like `minilm/attention`."""

    def __init__(self, parts: Sequence[_Part], objectives: Sequence[StudentObjective]) -> None:
        """Join objectives.

        Args:
            parts: name, weight and targets of each.
            objectives: the objectives, in the same order.

        Raises:
            InvalidConfigError: they need students of different kinds.
        """
        super().__init__()
        self._parts = tuple(parts)
        self._objectives = nn.ModuleList(objectives)
        self.needs = _joined_needs([(part.name, each.needs) for part, each in self._each()])
        poolers = [each.sentence_pooler for each in objectives if each.sentence_pooler is not None]
        ways = {(pooler.mode, pooler.normalize) for pooler in poolers}
        if len(poolers) > 1 and (len(ways) > 1 or any(pooler.dense for pooler in poolers)):
            raise InvalidConfigError(
                f"--objective {' and '.join(part.name for part in parts)}: a student makes one vector of a "
                "text, and two of them want different ones. Take one of them."
            )

    def _each(self) -> Iterator[tuple[_Part, StudentObjective]]:
        for part, objective in zip(self._parts, self._objectives, strict=True):
            assert isinstance(objective, StudentObjective)
            yield part, objective

    @property
    def is_fitted(self) -> bool:
        """Whether one of them has weights of its own that begin with a fit."""
        return any(objective.is_fitted for _, objective in self._each())

    def fit(self, outputs: Iterable[tuple[Reading, StudentBatch]]) -> None:
        """Fit the weights of those that are fitted; arguments as for the base."""
        fitted = [(part, objective) for part, objective in self._each() if objective.is_fitted]
        for (part, objective), found in zip(fitted, tee(outputs, len(fitted)), strict=True):
            objective.fit(self._own(part, objective, output) for output in found)

    @property
    def sentence_pooler(self) -> SentencePooler | None:
        """What makes one vector of a student's hidden states, where an objective is about vectors."""
        return next((each.sentence_pooler for _, each in self._each() if each.sentence_pooler), None)

    @property
    def similarity(self) -> Literal["dot"] | None:
        """What compares these vectors; same as for the base."""
        return next((each.similarity for _, each in self._each() if each.similarity), None)

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the parts of all losses."""
        parts = dict[str, Tensor]()
        for part, objective in self._each():
            own, targets = self._own(part, objective, (reading, batch))
            losses = objective(own, targets, method)
            parts |= {f"{part.name}/{name}": value for name, value in losses.items()}
        return parts

    def losses(self, parts: Parts, shares: Mapping[Unit, float] | None = None) -> Losses:
        """Return parts with the weighted sum of the objectives' own sums; arguments as for the base."""
        totals, values, units = [], dict[str, Tensor](), dict[str, Unit]()
        for part, objective in self._each():
            found = objective.losses(_named(parts, part.name), shares)
            totals.append(part.weight * found.total)
            values |= {f"{part.name}/{name}": value for name, value in found.parts.items()}
            units |= {f"{part.name}/{name}": unit for name, unit in found.units.items()}
        return Losses(torch.stack(totals).sum(), values, units)

    def total_of(self, parts: Mapping[str, float]) -> float:
        """Return the weighted sum of the objectives' own sums."""
        each = self._each()
        return math.fsum(part.weight * mine.total_of(_named(parts, part.name)) for part, mine in each)

    def _own(
        self, part: _Part, objective: StudentObjective, output: tuple[Reading, StudentBatch]
    ) -> tuple[Reading, StudentBatch]:
        """Return what one of the objectives would see alone."""
        reading, batch = output
        layers = [self.needs.layers.index(layer) for layer in objective.needs.layers]
        own = Reading(
            vectors=[reading.vectors[place] for place in layers],
            hidden=reading.hidden,
            logits=None if objective.needs.head is None else reading.logits,
        )
        vectors = tuple(batch.vectors[place] for place in part.layers) if part.needs_vectors else ()
        targets = tuple(batch.targets[place] for place in part.layers if batch.targets)
        return own, replace(batch, targets=targets, vectors=vectors)


class TogetherKind(ObjectiveKind):
    """Objectives whose names are joined with + and have weights, like `minilm+embedding=0.5`."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return what any of them needs.

        Raises:
            InvalidConfigError: the cache cannot serve one of them, or they cannot be learned at once.
        """
        wanted = self._each_wanted(request)
        heads = {each.relation_heads for each in wanted if each.kinds}
        if len({each.apart for each in wanted}) > 1 or len(heads) > 1:
            what = "read pairs of texts in different ways" if len(heads) <= 1 else "compare different heads"
            raise InvalidConfigError(
                f"--objective {request.config.objective}: they {what}, so they cannot be learned at once. "
                "Take one after the other: --first."
            )
        if any(each.labels for each in wanted) and any(
            LOGITS in each.signals and each.labels is None for each in wanted
        ):
            raise InvalidConfigError(
                f"--objective {request.config.objective}: not all of them learn labels with the answers. "
                "Take one after the other (--first), or leave out --own-labels."
            )
        return WantedTargets(
            kinds=tuple(dict.fromkeys(kind for each in wanted for kind in each.kinds)),
            relation_heads=next(iter(heads), None),
            layers=tuple(sorted({layer for each in wanted for layer in each.layers})),
            vectors=any(each.vectors for each in wanted),
            signals=tuple(dict.fromkeys(name for each in wanted for name in each.signals)),
            queries=any(each.queries for each in wanted),
            groups=any(each.groups for each in wanted),
            apart=any(each.apart for each in wanted),
            others=next((each.others for each in wanted if each.others is not None), None),
            labels=next((each.labels for each in wanted if each.labels is not None), None),
        )

    def build(self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts) -> Together:
        """Return the objectives of a student, joined."""
        weights = parts_of(request.config.objective)
        parts, objectives = [], []
        for each, own in zip(_requests(request), self._each_wanted(request), strict=True):
            name = each.config.objective
            places = tuple(wanted.layers.index(layer) for layer in own.layers)
            parts.append(_Part(name, weights[name], places, own.vectors))
            objectives.append(ObjectiveKind.of(each.config).build(each, own, student))
        return Together(parts, objectives)

    @staticmethod
    def _each_wanted(request: ObjectiveRequest) -> list[WantedTargets]:
        return [ObjectiveKind.of(each.config).wanted(each) for each in _requests(request)]


def _requests(request: ObjectiveRequest) -> list[ObjectiveRequest]:
    return [replace(request, config=config) for config in request.config.each]


def _named(parts: Mapping[str, _Value], name: str) -> dict[str, _Value]:
    """Return the parts of one objective, by its own names."""
    return {key.removeprefix(f"{name}/"): value for key, value in parts.items() if key.startswith(f"{name}/")}


def _joined_needs(each: Sequence[tuple[str, StudentNeeds]]) -> StudentNeeds:
    """Return what a student must give for all objectives.

    Raises:
        InvalidConfigError: some need another head than others, or masked text.
    """
    needs = [need for _, need in each]
    heads = {need.head for need in needs} - {None}
    differing: Mapping[str, Collection[object]] = {
        OF_MASKS: {need.is_masked for need in needs},
        OF_LABELS: {need.all_labels for need in needs if need.head == "tokens"},
        "a student has one head, for tokens or for whole texts": heads,
    }
    if (why := why_not_at_once("+".join(name for name, _ in each), differing)) is not None:
        raise InvalidConfigError(why)
    return StudentNeeds(
        layers=tuple(sorted({layer for need in needs for layer in need.layers})),
        hidden=tuple(sorted({state for need in needs for state in need.hidden})),
        head=next(iter(heads), None),
        is_masked=needs[0].is_masked,
        all_labels=any(need.all_labels for need in needs),
    )
