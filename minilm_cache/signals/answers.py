"""What a teacher says of a whole sequence: its pooled vector, and its logits."""

from typing import ClassVar

import torch
from torch import Tensor

from minilm_cache.codecs.fit_states import Bound, cosine_bound
from minilm_cache.codecs.transform import TransformCode
from minilm_cache.models.tap import Tap
from minilm_cache.signals.base import AsIs, SignalCodec, Taken, ValueSignal
from minilm_cache.signals.coded import Coded
from minilm_cache.storage_schema.states import LOGITS_PATH, SignalName, StatesIdentity


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
