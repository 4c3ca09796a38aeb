"""Reading of files that may be anything: never a pipe or a device, and never more than was asked for."""

import os
import stat
from pathlib import Path


class NotRegularError(OSError):
    """A link, a pipe, a device or a folder where a file should be."""


def first_bytes(path: Path, num_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return the first bytes of a regular file, without waiting for a pipe.

    Args:
        path: of the file.
        num_bytes: at most.
        follow_links: whether a symbolic link to a regular file will do.

    Raises:
        NotRegularError: it is no regular file.
        OSError: it is not there, or the file system refused.
    """
    if not follow_links and path.is_symlink():
        raise NotRegularError(None, "it is a symbolic link", str(path))
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotRegularError(None, "it is no regular file", str(path))
        return file.read(num_bytes)
