"""Read files of unknown kind safely: never a pipe or a device, and never more bytes than requested."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path


class NotRegularError(OSError):
    """A link, a pipe, a device or a folder where a file should be."""


def regular_bytes(path: Path, num_bytes: int, *, first: int = 0, follow_links: bool = False) -> bytes:
    """Return bytes of a regular file, without waiting for a pipe.

    Args:
        path: path of the file.
        num_bytes: most bytes to read.
        first: first byte to read, counted from 0.
        follow_links: whether a symbolic link to a regular file is accepted.

    Raises:
        NotRegularError: it is not a regular file.
        OSError: the file is missing, or the file system refused.
    """
    with open_regular(path, follow_links=follow_links) as file:
        file.seek(first)
        return file.read(num_bytes)


def bounded_bytes(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return the whole content of a regular file that has at most `max_bytes` bytes.

    Raises:
        NotRegularError: it is not a regular file.
        OSError: it is missing or longer, or the file system refused.
    """
    content = regular_bytes(path, max_bytes + 1, follow_links=follow_links)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", str(path))
    return content


def linked_part(root: Path, path: str) -> Path | None:
    """Return the first part of a path below `root` that is a symbolic link; the root itself may be one.

    Args:
        root: a folder.
        path: path below it, with `/` between parts.

    Returns:
        The path of the link. None means that there is none.
    """
    file = root
    for part in path.split("/"):
        file = file / part
        if file.is_symlink():
            return file
    return None


@contextmanager
def open_regular(path: Path, *, follow_links: bool = False) -> Iterator[BufferedIOBase]:
    """Open a regular file for a block; arguments and errors: see `regular_bytes`."""
    if not follow_links and path.is_symlink():
        raise NotRegularError(None, "it is a symbolic link", str(path))
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegularError(None, "it is not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)
