"""Every error this project raises on purpose.

    MiniLMCacheError
    |-- InvalidConfigError (ValueError)         a value that is not valid: misuse, exit code 2
    |-- CorpusError (ValueError)                text that cannot be read or is not there
    |-- TeacherError (ValueError)               a model that cannot be a teacher
    |-- CacheNotFoundError (FileNotFoundError)  no cache at this place
    |-- CacheIncompleteError                    a dump that has not finished
    |-- CacheCorruptError                       bytes that differ from what was committed
    |   `-- VerificationError                   what `verify` found: exit code 3
    |-- IdentityMismatchError                   two things differ that must be the same
    |-- UnsupportedFormatError                  written in a format this release cannot read
    |-- StorageError (OSError)                  the file system refused
    |   `-- ShardBusyError                      another writer holds the shard
    |-- DivergedError (ArithmeticError)         a loss that is NaN or infinite
    |-- TrackerError                            a tracker that does not start
    |-- RankLostError                           another process of a run has ended
    |-- DeviceError                             a device or its compiler that cannot do the work
    `-- InterruptedRunError                     stopped by the user, state kept: exit code 130

Errors are grouped by what a handler would do about them. A message is always one line: what failed, what was
expected and what was found, where, and what to do.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import ClassVar, Final


class ErrorKind(StrEnum):
    """Machine-readable kind of an error. Values are only ever added, never changed."""

    INVALID_CONFIG = "invalid_config"
    CODEC_RANGE = "codec_range"
    """No longer raised; kept because values are never removed."""
    CORPUS = "corpus"
    TEACHER = "teacher"
    CACHE_NOT_FOUND = "cache_not_found"
    CACHE_INCOMPLETE = "cache_incomplete"
    CACHE_CORRUPT = "cache_corrupt"
    VERIFICATION_FAILED = "verification_failed"
    IDENTITY_MISMATCH = "identity_mismatch"
    UNSUPPORTED_FORMAT = "unsupported_format"
    STORAGE = "storage"
    SHARD_BUSY = "shard_busy"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"
    TRACKER = "tracker"
    RANK_LOST = "rank_lost"
    DEVICE = "device"


_REMEDIES: Final = {
    errno.ENOSPC: "Free some space and run the same command again",
    errno.EDQUOT: "Free some quota and run the same command again",
    errno.EROFS: "Choose a folder on a writable file system",
    errno.ENOTDIR: "A file stands where a folder is needed: choose another place",
    errno.EEXIST: "Something with that name exists: choose another place",
    errno.EISDIR: "A folder stands where a file is needed: choose another place",
    errno.EACCES: "Change its permissions, or choose another place",
    errno.EFBIG: "The file system takes no file of this size: choose another place",
    errno.EPERM: "Change its permissions, or choose another place",
}


def remedy_of(error: OSError) -> str:
    """Return what helps against an error of the file system, as a sentence without its full stop."""
    return _REMEDIES.get(error.errno or 0, "Check the disk and run the same command again")


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust gave up; its error is no Exception, and no class to import."""
    return (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, for use within a message of this project."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0].rstrip(". ")


class MiniLMCacheError(Exception):
    """Base of all errors of this project; `str(error)` is one line for the user."""

    kind: ClassVar[ErrorKind]
    exit_code: ClassVar[int] = 1
    __str__ = Exception.__str__  # the message alone: OSError would add its own format


class InvalidConfigError(MiniLMCacheError, ValueError):
    """A setting that is not valid."""

    kind = ErrorKind.INVALID_CONFIG
    exit_code = 2


@contextmanager
def needs(what: str, extras: str) -> Iterator[None]:
    """Name the extra of a package that is imported inside and is not installed.

    Args:
        what: command, option or thing that needs it, for the message.
        extras: names of the extras, with commas between them.

    Raises:
        InvalidConfigError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            f"{what} needs {error.name}, which is not installed: pip install 'minilm-cache[{extras}]'."
        ) from error


class CorpusError(MiniLMCacheError, ValueError):
    """Text that is missing, unreadable or empty."""

    kind = ErrorKind.CORPUS


class TeacherError(MiniLMCacheError, ValueError):
    """A model that is missing, or that cannot be tapped safely and exactly."""

    kind = ErrorKind.TEACHER


class CacheNotFoundError(MiniLMCacheError, FileNotFoundError):
    """No cache where one was expected."""

    kind = ErrorKind.CACHE_NOT_FOUND


class CacheIncompleteError(MiniLMCacheError):
    """A cache whose dump has not finished."""

    kind = ErrorKind.CACHE_INCOMPLETE


class CacheCorruptError(MiniLMCacheError):
    """Bytes of a cache that are missing or differ from what was committed."""

    kind = ErrorKind.CACHE_CORRUPT


class VerificationError(CacheCorruptError):
    """A cache that `verify` has found to be damaged."""

    kind = ErrorKind.VERIFICATION_FAILED
    exit_code = 3


class IdentityMismatchError(MiniLMCacheError):
    """A cache or run folder that belongs to something else."""

    kind = ErrorKind.IDENTITY_MISMATCH


class UnsupportedFormatError(MiniLMCacheError):
    """A format version or codec that this release does not know."""

    kind = ErrorKind.UNSUPPORTED_FORMAT


class StorageError(MiniLMCacheError, OSError):
    """An operation that the file system refused: full, read-only, no permission."""

    kind = ErrorKind.STORAGE


class ShardBusyError(StorageError):
    """A shard that another writer holds."""

    kind = ErrorKind.SHARD_BUSY


class DivergedError(MiniLMCacheError, ArithmeticError):
    """A student whose loss is NaN or infinite."""

    kind = ErrorKind.DIVERGED


class TrackerError(MiniLMCacheError):
    """A tracker whose service does not answer, or requires a login."""

    kind = ErrorKind.TRACKER


class RankLostError(MiniLMCacheError):
    """Work of several processes, another of which has ended."""

    kind = ErrorKind.RANK_LOST


class DeviceError(MiniLMCacheError):
    """A device with too little memory, or without a compiler that works."""

    kind = ErrorKind.DEVICE


class InterruptedRunError(MiniLMCacheError):
    """A run that the user stopped; everything finished so far is kept."""

    kind = ErrorKind.INTERRUPTED
    exit_code = 130
