"""Augment text for a task: TinyBERT's algorithm 1 (Jiao et al. 2020, arXiv 1909.10351, section 3.2).

Every word of a document has candidates: of a word of one piece the tokens that a model with a head for masked
tokens puts in its place, of a longer one the words of the corpus whose embeddings are nearest. Each copy of a
document takes a candidate in place of a word with probability `replace`. The authors' code differs from the
algorithm as printed, and is the default form: stop words and words with other letters than a to z stay, the
model reads the document itself as a second segment, and nearest words take a capital where the word has one.
Where the paper takes nearest words from GloVe, a word's embedding is the mean of its pieces' input embeddings
of the same model.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedTokenizerFast

from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.masking import mask_token
from minilm_cache.dump.config import AugmentConfig
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.device import choose_device
from minilm_cache.models.load import load_model, load_tokenizer, locate_teacher
from minilm_cache.models.padding import pad
from minilm_cache.models.tap import TappedModel
from minilm_cache.models.teacher import check_length
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.relations.scores import key_mask
from minilm_cache.store.durable import new_file, refuse_existing, storage_errors

_MAX_WORDS = 2**14
"""Of the corpus, the most frequent ones: among them nearest words are looked for."""
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    a about above after again all am an and any are as at be because been before being below between
    both but by can did do does doing don down during each few for from further had has have having he
    her here hers herself him himself his how i if in into is it its itself just me more most my myself
    no nor not now of off on once only or other our ours ourselves out over own same she should so some
    such than that the their theirs them themselves then there these they this those through to too
    under until up very was we were what when where which while who whom why will with you your yours
    yourself yourselves
    """,
    )
)
"""English words that carry little of a sentence's meaning."""
_SPARE = 4
"""Positions for special tokens, and those that some families leave out."""
_BATCH = 32
"""Masked variants of a document read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmented:
    """What augmenting has come to."""

    path: Path
    num_documents: int
    num_lines: int
    """Documents and their copies."""


@dataclass(frozen=True, slots=True)
class _Word:
    start: int
    end: int
    """Of its letters in the document."""
    text: str
    pieces: tuple[int, ...]


def augment(
    config: AugmentConfig,
    out: Path,
    *,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> Augmented:
    """Write a corpus and its augmented copies as JSON lines: `text`, and the number of its `document`.

    Args:
        config: what to augment, by which model, how much.
        out: the file, which must not exist.
        progress: told of documents done.
        should_stop: asked before each document; nothing is written then.

    Raises:
        TeacherError: the model has no head for masked tokens.
        CorpusError: the corpus cannot be read.
        InterruptedRunError: it was asked to stop.
        StorageError: the file cannot be written.
    """
    progress = progress or Silent()
    refuse_existing(out)
    source = locate_teacher(config.teacher, config.revision)
    tokenizer = load_tokenizer(source.folder)
    model = TappedModel(load_model(source.folder, "tokens"))
    check_length(model, source.name, token=tokenizer.cls_token_id, max_length=config.max_length)
    model.tap((), head="tokens")
    corpus = load_corpus(config.corpus, config.text_column)
    device = choose_device(config.device)
    proposals = _Proposals(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        config=config,
        vocabulary=_frequent_words(corpus.texts(), tokenizer),
    )
    num_lines = 0
    progress.start("augment", corpus.identity.num_documents, "documents")
    with storage_errors("write", out), new_file(out) as file:
        for number, text in enumerate(corpus.texts()):
            if should_stop():
                raise InterruptedRunError("interrupted: nothing was written. Run the same command again.")
            own = [text, *proposals.copies(text, number)]
            lines = (json.dumps({"text": one, "document": number}, ensure_ascii=False) for one in own)
            file.writelines(f"{line}\n".encode() for line in lines)
            num_lines += len(own)
            progress.advance(1)
    return Augmented(path=out, num_documents=corpus.identity.num_documents, num_lines=num_lines)


@dataclass(frozen=True)
class _Proposals:
    """Candidates for the words of documents."""

    model: TappedModel
    tokenizer: PreTrainedTokenizerFast
    config: AugmentConfig
    vocabulary: Sequence[str]
    """Frequent words of the corpus."""

    def copies(self, text: str, number: int) -> list[str]:
        """Return a document's copies, those that are none dropped; a pure function of seed and number."""
        words = _words(text, self.tokenizer)
        candidates = self._candidates(text, words)
        found = []
        for copy in range(self.config.copies):
            generator = np.random.default_rng([self.config.seed, number, copy])
            parts, end = [], 0
            for word, own in zip(words, candidates, strict=True):
                taken = word.text
                if own and generator.random() < self.config.replace:
                    taken = own[int(generator.integers(len(own)))]
                parts += [text[end : word.start], taken]
                end = word.end
            found.append("".join([*parts, text[end:]]))
        return [one for one in dict.fromkeys(found) if one != text]

    @property
    def _is_authors(self) -> bool:
        return self.config.form == "authors"

    def _candidates(self, text: str, words: Sequence[_Word]) -> list[list[str]]:
        """Return the candidates of each word; a word without any stays."""
        chosen = [word for word in words if not self._is_authors or _may_be_replaced(word.text)]
        masked = iter(self._masked(text, [word for word in chosen if len(word.pieces) == 1]))
        found = {word: next(masked) if len(word.pieces) == 1 else self._nearest(word) for word in chosen}
        return [found.get(word, []) for word in words]

    @torch.no_grad()
    def _masked(self, text: str, words: Sequence[_Word]) -> list[list[str]]:
        """Return the likeliest tokens in place of each word; none beyond the model's length."""
        device = next(self.model.parameters()).device
        mask = mask_token(self.tokenizer)
        encoded = self._encoded(text)
        segments = encoded.sequence_ids(0)
        starts = {
            start: at
            for at, (start, end) in enumerate(encoded["offset_mapping"])
            if end > start and segments[at] == 0
        }
        row, types = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["token_type_ids"])
        places = [_place(starts, word) for word in words]
        masked = [place for place in places if place is not None]
        variants = [row.clone() for _ in masked]
        for variant, place in zip(variants, masked, strict=True):
            variant[place] = mask
        likeliest: list[list[str]] = []
        for first in range(0, len(variants), _BATCH):
            ids, lengths = pad(variants[first : first + _BATCH], self.tokenizer.pad_token_id)
            chosen = torch.zeros_like(ids, dtype=torch.bool)
            chosen[torch.arange(len(ids)), torch.tensor(masked[first : first + _BATCH])] = True
            attention = key_mask(lengths, ids.shape[1]).to(torch.int64)
            read = [part.to(device) for part in (ids, attention, chosen)]
            own_types = types.expand_as(ids).to(device) if self._has_segments else None
            likeliest += [self._whole_words(one) for one in self.model(*read, own_types).logits]
        answers = iter(likeliest)
        return [[] if place is None else next(answers) for place in places]

    def _encoded(self, text: str) -> BatchEncoding:
        """Return a document's tokens, and behind them those of the document again in form `authors`.

        The document itself is cut to `max_length`; what is read again is cut to what the model has room for.
        """
        positions = getattr(self.model.model.config, "max_position_embeddings", 2 * self.config.max_length)
        limit, room = self.config.max_length, min(positions - _SPARE, 2 * self.config.max_length)
        if not self._is_authors or room < 2 * _SPARE:
            return self._tokens(text, truncation=True, max_length=limit)
        own = self._tokens(text, truncation=True, max_length=min(limit, room - _SPARE))
        read = text[: max(end for _, end in own["offset_mapping"])]
        return self._tokens(read, read, truncation="only_second", max_length=room)

    def _tokens(self, *texts: str, truncation: bool | str, max_length: int) -> BatchEncoding:
        found = self.tokenizer(
            *texts,
            truncation=truncation,
            max_length=max_length,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        assert isinstance(found, BatchEncoding)
        return found

    @cached_property
    def _has_segments(self) -> bool:
        """Whether the model tells segments apart."""
        return int(getattr(self.model.model.config, "type_vocab_size", 0) or 0) > 1

    def _whole_words(self, logits: Tensor) -> list[str]:
        """Return the likeliest tokens that are words of their own."""
        most = min(self.config.candidates, int(self._is_word.sum()))
        best = logits.masked_fill(~self._is_word.to(logits.device), -torch.inf).topk(most).indices
        return [self._text(token) for token in best.tolist()]

    def _text(self, token: int) -> str:
        return "".join(self.tokenizer.decode([token])).strip()

    @cached_property
    def _is_word(self) -> Tensor:
        """True at tokens that are words: a word encoded alone is one piece, and that piece."""
        special = set(self.tokenizer.all_special_ids)
        found = torch.zeros(self.model.model.config.vocab_size, dtype=torch.bool)
        for number in range(len(self.tokenizer)):
            text = self._text(number)
            if number not in special and text.isalnum():
                found[number] = _pieces(text, self.tokenizer) == (number,)
        return found

    def _nearest(self, word: _Word) -> list[str]:
        own = F.normalize(self._embedding(word.pieces), dim=-1)
        best = (self._vectors @ own).topk(min(self.config.candidates + 1, len(self.vocabulary))).indices
        near = [self.vocabulary[at] for at in best.tolist()]
        others = [one for one in near if one != word.text.lower()][: self.config.candidates]
        return [one.title() for one in others] if self._is_authors and word.text.istitle() else others

    @cached_property
    def _vectors(self) -> Tensor:
        rows = [self._embedding(_pieces(word, self.tokenizer)) for word in self.vocabulary]
        return F.normalize(torch.stack(rows), dim=-1)

    def _embedding(self, pieces: Sequence[int]) -> Tensor:
        table = self.model.model.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        return table.weight.detach()[torch.tensor(pieces)].mean(0).cpu()


def _may_be_replaced(word: str) -> bool:
    """Return whether the authors' code replaces a word: letters a to z alone, and no stop word."""
    lower = word.lower()
    return bool(re.fullmatch("[a-z]+", lower)) and lower not in STOP_WORDS


def _place(starts: dict[int, int], word: _Word) -> int | None:
    """Return the token of a word; tokenizers that keep the space before a word may count it in."""
    return starts.get(word.start, starts.get(word.start - 1))


def _words(text: str, tokenizer: PreTrainedTokenizerFast) -> list[_Word]:
    """Return the words of a document that hold a letter or a number."""
    found = []
    for _, (start, end) in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text):
        own = text[start:end]
        start += len(own) - len(own.lstrip())
        own = own.strip()
        if any(letter.isalnum() for letter in own):
            found.append(_Word(start, start + len(own), own, _pieces(own, tokenizer)))
    return found


def _pieces(word: str, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Return the pieces of a word as it is inside a text."""
    ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    return tuple(int(one) for one in ids)


def _frequent_words(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the most frequent words, in lower case, those of equal count in alphabetical order."""
    counts: Counter[str] = Counter()
    for text in texts:
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        words = (text[start:end].strip().lower() for _, (start, end) in split)
        counts.update(word for word in words if word.isalnum())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ordered[:_MAX_WORDS]]
