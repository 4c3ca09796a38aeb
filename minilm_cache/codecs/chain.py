"""From the manifest's codec section to the codec."""

from minilm_cache.codecs.base import Codec
from minilm_cache.codecs.dense import DenseCodec
from minilm_cache.codecs.topk import LARGEST_RATIO, PPS_RATIO, TopKCodec
from minilm_cache.errors import UnsupportedFormatError
from minilm_cache.storage_schema.manifest import CodecParameters, DenseParameters


def build_codec(parameters: CodecParameters, max_length: int) -> Codec:
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
