"""How well a student's relations agree with a teacher's: by head, by position, and by length of the text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.models.padding import pad
from minilm_cache.models.tap import TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import TeacherSignal, key_mask, split_heads
from minilm_cache.report.compare import load_student
from minilm_cache.report.similarity import held_out_ids
from minilm_cache.storage_schema.identity import RelationKind

KINDS: Final = (RelationKind.ATTENTION, RelationKind.VALUE)
NUM_POSITIONS: Final = 8
"""Parts of equal size that a sequence is divided into."""
_SHORTEST: Final = 8
_BATCH_SIZE: Final = 16


_OF_SPLIT_HEADS: Final = (RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE)


@dataclass(frozen=True, slots=True)
class Probe:
    """Means over rows of relations on held-out text."""

    kl: float
    """KL(teacher || student), nats."""
    same: float
    """Share of rows whose likeliest column is the teacher's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationAgreement:
    """One relation of a student beside the teacher's."""

    student: str
    kind: RelationKind
    heads: list[Probe]
    positions: list[Probe]
    """Of rows by where they are in their sequence, from its first eighth to its last."""
    lengths: Mapping[int, Probe]
    """Of sequences cut to so many tokens, whole ones at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A student whose relations are probed."""

    name: str
    folder: Path
    relation_heads: int | None
    """That both sides' vectors are split into anew (MiniLMv2, arXiv 2012.15828); none: their own heads."""
    layer: int | None
    """Of the teacher that it is compared with, counted from 0; none: the last that the cache has."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Every row of one relation: KL and whether the likeliest column is the same, `(rows, heads)`."""

    kl: Float[Tensor, "rows heads"]
    same: Float[Tensor, "rows heads"]
    position: Float[Tensor, " rows"]
    """Between 0 and 1."""

    def probe(self, chosen: Tensor | slice = slice(None)) -> Probe:
        return Probe(float(self.kl[chosen].mean()), float(self.same[chosen].mean()))


def relation_agreement(cache: Cache, teacher: Teacher, students: Sequence[Probed]) -> list[RelationAgreement]:
    """Compare attention distributions and value relations of students with a teacher's, on held-out text.

    Where vectors are split into other heads than the attention's, there is no attention distribution of these
    heads: query, key and value relations are compared instead, which is what such students learned. Students
    with other heads than the teacher, whose relations are not split anew, are left out.

    Args:
        cache: whose held-out sequences are read, up to 4,096 tokens.
        teacher: of that cache.
        students: their last layers are looked at.

    Raises:
        TeacherError: a folder holds no student.
    """
    ids = held_out_ids(cache)
    if not ids:
        return []
    found: list[RelationAgreement] = []
    for one in students:
        student = load_student(one.folder, teacher.device)
        if one.relation_heads is None and _num_heads(student) != cache.manifest.identity.relation_heads:
            continue
        teacher.tap((cache.manifest.identity.layers[-1] if one.layer is None else one.layer,))
        found += _agreement(one, student, teacher=teacher, ids=ids)
    return found


def _kinds(relation_heads: int | None) -> tuple[RelationKind, ...]:
    """Return the relations that are compared, given the heads that vectors are split into anew."""
    return KINDS if relation_heads is None else _OF_SPLIT_HEADS


def _num_heads(student: TappedModel) -> int:
    return int(student.model.config.num_attention_heads)


def _agreement(
    one: Probed, student: TappedModel, *, teacher: Teacher, ids: Sequence[Int[Tensor, " _"]]
) -> Iterator[RelationAgreement]:
    longest = max(map(len, ids))
    cuts = [_SHORTEST * 2**power for power in range(longest.bit_length()) if _SHORTEST * 2**power < longest]
    by_length = {
        cut: _rows(student, teacher, ids=_cut(ids, cut), relation_heads=one.relation_heads)
        for cut in [*cuts, longest]
    }
    for kind in _kinds(one.relation_heads):
        whole = by_length[longest][kind]
        part = (whole.position * NUM_POSITIONS).long().clamp(max=NUM_POSITIONS - 1)
        yield RelationAgreement(
            student=one.name,
            kind=kind,
            heads=[
                Probe(float(kl), float(same))
                for kl, same in zip(whole.kl.mean(0), whole.same.mean(0), strict=True)
            ],
            positions=[whole.probe(part == number) for number in range(NUM_POSITIONS)],
            lengths={cut: rows[kind].probe() for cut, rows in by_length.items()},
        )


def _cut(ids: Sequence[Int[Tensor, " _"]], length: int) -> list[Tensor]:
    """Return sequences of at most so many tokens; the last one of each stays its last: it ends a text."""
    return [one if len(one) <= length else torch.cat([one[: length - 1], one[-1:]]) for one in ids]


@torch.no_grad()
def _rows(
    student: TappedModel, teacher: Teacher, *, ids: Sequence[Tensor], relation_heads: int | None
) -> dict[RelationKind, _Rows]:
    parts: dict[RelationKind, list[tuple[Tensor, ...]]] = {kind: [] for kind in _kinds(relation_heads)}
    for first in range(0, len(ids), _BATCH_SIZE):
        padded, lengths = pad(list(ids[first : first + _BATCH_SIZE]), 0)
        padded, lengths = padded.to(teacher.device), lengths.to(teacher.device)
        valid = key_mask(lengths, padded.shape[1])
        (expected,) = teacher.signals(padded, lengths)
        (vectors,) = student(padded, valid.to(torch.int64)).vectors
        found = TeacherSignal(vectors, lengths)
        if relation_heads is not None:
            expected = TeacherSignal(split_heads(expected.vectors, relation_heads), lengths)
            found = TeacherSignal(split_heads(vectors, relation_heads), lengths)
        position = torch.arange(padded.shape[1], device=lengths.device) / lengths[:, None]
        for kind, own_parts in parts.items():
            true, own = expected.probs(kind), found.probs(kind)
            tiny = torch.finfo(own.dtype).tiny
            kl = (torch.xlogy(true, true) - torch.xlogy(true, own.clamp(min=tiny))).sum(-1)
            same = (true.argmax(-1) == own.argmax(-1)).to(kl.dtype)
            rows = [part.transpose(1, 2)[valid].cpu() for part in (kl, same)]
            own_parts.append((*rows, position[valid].cpu()))
    return {kind: _Rows(*map(torch.cat, zip(*some, strict=True))) for kind, some in parts.items()}
