"""Files of a bucket, through obstore: requests that are repeated, that end, and that a stop interrupts."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Final, TypeVar
from urllib.parse import urlsplit

import obstore
import obstore.exceptions
from obstore.store import ObjectStore

from minilm_cache.errors import InvalidConfigError, StorageError
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


_FORKS: Final = SimpleNamespace(has_made_request=False, is_forked=False)
"""Whether this process was forked after a request: obstore's threads are not in it."""


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
        try:
            _with_retries(lambda: obstore.delete(self.store, list(paths)), *_BROKEN)
        except FileNotFoundError:  # of stores that remove one by one, and end at the first that is not there
            for path in paths:
                with suppress(FileNotFoundError):
                    _with_retries(partial(obstore.delete, self.store, path), *_BROKEN)

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


_PREFIXES: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_SERVERS: Final = {
    "s3": (
        *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_METADATA_ENDPOINT"),
        *("AWS_ENDPOINT_URL_STS", "AWS_STS_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    ),
    "gs": ("GOOGLE_BASE_URL",),
    "az": (
        *("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL", "AZURE_MSI_ENDPOINT"),
        *("AZURE_IDENTITY_ENDPOINT", "AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST"),
    ),
}
"""Variables that hold the URL of a server."""
_NEED_LEAVE: Final = frozenset(
    {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"}
)
"""Those of them where obstore wants to be allowed http by a variable of its own."""
_OF_LOGIN: Final = ("AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST")
"""Servers that are asked for a token where no key is given."""
_SHOWN_CHARS: Final = 32
_YES: Final = ("1", "true", "on", "yes", "y")
_NAMED_BY: Final[Mapping[str, str]] = {
    "Account must be specified": "AZURE_STORAGE_ACCOUNT_NAME",
    "Invalid Access Key": "AZURE_STORAGE_ACCOUNT_KEY",
    "SAS query": "AZURE_STORAGE_SAS_TOKEN",
    "Missing AccessKeyId": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "Missing SecretAccessKey": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "service account": "GOOGLE_APPLICATION_CREDENTIALS",
    "pem": "GOOGLE_APPLICATION_CREDENTIALS",
}
"""What obstore says where it names no value, and the variable that it means."""


def refuse_bad_variables(scheme: str) -> None:
    """Raise InvalidConfigError for variables of a store that obstore would not survive, or would not name.

    Args:
        scheme: scheme of the store's URL: `s3`, `gs` or `az`.
    """
    prefix = _PREFIXES[scheme]
    for name, value in sorted(os.environ.items()):
        is_document = value.lstrip().startswith("{") or name.endswith("CREDENTIALS")  # JSON of several lines
        is_odd = value != value.strip() or not value.isprintable()
        if name.startswith((prefix, "AZURITE_")) and is_odd and not is_document:
            raise InvalidConfigError(
                f"{name} begins or ends with a blank or holds a line break, as a value read from a file can. "
                "Remove them."
            )
    given = [name for name in _SERVERS[scheme] if name in os.environ]
    endpoints = [name for name in given if name in _NEED_LEAVE]
    for name in given:
        is_replaced = name in endpoints[1:]
        is_unused = name in _OF_LOGIN and "AZURE_STORAGE_ACCOUNT_KEY" in os.environ
        if not (is_replaced or is_unused):
            _check_server(name, os.environ[name], f"{prefix}ALLOW_HTTP")


def _check_server(name: str, value: str, leave: str) -> None:
    try:
        parts = urlsplit(value)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_server = False
    if not is_server:
        shown = value if "@" not in value and len(value) < _SHOWN_CHARS else "..."  # it may be a key
        raise InvalidConfigError(
            f"{name} is {shown!r}, which is not the URL of a server. Write http://HOST:PORT or "
            "https://HOST:PORT, or unset it."
        )
    if parts.username or parts.password:
        raise InvalidConfigError(
            f"{name} holds a user name or a password, which would end up in messages and logs. Leave it out."
        )
    is_emulated = os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in _YES
    allowed = os.environ.get(leave, "false").lower() in (*_YES, "", "maybe")
    if parts.scheme == "http" and name in _NEED_LEAVE and not (allowed or is_emulated):
        raise InvalidConfigError(
            f"{name} is {value}: http sends keys and data unencrypted, which is off by default. Set "
            f"{leave}=true to allow it, or give an https:// URL."
        )


def variables_in(scheme: str, text: str) -> str:
    """Return the names of the variables that an error of obstore is about; never their values."""
    prefix = _PREFIXES[scheme]
    quoted = [
        name
        for name, value in os.environ.items()
        if name.startswith(prefix) and (f'"{value}"' in text or (value and f" {value}" in text))
    ]
    fixed = [name for words, name in _NAMED_BY.items() if words in text]
    if "client error" in text and f"{prefix}PROXY_URL" in os.environ:
        fixed.append(f"{prefix}PROXY_URL")
    unit = " (a duration has a unit, like 30s)" if "Duration" in text else ""
    return (", ".join(quoted or fixed) or f"the variables that begin with {prefix}") + unit
