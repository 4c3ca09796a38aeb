"""Signals whose values are transform-coded: hidden states of every token, and pooled vectors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minilm_cache.codecs.transform import TransformCode, refuse_codes
from minilm_cache.signals.base import SignalCodec
from minilm_cache.storage_schema.arrays import state_codes_path
from minilm_cache.storage_schema.states import SignalName


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
