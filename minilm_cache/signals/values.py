"""Signals of numbers: hidden states, pooled vectors and logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from minilm_cache.codecs.transform import Bound, TransformCode, cosine_bound, refuse_codes, relative_bound
from minilm_cache.models.tap import Tap
from minilm_cache.signals.base import AsIs, SignalCodec, Taken, ValueSignal
from minilm_cache.storage_schema.arrays import state_codes_path
from minilm_cache.storage_schema.states import LOGITS_PATH, SignalName, StatesIdentity


@dataclass(frozen=True, slots=True)
class Coded(SignalCodec):
    """Codes of a fitted transform. A single row has no bound; the error over all rows is in the manifest."""

    name: SignalName
    code: TransformCode
    by_sequence: bool = False
    """Whether a sequence has one row."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Path of the codes."""
        return (state_codes_path(self.name),)

    @property
    def is_of_tokens(self) -> bool:
        """Whether each token has values."""
        return not self.by_sequence

    def encode(self, values: Tensor, length: int) -> Mapping[str, Tensor]:
        """Return codes of values."""
        del length
        codes = self.code.codes(values)
        return {self.paths[0]: codes[:, None] if self.by_sequence else codes}

    def check(self, rows: Mapping[str, Tensor]) -> None:
        """Refuse codes that no value has."""
        refuse_codes(rows[self.paths[0]])

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the values of codes."""
        codes = rows[self.paths[0]]
        decoded = self.code.rows(codes.flatten(0, 1))
        return decoded if self.by_sequence else decoded.view(*codes.shape[:2], -1)

    def to(self, device: torch.device) -> "Coded":
        """Return the same codec with its code on a device."""
        return replace(self, code=self.code.to(device))


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


class PooledVectors(ValueSignal):
    """One vector of each sequence, as the teacher pools its last hidden states; it is transform-coded."""

    option: ClassVar[str] = "--pooled"
    has_cosine: ClassVar[bool] = True

    def tap(self, name: SignalName, num_layers: int) -> Tap:
        """Return the last hidden state."""
        del name
        return Tap(hidden=(num_layers,))

    def values(self, name: SignalName, taken: Taken) -> Tensor:
        """Return the vectors, `(batch, width)`."""
        del name
        assert taken.pooler is not None
        vectors: Tensor = taken.pooler(taken.outputs.hidden[taken.num_layers], taken.inputs.lengths)
        return vectors

    def codec(self, name: SignalName, states: StatesIdentity, code: TransformCode | None) -> SignalCodec:
        """Return the fitted code."""
        assert code is not None
        return Coded(name, code, by_sequence=True)

    def bound(self, states: StatesIdentity) -> Bound | None:
        """Return the least mean cosine."""
        assert states.pooled is not None
        return cosine_bound(states.pooled.min_cosine)


class Logits(ValueSignal):
    """Logits of a teacher that classifies sequences, or scores them, in float32."""

    option: ClassVar[str] = "--logits"

    def tap(self, name: SignalName, num_layers: int) -> Tap:
        """Return the head's logits."""
        del name, num_layers
        return Tap(head="sequences")

    def values(self, name: SignalName, taken: Taken) -> Tensor:
        """Return the logits, `(batch, classes)`."""
        del name
        assert taken.outputs.logits is not None
        return taken.outputs.logits

    def codec(self, name: SignalName, states: StatesIdentity, code: TransformCode | None) -> SignalCodec:
        """Return the numbers as they are."""
        del name, states, code
        return AsIs(LOGITS_PATH, torch.float32, "first")
