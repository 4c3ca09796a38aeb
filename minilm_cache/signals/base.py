"""What a signal is: how it is taken of a teacher, stored, and compared; and the table of all signals."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS
from minilm_cache.codecs.transform import Bound, TransformCode
from minilm_cache.errors import CacheCorruptError, InvalidConfigError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.tap import Tap
from minilm_cache.models.teacher import TeacherReading
from minilm_cache.storage_schema.identity import TeacherIdentity
from minilm_cache.storage_schema.states import OtherSignal, SignalName, StatesIdentity


class Taken(NamedTuple):
    """A forward pass of a teacher, of which signals are taken."""

    outputs: TeacherReading
    inputs: Inputs
    """What the teacher read, on its device."""
    num_layers: int
    """Layers of the teacher."""
    pooler: SentencePooler | None
    """What pools its hidden states. None means that no pooled vectors are wanted."""


class SignalCodec(ABC):
    """How one signal is stored. `codecs/base.py` has the rules that all codecs keep."""

    @property
    @abstractmethod
    def paths(self) -> tuple[str, ...]:
        """Paths of its arrays, in the first masked reading."""

    @property
    @abstractmethod
    def is_of_tokens(self) -> bool:
        """Whether each token has values, so that a student must read the same tokens."""

    @abstractmethod
    def encode(self, values: Tensor, length: int) -> Mapping[str, Tensor]:
        """Return rows by path, `(batch, length, ...)`, or `(batch, 1, ...)` where a sequence has one row."""

    @abstractmethod
    def check(self, rows: Mapping[str, Tensor]) -> None:
        """Raise CacheCorruptError for rows that `encode` never writes."""

    @abstractmethod
    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the values of checked rows, on their device."""

    def to(self, device: torch.device) -> "SignalCodec":
        """Return the same codec with its constants on a device."""
        del device
        return self


class Signal(ABC):
    """One kind of signal; a cache may hold several of a kind, such as hidden states of several layers."""

    is_masked: ClassVar[bool] = False
    """Whether it depends on which tokens of a sequence are masked."""
    option: ClassVar[str]
    """Option of `dump` that stores it."""

    @abstractmethod
    def tap(self, name: SignalName, num_layers: int) -> Tap:
        """Return what of a forward pass it is taken of."""

    def option_for(self, names: Sequence[SignalName]) -> str:
        """Return the words of a dump that store these signals of the kind."""
        del names
        return self.option


class ValueSignal(Signal):
    """A signal whose values are numbers of every token, or of every sequence."""

    is_centred: ClassVar[bool] = False
    """Whether errors are relative to the variance of values, instead of their squares."""
    has_cosine: ClassVar[bool] = False
    """Whether the mean cosine of stored values with the teacher's is measured, too."""

    @abstractmethod
    def values(self, name: SignalName, taken: Taken) -> Tensor:
        """Return its values: `(batch, length, width)` or, with one row a sequence, `(batch, width)`."""

    @abstractmethod
    def codec(self, name: SignalName, states: StatesIdentity, code: TransformCode | None) -> SignalCodec:
        """Return how it is stored.

        Args:
            name: the signal.
            states: what the cache holds.
            code: its fitted code. None means that it has none.
        """

    def bound(self, states: StatesIdentity) -> Bound | None:
        """Return how closely its fitted code keeps to the teacher. None means that no code is fitted."""
        del states
        return None


@dataclass(frozen=True, slots=True)
class AsIs(SignalCodec):
    """Values as they are, as floats: of every token, of a sequence, or at its first token."""

    path: str
    dtype: torch.dtype
    place: Literal["token", "sequence", "first"]
    """Where the rows of a sequence stand."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Path of its array."""
        return (self.path,)

    @property
    def is_of_tokens(self) -> bool:
        """Whether each token has values."""
        return self.place == "token"

    def encode(self, values: Tensor, length: int) -> Mapping[str, Tensor]:
        """Return values in the type of the array.

        Raises:
            InvalidConfigError: they are of tokens where they should be of sequences, or the reverse.
        """
        if values.ndim != (3 if self.place == "token" else 2):
            wanted = "(batch, length, width)" if self.place == "token" else "(batch, width)"
            raise InvalidConfigError(
                f"{self.path}: the signal gives values of the shape {tuple(values.shape)}, and its rows are "
                f"{wanted}. Change its `values` or its `axis`."
            )
        stored = values.to(self.dtype)
        if self.place == "first":
            stored = torch.nn.functional.pad(stored[:, None], (0, 0, 0, length - 1))
        return {self.path: stored[:, None] if self.place == "sequence" else stored}

    def check(self, rows: Mapping[str, Tensor]) -> None:
        """Refuse NaN and infinity."""
        if not bool(rows[self.path].isfinite().all()):
            raise CacheCorruptError(f"a stored state is NaN or infinite. {NOT_OURS}")

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return values as float32."""
        values = rows[self.path]
        return (values if self.place == "token" else values[:, 0]).float()


class OwnSignal(ValueSignal):
    """Base of a signal that is added to those of this release by `register_signal`.

    It is stored as it is. Whoever reads a cache can decode it; only who dumps or verifies it with the teacher
    needs its code.
    """

    name: ClassVar[str]
    axis: ClassVar[Literal["token", "sequence"]]
    """What has a row of numbers."""
    dtype: ClassVar[Literal["float16", "float32"]] = "float16"
    settings: Mapping[str, int | float | str | bool] = {}
    """What else determines the numbers; it belongs to what identifies a cache."""

    @abstractmethod
    def width(self, teacher: TeacherIdentity) -> int:
        """Return the numbers of a row."""

    def described(self, teacher: TeacherIdentity) -> OtherSignal:
        """Return what a cache says of the signal."""
        return OtherSignal(
            name=self.name,
            axis=self.axis,
            width=self.width(teacher),
            dtype=self.dtype,
            settings=dict(self.settings),
        )

    def codec(self, name: SignalName, states: StatesIdentity, code: TransformCode | None) -> SignalCodec:
        """Return how it is stored."""
        del code
        return codec_of_other(next(other for other in states.others if other.as_name == name))

    def option_for(self, names: Sequence[SignalName]) -> str:
        """Return the words of a dump that store it."""
        del names
        return f"signal {self.name} (`DumpConfig.signal`, in Python)"


def codec_of_other(other: OtherSignal) -> SignalCodec:
    """Return how a signal is stored that is not of this release; its own code is not needed."""
    return AsIs(other.as_name.folder, getattr(torch, other.dtype), other.axis)
