"""Codec `vectors`: queries, keys and values in a few dozen bytes per token; relations are computed from them.

The queries, keys and values of a layer are affine in its input, so side by side they lie in a subspace of its
width (rotary positions widen it). Principal components project them to that subspace, weighted by what
an error costs in KL (`fit_vectors.py`), rounded with one step, and entropy-coded component by component
(`transform.py`). Decoding is one matrix product: vectors = mean + (codes * step) @ basis. Error bound: none
for a row; the mean KLs of attention and value relation are in the manifest (`calibration`,
`measured.fidelity`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor

from minilm_cache.codecs.base import Rows
from minilm_cache.codecs.transform import TransformCode, refuse_codes
from minilm_cache.relations.rows import RowTargets, VectorRows, WantedRelations
from minilm_cache.relations.scores import LayerRelations, Vectors, split_heads
from minilm_cache.storage_schema.arrays import codes_path
from minilm_cache.storage_schema.identity import RelationKind


def concatenate(vectors: Vectors) -> Float[Tensor, "batch length width"]:
    """Return queries, keys and values of each token side by side, head by head, float32."""
    parts = [part.transpose(1, 2).flatten(2) for part in (vectors.query, vectors.key, vectors.value)]
    return torch.cat(parts, -1).float()


def window_mask(
    window: int | None, length: int, device: torch.device
) -> Bool[Tensor, "1 1 query key"] | None:
    """Return the mask of attention that sees `window` positions to each side. None means that it sees all."""
    if window is None:
        return None
    position = torch.arange(length, device=device)
    return ((position[:, None] - position).abs() <= window)[None, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VectorsCodec:
    """One tapped layer's vectors; see the module's docstring."""

    layer: int
    """Layer of the teacher, counted from 0."""
    num_heads: int
    head_size: int
    scaling: float
    """Factor on query-key products."""
    window: int | None
    """Positions to each side that the teacher's attention sees. None means that it sees all."""
    code: TransformCode

    @property
    def codes_path(self) -> str:
        """Path of the one array that everything is decoded from."""
        return codes_path(self.layer)

    @property
    def is_unbiased(self) -> bool:
        """False: the decoded rows are close to the teacher's, but their expectation differs."""
        return False

    @property
    def everything(self) -> WantedRelations:
        """A request for every relation."""
        return WantedRelations(tuple(RelationKind))

    def paths(self, wanted: WantedRelations) -> tuple[str, ...]:
        """Return `codes_path`, or nothing if no relation is requested."""
        return (self.codes_path,) if wanted.kinds else ()

    def encode(
        self, content: LayerRelations, sequences: Sequence[int], *, lengths: Int[Tensor, " batch"]
    ) -> Rows:
        """Return the codes, `(batch, length, components)` int16; nothing is drawn."""
        del sequences, lengths
        return {self.codes_path: self.code.codes(concatenate(content.vectors))}

    def vectors(self, codes: Int16[Tensor, "batch length components"]) -> Vectors:
        """Return queries, keys and values, float32, on the device of the codes."""
        flat = self.code.rows(codes.flatten(0, 1))
        heads = flat.view(*codes.shape[:2], 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        mask = window_mask(self.window, codes.shape[1], codes.device)
        return Vectors(heads[0], heads[1], heads[2], mask, self.scaling)

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " _"]) -> None:
        """Raise CacheCorruptError for codes that `encode` never writes."""
        del lengths
        if self.codes_path in rows:
            refuse_codes(rows[self.codes_path])

    def decode(
        self, rows: Mapping[str, Tensor], wanted: WantedRelations, *, lengths: Int[Tensor, " batch"]
    ) -> dict[RelationKind, RowTargets]:
        """Return relations as the vectors that they are computed from."""
        del lengths
        if not wanted.kinds:
            return {}
        vectors = self.vectors(rows[self.codes_path])
        if wanted.heads is not None:
            vectors = split_heads(vectors, wanted.heads)
        return {kind: VectorRows(vectors, kind) for kind in wanted.kinds}

    def to(self, device: torch.device) -> "VectorsCodec":
        """Return the same codec with its code on a device."""
        return replace(self, code=self.code.to(device))
