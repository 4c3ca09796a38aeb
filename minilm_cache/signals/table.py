"""The table of signals: one row and one module each, and those that are registered."""

import re
from collections.abc import Sequence
from typing import Any, Final

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.signals.base import OwnSignal, Signal, ValueSignal
from minilm_cache.signals.labels import Labels
from minilm_cache.signals.values import FirstStates, HiddenStates, Logits, MaskedStates, PooledVectors
from minilm_cache.storage_schema.states import LABELS, LOGITS, OWN_NAME, POOLED, SignalName, StateFamily

SIGNALS: Final[dict[str, Signal]] = {
    str(StateFamily.HIDDEN): HiddenStates(),
    str(StateFamily.MASKED): MaskedStates(),
    str(StateFamily.FIRST): FirstStates(),
    POOLED.signal: PooledVectors(),
    LABELS.signal: Labels(),
    LOGITS.signal: Logits(),
}
"""Every signal, by its name."""


def register_signal(signal: OwnSignal) -> None:
    """Add a signal, or replace the added signal of the same name.

    Raises:
        InvalidConfigError: a signal of this release has the name, the name cannot be stored, or the signal
            depends on which tokens are masked.
    """
    if not re.fullmatch(OWN_NAME, signal.name):
        raise InvalidConfigError(
            f"signal {signal.name}: a name begins with a letter and has at most 48 characters of a to z, 0 "
            "to 9 and -. Choose another name."
        )
    if signal.is_masked:
        raise InvalidConfigError(
            f"signal {signal.name}: a signal of your own is taken of whole texts. Leave out is_masked."
        )
    if not isinstance(SIGNALS.get(signal.name, signal), OwnSignal):
        raise InvalidConfigError(f"signal {signal.name} is one of this release. Choose another name.")
    SIGNALS[signal.name] = signal


def signal_of(name: SignalName) -> Signal:
    """Return the signal of a name, to take it of a teacher.

    Raises:
        TeacherError: it was registered where the cache was dumped, and is not here.
    """
    if name.signal not in SIGNALS:
        raise TeacherError(
            f"signal {name.signal} is not of this release, so it cannot be taken of a teacher here. Register "
            "it first (minilm_cache.signals.table.register_signal)."
        )
    return SIGNALS[name.signal]


def own_signal(name: str) -> OwnSignal:
    """Return a registered signal.

    Raises:
        InvalidConfigError: there is none of this name.
    """
    signal: Any = SIGNALS.get(name)
    if not isinstance(signal, OwnSignal):
        known = ", ".join(sorted(each for each, kind in SIGNALS.items() if isinstance(kind, OwnSignal)))
        raise InvalidConfigError(
            f"signal {name}: no signal of this name is registered{f'; take {known}' if known else ''}."
        )
    return signal


def value_signal(name: SignalName) -> ValueSignal:
    """Return a signal whose values are numbers, to take it of a teacher; errors as for `signal_of`."""
    signal = signal_of(name)
    assert isinstance(signal, ValueSignal)
    return signal


def masked_part(names: Sequence[SignalName]) -> tuple[SignalName, ...]:
    """Return the signals that depend on which tokens are masked."""
    return tuple(name for name in names if name.signal in SIGNALS and SIGNALS[name.signal].is_masked)
