"""Ranks that write a cache together announce themselves in its folder.

Machines without a common file system dump into folders of their own, which may begin as copies of one
another. So an announcement holds the number of its own file (inode): that of a copied file differs.
"""

import os
from pathlib import Path
from typing import Final

from minilm_cache.store.durable import storage_errors
from minilm_cache.store.layout import LOCKS, below
from minilm_cache.store.regular_files import NotRegularError, regular_bytes

_MAX_BYTES: Final = 32
"""Most bytes of an announcement."""


def announce_rank(root: Path, rank: int) -> None:
    """Announce that a rank writes into the folder.

    Raises:
        StorageError: the file system refused.
    """
    path = below(root, f"{LOCKS}/rank-{rank:05d}")
    with storage_errors("write", path):
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
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
        return regular_bytes(path, _MAX_BYTES) == str(path.stat().st_ino).encode()
    except (FileNotFoundError, NotRegularError):  # the cache has just been sealed, or it is no announcement
        return False
