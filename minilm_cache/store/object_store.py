"""Files of a bucket, through obstore: requests that are repeated, that end, and that a stop interrupts."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import obstore
import obstore.exceptions
from obstore.store import ObjectStore

from minilm_cache.errors import StorageError
from minilm_cache.session import awaited, is_stop_overdue

Result = TypeVar("Result")

_WHOLE_BYTES: Final = 2**26
"""Greatest size of a file that is sent from memory."""
_WAITS_S: Final = (0.1, 0.3, 1.0, 3.0)
"""Seconds to wait before each repetition of a failed request."""
_LEAST_RATE: Final = 20_000
"""Bytes per second below which a transfer is given up."""
_MOST_S: Final = 120.0
"""Seconds that any request may take, whatever it transfers."""
_FOLDERS_S: Final = 20.0
"""Seconds that a list of folders may take. It comes as a whole, so one without end fills memory."""
_MAX_LISTED: Final = 2**22
"""Most files in a folder of a store: a listing that does not end must not fill memory."""
_BROKEN: Final = ("body error", "invalid list response")
"""What obstore says of an answer that breaks off; it does not repeat such a request by itself."""


class _Forks:
    """Whether this process was forked after a request: obstore's threads are not in it."""

    def __init__(self) -> None:
        self.has_made_request = False
        self.is_forked = False


_FORKS: Final = _Forks()


def _note_fork() -> None:
    _FORKS.is_forked = _FORKS.has_made_request


os.register_at_fork(after_in_child=_note_fork)


def request(call: Callable[[], Result], num_bytes: int = 0, *, most_s: float | None = None) -> Result:
    """Make a request.

    Args:
        call: makes the request.
        num_bytes: bytes that it transfers.
        most_s: seconds that it may take, apart from what it transfers. None means two minutes.

    Raises:
        InterruptedRunError: a stop was requested meanwhile.
        StorageError: it takes far longer than such a request takes, or cannot be made in a forked process.
    """
    if _FORKS.is_forked:
        raise StorageError(
            "this process was forked from one that has read from a store, and cannot read from it. Start it "
            "anew, with a DataLoader by multiprocessing_context='spawn'"
        )
    _FORKS.has_made_request = True
    return awaited(
        call,
        should_stop=is_stop_overdue,
        interrupted="interrupted: what has arrived is kept. Run the same command again to go on.",
        most_s=(most_s or _MOST_S) + num_bytes / _LEAST_RATE,
    )


def _with_retries(
    call: Callable[[], Result], *retried: str, num_bytes: int = 0, most_s: float | None = None
) -> Result:
    """Make a request, and repeat it while its error contains one of the `retried` texts.

    obstore itself does not repeat a creation, or a request whose answer breaks off.
    """
    for wait_s in _WAITS_S:
        try:
            return request(call, num_bytes, most_s=most_s)
        except obstore.exceptions.GenericError as error:
            if not any(text in str(error) for text in retried):
                raise
            time.sleep(wait_s)
    return request(call, num_bytes, most_s=most_s)


@dataclass(frozen=True, slots=True)
class BucketFiles:
    """Files of a bucket.

    It makes blocking calls, not those that obstore offers to fsspec: the latter answer from threads that
    request the interpreter, which ends a process with SIGABRT if it is exiting at that moment.
    """

    store: ObjectStore

    def read(self, path: str, num_bytes: int, first: int = 0) -> bytes:
        """Return `num_bytes` bytes of a file from the `first`-th on, or fewer if it ends before."""

        def bytes_there() -> bytes:
            try:
                return bytes(obstore.get_range(self.store, path, start=first, length=num_bytes))
            except obstore.exceptions.GenericError as error:
                if "416 Range" in str(error):  # the file ends before: no range from there on is valid
                    return b""
                raise

        return _with_retries(bytes_there, *_BROKEN, num_bytes=num_bytes)

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file, replacing an older one."""
        _with_retries(lambda: obstore.put(self.store, path, content), *_BROKEN, num_bytes=len(content))

    def send(self, path: str, file: Path) -> None:
        """Write a file of this machine, in parts if it is large, replacing an older one."""
        size = file.stat().st_size
        if size <= _WHOLE_BYTES:
            self.write(path, file.read_bytes())
        else:
            _with_retries(lambda: obstore.put(self.store, path, file), *_BROKEN, num_bytes=size)

    def create(self, path: str, content: bytes) -> bool:
        """Write a whole file unless it exists, and return whether it was written.

        If an answer was lost, the result may be False for a file that this call has written.
        """
        try:
            _with_retries(
                lambda: obstore.put(self.store, path, content, mode="create"), "HTTP error", " 503 "
            )
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def copy(self, path: str, to: str) -> None:
        """Copy a file within the store, replacing an older one."""
        _with_retries(lambda: obstore.copy(self.store, path, to), *_BROKEN)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; one that does not exist is no error."""
        with suppress(FileNotFoundError):
            _with_retries(lambda: obstore.delete(self.store, list(paths)), *_BROKEN)

    def sizes(self, path: str) -> dict[str, int]:
        """Return the paths and sizes, in bytes, of all files below a folder.

        Raises:
            StorageError: the listing does not end.
        """

        def listed() -> dict[str, int]:
            sizes: dict[str, int] = {}
            for chunk in obstore.list(self.store, path):
                before = len(sizes)
                sizes |= {meta["path"]: meta["size"] for meta in chunk}
                if is_stop_overdue() or len(sizes) > _MAX_LISTED or (chunk and len(sizes) == before):
                    raise StorageError("its list of files does not end, or was interrupted")
            return sizes

        return _with_retries(listed, *_BROKEN, num_bytes=_MAX_LISTED)

    def folders(self, path: str) -> list[str]:
        """Return the paths of the folders in a folder."""
        return _with_retries(
            lambda: list(obstore.list_with_delimiter(self.store, path)["common_prefixes"]),
            *_BROKEN,
            most_s=_FOLDERS_S,
        )
