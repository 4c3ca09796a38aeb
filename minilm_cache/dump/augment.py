"""Augment text for a task: TinyBERT's algorithm 1 (Jiao et al. 2020, arXiv 1909.10351, section 3.2).

Every word of a document has candidates. For a word of one piece they are the tokens that a model with a head
for masked tokens predicts in its place; for a longer word they are the words of the corpus whose embeddings
are nearest. Each copy of a document replaces a word by a candidate with probability `replace`. The authors'
code differs from the algorithm as printed, and is the default form: stop words and words with other letters
than a to z stay, the model reads the document itself as a second segment, and nearest words take a capital
where the word has one. Where the paper takes nearest words from GloVe, a word's embedding is the mean of its
pieces' input embeddings of the same model.
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
from minilm_cache.corpus.pairs import BETWEEN
from minilm_cache.dump.config import AugmentConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.device import choose_device
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import has_sides, load_model
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.outline import positions_of
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import check_length
from minilm_cache.models.tokenizer import load_tokenizer, mask_token, refuse_ids_beyond
from minilm_cache.session import ALONE, Session
from minilm_cache.store.durable import new_file, prepare_new, remove_left_of, storage_errors

_MAX_WORDS = 2**14
"""Number of most frequent words of the corpus among which nearest words are searched."""
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
"""Positions that are left for special tokens, and for those that some model families do not use."""
_BATCH = 32
"""Masked variants of a document per forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmented:
    """Result of an augmentation."""

    path: Path
    num_documents: int
    num_lines: int
    """Number of documents and copies written."""


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a document."""

    start: int
    """Position of its first character in the document."""
    end: int
    """Position after its last character."""
    text: str
    pieces: tuple[int, ...]
    """Token ids of its pieces."""


def augment(config: AugmentConfig, out: Path, *, session: Session = ALONE) -> Augmented:
    """Write a corpus and its augmented copies as JSON lines: `text`, and the number of its `document`.

    Texts that the corpus marks as copies of one document keep one number. Of pairs of texts, both are
    replaced, and the lines have `first` and `second`.

    Args:
        config: what to augment, by which model, how much.
        out: file to write, which must not exist.
        session: its progress shows documents done. Its `should_stop` is called before each document; True
            stops, and nothing is written.

    Raises:
        TeacherError: the model has no head for masked tokens.
        InvalidConfigError: records are queries with several documents.
        CorpusError: the corpus cannot be read.
        InterruptedRunError: a stop was requested.
        StorageError: the file cannot be written.
    """
    prepare_new(out)
    source = locate_teacher(config.teacher, config.revision)
    tokenizer = load_tokenizer(source.folder)
    model = TappedModel(load_model(source.folder, "tokens", name=source.name))
    refuse_ids_beyond(tokenizer, model.model.config.vocab_size, source.folder)
    check_length(model, source.name, token=tokenizer.cls_token_id, max_length=config.max_length)
    corpus = load_corpus(
        config.corpus, config.text_column, config.documents, pair_columns=config.pair_columns
    )
    if corpus.identity.groups:
        raise InvalidConfigError(
            f"--pair-columns {config.pair_columns}: records are queries with several documents, whose pairs "
            "belong together. augment takes pairs of two texts."
        )
    device = choose_device(config.device)
    replacer = _WordReplacer(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        config=config,
        vocabulary=_frequent_words((text.replace(BETWEEN, " ") for text in corpus.texts()), tokenizer),
    )
    names, num_lines = ("text",) if config.pair_columns is None else ("first", "second"), 0
    session.progress.start("augment", corpus.identity.num_documents, "documents")
    remove_left_of(out)
    documents = dict[str, int]()
    with storage_errors("write", out), new_file(out, replaces=False) as file:
        for number, (text, mark) in enumerate(zip(corpus.texts(), corpus.marks(), strict=True)):
            session.stop_if_asked("interrupted: nothing was written. Run the same command again.")
            texts = (text,) if config.pair_columns is None else tuple(text.split(BETWEEN))
            versions = [texts, *replacer.copies(texts, number)]
            document = number if mark is None else documents.setdefault(mark, number)
            lines = (
                json.dumps({**dict(zip(names, each, strict=True)), "document": document}, ensure_ascii=False)
                for each in versions
            )
            file.writelines(f"{line}\n".encode() for line in lines)
            num_lines += len(versions)
            session.progress.advance(1)
    return Augmented(path=out, num_documents=corpus.identity.num_documents, num_lines=num_lines)


@dataclass(frozen=True)
class _WordReplacer:
    """Makes copies of documents with words replaced by candidates."""

    model: TappedModel
    tokenizer: PreTrainedTokenizerFast
    config: AugmentConfig
    vocabulary: Sequence[str]
    """Frequent words of the corpus."""

    def copies(self, texts: Sequence[str], number: int) -> list[tuple[str, ...]]:
        """Return the different copies of a document, one text or two, that are not equal to it.

        With the same model and settings, they depend only on the texts and their number.
        """
        each = [self._replaced(text, [number, *[side] * (side > 0)]) for side, text in enumerate(texts)]
        return [copy for copy in dict.fromkeys(zip(*each, strict=True)) if copy != tuple(texts)]

    def _replaced(self, text: str, key: Sequence[int]) -> list[str]:
        """Return the copies of a text, some of which may be equal; `key` is part of their seed."""
        words = _words(text, self.tokenizer)
        candidates = self._candidates(text, words)
        copies = []
        for copy in range(self.config.copies):
            generator = np.random.default_rng([self.config.seed, key[0], copy, *key[1:]])
            parts, end = [], 0
            for word, choices in zip(words, candidates, strict=True):
                written = word.text
                if choices and generator.random() < self.config.replace:
                    written = choices[int(generator.integers(len(choices)))]
                parts += [text[end : word.start], written]
                end = word.end
            copies.append("".join([*parts, text[end:]]))
        return copies

    @property
    def _is_authors(self) -> bool:
        return self.config.form == "authors"

    def _candidates(self, text: str, words: Sequence[_Word]) -> list[list[str]]:
        """Return the candidates of each word; a word without candidates stays."""
        chosen = [word for word in words if not self._is_authors or _may_be_replaced(word.text)]
        masked = iter(self._masked(text, [word for word in chosen if len(word.pieces) == 1]))
        candidates = {word: next(masked) if len(word.pieces) == 1 else self._nearest(word) for word in chosen}
        return [candidates.get(word, []) for word in words]

    @torch.no_grad()
    def _masked(self, text: str, words: Sequence[_Word]) -> list[list[str]]:
        """Return the likeliest tokens in place of each word. A word beyond the model's length has none."""
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
            rows = variants[first : first + _BATCH]
            segments_of = [types] * len(rows) if self._has_segments else None
            inputs = Inputs.of(rows, self.tokenizer.pad_token_id, segments_of)
            places_of_batch = torch.arange(len(rows)) * len(row) + torch.tensor(
                masked[first : first + _BATCH]
            )
            output = self.model(inputs.to(device), Tap(head="tokens"), places_of_batch.to(device))
            likeliest += [self._whole_words(logits) for logits in output.logits]
        answers = iter(likeliest)
        return [[] if place is None else next(answers) for place in places]

    def _encoded(self, text: str) -> BatchEncoding:
        """Return the tokens of a document; form `authors` repeats the document as a second segment.

        The document is cut to `max_length` tokens, and the second segment to the positions that the model has
        left.
        """
        positions = positions_of(self.model.model.config) or 2 * self.config.max_length
        limit, room = self.config.max_length, min(positions - _SPARE, 2 * self.config.max_length)
        if not self._is_authors or room < 2 * _SPARE:
            return self._tokens(text, truncation=True, max_length=limit)
        tokens = self._tokens(text, truncation=True, max_length=min(limit, room - _SPARE))
        kept = text[: max(end for _, end in tokens["offset_mapping"])]
        return self._tokens(kept, kept, truncation="only_second", max_length=room)

    def _tokens(self, *texts: str, truncation: bool | str, max_length: int) -> BatchEncoding:
        encoded = self.tokenizer(
            *texts,
            truncation=truncation,
            max_length=max_length,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        assert isinstance(encoded, BatchEncoding)
        return encoded

    @cached_property
    def _has_segments(self) -> bool:
        """Whether the model distinguishes segments."""
        return has_sides(self.model.model.config)

    def _whole_words(self, logits: Tensor) -> list[str]:
        """Return the likeliest tokens that are whole words."""
        most = min(self.config.candidates, int(self._is_word.sum()))
        best = logits.masked_fill(~self._is_word.to(logits.device), -torch.inf).topk(most).indices
        return [self._text(token) for token in best.tolist()]

    def _text(self, token: int) -> str:
        return "".join(self.tokenizer.decode([token])).strip()

    @cached_property
    def _is_word(self) -> Tensor:
        """True at tokens that are whole words: their text, encoded alone, is that one token."""
        special = set(self.tokenizer.all_special_ids)
        is_word = torch.zeros(self.model.model.config.vocab_size, dtype=torch.bool)
        for number in range(len(self.tokenizer)):
            text = self._text(number)
            if number not in special and text.isalnum():
                is_word[number] = _pieces(text, self.tokenizer) == (number,)
        return is_word

    def _nearest(self, word: _Word) -> list[str]:
        vector = F.normalize(self._embedding(word.pieces), dim=-1)
        best = (self._vectors @ vector).topk(min(self.config.candidates + 1, len(self.vocabulary))).indices
        near = [self.vocabulary[at] for at in best.tolist()]
        others = [text for text in near if text != word.text.lower()][: self.config.candidates]
        return [text.title() for text in others] if self._is_authors and word.text.istitle() else others

    @cached_property
    def _vectors(self) -> Tensor:
        rows = [self._embedding(_pieces(word, self.tokenizer)) for word in self.vocabulary]
        return F.normalize(torch.stack(rows), dim=-1)

    def _embedding(self, pieces: Sequence[int]) -> Tensor:
        table = self.model.model.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        return table.weight.detach()[torch.tensor(pieces)].mean(0).cpu()


def _may_be_replaced(word: str) -> bool:
    """Return whether the authors' code replaces a word: it has only letters a to z and is not a stop word."""
    lower = word.lower()
    return bool(re.fullmatch("[a-z]+", lower)) and lower not in STOP_WORDS


def _place(starts: dict[int, int], word: _Word) -> int | None:
    """Return the position of a word's token; some tokenizers count the space before a word as its part."""
    return starts.get(word.start, starts.get(word.start - 1))


def _words(text: str, tokenizer: PreTrainedTokenizerFast) -> list[_Word]:
    """Return the words of a document that hold a letter or a number."""
    words = []
    for _, (start, end) in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text):
        part = text[start:end]
        start += len(part) - len(part.lstrip())
        part = part.strip()
        if any(letter.isalnum() for letter in part):
            words.append(_Word(start, start + len(part), part, _pieces(part, tokenizer)))
    return words


def _pieces(word: str, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Return the token ids of a word as it is encoded inside a text."""
    ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    return tuple(int(token) for token in ids)


def _frequent_words(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the most frequent words in lower case; words of equal count are in alphabetical order."""
    counts: Counter[str] = Counter()
    for text in texts:
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        words = (text[start:end].strip().lower() for _, (start, end) in split)
        counts.update(word for word in words if word.isalnum())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ordered[:_MAX_WORDS]]
