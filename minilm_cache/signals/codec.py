"""The codec of all signals of a cache. Each signal's own module says how it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.codecs.base import Rows
from minilm_cache.codecs.sampling import PPS_RATIO
from minilm_cache.codecs.transform import TransformCode
from minilm_cache.errors import UnsupportedFormatError
from minilm_cache.relations.signals import MaskedSequences, Signals
from minilm_cache.signals.base import SignalCodec, codec_of_other
from minilm_cache.signals.labels import LabelsCodec
from minilm_cache.signals.table import value_signal
from minilm_cache.storage_schema.arrays import masked_paths
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.states import LABELS, SignalName, StatesIdentity, reading_path


@dataclass(frozen=True, kw_only=True)
class SignalsCodec:
    """Everything that a cache stores in addition to relations; arrays are named by their paths."""

    parameters: StatesIdentity
    vocab_size: int
    codes: Mapping[SignalName, TransformCode]
    """Fitted code of each signal that has one."""

    @classmethod
    def of(cls, identity: CacheIdentity, codes: Mapping[SignalName, TransformCode]) -> "SignalsCodec":
        """Return the codec of a cache that has signals.

        Raises:
            UnsupportedFormatError: its weight scale is not this release's.
        """
        states = identity.states
        assert states is not None
        if states.labels is not None and states.labels.weight_ratio != PPS_RATIO:
            raise UnsupportedFormatError(
                f"labels of weight ratio {states.labels.weight_ratio} are unknown; this release knows "
                f"{PPS_RATIO}. Install a newer minilm-cache."
            )
        return cls(parameters=states, vocab_size=identity.teacher.vocab_size, codes=codes)

    @property
    def everything(self) -> tuple[SignalName, ...]:
        """A request for everything that is stored."""
        return self.parameters.names

    @cached_property
    def _codecs(self) -> dict[SignalName, SignalCodec]:
        """How each signal is stored, but for labels."""
        others = {other.as_name: codec_of_other(other) for other in self.parameters.others}
        return {
            name: others[name]
            if name in others
            else value_signal(name).codec(name, self.parameters, self.codes.get(name))
            for name in self.everything
            if name != LABELS
        }

    @property
    def labels(self) -> LabelsCodec:
        """How masked readings and labels are stored."""
        return LabelsCodec(self.parameters, self.vocab_size)

    def paths(self, wanted: Sequence[SignalName]) -> tuple[str, ...]:
        """Return the paths of the arrays that these signals are decoded from, in the first masked reading."""
        return tuple(
            path for name in wanted for path in (self.labels if name == LABELS else self._codecs[name]).paths
        )

    def paths_of_texts(self, wanted: Sequence[SignalName]) -> tuple[str, ...]:
        """Return the paths of those of these signals that belong to whole texts, not to their tokens."""
        codecs = (self._codecs[name] for name in wanted if name != LABELS)
        return tuple(path for codec in codecs if not codec.is_of_tokens for path in codec.paths)

    def stored_path(self, path: str, reading: int) -> str:
        """Return the path of an array in a masked reading; arrays that masks do not change have only one."""
        return reading_path(path, reading) if path in masked_paths(self.parameters) else path

    def encode(self, content: Signals, sequences: Sequence[int], *, lengths: Int[Tensor, " batch"]) -> Rows:
        """Encode a padded batch; integers may be int64 where their arrays store a smaller type."""
        length, rows = int(lengths.max()), dict[str, Tensor]()
        for name, values in content.values.items():
            rows |= self._codecs[name].encode(values, length)
        if content.masked is not None:
            rows |= self.labels.encode(content.masked, sequences, content.reading)
        return {self.stored_path(path, content.reading): values for path, values in rows.items()}

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for values that `encode` never writes."""
        del lengths
        for codec in self._codecs.values():
            if codec.paths[0] in rows:
                codec.check(rows)
        if self.labels.paths[0] in rows:
            self.labels.check(rows)

    def decode(
        self, rows: Mapping[str, Tensor], wanted: Sequence[SignalName], *, lengths: Int[Tensor, " batch"]
    ) -> Signals:
        """Decode signals, on the device of `rows`. Labels must be on the CPU (see `masked`).

        Args:
            rows: path of an array to `(batch, length, ...)`, and `tokens`; positions beyond a sequence's
                length are ignored.
            wanted: which signals to decode.
            lengths: valid positions of each sequence, `(batch,)`.
        """
        return Signals(
            values={name: self._codecs[name].decode(rows) for name in wanted if name != LABELS},
            masked=self.masked(rows, lengths) if LABELS in wanted else None,
        )

    def masked(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> MaskedSequences:
        """Decode the masked sequences and their labels; see `LabelsCodec.decode`."""
        return self.labels.decode(rows, lengths)

    def to(self, device: torch.device) -> "SignalsCodec":
        """Return the same codec with its codes on a device."""
        return replace(self, codes={name: code.to(device) for name, code in self.codes.items()})
