"""The order of documents, what is held out with all its copies, and where sequences begin.

Documents are taken in an order drawn from the seed, so that a prefix (`max_tokens`) is a sample of the whole
corpus, and so are the documents at the end, which are held out together with all their copies and come last.

An order has one part, or two where whole documents are held out. A part is two files, `part-0.order` (numbers
of documents) and `part-0.ends` (where each document ends), which are memory-mapped: a process that reads
sequences, or that divides them into shards, holds neither documents nor sequences. They are written once for
each corpus, tokenizer and packing, in blocks.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock
from pydantic import Field, ValidationError

from minilm_cache.corpus.tokens import LOCK, Tokens
from minilm_cache.errors import CorpusError
from minilm_cache.models.inputs import cut_pair
from minilm_cache.storage_schema.base import StoredModel
from minilm_cache.storage_schema.documents import FileDigest, StoredDocument
from minilm_cache.storage_schema.identity import Packing, canonical_sha256
from minilm_cache.store.checked import digest_file
from minilm_cache.store.durable import storage_errors, write_file

"""Documents that are looked at together."""

Keys = npt.NDArray[np.integer]
Ids = npt.NDArray[np.int64]


def with_copies(keys: Sequence[Keys], numbers: Ids) -> tuple[Ids, Ids]:
    """Return some documents with all documents that are their copies, and the number of each one's group.

    Documents that share a key, directly or through others, are in one group. All documents are looked at, but
    only what is returned is held in memory.

    Args:
        keys: hashes of all documents, `(corpus documents,)` for each kind.
        numbers: numbers of the documents, `(documents,)`.

    Returns:
        Numbers of documents, ascending, and of their groups, both `(members,)`.
    """
    members = np.unique(numbers)
    while True:
        shared = [np.unique(key[members]) for key in keys]
        more = np.unique(np.concatenate([members, *map(_holders, keys, shared)]))
        # What was added shares a key; only with two kinds of keys can it share another with others.
        if len(more) == len(members) or len(keys) == 1:
            return more, groups([key[more] for key in keys])
        members = more


def _holders(key: Keys, values: Keys) -> Ids:
    """Return the numbers of all documents whose key is one of some values, which are sorted."""
    holders = []
    for first in range(0, len(key), _BLOCK):
        block = key[first : first + _BLOCK]
        places = np.minimum(np.searchsorted(values, block), len(values) - 1)
        holders.append(first + np.flatnonzero(values[places] == block))
    return np.concatenate(holders)


def groups(keys: Sequence[Keys]) -> Ids:
    """Return group numbers, `(documents,)`: documents that share a key, directly or through others, have one.

    Args:
        keys: hashes of the documents, `(documents,)` for each kind.
    """
    numbered = [np.unique(key, return_inverse=True)[1] for key in keys]
    numbers = numbered[0].astype(np.int64)
    while True:
        before = numbers
        for key_numbers in numbered:
            least = np.full(int(key_numbers.max()) + 1, len(numbers), dtype=np.int64)
            np.minimum.at(least, key_numbers, numbers)
            numbers = least[key_numbers]
        if np.array_equal(numbers, before):
            return numbers


HELD_OUT_SHARE: Final = 0.02
_MAX_HELD_OUT_SHARE: Final = 0.05
"""Greatest share that is held out as whole documents, unless twice the target is more."""
MAX_HELD_OUT: Final = 2048
"""Greatest number of held-out sequences; more would not make the held-out KL more certain."""
_BLOCK: Final = 2**20
"""Documents that are handled at a time."""
_READ_AT_ONCE: Final = 2**10
"""Documents whose tokens are in memory at a time."""
_CANDIDATES: Final = 2**12
"""Documents from the end of the order that are looked at first for the held-out ones."""
_RECORD: Final = "order.json"
_SIDES: Final = ("train", "held-out")

Numbers = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Documents in order, and the sequences made from them; no sequence crosses the end of a part."""

    packing: Packing
    order: Numbers
    """Numbers of the documents in the corpus, `(documents,)`."""
    ends: Ids
    """Where each document ends, `(documents,)`. With `packed` it is a place in the stream of all tokens,
    where a separator follows each document but the last. With `records` it counts the sequences' tokens."""
    num_sequences: int

    @property
    def room(self) -> int:
        """Greatest number of tokens in a sequence, without special tokens."""
        return self.packing.room

    def tokens_before(self, number: int) -> int:
        """Return the number of tokens of the first `number` sequences, special tokens included."""
        if number == 0:
            return 0
        if self.packing.is_by_record:
            return int(self.ends[number - 1])
        full, rest = divmod(int(self.ends[-1]), self.room)
        if number <= full:
            return number * self.packing.max_length
        return full * self.packing.max_length + rest + self.packing.num_special

    def lengths(self, first: int, last: int) -> Ids:
        """Return the number of tokens of sequences, special tokens included, `(last - first,)`."""
        if self.packing.is_by_record:
            return np.diff(self.ends[first:last], prepend=self.tokens_before(first))
        lengths = np.full(last - first, self.packing.max_length, dtype=np.int64)
        if last > first:
            lengths[-1] = self.tokens_before(last) - self.tokens_before(last - 1)
        return lengths

    def sequences_within(self, num_tokens: int) -> int:
        """Return the greatest number of first sequences that have at most `num_tokens` tokens together."""
        if self.packing.is_by_record:
            within = int(np.searchsorted(self.ends, num_tokens, side="right"))
        else:
            full, rest = divmod(int(self.ends[-1]), self.room)
            within = min(full, num_tokens // self.packing.max_length)
            if rest and within == full and self.tokens_before(full + 1) <= num_tokens:
                within += 1
        return min(within, self.num_sequences)

    def read(
        self, first: int, last: int, *, documents: Callable[[Numbers], list[Ids]], separator: int
    ) -> tuple[list[Ids], Ids]:
        """Return sequences without special tokens at their ends, and the first document of each."""
        if self.packing.is_by_record:
            numbers, pair = self.order[first:last], self.packing.pair
            found = documents(numbers)
            bodies = [ids[: self.room] if pair is None else cut_pair(ids, self.room, pair) for ids in found]
            return bodies, numbers.astype(np.int64)
        start = first * self.room
        stop = min(last * self.room, int(self.ends[-1]))
        first_document = int(np.searchsorted(self.ends, start, side="right"))
        last_document = int(np.searchsorted(self.ends, stop - 1, side="right")) + 1
        begin = int(self.ends[first_document - 1]) if first_document else 0
        ends = self.ends[first_document:last_document]
        sizes = np.diff(ends, prepend=begin)
        pieces: list[Ids] = []
        for ids, size in zip(documents(self.order[first_document:last_document]), sizes, strict=True):
            # The last document of a part may be cut, and no separator follows it.
            pieces += [ids[:size], np.asarray([separator])][: 2 if size > len(ids) else 1]
        stream = np.concatenate(pieces)[start - begin : stop - begin]
        cuts = np.arange(start, stop, self.room)
        numbers = self.order[np.searchsorted(self.ends, cuts, side="right")]
        return np.split(stream, (cuts - start)[1:]), numbers.astype(np.int64)


class _PartRecord(StoredModel):
    num_sequences: int = Field(ge=1)
    order: FileDigest
    ends: FileDigest


class _OrderRecord(StoredDocument):
    parts: tuple[_PartRecord, ...] = Field(min_length=1, max_length=2)


def ordered(tokens: Tokens, packing: Packing) -> list[Part]:
    """Return the documents to read; those that are held out as whole documents are a second part.

    Raises:
        CorpusError: no document has a token.
        StorageError: the folder of the tokens cannot be written to.
    """
    if tokens.num_tokens == 0:
        raise CorpusError(f"corpus {tokens.name} is empty: no document has a token.")
    folder = tokens.folder / "orders" / canonical_sha256(packing.model_dump(mode="json"))[:32]
    files = _OrderFiles(folder=folder, tokens=tokens, packing=packing)
    with storage_errors("write", folder), FileLock(tokens.folder / LOCK):
        parts = files.written()
        if parts is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            parts = _write(files)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _OrderFiles:
    """The files of an order."""

    folder: Path
    tokens: Tokens
    packing: Packing

    @property
    def number_type(self) -> np.dtype[np.integer]:
        """Type of documents' numbers; with four bytes it serves four milliards of documents."""
        return np.dtype("<u4" if len(self.tokens.ends) < 2**32 else "<i8")

    def paths(self, name: str) -> tuple[Path, Path]:
        """Return the paths of a part's numbers and ends."""
        return self.folder / f"{name}.order", self.folder / f"{name}.ends"

    def part(self, name: str) -> Part:
        """Map the files of a part, with as many sequences as its documents and `max_tokens` allow."""
        order, ends = self.paths(name)
        numbers = np.memmap(order, self.number_type, mode="r").view(np.ndarray)
        places = np.memmap(ends, "<i8", mode="r").view(np.ndarray)
        packing = self.packing
        most = len(numbers) if packing.is_by_record else -(-int(places[-1]) // packing.room)
        part = Part(packing=packing, order=numbers, ends=places, num_sequences=most)
        limit = packing.max_tokens
        return part if limit is None else replace(part, num_sequences=part.sequences_within(limit))

    def written(self) -> list[Part] | None:
        """Return the parts of the order. None means that it is not written, or not as it should be."""
        try:
            record = _OrderRecord.model_validate_json((self.folder / _RECORD).read_bytes())
            parts = []
            for number, known in enumerate(record.parts):
                name = f"part-{number}"
                if tuple(map(digest_file, self.paths(name))) != (known.order, known.ends):
                    return None
                parts.append(replace(self.part(name), num_sequences=known.num_sequences))
        except (OSError, ValidationError):
            return None
        return parts


class _PartWriter:
    """Writes documents in order, and where each ends."""

    def __init__(self, files: _OrderFiles, name: str) -> None:
        self._order, self._name = files, name
        self._files: list[BinaryIO] = [path.open("wb") for path in files.paths(name)]
        self.end = 0
        """Where the last document ends, with a separator after it."""

    def add(self, numbers: Numbers, counts: Ids) -> None:
        """Append documents, by their numbers in the corpus, and how many tokens of each are used."""
        if self._order.packing.is_by_record:
            packing = self._order.packing
            sizes = np.minimum(counts, packing.room) + packing.num_special
        else:
            sizes = counts + 1
        ends = self.end + np.cumsum(sizes)
        self._files[0].write(numbers.astype(self._order.number_type).tobytes())
        self._files[1].write(ends.astype("<i8").tobytes())
        self.end = int(ends[-1]) if len(ends) else self.end

    def finish(self) -> Part:
        """Return the part."""
        if self._order.packing.mode == "packed":  # no separator follows the last document
            self._files[1].seek(-8, 2)
            self._files[1].write(np.asarray([self.end - 1], dtype="<i8").tobytes())
        for file in self._files:
            file.close()
        return self._order.part(self._name)


def _write(files: _OrderFiles) -> list[Part]:
    """Write an order, then what describes it, and return its parts."""
    everything = _take(files)
    split = None if files.packing.split is None else _split(files, everything)
    parts = {"everything": everything} if split is None else dict(zip(_SIDES, split, strict=True))
    records = []
    for number, (name, part) in enumerate(parts.items()):
        paths = files.paths(f"part-{number}")
        for old, new in zip(files.paths(name), paths, strict=True):
            old.replace(new)
        order, ends = map(digest_file, paths)
        records.append(_PartRecord(num_sequences=part.num_sequences, order=order, ends=ends))
    for path in files.folder.iterdir():
        if not path.name.startswith("part-"):
            path.unlink()
    write_file(files.folder / _RECORD, _OrderRecord(parts=tuple(records)).to_json(), durable=False)
    return list(parts.values())


def _take(files: _OrderFiles) -> Part:
    """Write the documents that have tokens in the order of the seed, until `max_tokens` are surely there."""
    writer, limit = _PartWriter(files, "everything"), files.packing.max_tokens
    for numbers in _permutation(files):
        counts = files.tokens.counts(numbers)
        writer.add(numbers[counts > 0], counts[counts > 0])
        if limit is not None and writer.end > limit + 1:
            break
    return writer.finish()


def _permutation(files: _OrderFiles) -> Iterator[Numbers]:
    """Yield blocks of `np.random.default_rng(seed).permutation(documents)`, which lies in a file.

    Where documents are pairs of queries with documents, those of a query follow its first one.
    """
    path, num_documents = files.folder / "permutation", len(files.tokens.ends)
    everyone = np.memmap(path, files.number_type, mode="w+", shape=num_documents)
    for first in range(0, len(everyone), _BLOCK):
        everyone[first : first + _BLOCK] = np.arange(first, min(first + _BLOCK, len(everyone)))
    np.random.default_rng(files.packing.seed).shuffle(everyone.view(np.ndarray))
    if files.tokens.record.corpus.groups:
        everyone[:] = _grouped(everyone.view(np.ndarray), files.tokens.keys[-1])
    for first in range(0, len(everyone), _BLOCK):
        yield everyone[first : first + _BLOCK].view(np.ndarray)


def _grouped(numbers: Numbers, keys: Keys) -> Numbers:
    """Return documents with those of one key together, ascending, where the first of them stands."""
    _, first, group = np.unique(keys[numbers], return_index=True, return_inverse=True)
    found: Numbers = numbers[np.lexsort((numbers, first[group]))]
    return found


def _split(files: _OrderFiles, everything: Part) -> list[Part] | None:
    """Write the documents to train on and those to hold out. None means that documents are too few.

    From the end of the order, each document is held out with all its copies, until about 2 % of the sequences
    are held out. A group is skipped if it would bring the share above 5 % or leave nothing to train on.
    """
    packing = everything.packing
    kept = _kept(files, everything)
    if kept.num_sequences == 1:
        return None
    keys = [*files.tokens.keys, *([_token_keys(files)] if packing.split == "tokens" else [])]
    held_out = _held_out(keys, kept)
    if not len(held_out):
        return None
    writers = [_PartWriter(files, name) for name in _SIDES]
    for first, numbers, counts in _blocks(kept):
        is_held_out = np.isin(np.arange(first, first + len(numbers)), held_out)
        for writer, is_chosen in zip(writers, (~is_held_out, is_held_out), strict=True):
            writer.add(numbers[is_chosen], counts[is_chosen])
    train, rest = (writer.finish() for writer in writers)
    most = packing.max_tokens
    if most is not None and _num_tokens(train) + _num_tokens(rest) > most:
        # Two parts need more special tokens than one, so the last training sequence may no longer fit.
        if train.num_sequences == 1:
            return None
        train = replace(train, num_sequences=train.num_sequences - 1)
    return [train, rest]


def _num_tokens(part: Part) -> int:
    return part.tokens_before(part.num_sequences)


def _kept(files: _OrderFiles, everything: Part) -> Part:
    """Return a part with only the documents, or beginnings of documents, that its sequences hold."""
    packing = everything.packing
    if packing.max_tokens is None:
        return everything
    num_documents = everything.num_sequences
    stop = int(everything.ends[-1])
    if packing.mode == "packed":
        stop = min(everything.num_sequences * everything.room, stop)
        num_documents = min(len(everything.order), int(np.searchsorted(everything.ends, stop)) + 1)
    writer = _PartWriter(files, "kept")
    for first, numbers, counts in _blocks(everything):
        of_block = slice(0, max(0, num_documents - first))
        chosen, used = numbers[of_block], counts[of_block]
        if packing.mode == "packed" and len(chosen):
            starts = writer.end + np.cumsum(used + 1) - (used + 1)
            used = np.minimum(used, stop - starts)
        writer.add(chosen, used)
    return writer.finish()


def _blocks(part: Part) -> Iterator[tuple[int, Numbers, Ids]]:
    """Yield the place of the first document of a block, numbers of documents, and tokens used of each.

    With `records`, what is used of a document is at most what a sequence has room for.
    """
    is_packed = part.packing.mode == "packed"
    for first in range(0, len(part.order), _BLOCK):
        ends = part.ends[first : first + _BLOCK]
        sizes = np.diff(ends, prepend=part.ends[first - 1] if first else 0)
        counts = sizes - (1 if is_packed else part.packing.num_special)
        if is_packed and first + len(ends) == len(part.order):
            counts[-1] += 1  # no separator follows the last document
        yield first, part.order[first : first + _BLOCK], counts


def held_out_target(num_sequences: int) -> int:
    """Return the number of sequences to hold out: about 2 %, at least 1, or 0 if there is only one."""
    return min(max(1, round(num_sequences * HELD_OUT_SHARE)), MAX_HELD_OUT, num_sequences - 1)


def _token_keys(files: _OrderFiles) -> Numbers:
    """Return a hash of the tokens of each document of the corpus that a sequence can hold, `(documents,)`.

    Documents of unlike text can have the same tokens: white space, case and what is cut off make no
    difference.
    """
    tokens, packing = files.tokens, files.packing
    pair = packing.pair
    most = packing.room if packing.is_by_record and pair is None else None
    keys = np.memmap(files.folder / "keys", "<u8", mode="w+", shape=len(tokens.ends))
    for first in range(0, len(keys), _READ_AT_ONCE):
        numbers = np.arange(first, min(first + _READ_AT_ONCE, len(keys)))
        for number, ids in zip(numbers.tolist(), tokens.read(numbers, most), strict=True):
            held = ids if pair is None else cut_pair(ids, packing.room, pair)
            keys[number] = xxhash.xxh3_64_intdigest(held.data)
    return keys.view(np.ndarray)


def _held_out(keys: Sequence[Numbers], kept: Part) -> npt.NDArray[np.int64]:
    """Return the places in the order of the documents to hold out."""
    is_packed = kept.packing.mode == "packed"
    total = int(kept.ends[-1]) + 1 if is_packed else len(kept.order)
    target = held_out_target(kept.num_sequences) * total / kept.num_sequences
    most = min(max(2 * target, _MAX_HELD_OUT_SHARE * total), total - 1)
    num_candidates = _CANDIDATES
    while True:
        candidates = kept.order[-num_candidates:][::-1]
        taken, is_enough = _take_groups(keys, kept, candidates, target=target, most=most)
        if is_enough or num_candidates >= len(kept.order):
            return taken
        num_candidates *= 8


def _take_groups(
    keys: Sequence[Numbers], kept: Part, candidates: Numbers, *, target: float, most: float
) -> tuple[npt.NDArray[np.int64], bool]:
    """Return the places of documents to hold out, taken from candidates, and whether they are enough."""
    numbers, groups = with_copies(keys, candidates.astype(np.int64))
    places, sizes = [], []
    for first, block, counts in _blocks(kept):
        is_member = np.isin(block, numbers)
        places.append(first + np.flatnonzero(is_member))
        sizes.append(counts[is_member] + 1 if kept.packing.mode == "packed" else np.ones(is_member.sum()))
    members = np.concatenate(places)
    group_of = dict(zip(numbers.tolist(), groups.tolist(), strict=True))
    member_groups = np.asarray([group_of[number] for number in kept.order[members].tolist()])
    group_sizes = np.bincount(member_groups, weights=np.concatenate(sizes))
    taken, seen, size = list[int](), set[int](), 0.0
    for number in candidates.tolist():
        if size >= target:
            break
        group = group_of[number]
        if group not in seen and size + group_sizes[group] <= most:
            taken.append(group)
            size += float(group_sizes[group])
        seen.add(group)
    return members[np.isin(member_groups, taken)], size >= target
