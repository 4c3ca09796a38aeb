"""Teachers that this machine has: found again by the hash of their weights, without a download."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedConfig

from minilm_cache.errors import MiniLMCacheError
from minilm_cache.models.files import first_setting_that_differs, weights_sha256
from minilm_cache.models.load import read_config
from minilm_cache.models.locate import ALIASES, CONFIG, MINI, locate_teacher
from minilm_cache.store.durable import bounded_bytes, write_file


def remember_teacher(home: Path, sha256: str, folder: Path) -> None:
    """Note where the weights of this hash lie, for `find_teacher`.

    Args:
        home: folder of caches and runs.
        sha256: hash of the weights, hexadecimal.
        folder: folder of the teacher.
    """
    note, content = _note(home, sha256), str(folder.resolve()).encode()
    if _noted(home, sha256) != folder.resolve():
        write_file(note, content)


def find_teacher(home: Path, sha256: str, name: str, *, config: PreTrainedConfig) -> Path | None:
    """Return the folder of the teacher of these weights and settings. None means that it is not at hand.

    Looked for where a dump on this machine found it, and among the teachers with names of their own, without
    a download.

    Args:
        home: folder of caches and runs.
        sha256: hash of the weights, hexadecimal.
        name: name of the teacher as a cache gives it; it is not trusted.
        config: its configuration; the one in the folder must compute the same.
    """
    for folder in (_noted(home, sha256), _named(name)):
        if folder is not None and holds_teacher(folder, sha256, config):
            return folder
    return None


def holds_teacher(folder: Path, sha256: str, config: PreTrainedConfig) -> bool:
    """Return whether a folder holds a whole model with these weights, which computes as `config` says."""
    try:
        is_there = (folder / CONFIG).is_file() and weights_sha256(folder) == sha256
        return is_there and first_setting_that_differs(read_config(folder), config) is None
    except (MiniLMCacheError, OSError):
        return False


def _note(home: Path, sha256: str) -> Path:
    return home / "teachers" / f"{sha256}.txt"


def _noted(home: Path, sha256: str) -> Path | None:
    try:
        return Path(bounded_bytes(_note(home, sha256), 2**14).decode())
    except (OSError, ValueError):  # none was written, or it is damaged
        return None


def _named(name: str) -> Path | None:
    """Return the folder of `mini` if it is installed, or of an alias if the hub's cache here holds it."""
    try:
        if name == MINI:
            return locate_teacher(MINI).folder
        if name in ALIASES:
            return Path(huggingface_hub.snapshot_download(ALIASES[name], local_files_only=True))
    except (MiniLMCacheError, LocalEntryNotFoundError, HFValidationError):
        return None
    return None
