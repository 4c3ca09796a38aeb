"""A check that machines have a folder in common: a file that one of them writes there must be on all."""

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from minilm_cache.errors import StorageError

_WAIT_S: Final = 5.0
_POLL_S: Final = 0.1


@contextmanager
def common_file(folder: Path) -> Iterator[Path]:
    """Write an empty file into a folder, which is made if it is not there, and remove it in the end.

    Raises:
        StorageError: the file system refused.
    """
    file = folder / f".common-{uuid4().hex}.partial"  # the suffix of files that may be left over
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise StorageError(f"cannot write in {folder}: {error.strerror}. Choose another --out.") from error
    try:
        yield file
    finally:
        with suppress(OSError):
            file.unlink()


def check_common(file: Path) -> None:
    """Raise StorageError if this machine does not see the file that another one has written.

    A network file system may show it some seconds later.
    """
    deadline = time.monotonic() + _WAIT_S
    while not file.exists():
        if time.monotonic() < deadline and file.parent.exists():
            time.sleep(_POLL_S)
            continue
        raise StorageError(
            f"machine {platform.node()} does not see what another machine writes in {file.parent}. Choose an "
            "--out on a file system that all of them have."
        )
