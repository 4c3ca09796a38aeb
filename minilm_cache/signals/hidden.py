"""Hidden states: of every token, of every token of masked readings, and of each sequence's first token."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from minilm_cache.codecs.fit_states import Bound, relative_bound
from minilm_cache.codecs.transform import TransformCode
from minilm_cache.models.tap import Tap
from minilm_cache.signals.base import AsIs, SignalCodec, Taken, ValueSignal
from minilm_cache.signals.coded import Coded
from minilm_cache.storage_schema.states import SignalName, StatesIdentity


class HiddenStates(ValueSignal):
    """Hidden states of every token, as transformers numbers them; they are transform-coded."""

    option: ClassVar[str] = "--hidden"
    is_centred: ClassVar[bool] = True

    def tap(self, name: SignalName, num_layers: int) -> Tap:
        """Return the hidden state."""
        del num_layers
        return Tap(hidden=(name.number,))

    def values(self, name: SignalName, taken: Taken) -> Tensor:
        """Return the hidden state, `(batch, length, hidden)`."""
        return taken.outputs.hidden[name.number]

    def codec(self, name: SignalName, states: StatesIdentity, code: TransformCode | None) -> SignalCodec:
        """Return the fitted code."""
        assert code is not None
        return Coded(name, code)

    def bound(self, states: StatesIdentity) -> Bound | None:
        """Return the greatest relative error."""
        assert states.max_error is not None
        return relative_bound(states.max_error)

    def option_for(self, names: Sequence[SignalName]) -> str:
        """Return the option and the numbers of the states."""
        return f"{self.option} {','.join(str(name.number) for name in names)}"


class MaskedStates(HiddenStates):
    """Hidden states of every token of sequences that are read with some of their tokens masked."""

    is_masked: ClassVar[bool] = True
    option: ClassVar[str] = "--masked-hidden"


class FirstStates(HiddenStates):
    """Hidden states of each sequence's first token, [CLS], in float16."""

    option: ClassVar[str] = "--first-hidden"
    is_centred: ClassVar[bool] = False

    def values(self, name: SignalName, taken: Taken) -> Tensor:
        """Return the first token's hidden state, `(batch, hidden)`."""
        return taken.outputs.hidden[name.number][:, 0]

    def codec(self, name: SignalName, states: StatesIdentity, code: TransformCode | None) -> SignalCodec:
        """Return its float16 numbers."""
        del states, code
        return AsIs(name.folder, torch.float16, "first")

    def bound(self, states: StatesIdentity) -> Bound | None:
        """Return nothing: first tokens have no fitted code."""
        del states
        return None
