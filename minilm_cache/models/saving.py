"""Writing models: refusals of the file system and of safetensors told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from minilm_cache.errors import first_line
from minilm_cache.store.durable import storage_errors


@contextmanager
def saving(doing: str, where: Path) -> Iterator[None]:
    """Turn what the file system and safetensors raise into a StorageError."""
    with storage_errors(doing, where):
        try:
            yield
        except safetensors.SafetensorError as error:
            raise OSError(None, first_line(error), str(where)) from error
