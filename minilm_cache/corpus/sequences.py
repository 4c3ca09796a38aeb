"""From documents to sequences of token ids, in a fixed order, and with tokens masked.

Each sequence stands between the special tokens that the tokenizer itself puts around a text, as BERT's puts
`[CLS] ... [SEP]`.

- `packed`: tokens of documents are joined, with the separator between two documents, and cut to full length.
  The last sequence is shorter; where whole documents are held out, so is the last training sequence.
- `records`: one sequence per document, cut where it is too long.
- `pairs`: one sequence per record of two texts, with what the tokenizer puts between them; the longer text is
  cut first.

Token ids and the order of documents lie on disk (`tokens`, `order`); a range of sequences is built when it is
read, and nothing is kept for each sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast

from minilm_cache.corpus.order import held_out_target, ordered
from minilm_cache.corpus.tokens import Tokens
from minilm_cache.models.inputs import Inputs
from minilm_cache.relations.signals import MaskedSequences
from minilm_cache.storage_schema.identity import Packing, PairTemplate
from minilm_cache.storage_schema.manifest import CutText
from minilm_cache.storage_schema.states import Masking

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Token ids of consecutive sequences."""

    ids: list[Ids]
    """Token ids of each sequence, special tokens included."""
    documents: Ids
    """Number of the document in the corpus that each sequence begins with, `(sequences,)`."""


class SequenceTable:
    """Every sequence of a corpus, addressed by number."""

    def __init__(self, tokens: Tokens, packing: Packing) -> None:
        """Order the documents of a corpus, or read the order that is kept with its tokens.

        Raises:
            CorpusError: no document has a token.
            StorageError: the folder of the tokens cannot be written to.
        """
        self._tokens, self.packing = tokens, packing
        template = packing.pair or packing.template or tokens.named_template
        assert template is not None  # a tokenizer without names has its template in the packing
        self._template = template
        self._parts = ordered(tokens, packing)
        self.num_sequences = sum(part.num_sequences for part in self._parts)
        """Number of sequences, the held-out ones included."""
        self.held_out_by: Literal["documents", "sequences"] | None = None
        """What is held out, same as in `CacheManifest`."""
        if packing.split is not None:
            self.held_out_by = "documents" if len(self._parts) > 1 else "sequences"

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences, special tokens included."""
        return self.tokens_before(self.num_sequences)

    @property
    def num_held_out(self) -> int:
        """Number of held-out sequences, the last ones: about 2 %, at least 1, or 0 if there is only one."""
        if self.held_out_by == "documents":
            return self._parts[-1].num_sequences
        return held_out_target(self.num_sequences)

    @property
    def num_train(self) -> int:
        """Number of sequences to train on, the first ones."""
        return self.num_sequences - self.num_held_out

    @property
    def cut(self) -> CutText | None:
        """What is missing of texts that are longer than a sequence. None means nothing."""
        if self.packing.mode == "packed":
            return None
        counts = [self._tokens.counts(part.order[: part.num_sequences]) for part in self._parts]
        missing = [np.maximum(count - self.packing.room, 0) for count in counts]
        num_texts = sum(int((left > 0).sum()) for left in missing)
        if not num_texts:
            return None
        return CutText(
            texts=num_texts,
            tokens=sum(int(left.sum()) for left in missing),
            of_tokens=sum(int(count.sum()) for count in counts),
        )

    def tokens_before(self, number: int) -> int:
        """Return the number of tokens of the first `number` sequences."""
        total = 0
        for part in self._parts:
            total += part.tokens_before(min(number, part.num_sequences))
            number = max(0, number - part.num_sequences)
        return total

    def sequences_within(self, num_tokens: int) -> int:
        """Return the greatest number of first sequences that have at most `num_tokens` tokens together."""
        within = 0
        for part in self._parts:
            of_part = part.sequences_within(num_tokens)
            within += of_part
            if of_part < part.num_sequences:
                break
            num_tokens -= part.tokens_before(of_part)
        return within

    def lengths(self, first: int, last: int) -> Ids:
        """Return the number of tokens of the sequences from `first` up to, but not including, `last`."""
        lengths = []
        for part in self._parts:
            if first < min(last, part.num_sequences):
                lengths.append(part.lengths(first, min(last, part.num_sequences)))
            first, last = max(0, first - part.num_sequences), last - part.num_sequences
        return np.concatenate(lengths)

    def read(self, first: int, last: int) -> TokenBatch:
        """Return the sequences from `first` up to, but not including, `last`.

        Raises:
            CacheCorruptError: token ids are not those that were written.
        """
        bodies: list[Ids] = []
        documents: list[Ids] = []
        tokens = self._tokens
        for part in self._parts:
            if first < min(last, part.num_sequences):
                part_bodies, numbers = part.read(
                    first,
                    min(last, part.num_sequences),
                    documents=tokens.read,
                    separator=0 if isinstance(self._template, PairTemplate) else self._template.separator,
                )
                bodies += part_bodies
                documents.append(numbers)
            first, last = max(0, first - part.num_sequences), last - part.num_sequences
        before, after = (
            np.asarray(side, dtype=np.int64) for side in (self._template.before, self._template.after)
        )
        ids = [np.concatenate((before, body, after)) for body in bodies]
        return TokenBatch(ids=ids, documents=np.concatenate(documents))


SHARE = 0.15
_MASKED = 0.8
_RANDOM = 0.1
_STREAM = 17
"""Random stream that tokens are chosen with; labels use the stream before it."""


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
