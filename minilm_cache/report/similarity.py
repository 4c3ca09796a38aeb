"""The figures of papers: linear CKA and SVCCA of layers, and how far relations agree."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import load_model
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import LayerRelations, split_heads
from minilm_cache.report.compare import load_student
from minilm_cache.storage_schema.identity import PairTemplate, RelationKind

Features = npt.NDArray[np.float64]
"""States of one layer, `(tokens, width)`, or one value for each pair of layers, `(left, right)`; float64."""

MAX_TOKENS: Final = 4096
"""Held-out tokens after which no further sequence is read."""
_BATCH_SIZE: Final = 16
_VARIANCE_KEPT: Final = 0.99
"""Share of the variance that the first step of SVCCA, the singular value decomposition, keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSimilarity:
    """Similarity of a student's layers to the teacher's, between 0 and 1.

    Layer 0 is the output of the embedding.
    """

    student: str
    num_tokens: int
    cka: Features
    """Linear CKA, `(teacher layers + 1, student layers + 1)`."""
    svcca: Features
    """Mean canonical correlation, `(teacher layers + 1, student layers + 1)`."""


def linear_cka(left: Sequence[Features], right: Sequence[Features]) -> Features:
    """Return linear centred kernel alignment of each left layer with each right one, `(left, right)`.

    Kornblith et al. 2019, arXiv 1905.00414, section 3: |Y^T X|^2 / (|X^T X| |Y^T Y|), columns centred.
    """
    left, right = [x - x.mean(0) for x in left], [y - y.mean(0) for y in right]
    left_norms, right_norms = ([float(np.linalg.norm(x.T @ x)) for x in side] for side in (left, right))
    cross = [[float(np.linalg.norm(y.T @ x) ** 2) for y in right] for x in left]
    aligned: Features = np.asarray(cross) / np.outer(left_norms, right_norms)
    return aligned


def svcca(left: Sequence[Features], right: Sequence[Features]) -> Features:
    """Return the mean canonical correlation of each left layer with each right one, `(left, right)`.

    Only the directions that hold 99 % of each side's variance are compared (Raghu et al. 2017, arXiv
    1706.05806, section 2). The result tends to 1 where there are few more tokens than directions.
    """
    left_bases, right_bases = ([_principal(layer) for layer in side] for side in (left, right))
    return np.asarray([[_mean_correlation(x, y) for y in right_bases] for x in left_bases])


def _mean_correlation(left: Features, right: Features) -> float:
    return float(np.clip(np.linalg.svd(left.T @ right, compute_uv=False), 0, 1).mean())


def _principal(features: Features) -> Features:
    """Return an orthonormal basis of the columns that hold 99 % of the variance."""
    basis, singular, _ = np.linalg.svd(features - features.mean(0), full_matrices=False)
    share = np.cumsum(singular**2) / np.sum(singular**2)
    return basis[:, : int(np.searchsorted(share, _VARIANCE_KEPT)) + 1]


def layer_similarity(
    cache: Cache, teacher: Teacher, students: Sequence[tuple[str, Path]]
) -> list[LayerSimilarity]:
    """Compare every layer of a teacher with every layer of students, on held-out sequences.

    Args:
        cache: cache whose held-out sequences are read, up to 4,096 tokens.
        teacher: teacher that the cache was dumped from.
        students: names and folders of the students.

    Raises:
        TeacherError: a folder holds no student.
    """
    ids, pair = held_out_ids(cache), cache.manifest.identity.packing.pair
    if not ids:
        return []
    size = teacher.at_once(_BATCH_SIZE)
    expected = _states(teacher.model, ids, size, device=teacher.device, pair=pair)
    similarities = []
    for name, folder in students:
        model = load_model(folder, attention="sdpa").eval().to(teacher.device)
        states = _states(model, ids, size, device=teacher.device, pair=pair)
        similarities.append(
            LayerSimilarity(
                student=name,
                num_tokens=sum(map(len, ids)),
                cka=linear_cka(expected, states),
                svcca=svcca(expected, states),
            )
        )
    return similarities


def held_out_ids(cache: Cache) -> list[torch.Tensor]:
    """Return token ids of held-out sequences until they hold at least 4,096 tokens, or of all of them."""
    sequences: list[torch.Tensor] = []
    for number in range(cache.manifest.num_train, cache.manifest.num_sequences):
        if sum(map(len, sequences)) >= MAX_TOKENS:
            break
        sequences.append(cache[number].input_ids)
    return sequences


@torch.no_grad()
def _states(
    model: PreTrainedModel,
    ids: Sequence[torch.Tensor],
    size: int,
    *,
    device: torch.device,
    pair: PairTemplate | None,
) -> list[Features]:
    """Return the states of every layer at all tokens that are not padding, `(tokens, width)` each."""
    layers: list[list[torch.Tensor]] = []
    for first in range(0, len(ids), size):
        inputs = Inputs.of(ids[first : first + size], 0).paired(pair).to(device)
        segments = {} if inputs.segments is None else {"token_type_ids": inputs.segments}
        states = model(
            input_ids=inputs.ids, attention_mask=inputs.mask, output_hidden_states=True, **segments
        ).hidden_states
        layers.append([state[inputs.valid].cpu() for state in states])
    return [torch.cat(parts).double().numpy() for parts in zip(*layers, strict=True)]


KINDS: Final = (RelationKind.ATTENTION, RelationKind.VALUE)
NUM_POSITIONS: Final = 8
"""Number of parts of equal size that a sequence is divided into."""
_SHORTEST: Final = 8
"""Tokens of the shortest cut of the sequences; each further cut is twice as long."""
_SPLIT_KINDS: Final = (RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE)
"""Relations that are compared where vectors are split into other heads than the attention's."""


@dataclass(frozen=True, slots=True)
class MeanAgreement:
    """Agreement of a student's relation with the teacher's, averaged over rows of held-out text."""

    kl: float
    """KL(teacher || student), nats."""
    same: float
    """Share of rows whose likeliest column is the same as the teacher's, between 0 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationAgreement:
    """How well one relation of a student agrees with the teacher's."""

    student: str
    kind: RelationKind
    heads: list[MeanAgreement]
    """Agreement of each relation head."""
    positions: list[MeanAgreement | None]
    """Agreement of rows by their position in the sequence, from its first eighth to its last. None means that
    sequences are so short that no row lies there."""
    lengths: Mapping[int, MeanAgreement]
    """Agreement on sequences cut to a number of tokens, by that number; the last entry is for whole ones."""

    @property
    def probes(self) -> dict[str, dict[int, MeanAgreement]]:
        """What was measured, by the place in the model or in the text that it was measured at."""
        eighths = {number: each for number, each in enumerate(self.positions, 1) if each is not None}
        return {
            "head": dict(enumerate(self.heads)),
            "eighth of the sequence": eighths,
            "tokens of the sequence": dict(self.lengths),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStudent:
    """A student whose relations are compared with the teacher's."""

    name: str
    folder: Path
    relation_heads: int | None
    """Number of relation heads that the vectors of both models are split into (MiniLMv2, arXiv 2012.15828).
    None means that both keep their attention heads."""
    layer: int | None
    """Layer of the teacher that it is compared with, from 0. None means the last layer in the cache."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one relation: KL, and whether the likeliest column is the same, `(rows, heads)`."""

    kl: Float[Tensor, "rows heads"]
    """KL(teacher || student), nats."""
    same: Float[Tensor, "rows heads"]
    """1 where the likeliest column is the same as the teacher's, else 0."""
    position: Float[Tensor, " rows"]
    """Position of the row in its sequence, between 0 and 1."""

    def mean(self, chosen: Tensor | slice = slice(None)) -> MeanAgreement:
        """Return the means over the chosen rows and all heads."""
        return MeanAgreement(float(self.kl[chosen].mean()), float(self.same[chosen].mean()))


def relation_agreement(
    cache: Cache, teacher: Teacher, students: Sequence[ComparedStudent]
) -> list[RelationAgreement]:
    """Compare attention distributions and value relations of students with a teacher's, on held-out text.

    Where vectors are split into other heads than the attention's, these heads have no attention distribution:
    query, key and value relations are compared instead, which is what such students learned. Students with
    another number of heads than the teacher, whose vectors are not split, are left out.

    Args:
        cache: cache whose held-out sequences are read, up to 4,096 tokens.
        teacher: teacher that the cache was dumped from.
        students: students whose last layers are compared.

    Raises:
        TeacherError: a folder holds no student.
    """
    ids = held_out_ids(cache)
    if not ids:
        return []
    agreements: list[RelationAgreement] = []
    for student in students:
        model = load_student(student.folder, teacher.device)
        heads = model.model.config.num_attention_heads
        if student.relation_heads is None and heads != cache.manifest.identity.relation_heads:
            continue
        layer = cache.manifest.identity.last_layer if student.layer is None else student.layer
        pair = cache.manifest.identity.packing.pair
        agreements += _agreement(student, model, teacher=teacher, layer=layer, ids=ids, pair=pair)
    return agreements


def _kinds(relation_heads: int | None) -> tuple[RelationKind, ...]:
    """Return the relations that are compared, given the number of heads that vectors are split into."""
    return KINDS if relation_heads is None else _SPLIT_KINDS


def _agreement(
    student: ComparedStudent,
    model: TappedModel,
    *,
    teacher: Teacher,
    layer: int,
    ids: Sequence[Int[Tensor, " _"]],
    pair: PairTemplate | None,
) -> Iterator[RelationAgreement]:
    longest, heads = max(map(len, ids)), student.relation_heads
    cuts = [_SHORTEST * 2**power for power in range(longest.bit_length()) if _SHORTEST * 2**power < longest]
    by_length = {
        cut: _rows(model, teacher, layer=layer, ids=_cut(ids, cut), relation_heads=heads, pair=pair)
        for cut in [*cuts, longest]
    }
    for kind in _kinds(student.relation_heads):
        whole = by_length[longest][kind]
        part = (whole.position * NUM_POSITIONS).long().clamp(max=NUM_POSITIONS - 1)
        yield RelationAgreement(
            student=student.name,
            kind=kind,
            heads=[
                MeanAgreement(float(kl), float(same))
                for kl, same in zip(whole.kl.mean(0), whole.same.mean(0), strict=True)
            ],
            positions=[
                whole.mean(part == number) if bool((part == number).any()) else None
                for number in range(NUM_POSITIONS)
            ],
            lengths={cut: rows[kind].mean() for cut, rows in by_length.items()},
        )


def _cut(ids: Sequence[Int[Tensor, " _"]], length: int) -> list[Tensor]:
    """Return sequences of at most `length` tokens that keep their last token, because it ends the text."""
    return [
        sequence if len(sequence) <= length else torch.cat([sequence[: length - 1], sequence[-1:]])
        for sequence in ids
    ]


@torch.no_grad()
def _rows(
    model: TappedModel,
    teacher: Teacher,
    *,
    layer: int,
    ids: Sequence[Tensor],
    relation_heads: int | None,
    pair: PairTemplate | None,
) -> dict[RelationKind, _Rows]:
    """Return the rows of every relation that is compared, of all sequences without their padding."""
    parts: dict[RelationKind, list[tuple[Tensor, ...]]] = {kind: [] for kind in _kinds(relation_heads)}
    size = teacher.at_once(_BATCH_SIZE)
    for first in range(0, len(ids), size):
        inputs = Inputs.of(ids[first : first + size], 0).paired(pair).to(teacher.device)
        lengths, valid = inputs.lengths, inputs.valid
        (expected,) = teacher.relations(inputs, (layer,))
        (vectors,) = model(inputs, Tap((model.num_layers - 1,))).vectors
        learned = LayerRelations(vectors, lengths)
        if relation_heads is not None:
            expected = LayerRelations(split_heads(expected.vectors, relation_heads), lengths)
            learned = LayerRelations(split_heads(vectors, relation_heads), lengths)
        position = torch.arange(valid.shape[1], device=lengths.device) / lengths[:, None]
        for kind, batches in parts.items():
            true, approximate = expected.probs(kind), learned.probs(kind)
            tiny = torch.finfo(approximate.dtype).tiny
            kl = (torch.xlogy(true, true) - torch.xlogy(true, approximate.clamp(min=tiny))).sum(-1)
            same = (true.argmax(-1) == approximate.argmax(-1)).to(kl.dtype)
            rows = [part.transpose(1, 2)[valid].cpu() for part in (kl, same)]
            batches.append((*rows, position[valid].cpu()))
    return {kind: _Rows(*map(torch.cat, zip(*batches, strict=True))) for kind, batches in parts.items()}
