"""Which tokens are masked, and what replaces them (BERT, arXiv 1810.04805, section 3.1).

Masks are a pure function of seed, sequence and reading, so that a dump does not depend on its batches. A
reading is one masked version of a sequence. A cache holds one or more readings of each sequence, and epochs
use them in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast

from minilm_cache.errors import TeacherError
from minilm_cache.models.inputs import Inputs
from minilm_cache.relations.signals import MaskedSequences
from minilm_cache.storage_schema.states import Masking

SHARE = 0.15
_MASKED = 0.8
_RANDOM = 0.1
_STREAM = 17
"""Random stream that tokens are chosen with; labels use the stream before it."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masker:
    """Masks sequences of token ids."""

    masking: Masking
    special: frozenset[int]
    """Tokens that are never chosen and never replace others."""
    ordinary: Ids
    """All other tokens."""

    @classmethod
    def of(cls, masking: Masking, tokenizer: PreTrainedTokenizerFast) -> "Masker":
        """Return the masker of a tokenizer."""
        special = frozenset(tokenizer.all_special_ids)
        ordinary = np.asarray([number for number in range(len(tokenizer)) if number not in special])
        return cls(masking=masking, special=special, ordinary=ordinary)

    def mask(self, inputs: Inputs, numbers: Sequence[int], reading: int = 0) -> MaskedSequences:
        """Return a batch with tokens masked, on the CPU.

        Args:
            inputs: sequences, on the CPU.
            numbers: their numbers in the cache.
            reading: number of the reading; each reading masks other tokens.
        """
        read, chosen = inputs.ids.numpy().copy(), np.zeros(inputs.ids.shape, dtype=np.bool_)
        for at, (number, length) in enumerate(zip(numbers, inputs.lengths.tolist(), strict=True)):
            self._mask_sequence(read[at, :length], chosen[at, :length], number=number, reading=reading)
        return MaskedSequences.of(torch.from_numpy(read), torch.from_numpy(chosen))

    def _mask_sequence(self, read: Ids, chosen: npt.NDArray[np.bool_], *, number: int, reading: int) -> None:
        """Mask one sequence in place."""
        counter = [0, reading, _STREAM, number]
        generator = np.random.Generator(np.random.Philox(key=self.masking.seed, counter=counter))
        places = np.flatnonzero([token not in self.special for token in read.tolist()])
        if not len(places):
            return
        count = max(1, round(self.masking.share * len(places)))
        taken = np.sort(generator.choice(places, count, replace=False))
        chosen[taken] = True
        draws = generator.random(count)
        replacements = generator.choice(self.ordinary, count)
        read[taken[draws < _MASKED]] = self.masking.mask_token
        is_replaced = (draws >= _MASKED) & (draws < _MASKED + _RANDOM)
        read[taken[is_replaced]] = replacements[is_replaced]


def mask_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the token that replaces masked tokens.

    Raises:
        TeacherError: the tokenizer has no such token.
    """
    token = tokenizer.mask_token_id
    if not isinstance(token, int):
        raise TeacherError(
            f"the tokenizer of {tokenizer.name_or_path} has no mask_token, which soft labels need. Set it "
            "and save the tokenizer again, or leave out --labels."
        )
    return token
