"""`embedding`: the teacher's vector of each sequence."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minilm_cache.models.pooling import SentencePooler, projection_to
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import (
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
)
from minilm_cache.objectives.batch import StudentBatch, Unit, WantedTargets
from minilm_cache.objectives.config import ObjectiveConfig, shorter_widths
from minilm_cache.objectives.several import cosine_spread, first_vectors
from minilm_cache.relations.loss import Method
from minilm_cache.storage_schema.states import POOLED, Pooling

_RIDGE = 1e-3
"""Ridge of the fit of a linear map, relative to the mean square of the student's dimensions."""
COSINE, MSE, SIMILARITY = "cosine", "mse", "similarity"
CENTRED, NEIGHBOURS = "centred", "neighbours"
_NUM_REFERENCES = 2048
"""Training texts whose vectors say where the teacher's lie, and that are the neighbours of others."""
_LEAST_TEMPERATURE = 1e-3
_SPREAD = 1 / 3
"""Default temperature of `neighbours`, relative to the standard deviation of the teacher's cosines."""


class EmbeddingObjective(StudentObjective):
    """Compares pooled vectors of a student with the teacher's, in one or several ways.

    - `cosine`: 1 less the cosine of both vectors of a sequence.
    - `mse`: their squared difference, mean over dimensions (Reimers and Gurevych 2020, arXiv 2004.09813).
    - `similarity`: squared difference of the cosines of the batch's sequences with each other, mean over
      pairs (after Tung and Mori 2019, arXiv 1907.09682, who compare products of activations).
    - `centred`: the cosine of both after the mean of the teacher's vectors is taken from them. Some teachers'
      vectors crowd together, so that their cosines say little else than this mean.
    - `neighbours`: KL(teacher || student), nats, of the distributions over 2,048 of the cache's texts that
      the softmax of the cosines with their vectors gives, divided by a temperature (after Fang et al. 2021,
      arXiv 2101.04731, equation 5, with the cache for a queue).

    A student of another width than the vectors learns a linear map to them, which is saved with it. Each
    shorter width of `matryoshka` adds `similarity` of the first so many dimensions with the teacher's whole
    vectors (Kusupati et al. 2022, arXiv 2205.13147, for the idea).
    """

    def __init__(
        self,
        pooling: Pooling,
        hidden_size: int,
        num_layers: int,
        *,
        losses: Mapping[str, float],
        widths: Sequence[int],
        references: Float[Tensor, "texts width"] | None = None,
        temperature: float | None = None,
        has_several: bool = False,
    ) -> None:
        """Compare vectors.

        Args:
            pooling: how the teacher pools.
            hidden_size: width of the student's hidden states.
            num_layers: layers of the student.
            losses: weight of each comparison, by its name.
            widths: shorter widths whose first dimensions are to be vectors, too.
            references: the teacher's vectors of some texts, which `centred` and `neighbours` need. None means
                that neither is compared.
            temperature: what `neighbours` divides cosines by. None means a third of their standard deviation
                over pairs of references.
            has_several: whether the vectors are those of several teachers, side by side.
        """
        super().__init__()
        self._references: Tensor
        self._mean: Tensor
        self.pooler = SentencePooler(
            pooling.mode,
            projection_to(pooling.width, hidden_size, bias=not has_several),
            normalize=pooling.normalize,
        )
        self.needs = StudentNeeds(hidden=(num_layers,))
        self._last, self._losses, self._widths = num_layers, tuple(losses), tuple(widths)
        self._has_several = has_several
        if references is not None:
            unit = F.normalize(references.float(), dim=-1)
            self._temperature = temperature or max(cosine_spread(unit) * _SPREAD, _LEAST_TEMPERATURE)
            self.register_buffer("_references", unit, persistent=False)
            self.register_buffer("_mean", references.float().mean(0), persistent=False)
        shorter = {self._shorter(width): losses.get(SIMILARITY, 1.0) for width in widths}
        self.weights = {**losses, **shorter}
        self.units: Mapping[str, Unit] = MappingProxyType(dict.fromkeys(self.weights, "sequences"))

    @property
    def compares_texts(self) -> bool:
        """Whether only similarities are compared."""
        return self._losses == (SIMILARITY,)

    @property
    def is_fitted(self) -> bool:
        """Whether there is a linear map to the teacher's width, which begins with a least squares fit."""
        return bool(self.pooler.dense)

    @torch.no_grad()
    def fit(self, outputs: Iterable[tuple[Reading, StudentBatch]]) -> None:
        """Fit the linear map to the teacher's vectors by least squares, with a small ridge."""
        pairs = []
        for reading, batch in outputs:
            pooled = self.pooler.pool(reading.hidden[self._last].float(), batch.inputs.lengths)
            # The next forward pass overwrites what a GPU's replayed graph gave, so that is copied here.
            pairs.append((pooled.cpu(), batch.signals[POOLED].cpu()))
        pooled, targets = (torch.cat(rows).double() for rows in zip(*pairs, strict=True))
        (layer,) = self.pooler.dense
        has_bias = layer.linear.bias is not None
        mean, target_mean = pooled.mean(0) * has_bias, targets.mean(0) * has_bias
        centred = pooled - mean
        covariance = centred.T @ centred
        # Untrained students may give nearly the same vector to all texts: a ridge by variance would make
        # weights so large that the first steps throw the student off.
        ridge = _RIDGE * pooled.square().sum() / len(covariance) * torch.eye(len(covariance)).to(covariance)
        weight = torch.linalg.solve(covariance + ridge, centred.T @ (targets - target_mean)).T
        layer.linear.weight.copy_(weight)
        if has_bias:
            layer.linear.bias.copy_(target_mean - weight @ mean)

    def _neighbours(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return KL(teacher || student) of the distributions over the references, mean over texts, nats."""
        theirs, mine = (
            torch.log_softmax(F.normalize(vectors, dim=-1) @ self._references.T / self._temperature, -1)
            for vectors in (teacher, student)
        )
        return F.kl_div(mine, theirs, reduction="batchmean", log_target=True)

    @property
    def sentence_pooler(self) -> SentencePooler:
        """What makes one vector of a student's hidden states.

        Vectors of several teachers side by side are turned to as few dimensions as the student's own states
        have, which keeps their products: they are no teacher's vectors, so nothing else needs their width.
        """
        return self.pooler.turned() if self._has_several else self.pooler

    @staticmethod
    def _shorter(width: int) -> str:
        return f"{SIMILARITY} of {width}"

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        """Return the loss; parts have the names of the comparisons, and are means over sequences."""
        del method
        with torch.autocast(batch.inputs.ids.device.type, enabled=False):
            student = self.pooler(reading.hidden[self._last], batch.inputs.lengths)
            teacher = batch.signals[POOLED].float()
            parts: dict[str, Tensor] = {}
            if COSINE in self._losses:
                parts[COSINE] = 1 - F.cosine_similarity(student, teacher, dim=-1).mean()
            if MSE in self._losses:
                parts[MSE] = (student - teacher).square().mean()
            if SIMILARITY in self._losses:
                parts[SIMILARITY] = similarity_difference(student, teacher)
            if CENTRED in self._losses:
                parts[CENTRED] = (
                    1 - F.cosine_similarity(student - self._mean, teacher - self._mean, dim=-1).mean()
                )
            if NEIGHBOURS in self._losses:
                parts[NEIGHBOURS] = self._neighbours(student, teacher)
            for width in self._widths:
                parts[self._shorter(width)] = similarity_difference(student[:, :width], teacher)
        return parts


def reference_vectors(request: ObjectiveRequest) -> Float[Tensor, "texts width"]:
    """Return the teachers' vectors of the first training texts of a cache, 2,048 at most.

    Raises:
        CacheCorruptError: its first shards are damaged.
    """
    vectors = first_vectors(request.cache, _NUM_REFERENCES)
    if request.others is None:
        return vectors
    return request.others.joined(vectors, request.others.of(np.arange(len(vectors))))


def similarity_difference(
    student: Float[Tensor, "batch width"], teacher: Float[Tensor, "batch other_width"]
) -> Float[Tensor, ""]:
    """Return the squared difference of the cosines of all pairs of rows, mean over pairs; 0 for one row."""
    differences = _cosines(student) - _cosines(teacher)
    pairs = max(1, len(differences) * (len(differences) - 1))
    return differences.fill_diagonal_(0).square().sum() / pairs


def _cosines(vectors: Tensor) -> Tensor:
    unit = F.normalize(vectors, dim=-1)
    return unit @ unit.T


class Embedding(ObjectiveKind):
    """One vector of each sequence."""

    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        """Return the pooled vectors."""
        pooled = request.cache.manifest.identity.pooled
        if pooled is not None:
            shorter_widths(request.config, pooled.width)
        return WantedTargets(kinds=(), signals=(POOLED,), others=request.others)

    def build(
        self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts
    ) -> EmbeddingObjective:
        """Return the objective of a student of any width."""
        del wanted
        losses, pooled = _weights(request.config), request.cache.manifest.identity.pooled
        assert pooled is not None, "checked before"
        pooling = pooled
        if request.others is not None:
            width = pooling.width + request.others.width
            pooling = pooling.model_copy(update={"width": width, "normalize": True})
        return EmbeddingObjective(
            pooling,
            student.hidden_size,
            student.num_layers,
            losses=losses,
            widths=shorter_widths(request.config, pooled.width),
            references=reference_vectors(request) if {CENTRED, NEIGHBOURS} & losses.keys() else None,
            temperature=request.config.temperature,
            has_several=request.others is not None,
        )


def _weights(config: ObjectiveConfig) -> dict[str, float]:
    """Return the weight of each comparison."""
    given = [text.partition("=") for text in config.loss or (COSINE,)]
    return {name: float(weight or 1) for name, _, weight in given}
