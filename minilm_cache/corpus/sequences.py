"""From documents to sequences of token ids, in a fixed order, in bounded memory.

Documents are taken in an order drawn from the seed, so that a prefix (`max_tokens`) is a sample of the whole
corpus, and so are the documents at the end, which are held out together with all their copies and come last.

- `packed`: tokens of documents are joined, with the separator between two documents, and cut to full length,
  each sequence `[CLS] ... [SEP]`, as BERT was pre-trained. The last sequence is shorter; where whole
  documents are held out, so is the last training sequence.
- `records`: one sequence per document, cut where it is too long.

Token ids stay in Arrow files on disk; a range of sequences is built when it is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from minilm_cache.corpus.load import Corpus
from minilm_cache.errors import CorpusError
from minilm_cache.storage_schema.identity import Packing

HELD_OUT_SHARE = 0.02
_MAX_HELD_OUT_SHARE = 0.05
"""Greatest share that is held out as whole documents, unless twice the target is more."""
MAX_HELD_OUT = 2048
"""Greatest number of held-out sequences; more would not make the held-out KL more certain."""

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

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, packing: Packing) -> None:
        """Tokenise the corpus (in parallel: the tokenizer uses every core).

        Raises:
            CorpusError: no document has a token.
        """
        self.packing = packing
        self._cls, self._sep = _special_tokens(tokenizer)
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
        order, counts = order[counts > 0], counts[counts > 0]
        self._tokens = tokens.with_format("arrow")
        if len(order) == 0:
            raise CorpusError(f"corpus {corpus.name} is empty: no document has a token.")
        everything = _Part(packing, self._room, order=order, counts=counts)
        self._parts, self.held_out_by = [everything], None
        if packing.split == "documents":
            self._parts = _split(everything, corpus.groups)
            self.held_out_by = "documents" if len(self._parts) > 1 else "sequences"

    held_out_by: Literal["documents", "sequences"] | None
    """What is held out, same as in `CacheManifest`."""

    @cached_property
    def lengths(self) -> Ids:
        """Tokens of each sequence, special tokens included, `(sequences,)`."""
        return np.concatenate([part.lengths for part in self._parts])

    @property
    def num_held_out(self) -> int:
        """Number of held-out sequences, the last ones: about 2 %, at least 1, or 0 if there is only one."""
        if self.held_out_by == "documents":
            return len(self._parts[-1].lengths)
        return _held_out_target(len(self.lengths))

    def read(self, first: int, last: int) -> TokenBatch:
        """Return the sequences with numbers from `first` up to, but not including, `last`."""
        bodies: list[Ids] = []
        documents: list[Ids] = []
        for part in self._parts:
            if first < min(last, len(part.lengths)):
                part_bodies, numbers = part.read(
                    first, min(last, len(part.lengths)), documents=self._documents, separator=self._sep
                )
                bodies += part_bodies
                documents.append(numbers)
            first, last = max(0, first - len(part.lengths)), last - len(part.lengths)
        ids = [np.concatenate(([self._cls], body, [self._sep])) for body in bodies]
        return TokenBatch(ids=ids, documents=np.concatenate(documents).astype(np.int64))

    def _documents(self, numbers: Ids) -> list[Ids]:
        """Return the token ids of documents, by their numbers in the corpus."""
        column = self._tokens[numbers.tolist()]["ids"].combine_chunks()
        flat = column.flatten().to_numpy().astype(np.int64)
        return np.split(flat, np.cumsum(column.value_lengths().to_numpy())[:-1])


class _Part:
    """Documents in order, and the sequences made from them; no sequence crosses the end of a part."""

    def __init__(self, packing: Packing, room: int, *, order: Ids, counts: Ids) -> None:
        """Store the documents of the part.

        Args:
            packing: how documents become sequences.
            room: greatest number of tokens in a sequence, without special tokens.
            order: numbers of the documents in the corpus, `(documents,)`.
            counts: number of tokens to use of each document, at least one, `(documents,)`.
        """
        self.packing, self.room, self.order, self.counts = packing, room, order, counts

    @cached_property
    def lengths(self) -> Ids:
        """Tokens of each sequence, special tokens included, `(sequences,)`."""
        if self.packing.mode == "records":
            lengths: Ids = np.minimum(self.counts, self.room) + 2
        else:
            full, rest = divmod(int(self.ends[-1]), self.room)
            lengths = np.full(full + (rest > 0), self.packing.max_length, dtype=np.int64)
            if rest:
                lengths[-1] = rest + 2
        if self.packing.max_tokens is not None:
            kept = int(np.searchsorted(np.cumsum(lengths), self.packing.max_tokens, side="right"))
            lengths = lengths[:kept]
        return lengths

    @cached_property
    def ends(self) -> Ids:
        """Ends of documents in the packed stream; a separator follows each document but the last."""
        sizes = self.counts + 1
        sizes[-1] -= 1
        return np.cumsum(sizes)

    def of(self, chosen: npt.NDArray[np.bool_]) -> "_Part":
        """Return a part with only the documents where `chosen`, `(documents,)`, is True."""
        return _Part(self.packing, self.room, order=self.order[chosen], counts=self.counts[chosen])

    def kept(self) -> "_Part":
        """Return a part with only the documents, or beginnings of documents, that its sequences hold."""
        if self.packing.mode == "records":
            return self.of(np.arange(len(self.order)) < len(self.lengths))
        stop = int((self.lengths - 2).sum())
        starts = np.concatenate(([0], self.ends[:-1]))
        counts = np.minimum(self.counts, stop - starts)
        return _Part(self.packing, self.room, order=self.order, counts=counts).of(starts < stop)

    def read(
        self, first: int, last: int, *, documents: Callable[[Ids], list[Ids]], separator: int
    ) -> tuple[list[Ids], Ids]:
        """Return sequences without special tokens at their ends, and the first document of each."""
        if self.packing.mode == "records":
            numbers = self.order[first:last]
            return [ids[: self.room] for ids in documents(numbers)], numbers
        start = first * self.room
        stop = min(last * self.room, int(self.ends[-1]))
        first_document = int(np.searchsorted(self.ends, start, side="right"))
        last_document = int(np.searchsorted(self.ends, stop - 1, side="right")) + 1
        span = slice(first_document, last_document)
        pieces: list[Ids] = []
        for ids, count in zip(documents(self.order[span]), self.counts[span].tolist(), strict=True):
            pieces += [ids[:count], np.asarray([separator])]
        begin = int(self.ends[first_document - 1]) if first_document else 0
        stream = np.concatenate(pieces)[start - begin : stop - begin]
        cuts = np.arange(start, stop, self.room)
        numbers = self.order[np.searchsorted(self.ends, cuts, side="right")]
        return np.split(stream, (cuts - start)[1:]), numbers


def _held_out_target(num_sequences: int) -> int:
    return min(max(1, round(num_sequences * HELD_OUT_SHARE)), MAX_HELD_OUT, num_sequences - 1)


def _split(everything: _Part, groups: Ids) -> list[_Part]:
    """Return the documents to train on and those to hold out, or one part where documents are too few.

    From the end of the order, each document is held out with all its copies, until about 2 % of the sequences
    are held out. A group is skipped if it would bring the share above 5 % or leave nothing to train on.

    Args:
        everything: all documents.
        groups: number of the group of each document in the corpus, `(corpus documents,)`.
    """
    kept = everything.kept()
    num_sequences = len(kept.lengths)
    document_sizes = np.ones_like(kept.counts) if kept.packing.mode == "records" else kept.counts + 1
    total = int(document_sizes.sum())
    target = _held_out_target(num_sequences) * total / num_sequences
    most = min(max(2 * target, _MAX_HELD_OUT_SHARE * total), total - 1)
    kept_groups = groups[kept.order]
    sizes = np.bincount(kept_groups, weights=document_sizes)
    taken, seen, size = list[int](), set[int](), 0.0
    for group in map(int, kept_groups[::-1]):  # a loop, because it ends after a few of perhaps many millions
        if size >= target:
            break
        if group not in seen and size + sizes[group] <= most:
            taken.append(group)
            size += sizes[group]
        seen.add(group)
    is_held_out = np.isin(kept_groups, taken)
    if not taken or num_sequences == 1:
        return [everything]
    train, held_out = kept.of(~is_held_out), kept.of(is_held_out)
    most_tokens, tokens = kept.packing.max_tokens, int(train.lengths.sum() + held_out.lengths.sum())
    if most_tokens is not None and tokens > most_tokens:
        # Two parts need more special tokens than one, so the last training sequence may no longer fit.
        if len(train.lengths) == 1:
            return [everything]
        train.lengths = train.lengths[:-1]
    return [train, held_out]


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


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert isinstance(cls, int)
    assert isinstance(sep, int)
    return cls, sep
