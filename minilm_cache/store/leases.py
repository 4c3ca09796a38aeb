"""Leases on work that processes of several machines share, as small files of a store; ranks of one folder.

A lease is created only if there is none, and its holder writes it again while it works. Who sees a lease
unchanged for `LEASE_S` seconds takes it over by creating the next one of that name. Clocks are not compared.
Leases save work and decide nothing: two holders of one lease do the same work twice, and commit it once.
"""

import os
import platform
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final

from pydantic import Field

from minilm_cache.errors import CacheCorruptError, InterruptedRunError, StorageError
from minilm_cache.storage_schema.base import StoredModel, parse
from minilm_cache.store.durable import NotRegularError, regular_bytes, storage_errors
from minilm_cache.store.layout import LOCKS, below
from minilm_cache.store.remote import RemoteFolder

LEASE_S: Final = 60.0
"""Seconds after which a lease that its holder has not renewed may be taken over."""
_RENEWALS: Final = 4
"""How often a lease is renewed while it lasts."""
_MAX_BYTES: Final = 1024


class _Holder(StoredModel):
    """Who holds a lease."""

    owner: str = Field(max_length=64)
    machine: str = Field(max_length=256)
    process: int
    renewals: int = 0


@dataclass(slots=True)
class Lease:
    """A lease that this process holds."""

    leases: "Leases"
    name: str
    number: int
    """How often it was taken over from a holder that had not renewed it."""

    @property
    def file(self) -> str:
        """Name of the file that this holder writes."""
        return f"{self.name}-{self.number}"

    def __enter__(self) -> "Lease":
        """Hold it for a block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let others have it."""
        self.release()

    def release(self) -> None:
        """Let others have it at once; any thread may call it."""
        self.leases.release(self)


@dataclass(slots=True)
class Leases:
    """The leases in a folder of a store. A thread renews those that are held, until `close`."""

    folder: RemoteFolder
    _held: set[str] = field(default_factory=set)
    _seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _closed: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _me: _Holder = field(
        default_factory=lambda: _Holder(owner=uuid.uuid4().hex, machine=_this_machine(), process=os.getpid())
    )

    def acquire(self, name: str) -> Lease | None:
        """Acquire and return a lease. None means that another process holds it.

        Raises:
            StorageError: the store refused, or cannot be reached.
        """
        for number in count():
            file = f"{name}-{number}"
            if self.folder.create(file, self._content()):
                return self._hold(Lease(self, name, number))
            try:
                content = self.folder.read_if_there(file, _MAX_BYTES)
            except (
                CacheCorruptError
            ):  # too long for a lease, or no regular file: passed over, as other nonsense is
                continue
            if content is None:  # released meanwhile, or the cache was finished, which removes all leases
                return None
            holder = _read(content, f"{self.folder.url}/{file}")
            if holder == self._me and file not in self._held:  # the answer to its creation was lost
                return self._hold(Lease(self, name, number))
            if holder is not None and not self._has_expired(file, content, holder):
                return None
        raise AssertionError

    def release(self, lease: Lease) -> None:
        """Let others have a lease at once: remove its file, and those of the holders before.

        Where it was taken over, the files stay: whoever looks for a lease counts through them to its holder.
        """
        with self._lock:
            self._held.discard(lease.file)
        with suppress(StorageError, InterruptedRunError, CacheCorruptError):  # it expires
            if self.folder.read_if_there(f"{lease.name}-{lease.number + 1}", _MAX_BYTES) is None:
                self.folder.remove([f"{lease.name}-{number}" for number in range(lease.number + 1)])

    def close(self) -> None:
        """End the thread that renews leases."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _content(self, renewals: int = 0) -> bytes:
        return self._me.model_copy(update={"renewals": renewals}).model_dump_json().encode()

    def _hold(self, lease: Lease) -> Lease:
        with self._lock:
            self._held.add(lease.file)
            if self._thread is None:
                self._thread = Thread(target=self._renew, daemon=True)
                self._thread.start()
        return lease

    def _renew(self) -> None:
        renewals = 0
        while not self._closed.wait(LEASE_S / _RENEWALS):
            renewals += 1
            content = self._content(renewals)
            with self._lock:
                held = sorted(self._held)
            for file in held:  # without the lock: a store that is slow must not hold up who releases
                with suppress(StorageError, InterruptedRunError):  # the next renewal may succeed
                    if file in self._held:
                        self.folder.write(file, content)
                    if file not in self._held:  # released meanwhile: what was written late must not stay
                        self.folder.remove([file])

    def _has_expired(self, file: str, content: bytes, holder: _Holder) -> bool:
        if holder.machine == self._me.machine and not _is_alive(holder.process):
            return True
        known = self._seen.get(file)
        if known is None or known[0] != content:
            self._seen[file] = (content, time.monotonic())
            return False
        return time.monotonic() - known[1] > LEASE_S


def _this_machine() -> str:
    """Return what tells apart the machines, and the containers of a machine, whose process numbers differ."""
    try:
        space = Path("/proc/self/ns/pid").readlink().name
    except OSError:  # no Linux
        space = ""
    return f"{platform.node()}-{uuid.getnode():x}-{space}"[:256]


def _read(content: bytes, where: str) -> _Holder | None:
    """Return who holds a lease. None means that the file is no lease."""
    try:
        return parse(_Holder, content, where)
    except CacheCorruptError:
        return None


def _is_alive(process: int) -> bool:
    """Return whether a process of this machine runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


_RANKS_MAX_BYTES: Final = 32
"""Most bytes of an announcement."""


def announce_rank(root: Path, rank: int) -> None:
    """Announce that a rank writes into the folder.

    Raises:
        StorageError: the file system refused.
    """
    path = below(root, f"{LOCKS}/rank-{rank:05d}")
    with storage_errors("write", path):
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write(str(os.fstat(file.fileno()).st_ino))


def announced_ranks(root: Path) -> list[int]:
    """Return the ranks that have announced themselves in this folder.

    Raises:
        StorageError: the file system refused.
    """
    folder = below(root, LOCKS)
    with storage_errors("list", folder):
        files = [path for path in folder.glob("rank-[0-9]*") if _was_made_here(path)]
    return [int(path.name.removeprefix("rank-")) for path in files]


def forget_ranks(root: Path) -> None:
    """Remove all announcements."""
    for path in below(root, LOCKS).glob("rank-*"):
        path.unlink(missing_ok=True)


def _was_made_here(path: Path) -> bool:
    """Return whether an announcement was made in this folder, and not copied with it."""
    try:
        return regular_bytes(path, _RANKS_MAX_BYTES) == str(path.stat().st_ino).encode()
    except (FileNotFoundError, NotRegularError):  # the cache has just been sealed, or it is no announcement
        return False
