"""Read files of unknown kind safely: never a pipe or a device, and never more bytes than requested."""

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
