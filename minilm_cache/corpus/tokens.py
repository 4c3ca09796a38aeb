"""Token ids of every document of a corpus, on disk or at a URL: a text is tokenised once.

A folder of tokens is named by what it was made from (`address_of`): the corpus and the tokenizer, by content.

- `tokens.json`: what the folder holds, with the hashes of its files. It is written last.
- `ends`: number of tokens up to the end of each document, int64.
- `texts`: a hash of each document's text, uint64; `copies`: one of its value in column `document`.
- `part-00000.ids`: token ids of consecutive documents, uint16 or uint32.
- `part-00000.sums`: XXH3-64 of each `BLOCK` bytes of the part, which are compared when a block is first read.

Everything is little-endian and is memory-mapped, so that a process holds what it reads and not the corpus.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerFast

from minilm_cache.corpus.template import named_template
from minilm_cache.errors import CacheCorruptError, CacheNotFoundError
from minilm_cache.models.tokenizer import tokenizer_sha256
from minilm_cache.session import Session
from minilm_cache.storage_schema.base import Sha256, StoredModel, parse
from minilm_cache.storage_schema.documents import FileDigest, StoredDocument
from minilm_cache.storage_schema.identity import CorpusIdentity, canonical_sha256
from minilm_cache.store.checked import digest_file
from minilm_cache.store.durable import (
    new_file,
    read_bounded,
    refuse_full_disk,
    remove_partials,
    storage_errors,
    write_file,
)
from minilm_cache.store.leases import Leases
from minilm_cache.store.remote import TRANSFERS, RemoteFolder, open_store

TOKENS_FILE: Final = "tokens.json"
ENDS: Final = "ends"
TEXTS: Final = "texts"
COPIES: Final = "copies"
LOCK: Final = ".lock"
"""Lock on making a folder of tokens, and the orders in it."""
BLOCK: Final = 2**16
"""Bytes of token ids that are checked at a time: reading one document reads and hashes little more."""
MAX_PARTS: Final = 512
"""Most parts: each is a mapped file, and systems allow a process 1,024 open files by default."""
MAX_JSON_BYTES: Final = 2**22
"""Most bytes of `tokens.json`."""
_VERSION: Final = 1

Ids = npt.NDArray[np.int64]


class TokenPart(StoredModel):
    """Consecutive documents whose token ids are in one file."""

    num_documents: int = Field(ge=1, le=2**40)
    num_tokens: int = Field(ge=0, le=2**40)
    sums: FileDigest
    """Digest of the file of checksums."""


class TokenRecord(StoredDocument):
    """What a folder of tokens holds."""

    version: Literal[1] = _VERSION
    corpus: CorpusIdentity
    tokenizer_sha256: Sha256
    dtype: Literal["<u2", "<u4"]
    """Type of the token ids, as numpy writes it."""
    parts: tuple[TokenPart, ...] = Field(min_length=1, max_length=MAX_PARTS)
    files: dict[str, FileDigest]
    """Digests of `ends`, `texts` and `copies`."""

    @model_validator(mode="after")
    def _holds_the_corpus(self) -> "TokenRecord":
        if sum(part.num_documents for part in self.parts) != self.corpus.num_documents:
            raise ValueError("its parts have other documents than the corpus")
        if (COPIES in self.files) != (self.corpus.copies_sha256 is not None):
            raise ValueError("its files are not those of the corpus")
        return self

    @property
    def address(self) -> str:
        """Name of the folder: 32 hexadecimal digits."""
        return _address(self.corpus, self.tokenizer_sha256)


class Tokens:
    """Token ids of the documents of a corpus, by number."""

    def __init__(self, folder: Path, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
        """Open a folder of tokens and compare its files with what was written; token ids follow when read.

        Args:
            folder: folder of tokens.
            name: name of the corpus, for messages.
            tokenizer: the tokenizer that the folder was made with.

        Raises:
            CacheCorruptError: a file is missing or damaged.
        """
        self.folder, self.name = folder, name
        self.named_template = named_template(tokenizer)
        """Special tokens of sequences whose packing names none."""
        self.record = read_record(folder)
        self.ends: Ids = self._checked(ENDS, np.dtype("<i8"))
        """Number of tokens up to the end of each document, `(documents,)`."""
        self.keys = [
            self._checked(file, np.dtype("<u8")) for file in (TEXTS, COPIES) if file in self.record.files
        ]
        """Hashes of each document, `(documents,)`: documents that share one are copies of one text."""
        self._firsts = np.cumsum([0, *(part.num_documents for part in self.record.parts)])
        self._part = lru_cache(maxsize=None)(self._open_part)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole corpus, without special tokens."""
        return int(self.ends[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the folder's files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def counts(self, numbers: npt.NDArray[np.integer]) -> Ids:
        """Return the number of tokens of documents, by their numbers in the corpus."""
        ends: Ids = self.ends[numbers]
        before: Ids = np.where(numbers > 0, self.ends[np.maximum(numbers, 1) - 1], 0)
        return ends - before

    def read(self, numbers: npt.NDArray[np.integer], most: int | None = None) -> list[Ids]:
        """Return the token ids of documents, by their numbers in the corpus.

        Args:
            numbers: numbers of the documents.
            most: number of the first tokens of each that are read. None means all.

        Raises:
            CacheCorruptError: token ids are not those that were written.
        """
        parts = np.searchsorted(self._firsts, numbers, side="right") - 1
        firsts = self._firsts[parts]
        before = np.where(firsts > 0, self.ends[np.maximum(firsts, 1) - 1], 0)
        stops = self.ends[numbers] - before
        starts = stops - self.counts(numbers)
        stops = stops if most is None else np.minimum(stops, starts + most)
        places = zip(parts.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return [self._part(part).read(start, stop) for part, start, stop in places]

    def _checked(self, file: str, dtype: np.dtype[np.generic]) -> npt.NDArray[Any]:
        """Return a number for each document, after comparing the file with its digest."""
        path = self.folder / file
        num_bytes = self.record.corpus.num_documents * dtype.itemsize
        if path.stat().st_size != num_bytes or digest_file(path) != self.record.files[file]:
            raise damaged(path)
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)

    def _open_part(self, number: int) -> "_PartFile":
        part, stem = self.record.parts[number], part_name(number)
        sums = self.folder / f"{stem}.sums"
        if not sums.is_file() or digest_file(sums) != part.sums:
            raise damaged(sums)
        return _PartFile(
            self.folder / f"{stem}.ids", sums, dtype=np.dtype(self.record.dtype), num_tokens=part.num_tokens
        )


class _PartFile:
    """Token ids of consecutive documents."""

    def __init__(self, path: Path, sums: Path, *, dtype: np.dtype[np.generic], num_tokens: int) -> None:
        num_bytes = num_tokens * dtype.itemsize
        if not path.is_file() or path.stat().st_size != num_bytes:
            raise damaged(path)
        # An empty file cannot be mapped.
        self._bytes = np.memmap(path, np.uint8, mode="r") if num_bytes else np.zeros(0, np.uint8)
        self._path, self._dtype = path, dtype
        self._sums = np.fromfile(sums, dtype="<u8")
        self._is_checked = np.zeros(len(self._sums), dtype=np.bool_)

    def read(self, start: int, stop: int) -> Ids:
        """Return the token ids from `start` up to, but not including, `stop`."""
        size = self._dtype.itemsize
        first, last = start * size // BLOCK, -(-stop * size // BLOCK)
        if not self._is_checked[first:last].all():
            for block in range(first, last):
                content = self._bytes[block * BLOCK : (block + 1) * BLOCK]
                if xxhash.xxh3_64_intdigest(content.data) != self._sums[block]:
                    raise damaged(self._path)
            self._is_checked[first:last] = True
        return self._bytes[start * size : stop * size].view(self._dtype).astype(np.int64)


def read_record(folder: Path) -> TokenRecord:
    """Return what a folder of tokens holds.

    Raises:
        CacheCorruptError: the file that says so is damaged.
    """
    path = folder / TOKENS_FILE
    try:
        return TokenRecord.model_validate_json(read_bounded(path, MAX_JSON_BYTES))
    except ValidationError as error:
        raise damaged(path) from error


def address_of(corpus: CorpusIdentity, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the name of the folder of a corpus' tokens: 32 hexadecimal digits."""
    return _address(corpus, tokenizer_sha256(tokenizer))


def _address(corpus: CorpusIdentity, tokenizer: str) -> str:
    return canonical_sha256([_VERSION, corpus.model_dump(mode="json"), tokenizer])[:32]


def part_name(number: int) -> str:
    """Return the name of the files of a part, without their endings."""
    return f"part-{number:05d}"


def block_sums(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the checksum of each block of a file's content, `(blocks,)`."""
    starts: Sequence[int] = range(0, len(content), BLOCK)
    sums = (xxhash.xxh3_64_intdigest(content[start : start + BLOCK].data) for start in starts)
    return np.fromiter(sums, dtype="<u8", count=len(starts))


def damaged(path: Path) -> CacheCorruptError:
    """Return the error of a file of tokens that is not what was written."""
    return CacheCorruptError(
        f"{path} is damaged or missing. Remove the folder {path.parent}, and run the same command again: it "
        "tokenises the text anew."
    )


_LEASE: Final = "tokenise"
_POLL_S: Final = 1.0
"""Seconds between two looks at tokens that another machine makes."""
_REQUEST_BYTES: Final = 2**23


def shared_tokens(address: str) -> RemoteFolder | None:
    """Return the folder of tokens at the URL that MINILM_CACHE_TOKENS names. None means that it names none.

    Args:
        address: name of the folder of tokens (`tokens.address_of`).

    Raises:
        InvalidConfigError: the URL cannot be opened.
    """
    url = os.environ.get("MINILM_CACHE_TOKENS", "")
    return open_store(url).below(address) if url else None


@contextmanager
def fetched_or_first(
    shared: RemoteFolder, folder: Path, vocab_size: int, *, session: Session
) -> Iterator[bool]:
    """Fetch tokens, or hold the lease on making them; yield whether they were fetched.

    Args:
        shared: folder of the tokens in a store.
        folder: folder of the tokens on this machine.
        vocab_size: token ids are below this number.
        session: its progress shows files fetched, or that another machine makes the tokens. Its `should_stop`
            is called about once a second; True stops.

    Raises:
        InterruptedRunError: a stop was requested.
        CacheCorruptError: a fetched file is not what was sent.
        StorageError: the store cannot be reached.
    """
    leases, waits = Leases(shared.below("claims")), False
    try:
        while True:
            content = _sent(shared)
            lease = leases.acquire(_LEASE) if content is None else None
            if lease is not None:
                with lease:
                    content = _sent(shared)  # by whoever held the lease before
                    if content is None:
                        yield False
                        return
            if content is not None:
                arrival = _Arrival(shared, folder, _record(content, shared), session)
                arrival.fetch(vocab_size)
                write_file(folder / TOKENS_FILE, content, durable=False)
                yield True
                return
            if not waits:
                session.progress.note(
                    f"another machine tokenises this text and sends it to {shared.url}: waiting"
                )
            waits = True
            session.stop_if_asked("interrupted while another machine tokenises this text.")
            time.sleep(_POLL_S)
    finally:
        leases.close()


def _sent(shared: RemoteFolder) -> bytes | None:
    """Return the description of the tokens in a store. None means that they have not been sent."""
    return shared.read_if_there(TOKENS_FILE, MAX_JSON_BYTES)


def send_if_missing(folder: Path, shared: RemoteFolder, *, session: Session) -> None:
    """Send tokens to a store that lacks them, unless another machine is making or sending them.

    Arguments and errors: see `send`.
    """
    if _sent(shared) is not None:
        return
    leases = Leases(shared.below("claims"))
    try:
        lease = leases.acquire(_LEASE)
        with lease or nullcontext():
            if lease is not None and _sent(shared) is None:
                send(folder, shared, session=session)
    finally:
        leases.close()


def send(folder: Path, shared: RemoteFolder, *, session: Session) -> None:
    """Send tokens to a store; what describes them goes last.

    Args:
        folder: folder of the tokens on this machine.
        shared: folder of the tokens in the store.
        session: its progress shows bytes sent. Its `should_stop` is called before each file; True stops.

    Raises:
        InterruptedRunError: a stop was requested.
        StorageError: the store refused, or cannot be reached.
    """
    content = (folder / TOKENS_FILE).read_bytes()
    sizes = _sizes(parse(TokenRecord, content, str(folder / TOKENS_FILE)))
    session.progress.start(f"send tokens to {shared.url}", sum(sizes.values()), "bytes")

    def send_file(name: str) -> None:
        _refuse_stop(session)
        shared.send(name, folder / name)
        session.progress.advance(sizes[name])

    with ThreadPoolExecutor(TRANSFERS) as threads:
        list(threads.map(send_file, sizes))
    shared.write(TOKENS_FILE, content)


def _record(content: bytes, shared: RemoteFolder) -> TokenRecord:
    """Return the description of tokens in a store, which must be those of this folder."""
    try:
        record = parse(TokenRecord, content, TOKENS_FILE)
    except CacheCorruptError as error:
        raise _damaged(shared, TOKENS_FILE) from error
    address = shared.url.rpartition("/")[2]
    if record.address != address or not {ENDS, TEXTS} <= record.files.keys() <= {ENDS, TEXTS, COPIES}:
        raise _damaged(shared, TOKENS_FILE)
    return record


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Tokens that are fetched into a folder."""

    shared: RemoteFolder
    folder: Path
    record: TokenRecord
    session: Session

    def fetch(self, vocab_size: int) -> None:
        """Fetch all files but the description, and check that they are what it says.

        Args:
            vocab_size: token ids are below this number.
        """
        sizes = _sizes(self.record)
        refuse_full_disk(self.folder, sum(sizes.values()), "fetch tokens into")
        self.session.progress.start(f"fetch tokens from {self.shared.url}", sum(sizes.values()), "bytes")
        with ThreadPoolExecutor(TRANSFERS) as threads:
            list(threads.map(self._fetch_file, *zip(*sizes.items(), strict=True)))
        for name, digest in self.record.files.items():
            if digest_file(self.folder / name) != digest:
                raise _damaged(self.shared, name)
        bounds = np.cumsum([part.num_documents for part in self.record.parts])
        tokens = np.cumsum([part.num_tokens for part in self.record.parts])
        ends = np.memmap(self.folder / ENDS, "<i8", mode="r")
        if not np.array_equal(ends[bounds - 1], tokens) or (np.diff(ends, prepend=0) < 0).any():
            raise _damaged(self.shared, ENDS)
        for number, part in enumerate(self.record.parts):
            stem = self.folder / part_name(number)
            if not _is_sound(stem, part, dtype=self.record.dtype, vocab_size=vocab_size):
                raise _damaged(self.shared, f"{stem.name}.ids")

    def _fetch_file(self, name: str, num_bytes: int) -> None:
        file = self.folder / name
        remove_partials(file)  # of machines that were stopped
        with storage_errors("write", file), new_file(file, durable=False) as arriving:
            for first in range(0, num_bytes, _REQUEST_BYTES):
                _refuse_stop(self.session)
                size = min(_REQUEST_BYTES, num_bytes - first)
                try:
                    part = self.shared.read_range(name, first, size)
                except CacheNotFoundError as error:
                    raise _damaged(self.shared, name) from error
                if len(part) != size:
                    raise _damaged(self.shared, name)
                arriving.write(part)
                self.session.progress.advance(size)


def _refuse_stop(session: Session) -> None:
    session.stop_if_asked("interrupted while tokens are copied. Run the same command again.")


def _sizes(record: TokenRecord) -> dict[str, int]:
    """Return the bytes of every file but the description, by name."""
    sizes = dict.fromkeys(record.files, 8 * record.corpus.num_documents)
    for number, part in enumerate(record.parts):
        num_bytes = part.num_tokens * np.dtype(record.dtype).itemsize
        sizes[f"{part_name(number)}.ids"] = num_bytes
        sizes[f"{part_name(number)}.sums"] = 8 * -(-num_bytes // BLOCK)
    return sizes


def _is_sound(stem: Path, part: TokenPart, *, dtype: str, vocab_size: int) -> bool:
    """Return whether a part is what its checksums say, with token ids that the vocabulary has."""
    ids = np.fromfile(stem.with_suffix(".ids"), dtype)
    sums = np.fromfile(stem.with_suffix(".sums"), "<u8")
    return (
        digest_file(stem.with_suffix(".sums")) == part.sums
        and np.array_equal(block_sums(ids.view(np.uint8)), sums)
        and int(ids.max(initial=0)) < vocab_size
    )


def _damaged(shared: RemoteFolder, name: str) -> CacheCorruptError:
    return CacheCorruptError(
        f"{shared.url}/{name} is damaged. Remove {shared.url}, and run the same command again: it tokenises "
        "the text anew."
    )
