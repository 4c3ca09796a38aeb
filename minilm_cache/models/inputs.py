"""What a model reads: sequences of any lengths as one padded batch, with segments where texts are pairs.

Where a text is generated from another one, the parts of a sequence say who sees whom: the mask of UniLM (Dong
et al. 2019, arXiv 1905.03197, section 2.3), with masked copies of target tokens as in UniLMv2 (Bao et al.
2020, arXiv 2002.12804, section 3.2).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from minilm_cache.relations.scores import key_mask
from minilm_cache.relations.transfer import pin, send
from minilm_cache.storage_schema.identity import PairTemplate


class Part(IntEnum):
    """What a token is, where a text is generated from another one."""

    SOURCE = 0
    """A token of the text that is read. It sees the whole source."""
    TARGET = 1
    """A token of the text that is generated. It sees the source, the target before it, and itself."""
    MASKED = 2
    """A copy of a target's token that stands for it while it is predicted. It sees the source, the target
    before that token, and itself; no other token sees it."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A padded batch. Padding is on the right, whatever side the tokenizer pads on."""

    ids: Int[Tensor, "batch length"]
    """Token ids."""
    lengths: Int[Tensor, " batch"]
    """Tokens of each sequence."""
    segments: Int[Tensor, "batch length"] | None = None
    """Segment of each token, 0 or 1, where a sequence is a pair of texts. None means one segment."""
    is_full: bool = False
    """True if it is known that no sequence is padded; models then need no mask."""
    parts: Int[Tensor, "batch length"] | None = None
    """Part of each token, where a text is generated from another one. None means that all see each other."""
    positions: Int[Tensor, "batch length"] | None = None
    """Position of each token, from 0 on; those of copies are not in order. None means the order of tokens."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Int[Tensor, " _"]],
        pad_token: int,
        segments: Sequence[Int[Tensor, " _"]] | None = None,
    ) -> "Inputs":
        """Return sequences of the CPU as one batch.

        Args:
            rows: token ids of each sequence.
            pad_token: id that fills rows up.
            segments: segment of each token. None means one segment.
        """
        lengths = torch.tensor([len(row) for row in rows])
        ids = padded(rows, pad_token)
        is_full = bool((lengths == ids.shape[1]).all())
        return cls(ids, lengths, None if segments is None else padded(segments, 0), is_full)

    @classmethod
    def full(cls, ids: Int[Tensor, "batch length"]) -> "Inputs":
        """Return sequences of one length, none of them padded."""
        return cls(ids, torch.full_like(ids[:, 0], ids.shape[1]), is_full=True)

    def paired(self, pair: PairTemplate | None) -> "Inputs":
        """Return the same sequences with the segments of pairs of texts.

        Args:
            pair: what stands around and between the texts of each sequence. None means that sequences are no
                pairs.
        """
        if pair is None or not pair.has_segments:
            return self
        start, width = len(pair.before), len(pair.between)
        between = torch.tensor(pair.between, device=self.ids.device)
        windows = self.ids[:, start:].unfold(1, width, 1)
        matches = (windows == between).all(-1)
        second = matches.int().argmax(1) + start + width
        position = torch.arange(self.ids.shape[1], device=self.ids.device)
        segments = (position >= second[:, None]) & self.valid & matches.any(1)[:, None]
        return replace(self, segments=segments.to(torch.int64))

    def apart(
        self, pair: PairTemplate, queries: Int[Tensor, " batch"], pad_token: int, *, most: int
    ) -> "Inputs":
        """Return the texts of pairs as sequences of their own: each first text once, then all second texts.

        A text alone stands between the tokens that are before and after a pair.

        Args:
            pair: what stands around and between the texts.
            queries: number of the first text of each pair, as `query_numbers` returns them.
            pad_token: id that fills rows up.
            most: most tokens of each sequence; what is longer is cut.
        """
        firsts, seconds = dict[int, Tensor](), list[Tensor]()
        before, after = (torch.tensor(part, dtype=torch.int64) for part in (pair.before, pair.after))
        rows = zip(self.ids, self.lengths.tolist(), queries.tolist(), strict=True)
        for row, length, query in rows:
            first, second = (torch.from_numpy(part) for part in texts_of_pair(row[:length].numpy(), pair))
            firsts.setdefault(query, first)
            seconds.append(second)
        texts = [firsts[query] for query in range(len(firsts))] + seconds
        room = most - len(before) - len(after)
        return Inputs.of([torch.cat((before, text[:room], after)) for text in texts], pad_token)

    @property
    def valid(self) -> Bool[Tensor, "batch length"]:
        """True at tokens, False at padding."""
        return key_mask(self.lengths, self.ids.shape[1])

    @property
    def mask(self) -> Int[Tensor, "batch length"] | Bool[Tensor, "batch 1 length length"] | None:
        """The mask that models of transformers take: 1 at tokens, 0 at padding. None means no padding.

        Where a text is generated from another one it is true where a token (third axis) sees another one
        (last axis); padding sees itself, so that no row is empty.
        """
        if self.parts is not None:
            return self._sight(self.parts)
        return None if self.is_full else self.valid.to(torch.int64)

    def _sight(self, parts: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch 1 length length"]:
        assert self.positions is not None
        queries, keys = parts[:, :, None], parts[:, None, :]
        before = self.positions[:, None, :] < self.positions[:, :, None] + (queries == Part.TARGET)
        sees_target = (keys == Part.TARGET) & (queries != Part.SOURCE) & before
        itself = torch.eye(parts.shape[1], dtype=torch.bool, device=parts.device)
        seen = ((keys == Part.SOURCE) | sees_target) & self.valid[:, None, :] | itself
        return seen[:, None]

    def with_ids(self, ids: Int[Tensor, "batch length"]) -> "Inputs":
        """Return the same sequences with other token ids, such as masked ones."""
        return replace(self, ids=ids)

    def filled_up(self, length: int, pad_token: int) -> "Inputs":
        """Return the same sequences, of one segment, padded to at least a length."""
        more = length - self.ids.shape[1]
        if more <= 0:
            return self
        return Inputs(torch.nn.functional.pad(self.ids, (0, more), value=pad_token), self.lengths)

    def to(self, device: torch.device) -> "Inputs":
        """Return the same batch on a device, without waiting for it."""
        return self._with(lambda part: send(part, device))

    def pinned_for(self, device: torch.device) -> "Inputs":
        """Return the same batch in memory from which `to` need not copy it first."""
        return self._with(lambda part: pin(part, device))

    def _with(self, moved: Callable[[Tensor], Tensor]) -> "Inputs":
        segments, parts, positions = (
            None if part is None else moved(part) for part in (self.segments, self.parts, self.positions)
        )
        return Inputs(moved(self.ids), moved(self.lengths), segments, self.is_full, parts, positions)


def texts_of_pair(row: npt.NDArray[Any], pair: PairTemplate) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the tokens of the two texts of a pair, without those around and between them.

    Args:
        row: tokens of the pair, without padding.
        pair: what stands around and between the texts.
    """
    texts = row[len(pair.before) : len(row) - len(pair.after)]
    place = int((texts == pair.between[0]).argmax())
    return texts[:place], texts[place + len(pair.between) :]


def cut_pair(ids: npt.NDArray[Any], room: int, pair: PairTemplate) -> npt.NDArray[Any]:
    """Return two texts and the tokens between them, cut to fit: the longer one first.

    Lengths are those of tokenizers' own truncation `longest_first`: one text alone is cut while the other is
    the shorter, and both share what is left where both are longer than half of it.

    Args:
        ids: the tokens of the first text, those between, and those of the second text.
        room: most tokens of all of them.
        pair: what stands between the texts, and which of them is cut. Where it is the second alone, the first
            is cut only where it leaves no room for a token of the second, so that a query is the same with
            each of its documents.
    """
    between = pair.between
    if len(ids) <= room:
        return ids
    place, most = int(np.flatnonzero(ids == between[0])[0]), room - len(between)
    first, second = ids[:place], ids[place + len(between) :]
    if pair.cut == "second":
        first = first[: most - 1]
        return np.concatenate((first, np.asarray(between, dtype=ids.dtype), second[: most - len(first)]))
    shorter, longer = sorted((len(first), len(second)))
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter = most // 2
        longer = most - shorter
    kept = (shorter, longer) if len(first) <= len(second) else (longer, shorter)
    return np.concatenate((first[: kept[0]], np.asarray(between, dtype=ids.dtype), second[: kept[1]]))


def query_numbers(rows: Iterable[npt.NDArray[np.generic]], pair: PairTemplate) -> Int[Tensor, " batch"]:
    """Return the number of the first text of each pair, from 0 on in the order in which texts come.

    Args:
        rows: tokens of each pair; they may be padded.
        pair: what stands around and between the texts.
    """
    known: dict[bytes, int] = {}
    numbers = []
    for row in rows:
        text = row[len(pair.before) :]
        first = text[: int((text == pair.between[0]).argmax())]
        numbers.append(known.setdefault(first.tobytes(), len(known)))
    return torch.tensor(numbers)


def padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """Return rows of any lengths as one batch, filled up with a value on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
