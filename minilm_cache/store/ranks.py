"""Ranks that write a cache together announce themselves in its folder.

Machines without a common file system dump into folders of their own, which may begin as copies of one
another. So an announcement holds the number of its own file (inode): that of a copied file differs.
"""

from pathlib import Path
from typing import Final

from minilm_cache.store.durable import storage_errors
from minilm_cache.store.layout import LOCKS, below

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
        path.touch()
        path.write_text(str(path.stat().st_ino))


def other_ranks(root: Path, rank: int) -> list[int]:
    """Return the ranks that have announced themselves in this folder, without `rank`.

    Raises:
        StorageError: the file system refused.
    """
    folder = below(root, LOCKS)
    with storage_errors("list", folder):
        announced = [int(path.name.removeprefix("rank-")) for path in _announcements(folder)]
    return sorted(other for other in announced if other != rank)


def forget_ranks(root: Path) -> None:
    """Remove all announcements."""
    for path in below(root, LOCKS).glob("rank-*"):
        path.unlink(missing_ok=True)


def _announcements(folder: Path) -> list[Path]:
    files = (path for path in folder.glob("rank-[0-9]*") if path.is_file() and not path.is_symlink())
    return [path for path in files if path.read_bytes()[:_MAX_BYTES] == str(path.stat().st_ino).encode()]
