"""From documents to sequences of token ids, in a fixed order, in bounded memory.

Documents are taken in an order drawn from the seed, so that the last sequences, which are held out, are a
sample of the whole corpus, and so that a prefix (`max_tokens`) is one, too.
`packed`: their tokens are joined, the separator between two documents, and cut to full length, each
sequence `[CLS] ... [SEP]`, as BERT was pre-trained; the last one is shorter. `records`: one sequence per
document, cut where it is too long.
Token ids stay in Arrow files on disk; a range of sequences is put together when it is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from minilm_cache.dump.corpus import Corpus
from minilm_cache.errors import CorpusError
from minilm_cache.storage_schema.identity import Packing

HELD_OUT_SHARE = 0.02
MAX_HELD_OUT = 2048
"""Sequences; more would not make the held-out KL more certain."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Consecutive sequences."""

    ids: list[Ids]
    """Token ids of each, special tokens counted."""
    documents: Ids
    """Number in the corpus of the document that each one's first token is from, `(sequences,)`."""


class SequenceTable:
    """Every sequence of a corpus, addressed by number."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, packing: Packing) -> None:
        """Tokenise the corpus (in parallel: the tokenizer uses every core).

        Raises:
            CorpusError: no document has a token.
        """
        self.packing = packing
        self._cls, self._sep = _specials(tokenizer)
        self._room = packing.max_length - 2
        tokens = corpus.documents.map(
            _tokenise,
            batched=True,
            fn_kwargs={"tokenizer": tokenizer},
            remove_columns=["text"],
            features=datasets.Features(
                {"ids": datasets.List(datasets.Value("int32")), "num_tokens": datasets.Value("int64")}
            ),
            load_from_cache_file=False,
        )
        order = np.random.default_rng(packing.seed).permutation(len(tokens))
        counts = tokens.with_format("numpy")["num_tokens"][:][order]
        self._order = order[counts > 0]
        self._counts = counts[counts > 0]
        self._tokens = tokens.with_format("arrow")
        if len(self._order) == 0:
            raise CorpusError(f"corpus {corpus.name} is empty: no document has a token.")

    @cached_property
    def lengths(self) -> Ids:
        """Tokens of each sequence, special tokens counted, `(sequences,)`."""
        if self.packing.mode == "records":
            lengths: Ids = np.minimum(self._counts, self._room) + 2
        else:
            stream = int(self._stream_ends[-1])
            full, rest = divmod(stream, self._room)
            lengths = np.full(full + (rest > 0), self.packing.max_length, dtype=np.int64)
            if rest:
                lengths[-1] = rest + 2
        if self.packing.max_tokens is not None:
            kept = int(np.searchsorted(np.cumsum(lengths), self.packing.max_tokens, side="right"))
            lengths = lengths[:kept]
        return lengths

    @property
    def num_held_out(self) -> int:
        """How many of the last sequences are held out: 2 %, at least one, none of a single sequence."""
        share = max(1, round(len(self.lengths) * HELD_OUT_SHARE))
        return min(share, MAX_HELD_OUT, len(self.lengths) - 1)

    @cached_property
    def _stream_ends(self) -> Ids:
        """Ends of documents in the packed stream; each but the last is followed by a separator."""
        sizes = self._counts + 1
        sizes[-1] -= 1
        return np.cumsum(sizes)

    def read(self, first: int, last: int) -> TokenBatch:
        """Return the sequences numbered from `first` to before `last`."""
        if self.packing.mode == "records":
            bodies = [ids[: self._room] for ids in self._documents(first, last)]
            documents = self._order[first:last]
        else:
            bodies, documents = self._read_packed(first, last)
        ids = [np.concatenate(([self._cls], body, [self._sep])) for body in bodies]
        return TokenBatch(ids=ids, documents=documents.astype(np.int64))

    def _read_packed(self, first: int, last: int) -> tuple[list[Ids], Ids]:
        start = first * self._room
        stop = min(last * self._room, int(self._stream_ends[-1]))
        first_document = int(np.searchsorted(self._stream_ends, start, side="right"))
        last_document = int(np.searchsorted(self._stream_ends, stop - 1, side="right")) + 1
        parts: list[Ids] = []
        for ids in self._documents(first_document, last_document):
            parts += [ids, np.asarray([self._sep])]
        begin = int(self._stream_ends[first_document - 1]) if first_document else 0
        stream = np.concatenate(parts)[start - begin : stop - begin]
        cuts = np.arange(start, stop, self._room)
        documents = self._order[np.searchsorted(self._stream_ends, cuts, side="right")]
        return np.split(stream, (cuts - start)[1:]), documents

    def _documents(self, first: int, last: int) -> list[Ids]:
        column = self._tokens[self._order[first:last].tolist()]["ids"].combine_chunks()
        flat = column.flatten().to_numpy().astype(np.int64)
        sizes = self._counts[first:last]
        return np.split(flat, np.cumsum(sizes)[:-1])


def _tokenise(batch: Mapping[str, list[str]], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids = tokenizer(
        batch["text"],
        add_special_tokens=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
    return {"ids": ids, "num_tokens": [len(row) for row in ids]}


def _specials(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert isinstance(cls, int)
    assert isinstance(sep, int)
    return cls, sep
