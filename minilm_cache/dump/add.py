"""Adding to a cache: which parts of a new one are another's, and which are still to be computed."""

from collections.abc import Sequence
from pathlib import Path

from minilm_cache.codecs.base import RelationCodec
from minilm_cache.codecs.states import StatesCodec
from minilm_cache.errors import IdentityMismatchError
from minilm_cache.relations.states import WantedStates
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.states import StatesIdentity
from minilm_cache.store.reader import CacheReader


def open_donor(add: Path, identity: CacheIdentity) -> CacheReader:
    """Open a cache that is added to.

    Args:
        add: its folder.
        identity: of the cache that is to hold what it holds, and more.

    Raises:
        MiniLMCacheError: there is no such cache, or it is damaged or not complete.
        IdentityMismatchError: it is of another teacher, text or codec, or holds what the new one does not.
    """
    donor = CacheReader(add)
    own = donor.manifest.identity
    free = {"layers", "states"}
    theirs, ours = own.model_dump(exclude=free), identity.model_dump(exclude=free)
    differing = [name for name in ours if ours[name] != theirs[name]]
    if not set(own.layers) <= set(identity.layers):
        differing.append("layers")
    differing += _more_states(own.states, identity.states)
    if differing:
        raise IdentityMismatchError(
            f"--add {add}: that cache differs in {', '.join(differing)}, and only layers and states can be "
            "added to those that it has. Repeat its settings, with more, or dump without --add."
        )
    return donor


def _more_states(there: StatesIdentity | None, asked: StatesIdentity | None) -> list[str]:
    """Return the states that a cache has and another one lacks, or has otherwise."""
    if there is None:
        return []
    if asked is None:
        return ["states"]
    found = [
        name
        for name in ("hidden", "masked_hidden", "first")
        if not set(getattr(there, name)) <= set(getattr(asked, name))
    ]
    same = ("max_error", "calibration_tokens", "masking", "labels", "num_classes")
    return found + [name for name in same if getattr(there, name) not in (None, getattr(asked, name))]


def layers_to_write(
    codecs: Sequence[RelationCodec], identity: CacheIdentity, donor: CacheReader | None
) -> dict[int, RelationCodec]:
    """Return the codecs of layers whose relations are to be computed."""
    there = () if donor is None else donor.manifest.identity.layers
    return {layer: codec for layer, codec in zip(identity.layers, codecs, strict=True) if layer not in there}


def states_to_write(codec: StatesCodec | None, donor: CacheReader | None) -> WantedStates:
    """Return the states that are to be computed."""
    if codec is None:
        return WantedStates()
    everything = codec.everything
    there = set() if donor is None else {spec.path for spec in donor.specs}

    def is_new(wanted: WantedStates) -> bool:
        return not there.issuperset(codec.paths(wanted))

    return WantedStates(
        hidden=tuple(name for name in everything.hidden if is_new(WantedStates(hidden=(name,)))),
        masked=everything.masked and is_new(WantedStates(masked=True)),
        logits=everything.logits and is_new(WantedStates(logits=True)),
    )
