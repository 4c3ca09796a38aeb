"""From the manifest's codec section to the codec, and from one relation to all that are stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from minilm_cache.codecs.base import RelationCodec, Rows, SignalCodec
from minilm_cache.codecs.dense import DenseCodec
from minilm_cache.codecs.topk import LARGEST_RATIO, PPS_RATIO, TopKCodec
from minilm_cache.codecs.transform import TransformCode
from minilm_cache.codecs.vectors import VectorsCodec
from minilm_cache.errors import UnsupportedFormatError
from minilm_cache.relations.rows import RowTargets
from minilm_cache.relations.scores import TeacherSignal
from minilm_cache.storage_schema.arrays import relation_arrays, relation_path
from minilm_cache.storage_schema.identity import (
    CacheIdentity,
    DenseParameters,
    RelationKind,
    TopKParameters,
    VectorsParameters,
)
from minilm_cache.storage_schema.manifest import Calibration, layer_folder


def build_codec(parameters: TopKParameters | DenseParameters, max_length: int) -> RelationCodec:
    """Return the codec that a manifest names.

    Raises:
        UnsupportedFormatError: its weight scale is not one of this release's.
    """
    if isinstance(parameters, DenseParameters):
        return DenseCodec(max_length=max_length)
    codec = TopKCodec(
        max_length=max_length,
        k=parameters.k,
        select=parameters.select,
        tail=parameters.tail,
        seed=parameters.seed,
    )
    if codec.parameters != parameters:
        raise UnsupportedFormatError(
            f"codec topk with weight ratio {parameters.weight_ratio} is unknown; this release knows "
            f"{PPS_RATIO} for pps and {LARGEST_RATIO} for largest. Install a newer minilm-cache."
        )
    return codec


def store_relations(
    parameters: TopKParameters | DenseParameters, max_length: int, kinds: tuple[RelationKind, ...]
) -> "StoredRelations":
    """Return the codec of a cache that stores these relations.

    Raises:
        UnsupportedFormatError: its weight scale is not one of this release's.
    """
    names = relation_arrays(parameters, max_length)
    return StoredRelations(codec=build_codec(parameters, max_length), kinds=kinds, names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRelations:
    """Relations stored one beside the other, each with the same codec."""

    codec: RelationCodec
    kinds: tuple[RelationKind, ...]
    names: tuple[str, ...]
    """Arrays of a relation: `gap`, `weight`, ..."""

    @property
    def is_unbiased(self) -> bool:
        """As its codec is."""
        return self.codec.is_unbiased

    def paths(self, kinds: Sequence[RelationKind]) -> tuple[str, ...]:
        """Return the arrays of these relations."""
        return tuple(relation_path(kind, name) for kind in kinds for name in self.names)

    def encode(self, signal: TeacherSignal, sequences: Sequence[int]) -> Rows:
        """Return the rows of every relation."""
        return {
            relation_path(kind, name): values
            for kind in self.kinds
            for name, values in self.codec.encode(signal.probs(kind), kind, sequences, signal.lengths).items()
        }

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for values that `encode` never writes."""
        for kind in self.kinds:
            self.codec.check({name: rows[relation_path(kind, name)] for name in self.names}, lengths)

    def decode(
        self,
        rows: Mapping[str, Tensor],
        kinds: Sequence[RelationKind],
        lengths: Int[Tensor, " batch"],
        relation_heads: int | None = None,
    ) -> dict[RelationKind, RowTargets]:
        """Return relations as targets, of the heads they were stored with.

        Raises:
            CacheCorruptError: values that `encode` never writes.
        """
        assert relation_heads is None, "stored rows cannot be split anew"
        return {
            kind: self.codec.decode({name: rows[relation_path(kind, name)] for name in self.names}, lengths)
            for kind in kinds
        }


def layer_codec(
    identity: CacheIdentity,
    calibration: Calibration | None,
    layer: int,
    codes: Mapping[str, TransformCode],
) -> SignalCodec:
    """Return the codec that a layer is written with.

    Args:
        identity: of the cache.
        calibration: of codes.
        layer: of the teacher.
        codes: by the folder of their arrays.

    Raises:
        UnsupportedFormatError: a newer release wrote it.
    """
    if not isinstance(identity.codec, VectorsParameters):
        return store_relations(identity.codec, identity.packing.max_length, identity.relations)
    assert calibration is not None
    fitted = calibration.of_layer(layer)
    return VectorsCodec(
        layer=layer,
        num_heads=identity.relation_heads,
        head_size=fitted.head_size,
        scaling=fitted.scaling,
        window=fitted.window,
        code=codes[layer_folder(layer)],
    )
