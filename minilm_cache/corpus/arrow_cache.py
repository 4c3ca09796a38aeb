"""Where `datasets` keeps the Arrow files that it makes from files on this machine."""

import hashlib
from pathlib import Path

import datasets


def arrow_cache(source: Path) -> str | None:
    """Return the folder for the Arrow files of a file or a folder. None means the default of `datasets`.

    `datasets` itself identifies a file by its path and modification time, and a folder by its name and
    README. A source that was written again, unpacked with the times of its archive, or that has the name of
    another source would be read as the old content. This folder depends on inodes and times of
    change, which only the file system sets.
    """
    if source.is_file():
        files = [source]
    elif source.is_dir():
        files = sorted(file for file in source.rglob("*") if file.is_file())
    else:
        return None
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_ino}\0{stat.st_ctime_ns}\0{stat.st_size}\0".encode())
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "by-source" / digest.hexdigest()[:32])
