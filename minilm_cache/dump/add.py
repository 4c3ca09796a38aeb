"""Add to a cache: which parts of the new cache come from the old one, and which are still to be computed."""

from collections.abc import Sequence
from pathlib import Path

from minilm_cache.codecs.base import RelationCodec
from minilm_cache.errors import IdentityMismatchError
from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.states import SignalName, StatesIdentity
from minilm_cache.store.reader import CacheReader


def open_donor(add: Path, identity: CacheIdentity) -> CacheReader:
    """Open the cache that a dump adds to.

    Args:
        add: folder of that cache.
        identity: identity of the new cache, which is to hold everything that the old one holds.

    Raises:
        MiniLMCacheError: the cache does not exist, is damaged or is not complete.
        IdentityMismatchError: the cache has another teacher, text or codec, or holds something that the new
            one does not.
    """
    donor = CacheReader(add)
    donor_identity = donor.manifest.identity
    free = {"layers", "states"}
    theirs, ours = donor_identity.model_dump(exclude=free), identity.model_dump(exclude=free)
    differing = [name for name in ours if ours[name] != theirs[name]]
    if not set(donor_identity.layers) <= set(identity.layers):
        differing.append("layers")
    differing += _states_that_differ(donor_identity.states, identity.states)
    if differing:
        raise IdentityMismatchError(
            f"--add {add}: that cache differs in {', '.join(differing)}, and only layers and states can be "
            "added to those that it has. Repeat its settings, with more, or dump without --add."
        )
    return donor


def _states_that_differ(stored: StatesIdentity | None, requested: StatesIdentity | None) -> list[str]:
    """Return the names of what a cache stores and the new one lacks, or stores with other settings."""
    if stored is None:
        return []
    if requested is None:
        return ["states"]
    lacking = [
        name
        for name in ("hidden", "masked_hidden", "first")
        if not set(getattr(stored, name)) <= set(getattr(requested, name))
    ]
    same = ("max_error", "calibration_tokens", "masking", "labels", "num_classes", "pooled")
    lacking += [name for name in same if getattr(stored, name) not in (None, getattr(requested, name))]
    return lacking + ["others"] * any(other not in requested.others for other in stored.others)


def layers_to_write(
    codecs: Sequence[RelationCodec], identity: CacheIdentity, donor: CacheReader | None
) -> dict[int, RelationCodec]:
    """Return the codecs of the layers whose relations are still to be computed."""
    stored = () if donor is None else donor.manifest.identity.layers
    return {layer: codec for layer, codec in zip(identity.layers, codecs, strict=True) if layer not in stored}


def signals_to_write(codec: SignalsCodec | None, donor: CacheReader | None) -> tuple[SignalName, ...]:
    """Return the signals that are still to be computed."""
    if codec is None:
        return ()
    stored = set() if donor is None else {spec.path for spec in donor.specs}
    return tuple(name for name in codec.everything if not stored.issuperset(codec.paths((name,))))
