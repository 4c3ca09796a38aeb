"""Cuts the heads of a layer: products of queries and keys, and values, to fewer dimensions."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.slicing.solve import low_rank


class HeadMaps(NamedTuple):
    """Linear maps of all heads of a layer, side by side; a bias is the last row."""

    query: Float[Tensor, "inputs _"]
    key: Float[Tensor, "inputs _"]
    value: Float[Tensor, "inputs _"]
    output: Float[Tensor, "_ hidden"]
    """From the heads' contexts to the hidden size, without a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCut:
    """What heads are cut to."""

    num_teacher_heads: int
    num_heads: int
    size: int
    """Dimensions of each of the student's heads."""
    is_rotary: bool
    keeps_values: bool

    def cut(self, maps: HeadMaps, moment: Float[Tensor, "inputs inputs"]) -> HeadMaps:
        """Return the maps of the student's heads.

        Fewer heads than the teacher's: those that add most to the residual stream. More heads: each of the
        teacher's heads becomes several, which share its values among them.

        Args:
            maps: maps from the student's states to the teacher's queries, keys and values, and from the
                teacher's contexts to the student's hidden size.
            moment: second moment of the student's states, float64.
        """
        parts = [part.tensor_split(self.num_teacher_heads, 1) for part in (maps.query, maps.key, maps.value)]
        outputs = maps.output.tensor_split(self.num_teacher_heads)
        heads = [
            HeadMaps(query, key, value, output)
            for query, key, value, output in zip(*parts, outputs, strict=True)
        ]
        powers = torch.stack([_power(head, moment) for head in heads])
        chosen = powers.topk(min(self.num_heads, len(heads))).indices.sort().values.tolist()
        cuts = [
            self._head(heads[chosen[number % len(chosen)]], moment, copy=number // len(chosen))
            for number in range(self.num_heads)
        ]
        query, key, value = (torch.cat(parts, 1) for parts in list(zip(*cuts, strict=True))[:3])
        return HeadMaps(query, key, value, torch.cat([cut.output for cut in cuts]))

    def _head(self, head: HeadMaps, moment: Tensor, *, copy: int) -> HeadMaps:
        """Return one head cut to the student's size, padded with zeros where the teacher's is smaller."""
        teacher_size = head.query.shape[1]
        if teacher_size == self.size and not copy:
            return head
        # Scores are divided by the root of the head's size, so smaller heads need smaller products.
        scale = (self.size / teacher_size) ** 0.25
        if self.is_rotary:
            taken, places = rotary_dimensions(teacher_size, self.size)
            query, key = (part.new_zeros(len(part), self.size) for part in (head.query, head.key))
            query[:, places], key[:, places] = head.query[:, taken], head.key[:, taken]
        else:
            rank = min(self.size, teacher_size)
            query, key = low_rank(head.query, head.key, moment=moment, rank=rank)
        directions = self._value_directions(head, moment)
        start = copy * self.size % directions.shape[1]
        directions = directions[:, start : start + self.size]
        return HeadMaps(
            _padded(query * scale, self.size),
            _padded(key * scale, self.size),
            _padded(head.value @ directions * scale, self.size),
            _padded((directions.T @ head.output / scale).T, self.size).T,
        )

    def _value_directions(self, head: HeadMaps, moment: Tensor) -> Float[Tensor, "size size"]:
        """Return orthonormal directions of a head's values, the strongest first.

        Values keep their lengths and angles in them, so that value relations, softmax(VV^T/sqrt(d)), stay
        close.
        """
        values = head.value.double()
        power = values.T @ moment @ values
        if not self.keeps_values:  # weighted with what the output projection makes of them
            output = head.output.double()
            root = torch.linalg.cholesky(output @ output.T + 1e-9 * torch.eye(len(output)))
            _, vectors = torch.linalg.eigh(root.T @ power @ root)
            vectors, _ = torch.linalg.qr(root @ vectors.flip(1))
        else:
            _, vectors = torch.linalg.eigh(power)
            vectors = vectors.flip(1)
        directions: Tensor = vectors.to(head.value.dtype)
        return directions


def _power(head: HeadMaps, moment: Tensor) -> Tensor:
    """Return how much a head adds to the residual stream where it gathers one token's values."""
    added = (head.value @ head.output).double()
    return torch.einsum("ih,ij,jh->", added, moment, added)


def _padded(columns: Tensor, size: int) -> Tensor:
    missing = size - columns.shape[1]
    return torch.nn.functional.pad(columns, (0, missing)) if missing else columns


def rotary_dimensions(teacher_size: int, size: int) -> tuple[Int[Tensor, " kept"], Int[Tensor, " kept"]]:
    """Return dimensions of a teacher's head, and those of a student's head that turn by the same angles.

    Dimension i turns with i + size/2 by an angle that falls with i/size (RoFormer, arXiv 2104.09864, eq. 15),
    so a pair can only stand for a pair of the same or nearly the same angle.
    """
    theirs, own = teacher_size // 2, size // 2
    number = torch.arange(min(theirs, own))
    taken, places = number * max(theirs, own) // own, number * max(theirs, own) // theirs
    return torch.cat([taken, taken + theirs]), torch.cat([places, places + own])
