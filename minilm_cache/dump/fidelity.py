"""How faithful a complete cache is, in words: its KL beside what was asked, and how its students end."""

import math
from typing import Final

from minilm_cache.storage_schema.identity import DenseParameters, TopKParameters, VectorsParameters
from minilm_cache.storage_schema.manifest import CacheManifest

_VECTORS_PERCENT: Final = {0.005: 0.5, 0.01: 1.1, 0.015: 1.9}
"""How much higher the KL of students ends than online, per cent, by `--max-kl` (many_epochs.json)."""
_TOPK_K: Final = 16
_TOPK_PERCENT: Final = 1.6
"""The same for sampled rows of `_TOPK_K` entries."""
_TOLERANCE: Final = 1.1
"""How far above `--max-kl` a cache may measure on held-out text: the caches behind the figures do, too."""


def max_kl_in_words(manifest: CacheManifest) -> str | None:
    """Return how the worst KL on held-out sequences compares with `--max-kl`; None for codecs without it."""
    ratio, codec = manifest.kl_over_max, manifest.identity.codec
    if ratio is None or not isinstance(codec, VectorsParameters):
        return None
    if math.isinf(ratio):
        return f"worst KL infinite on {manifest.measured_on}: stored rows have zeros that the teacher has not"
    worst = f"worst KL {ratio * codec.max_kl:.4f} nats on {manifest.measured_on}"
    if ratio <= 1:
        return f"{worst}, within --max-kl {codec.max_kl:g}"
    return (
        f"{worst}, {100 * (ratio - 1):.1f} % above --max-kl {codec.max_kl:g}, which holds on the sequences "
        "that the code was checked with"
    )


def states_in_words(manifest: CacheManifest) -> str | None:
    """Return which states are less exact on held-out sequences than was asked; None where none is."""
    states, measured = manifest.identity.states, manifest.measured
    if states is None or measured is None:
        return None
    most, least = states.max_error, None if states.pooled is None else states.pooled.min_cosine
    beyond = []
    for each in measured.states:
        if most is not None and each.relative_error is not None and each.relative_error > most:
            beyond.append(f"{each.path} has an error of {each.relative_error:.4f} (--max-error {most:g})")
        if least is not None and each.cosine is not None and each.cosine < least:
            beyond.append(f"{each.path} has a cosine of {each.cosine:.5f} (--min-cosine {least:g})")
    if not beyond:
        return None
    return f"{', '.join(beyond)} on {manifest.measured_on}; they hold where the code was fitted"


def verdict(manifest: CacheManifest) -> str | None:
    """Return how students of a cache end, in words.

    None means that nothing was measured for such a cache: it stores no relations, or those of several layers,
    or it is not complete.
    """
    if manifest.measured is None or len(manifest.identity.layers) != 1:
        return None
    codec = manifest.identity.codec
    percent = None
    if isinstance(codec, DenseParameters):
        return "students learn from the teacher's own rows, as with the teacher in the loop"
    if isinstance(codec, TopKParameters) and codec.select == "pps" and codec.k == _TOPK_K:
        percent = _TOPK_PERCENT
    if isinstance(codec, VectorsParameters):
        worst = codec.max_kl * max(1.0, (manifest.kl_over_max or 0.0) / _TOLERANCE)
        percent = next((percent for kl, percent in _VECTORS_PERCENT.items() if worst <= kl), None)
    if percent is None:
        return "no benchmark says how students of such rows end (docs/storage.md has what was measured)"
    return (
        f"in the benchmark, students of such rows ended about {percent} % above online training (KL on the "
        "training text after 20 epochs, 3x192 from mini, last layer: docs/storage.md)"
    )


def kl_infinite_because(manifest: CacheManifest) -> str | None:
    """Return why KL(teacher, stored) is infinite: stored rows have zeros where the teacher has none.

    None means that it is a number, or that no relations are stored.
    """
    codec = manifest.identity.codec
    if not isinstance(codec, TopKParameters) or (codec.select == "largest" and codec.tail == "uniform"):
        return None
    return "sampled, unbiased" if codec.select == "pps" else "infinite: largest only"
