"""A smaller vocabulary: the pieces that a text needs, of a tokenizer that cuts this text as it did before.

In small encoders the table of word pieces is most of the weights. A piece that no text uses can go, if what
the tokenizer needs to find the others stays: see `Pieces.always` and `Pieces.with_parts`.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from minilm_cache.errors import InvalidConfigError, TeacherError, first_line
from minilm_cache.models.files import library_errors
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.models.truncate import saving
from minilm_cache.storage_schema.identity import canonical_sha256

_TOKEN_SETTINGS: Final = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id"),
    *("unk_token_id", "decoder_start_token_id"),
)
"""Settings of a model that are ids of tokens."""
_OLDER_FILES: Final = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json")
"""Files of a tokenizer that tokenizer.json replaces, and that would bring all pieces back."""
_BATCH: Final = 1000
"""Texts that are read at a time."""
_LARGEST_DIFFERENCE: Final = 1e-4
"""Greatest difference of hidden states, of a length of about 10, that rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a text a smaller vocabulary covers."""

    texts: float
    """Share of texts all of whose pieces are kept, which are cut as before."""
    tokens: float
    """Share of tokens whose pieces are kept."""
    unknown: float
    """Share of the smaller tokenizer's tokens that are its unknown token."""

    @property
    def in_words(self) -> str:
        """What is covered, for people."""
        return (
            f"{self.texts:.1%} of texts are cut as before, {self.tokens:.2%} of tokens are kept, "
            f"{self.unknown:.2%} are unknown"
        )


class Pieces:
    """The pieces of a tokenizer's vocabulary, and what it needs to find each of them in a text.

    - WordPiece takes the longest piece that a word begins with. A word of pieces that are all kept is cut as
      before; one of others is spelled, so single characters stay, at the beginning of a word and within it.
    - BPE joins two pieces at a time. Whatever is joined to a piece on its way stays, and what is not joined
      of others: characters, or bytes.
    - Unigram looks for the likeliest pieces. An unknown character is as likely as the least likely piece,
      less a constant (10), so that piece stays. Each kept piece keeps its characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str] = ()) -> None:
        """Read a tokenizer of one of these kinds, or of whole words.

        Args:
            tokenizer: the tokenizer.
            texts: texts whose pieces stay in any case, such as a model's prompts.
        """
        self.tokenizer = tokenizer
        self._document: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        self._model: dict[str, Any] = self._document["model"]
        self.kind = str(self._model["type"])
        if self.kind == "Unigram":
            self._ids = {piece: number for number, (piece, _) in enumerate(self._model["vocab"])}
        else:
            self._ids = dict(self._model["vocab"])
        self._parts = self._characters() if self.kind == "Unigram" else self._joined()
        special = {int(added["id"]) for added in self._document["added_tokens"]}
        unknown = self._model.get("unk_token")
        special |= {self._ids[unknown]} if unknown in self._ids else set()
        special |= _numbers_in(self._document["post_processor"])
        special |= {
            number for text in texts for number in tokenizer(text, add_special_tokens=False)["input_ids"]
        }
        stays = special | self._never_left_out()
        self.always = frozenset(part for number in stays for part in self.with_parts(number))
        """Numbers of the pieces that every vocabulary keeps: special tokens, and those named above."""
        self.size = 1 + max((*self._ids.values(), *special))
        """Number of pieces, those of added tokens included."""
        self.known = np.zeros(self.size, np.bool_)
        """Which numbers are pieces, `(pieces,)`: a stranger's vocabulary may have gaps."""
        self.known[[*self._ids.values(), *special]] = True

    def _merges(self) -> list[tuple[str, str]]:
        """Return the pairs that BPE joins, in order; older files have them as one text with a space."""
        pairs = self._model.get("merges", ())
        return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ", 1)) for pair in pairs]

    def _characters(self) -> dict[int, set[int]]:
        """Return the characters of each piece of Unigram: words whose pieces are lost are spelled by them."""
        return {
            number: {self._ids[character] for character in piece if character in self._ids}
            for piece, number in self._ids.items()
        }

    def _joined(self) -> dict[int, set[int]]:
        """Return the pieces that each piece of BPE is joined of, in whatever way."""
        prefix = self._model.get("continuing_subword_prefix") or ""
        joined: dict[int, set[int]] = {}
        for left, right in self._merges():
            whole = left + right.removeprefix(prefix)
            joined.setdefault(self._ids[whole], set()).update((self._ids[left], self._ids[right]))
        return joined

    def _never_left_out(self) -> set[int]:
        """Return the numbers of the pieces that a kind of tokenizer needs whatever the text is."""
        if self.kind == "WordPiece":
            prefix = self._model["continuing_subword_prefix"]
            return {number for piece, number in self._ids.items() if len(piece.removeprefix(prefix)) == 1}
        if self.kind == "BPE":
            return set(self._ids.values()) - self._parts.keys()
        if self.kind == "Unigram":
            scores = [score for _, score in self._model["vocab"]]
            of_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if self._model.get("byte_fallback") else []
            kept = {self._ids[piece] for piece in of_bytes if piece in self._ids}
            return kept | {scores.index(min(scores)), *({self._model["unk_id"]} - {None})}
        return set()

    def with_parts(self, number: int) -> set[int]:
        """Return a piece and the pieces that stay with it."""
        found, todo = set(), [number]
        while todo:
            piece = todo.pop()
            if piece not in found:
                found.add(piece)
                todo += self._parts.get(piece, ())
        return found

    def listed(self, file: Path) -> list[int]:
        """Return the numbers of the pieces that a file lists or a model has, and of those that stay anyway.

        Raises:
            InvalidConfigError: it cannot be read as text, or one is no piece of this tokenizer.
            TeacherError: the model's tokenizer cannot be read.
        """
        try:
            if file.is_dir():
                vocab = load_tokenizer(file, has_ends=False).get_vocab()
                lines = sorted(vocab, key=lambda piece: vocab[piece])
            else:
                lines = file.read_text(encoding="utf-8-sig").replace("\r\n", "\n").split("\n")
        except (OSError, UnicodeError) as error:
            raise InvalidConfigError(f"--vocab {file}: {first_line(error)}. Give a text in UTF-8.") from error
        if not any(lines):
            raise InvalidConfigError(f"--vocab {file} names no piece. Write one a line.")
        known, kept = self.tokenizer.get_vocab(), set(self.always)
        for number, piece in enumerate(lines, 1):
            if piece and piece not in known:
                raise InvalidConfigError(
                    f"--vocab {file}, line {number}: {piece[:40]!r} is not a piece of this tokenizer, which "
                    f"is of the kind {self.kind}. Give pieces as they stand in its vocabulary."
                )
            kept |= self.with_parts(known[piece]) if piece else set()
        return sorted(kept)

    def chosen(self, counts: npt.NDArray[np.int64], most: int | None = None) -> list[int]:
        """Return the numbers of the pieces to keep, ascending: the place of one is its new number.

        Args:
            counts: how often a text has each piece, `(pieces,)`.
            most: most pieces that are kept, the most frequent ones; those that stay in any case are counted.
                None means all that the text has.

        Raises:
            InvalidConfigError: fewer pieces are asked for than stay in any case.
        """
        kept = set(self.always)
        if most is not None and most < len(kept):
            raise InvalidConfigError(
                f"--vocab {most}: {len(kept)} pieces of this tokenizer stay in any case (special tokens, "
                "single characters). Give more."
            )
        order = np.argsort(-counts, kind="stable")
        for number in order[: int((counts > 0).sum())].tolist():
            more = self.with_parts(number)
            if most is None or len(kept | more) <= most:
                kept |= more
        return sorted(kept)

    def counts(self, rows: Iterable[npt.NDArray[np.integer]]) -> npt.NDArray[np.int64]:
        """Return how often token ids have each piece, `(pieces,)`."""
        total = np.zeros(self.size, np.int64)
        for ids in rows:
            np.add.at(total, ids, 1)  # in the time of the tokens, however many pieces there are
        return total

    def coverage(self, kept: Sequence[int], rows: Iterable[npt.NDArray[np.integer]]) -> Coverage | None:
        """Return how much of a text a vocabulary covers. None means that there is no token.

        Args:
            kept: numbers of its pieces, ascending.
            rows: token ids of each text, by this tokenizer.
        """
        is_kept = np.zeros(self.size, np.bool_)
        is_kept[list(kept)] = True
        smaller = self.trimmed(kept)
        texts, whole, tokens, kept_tokens, read, unknown = 0, 0, 0, 0, 0, 0
        for batch in _batches(ids for ids in rows if len(ids)):
            found = [is_kept[ids] for ids in batch]
            others = [ids.tolist() for ids, each in zip(batch, found, strict=True) if not each.all()]
            written = self.tokenizer.batch_decode(others)
            again = smaller(written, add_special_tokens=False)["input_ids"] if written else []
            texts, whole = texts + len(batch), whole + len(batch) - len(others)
            tokens += sum(map(len, batch))
            kept_tokens += sum(int(each.sum()) for each in found)
            read += sum(len(each) for each in found if each.all()) + sum(map(len, again))
            unknown += sum(ids.count(smaller.unk_token_id) for ids in again)
        if not texts:
            return None
        return Coverage(texts=whole / texts, tokens=kept_tokens / tokens, unknown=unknown / read)

    def trimmed(self, kept: Sequence[int]) -> PreTrainedTokenizerFast:
        """Return a tokenizer of some of the pieces, whose new numbers are their places in `kept`."""
        place = {number: new for new, number in enumerate(kept)}
        document = copy.deepcopy(self._document)
        document["truncation"] = document["padding"] = None
        for added in document["added_tokens"]:
            added["id"] = place[added["id"]]
        _renumber(document["post_processor"], place)
        model = document["model"]
        if self.kind == "Unigram":
            vocab = self._model["vocab"]
            model["vocab"] = [vocab[number] for number in kept if number < len(vocab)]
            model["unk_id"] = place.get(self._model["unk_id"])
        else:
            left = {piece: place[number] for piece, number in self._ids.items() if number in place}
            model["vocab"] = dict(sorted(left.items(), key=lambda item: item[1]))
        if self.kind == "BPE":
            prefix = model.get("continuing_subword_prefix") or ""
            model["merges"] = [
                [left, right]
                for left, right in self._merges()
                if {left, right, left + right.removeprefix(prefix)} <= model["vocab"].keys()
            ]
        return self._saved_with(json.dumps(document, ensure_ascii=False))

    def _saved_with(self, document: str) -> PreTrainedTokenizerFast:
        """Return this tokenizer with other content, as its files would give it."""
        with TemporaryDirectory() as place:
            folder = Path(place)
            with saving("write", folder):
                self.tokenizer.save_pretrained(folder)
            for name in _OLDER_FILES:
                (folder / name).unlink(missing_ok=True)
            settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            settings.pop("added_tokens_decoder", None)  # by number; tokenizer.json has them
            (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
            (folder / "tokenizer.json").write_text(document, encoding="utf-8")
            return load_tokenizer(folder, has_ends=False)

    def spelled(self, kept: Sequence[int], lost: Iterable[int]) -> dict[int, list[int]]:
        """Return new numbers of pieces that stand for lost ones: as a tokenizer of kept pieces spells them.

        Args:
            kept: numbers of the kept pieces, ascending.
            lost: numbers of other pieces.
        """
        smaller = self.trimmed(kept)
        vocab, unknown = smaller.get_vocab(), smaller.unk_token_id
        piece_of = {number: piece for piece, number in self._ids.items()}
        prefix = self._model.get("continuing_subword_prefix") or ""
        suffix = self._model.get("end_of_word_suffix") or ""
        whole = smaller.backend_tokenizer.model
        inner = _without_suffix(smaller.backend_tokenizer).model if suffix else whole
        spelled = {}
        for number in lost:
            piece = piece_of[number]
            if prefix and piece.startswith(prefix):
                ids = _longest_first(piece, prefix, vocab)
            else:
                # The suffix is added to what is taken for a whole word.
                model = whole if suffix and piece.endswith(suffix) else inner
                ids = [token.id for token in model.tokenize(piece.removesuffix(suffix))]
            spelled[number] = ids or [unknown]
        return spelled


def _batches(rows: Iterable[npt.NDArray[np.integer]]) -> Iterator[list[npt.NDArray[np.integer]]]:
    """Yield texts some at a time, so that a large text is never held whole."""
    left = iter(rows)
    while batch := list(islice(left, _BATCH)):
        yield batch


def _without_suffix(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that cuts parts of words, whose ends it does not mark."""
    document = json.loads(tokenizer.to_str())
    document["model"]["end_of_word_suffix"] = None
    return Tokenizer.from_str(json.dumps(document))


def _longest_first(piece: str, prefix: str, vocab: Mapping[str, int]) -> list[int]:
    """Return the longest pieces that the rest of a word is made of, as WordPiece finds them; [] if none."""
    rest, found = piece.removeprefix(prefix), []
    while rest:
        end = next((end for end in range(len(rest), 0, -1) if prefix + rest[:end] in vocab), None)
        if end is None:
            return []
        found.append(vocab[prefix + rest[:end]])
        rest = rest[end:]
    return found


def _numbers_in(processor: dict[str, Any] | None) -> set[int]:
    """Return the numbers of the tokens that stand around texts."""
    if processor is None:
        return set()
    parts = processor.get("processors", ())
    found = {number for part in parts for number in _numbers_in(part)}
    found |= {number for special in processor.get("special_tokens", {}).values() for number in special["ids"]}
    return found | {processor[name][1] for name in ("cls", "sep") if name in processor}


def _renumber(processor: dict[str, Any] | None, place: Mapping[int, int]) -> None:
    """Give what stands around texts its new numbers."""
    if processor is None:
        return
    for part in processor.get("processors", ()):
        _renumber(part, place)
    for special in processor.get("special_tokens", {}).values():
        special["ids"] = [place[number] for number in special["ids"]]
    for name in ("cls", "sep"):
        if name in processor:
            token, number = processor[name]
            processor[name] = [token, place[number]]


def trimmed_config(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """Return the configuration of a model that knows only some pieces, given by their numbers, ascending."""
    place = {number: new for new, number in enumerate(kept)}
    smaller = copy.deepcopy(config)
    smaller.vocab_size = len(kept)
    for name in _TOKEN_SETTINGS:
        number = getattr(smaller, name, None)
        if isinstance(number, int):
            try:
                setattr(smaller, name, place.get(number))
            except StrictDataclassError as error:  # it must be a number, and is that of no piece
                raise TeacherError(
                    f"{name} is {number} in config.json, a number that no piece of the tokenizer has. "
                    "Correct it."
                ) from error
        elif isinstance(number, list):  # several tokens may end a generated text
            setattr(smaller, name, [place[each] for each in number if each in place])
    return smaller


def trim_model(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return a copy of a model, with or without a head, that knows only some pieces.

    Args:
        model: a model in evaluation mode.
        kept: numbers of the pieces, ascending; the place of one is its new number.

    Raises:
        TeacherError: the copy would not compute the same, because its positions depend on a number.
    """
    rows = torch.tensor(kept)
    smaller: PreTrainedModel = type(model)(trimmed_config(model.config, kept)).eval()
    shapes = {name: weight.shape for name, weight in smaller.state_dict().items()}
    weights = {name: _of_pieces(weight, shapes[name], rows) for name, weight in model.state_dict().items()}
    smaller.load_state_dict(weights)
    _refuse_other_states(model, smaller, rows)
    return smaller


def _of_pieces(weight: torch.Tensor, shape: torch.Size, rows: torch.Tensor) -> torch.Tensor:
    """Return a weight with some pieces only, on the axis of the vocabulary; MobileBERT's head has it last."""
    for axis, (whole, part) in enumerate(zip(weight.shape, shape, strict=True)):
        weight = weight if whole == part else weight.index_select(axis, rows)
    return weight


@torch.no_grad()
def _refuse_other_states(model: PreTrainedModel, smaller: PreTrainedModel, rows: torch.Tensor) -> None:
    """Raise TeacherError if a smaller model computes other hidden states of the pieces that it has."""
    places = torch.linspace(0, len(rows) - 1, 2 * 12).long().view(2, 12)
    whole: nn.Module = model.base_model
    with library_errors(f"cannot run a model of the family {model.config.model_type} on word pieces alone"):
        before, after = (
            encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            for encoder, ids in ((whole, rows[places]), (smaller.base_model, places))
        )
    if float((before - after).norm(dim=-1).max()) > _LARGEST_DIFFERENCE * float(before.norm(dim=-1).max()):
        raise TeacherError(
            f"a model of the family {model.config.model_type} with fewer pieces computes other hidden "
            "states, so the number of its padding token matters. Give one whose padding token is among its "
            "first."
        )


def name_of(kept: Sequence[int]) -> str:
    """Return the name of some pieces of a tokenizer, by their numbers."""
    return canonical_sha256(list(kept))[:12]
