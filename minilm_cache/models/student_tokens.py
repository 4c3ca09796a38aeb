"""How students read the sequences of a cache, where their tokenizer is not that of its teacher.

The tokenizer of another model reads all texts anew, a trimmed one those that have pieces which it lacks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from tokenizers import decoders
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.inputs import Inputs, cut_pair, texts_of_pair
from minilm_cache.models.tokenizer import tokenizer_sha256
from minilm_cache.models.vocabulary import Pieces, name_of
from minilm_cache.storage_schema.identity import PairTemplate


class StudentTokens(ABC):
    """How students read the sequences of a cache, where they have another vocabulary than its teacher."""

    tokenizer: PreTrainedTokenizerFast
    """The students' tokenizer, which is saved with them."""
    name: str
    """What identifies it: 12 hexadecimal digits of a hash."""
    pair: PairTemplate | None = None
    """What stands around and between two texts, in ids of `tokenizer`. None means that sequences are single
    texts."""

    @property
    @abstractmethod
    def pad_token(self) -> int:
        """Id that fills up the sequences that students read."""

    @abstractmethod
    def check_places(self, *, reads_texts: bool) -> None:
        """Raise InvalidConfigError if what is learned of tokens cannot be, because they lose their places.

        Args:
            reads_texts: whether something is learned of whole texts, too.
        """

    @abstractmethod
    def read(self, inputs: Inputs, most: int | None) -> Inputs:
        """Return sequences as students read them.

        Args:
            inputs: sequences of the cache, on the CPU. Segments of pairs are found again by `pair`.
            most: most tokens of a sequence. None means that tokens have to keep their places, because what
                is learned belongs to tokens.
        """

    def row(self, ids: Int[Tensor, " length"], most: int) -> Int[Tensor, " other_length"]:
        """Return one sequence as students read it, cut to `most` tokens."""
        inputs = self.read(Inputs.full(ids[None]), most)
        return inputs.ids[0, : int(inputs.lengths[0])]


class OtherTokenizer(StudentTokens):
    """Another model's tokenizer: texts are written from the cache's token ids, and read anew."""

    def __init__(
        self,
        cached: PreTrainedTokenizerFast,
        own: PreTrainedTokenizerFast,
        *,
        pairs: tuple[PairTemplate, PairTemplate] | None = None,
    ) -> None:
        """Read texts that one tokenizer writes by another one.

        Args:
            cached: the tokenizer of the cache.
            own: the tokenizer of students.
            pairs: what each of them puts around and between two texts. None means that sequences are single
                texts.
        """
        self._cached, self.tokenizer = cached, own
        own.truncation_side = "right"  # as students' folders say, whatever the donor's does
        self._writer = _Writer(cached, None if pairs is None else pairs[0])
        self.pair = None if pairs is None else pairs[1]
        self.name = tokenizer_sha256(own)[:12]

    @property
    def pad_token(self) -> int:
        """Id that fills up the sequences that students read."""
        return int(self.tokenizer.pad_token_id)

    @property
    def left_out(self) -> int | None:
        """Id of the cache's unknown token. Texts that are written from ids lack the words that it stands for.

        None means that there is no such token, or that it stands at the ends of texts, too.
        """
        names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
        number, at_ends = self._cached.unk_token_id, {getattr(self._cached, name) for name in names}
        return None if number is None or number in at_ends else int(number)

    def check_places(self, *, reads_texts: bool) -> None:
        """Raise InvalidConfigError: the other tokenizer's tokens have other places."""
        del reads_texts
        raise InvalidConfigError(
            "students of this donor have another tokenizer than the cache, and what is learned of single "
            "tokens has no place there. Take a donor with the tokenizer of the cache, or learn of whole "
            "texts alone (--objective embedding)."
        )

    def read(self, inputs: Inputs, most: int | None) -> Inputs:
        """Return sequences as students read them."""
        assert most is not None, "`check_places` refuses what is learned of tokens"
        rows = inputs.ids[inputs.valid].split(inputs.lengths.tolist())
        return Inputs.of(
            _read(self.tokenizer, self._writer.write(rows), most, pair=self.pair), self.pad_token
        )


class _Writer:
    """Writes the texts of sequences from the token ids of a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, pair: PairTemplate | None, *, keeps_unknown: bool = False
    ) -> None:
        """Write texts.

        Args:
            tokenizer: the tokenizer of the ids.
            pair: what it puts around and between two texts. None means single texts.
            keeps_unknown: whether its unknown token is written, too, for a tokenizer that reads it again.
        """
        self._tokenizer, self.pair, self._keeps_unknown = tokenizer, pair, keeps_unknown
        self._around = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        # Word pieces lack the spaces of a text: its signs would stand alone, like "it ' s".
        self._joins = isinstance(tokenizer.backend_tokenizer.decoder, decoders.WordPiece)

    def write(self, rows: Sequence[Int[Tensor, " _"]]) -> list[tuple[str, ...]]:
        """Return the text of each sequence, or both texts of each pair."""
        if self.pair is None:
            return [(self._text(row.tolist()),) for row in rows]
        parts = [texts_of_pair(row.numpy(), self.pair) for row in rows]
        return [(self._text(first.tolist()), self._text(second.tolist())) for first, second in parts]

    def _text(self, ids: list[int]) -> str:
        if self._keeps_unknown:
            ids = [number for number in ids if number not in self._around]
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=not self._keeps_unknown, clean_up_tokenization_spaces=self._joins
            )
        )


def _read(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[tuple[str, ...]],
    most: int | None,
    *,
    pair: PairTemplate | None,
) -> list[Int[Tensor, " _"]]:
    """Return sequences as a tokenizer reads their texts.

    Args:
        tokenizer: the tokenizer that reads.
        texts: the text of each sequence, or both texts of each pair.
        most: most tokens of a sequence. None means no limit.
        pair: what the tokenizer puts around and between two texts. None means single texts.
    """
    firsts = [each[0] for each in texts]
    if pair is None:
        read = tokenizer(firsts, truncation=most is not None, max_length=most, verbose=False)["input_ids"]
        return list(map(torch.tensor, read))
    sides = [
        tokenizer(side, add_special_tokens=False, verbose=False)["input_ids"]
        for side in (firsts, [each[1] for each in texts])
    ]
    wholes = [
        torch.tensor([*pair.before, *first, *pair.between, *second, *pair.after])
        for first, second in zip(*sides, strict=True)
    ]
    return wholes if most is None else [_cut(whole, most, pair=pair) for whole in wholes]


def _cut(
    row: Int[Tensor, " length"], most: int, *, pair: PairTemplate | None, num_after: int = 0
) -> Int[Tensor, " cut"]:
    """Return a sequence cut to `most` tokens: before the last ones, which end every text, or as pairs are."""
    if len(row) <= most:
        return row
    if pair is None:
        end = len(row) - num_after
        return torch.cat([row[: most - num_after], row[end:]])
    start, end = len(pair.before), len(row) - len(pair.after)
    texts = cut_pair(row[start:end].numpy(), most - start - len(pair.after), pair)
    return torch.cat([row[:start], torch.from_numpy(texts), row[end:]])


class Vocabulary(StudentTokens):
    """The pieces that students have of a cache's tokenizer.

    A text with lost pieces is written from its token ids, and read as in use. Where the cache's tokenizer
    would not give these ids back, for example of a text that was cut within a character, its lost pieces are
    spelled one by one, and what becomes too long is cut. Where tokens have to keep their places, a lost piece
    is an unknown one.
    """

    def __init__(
        self,
        pieces: Pieces,
        counts: npt.NDArray[np.int64],
        kept: Sequence[int],
        *,
        num_after: int,
        pair: PairTemplate | None = None,
    ) -> None:
        """Prepare to read sequences.

        Args:
            pieces: the pieces of the cache's tokenizer.
            counts: how often the cache has each piece, `(pieces,)`: others are not looked at.
            kept: numbers of the pieces that students have, ascending.
            num_after: special tokens after a single text, which stay where it is cut.
            pair: what stands around and between the texts of the cache's pairs. None means single texts.
        """
        self.pieces, self.kept = pieces, tuple(kept)
        self.tokenizer = pieces.trimmed(kept)
        self.tokenizer.truncation_side = "right"
        self._num_after = num_after
        self._writer = _Writer(pieces.tokenizer, pair, keeps_unknown=True)
        self.name = name_of(kept)
        self._new = torch.full((pieces.size,), int(self.tokenizer.unk_token_id or 0))
        self._new[torch.tensor(kept)] = torch.arange(len(kept))
        if pair is not None:
            names = ("before", "between", "after")
            renumbered = {name: tuple(self._new[list(getattr(pair, name))].tolist()) for name in names}
            self.pair = pair.model_copy(update=renumbered)
        lost = sorted(set(np.flatnonzero(counts).tolist()) - set(kept))
        self._has_lost = bool(lost)
        spelled = pieces.spelled(kept, lost) if lost else {}
        # All spellings one after the other: a kept piece is its own, that of a lost one begins at `first`.
        self._spelling = torch.cat([self._new, *map(torch.tensor, spelled.values())])
        self._first, self._count = torch.arange(pieces.size), torch.ones(pieces.size, dtype=torch.int64)
        if lost:
            sizes = torch.tensor([len(ids) for ids in spelled.values()])
            self._first[lost], self._count[lost] = pieces.size + sizes.cumsum(0) - sizes, sizes

    def check_places(self, *, reads_texts: bool) -> None:
        """Raise InvalidConfigError if a lost piece could only be read as another token, or in two ways."""
        if self._has_lost and reads_texts:
            raise InvalidConfigError(
                "--vocab: pieces that students lack are read as unknown ones where single tokens are "
                "learned, and are cut into other pieces where whole texts are, as later in use. Learn one "
                "after the other (--first), or leave --vocab out and trim the student afterwards."
            )
        if self._has_lost and self.tokenizer.unk_token_id is None:
            raise InvalidConfigError(
                "--vocab: what is learned of this cache belongs to tokens, so pieces that students lack are "
                "read as unknown ones, and this tokenizer has no unknown token. Leave --vocab out, or learn "
                "vectors of texts (--objective embedding)."
            )

    @property
    def pad_token(self) -> int:
        """Id that fills up the sequences that students read."""
        return int(self._new[self.pieces.tokenizer.pad_token_id])

    def read(self, inputs: Inputs, most: int | None) -> Inputs:
        """Return sequences as students read them."""
        if most is None:
            return inputs.with_ids(self._new[inputs.ids])
        ids = inputs.ids[inputs.valid]
        counts = self._count[ids]
        places = (self._first[ids] - counts.cumsum(0) + counts).repeat_interleave(counts)
        spelled = self._spelling[places + torch.arange(len(places))]
        lengths = inputs.lengths.tolist()
        rows = [
            _cut(row, most, pair=self.pair, num_after=self._num_after)
            for row in spelled.split([int(part.sum()) for part in counts.split(lengths)])
        ]
        cached = ids.split(lengths)
        others = [number for number, row in enumerate(cached) if (self._first[row] >= self.pieces.size).any()]
        if not others:
            return Inputs.of(rows, self.pad_token)
        for number, row in zip(
            others, self._in_use([cached[number] for number in others], most), strict=True
        ):
            rows[number] = rows[number] if row is None else row
        return Inputs.of(rows, self.pad_token)

    def _in_use(self, rows: Sequence[Int[Tensor, " _"]], most: int) -> list[Int[Tensor, " _"] | None]:
        """Return texts as the students' tokenizer reads them; None where ids do not say what a text was."""
        texts = self._writer.write(rows)
        again = _read(self.pieces.tokenizer, texts, None, pair=self._writer.pair)
        read = _read(self.tokenizer, texts, most, pair=self.pair)
        return [
            own if torch.equal(row, same) else None for row, same, own in zip(rows, again, read, strict=True)
        ]
