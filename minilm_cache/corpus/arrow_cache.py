"""Where `datasets` keeps the Arrow files that it makes from files on this machine."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import datasets


def arrow_cache(source: Path) -> str | None:
    """Return the folder for the Arrow files of a folder. None means the default of `datasets`.

    `datasets` itself identifies a file by its path and modification time, and a folder by its name and
    README. A source that was written again, unpacked with the times of its archive, or that has the name of
    another source would be read as the old content. This folder depends on inodes and times of
    change, which only the file system sets.
    """
    if not source.is_dir():
        return None
    return str(arrow_folder([file for file in source.rglob("*") if file.is_file()]))


def arrow_folder(files: Sequence[Path]) -> Path:
    """Return the folder for the Arrow files that are made from files as they are now."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        digest.update(os.fsencode(file.resolve()))
        digest.update(f"\0{stat.st_ino}\0{stat.st_ctime_ns}\0{stat.st_size}\0".encode())
    return Path(datasets.config.HF_DATASETS_CACHE) / "by-source" / digest.hexdigest()[:32]
