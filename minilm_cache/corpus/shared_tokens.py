"""Tokens at a URL: one machine tokenises a text, and all others fetch what it has sent."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from minilm_cache.corpus.tokens import (
    BLOCK,
    COPIES,
    ENDS,
    MAX_JSON_BYTES,
    TEXTS,
    TOKENS_FILE,
    TokenPart,
    TokenRecord,
    block_sums,
    part_name,
)
from minilm_cache.errors import CacheCorruptError, CacheNotFoundError, InterruptedRunError
from minilm_cache.session import Session
from minilm_cache.storage_schema.problems import parse
from minilm_cache.store.durable import new_file, refuse_full_disk, remove_partials, storage_errors, write_file
from minilm_cache.store.fingerprint import digest_file
from minilm_cache.store.leases import Leases
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.store.transfer import TRANSFERS

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
            if session.should_stop():
                raise InterruptedRunError("interrupted while another machine tokenises this text.")
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
    if session.should_stop():
        raise InterruptedRunError("interrupted while tokens are copied. Run the same command again.")


def _sizes(record: TokenRecord) -> dict[str, int]:
    """Return the bytes of every file but the description, by name."""
    num_documents = sum(part.num_documents for part in record.parts)
    sizes = dict.fromkeys(record.files, 8 * num_documents)
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
