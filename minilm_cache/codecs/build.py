"""Building the codecs of a manifest: the only place that checks which codec a cache uses."""

from collections.abc import Mapping

from minilm_cache.codecs.base import RelationCodec
from minilm_cache.codecs.rows import ROW_RELATIONS, DenseCodec, RowsCodec
from minilm_cache.codecs.sampling import PPS_RATIO
from minilm_cache.codecs.topk import LARGEST_RATIO, TopKCodec
from minilm_cache.codecs.transform import TransformCode
from minilm_cache.codecs.vectors import VectorsCodec
from minilm_cache.errors import UnsupportedFormatError
from minilm_cache.storage_schema.identity import (
    CacheIdentity,
    DenseParameters,
    NoRelationsParameters,
    RelationKind,
    TopKParameters,
    VectorsParameters,
)
from minilm_cache.storage_schema.manifest import Calibration, layer_folder


def build_codec(
    parameters: TopKParameters | DenseParameters,
    max_length: int,
    kinds: tuple[RelationKind, ...] = ROW_RELATIONS,
    *,
    is_causal: bool = False,
) -> RowsCodec:
    """Return the codec of a cache that stores the rows of these relations, which may be a causal model's.

    Raises:
        UnsupportedFormatError: its weight scale is not one of this release's.
    """
    if isinstance(parameters, DenseParameters):
        return DenseCodec(max_length=max_length, kinds=kinds, is_causal=is_causal)
    codec = TopKCodec(
        max_length=max_length,
        kinds=kinds,
        is_causal=is_causal,
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


def layer_codec(
    identity: CacheIdentity,
    calibration: Calibration | None,
    *,
    layer: int,
    codes: Mapping[str, TransformCode],
) -> RelationCodec:
    """Return the codec that a layer is written with.

    Args:
        identity: the identity of the cache.
        calibration: how codes were fitted. None means that the cache has none.
        layer: layer of the teacher, counted from 0.
        codes: fitted codes, by the folder of their arrays.

    Raises:
        UnsupportedFormatError: a newer release wrote the cache.
    """
    assert not isinstance(identity.codec, NoRelationsParameters), "it has no layers"
    if not isinstance(identity.codec, VectorsParameters):
        return build_codec(
            identity.codec, identity.packing.max_length, identity.relations, is_causal=identity.is_causal
        )
    assert calibration is not None
    fitted = calibration.of_layer(layer)
    return VectorsCodec(
        layer=layer,
        num_heads=identity.relation_heads,
        head_size=fitted.head_size,
        scaling=fitted.scaling,
        window=fitted.window,
        is_causal=identity.is_causal,
        code=codes[layer_folder(layer)],
    )
