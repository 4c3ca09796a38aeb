"""How well a student's relations agree with a teacher's: by head, by position, and by length of the text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import LayerRelations, split_heads
from minilm_cache.report.compare import load_student
from minilm_cache.report.similarity import held_out_ids
from minilm_cache.storage_schema.identity import RelationKind

KINDS: Final = (RelationKind.ATTENTION, RelationKind.VALUE)
NUM_POSITIONS: Final = 8
"""Number of parts of equal size that a sequence is divided into."""
_SHORTEST: Final = 8
"""Tokens of the shortest cut of the sequences; each further cut is twice as long."""
_BATCH_SIZE: Final = 16
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
    positions: list[MeanAgreement]
    """Agreement of rows by their position in the sequence, from its first eighth to its last."""
    lengths: Mapping[int, MeanAgreement]
    """Agreement on sequences cut to a number of tokens, by that number; the last entry is for whole ones."""


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
        if student.relation_heads is None and _num_heads(model) != cache.manifest.identity.relation_heads:
            continue
        layer = cache.manifest.identity.last_layer if student.layer is None else student.layer
        agreements += _agreement(student, model, teacher=teacher, layer=layer, ids=ids)
    return agreements


def _kinds(relation_heads: int | None) -> tuple[RelationKind, ...]:
    """Return the relations that are compared, given the number of heads that vectors are split into."""
    return KINDS if relation_heads is None else _SPLIT_KINDS


def _num_heads(student: TappedModel) -> int:
    return int(student.model.config.num_attention_heads)


def _agreement(
    student: ComparedStudent,
    model: TappedModel,
    *,
    teacher: Teacher,
    layer: int,
    ids: Sequence[Int[Tensor, " _"]],
) -> Iterator[RelationAgreement]:
    longest = max(map(len, ids))
    cuts = [_SHORTEST * 2**power for power in range(longest.bit_length()) if _SHORTEST * 2**power < longest]
    by_length = {
        cut: _rows(model, teacher, layer=layer, ids=_cut(ids, cut), relation_heads=student.relation_heads)
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
            positions=[whole.mean(part == number) for number in range(NUM_POSITIONS)],
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
    model: TappedModel, teacher: Teacher, *, layer: int, ids: Sequence[Tensor], relation_heads: int | None
) -> dict[RelationKind, _Rows]:
    """Return the rows of every relation that is compared, of all sequences without their padding."""
    parts: dict[RelationKind, list[tuple[Tensor, ...]]] = {kind: [] for kind in _kinds(relation_heads)}
    for first in range(0, len(ids), _BATCH_SIZE):
        inputs = Inputs.of(ids[first : first + _BATCH_SIZE], 0).to(teacher.device)
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
