"""Where `datasets` keeps the Arrow files that it makes of files on this machine."""

import hashlib
from pathlib import Path

import datasets


def arrow_cache(source: Path) -> str | None:
    """Return the folder for what is made of a file or a folder; none, the usual one: it is not here.

    `datasets` itself goes by a file's path and time of change, and by a folder's name and README alone. One
    that was written anew, unpacked with the times of its archive, or that has the name of another, would
    be read as what was there before. What the file system notes of a change cannot be set back.
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
