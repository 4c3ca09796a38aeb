"""Codec `dense`: every probability as float16, the exact reference for tests and small studies.

Error bound: float16 rounding, at most 2**-11 relative above 2**-14 and 2**-25 absolute below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS, Rows
from minilm_cache.codecs.rows import RowsCodec
from minilm_cache.errors import CacheCorruptError
from minilm_cache.relations.rows import DenseRows
from minilm_cache.storage_schema.identity import DenseParameters, RelationKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCodec(RowsCodec):
    """Every column of every row; rows are padded to `max_length` columns."""

    @property
    def parameters(self) -> DenseParameters:
        """The parameters of this codec in the manifest."""
        return DenseParameters()

    @property
    def is_unbiased(self) -> bool:
        """True: the stored row is the teacher's row, up to rounding."""
        return True

    def encode_relation(
        self,
        probs: Float[Tensor, "batch heads query key"],
        kind: RelationKind,
        *,
        sequences: Sequence[int],
        lengths: Int[Tensor, " batch"],
    ) -> Rows:
        """Return `probability`, `(batch, length, heads, max_length)` float16; nothing is drawn."""
        del kind, sequences, lengths
        padded = torch.nn.functional.pad(probs.half(), (0, self.max_length - probs.shape[-1]))
        return {"probability": padded.transpose(1, 2)}

    def check_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for values that are not probabilities."""
        del lengths
        least, greatest = rows["probability"].aminmax()
        if not (float(least) >= 0 and float(greatest) <= 1):  # so that NaN fails, too
            raise CacheCorruptError(f"a stored row holds a value that is not a probability. {NOT_OURS}")

    def decode_relation(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> DenseRows:
        """Return the rows as float32, cut to the batch's padded length."""
        probability = rows["probability"][..., : rows["probability"].shape[1]].transpose(1, 2).float()
        valid = torch.arange(probability.shape[-1], device=lengths.device) < lengths[:, None]
        return DenseRows(probability.where(valid[:, None, :, None], 0))
