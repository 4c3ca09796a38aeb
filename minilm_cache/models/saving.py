"""Writing models: errors of the file system and of safetensors become one line for the user."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from minilm_cache.errors import first_line
from minilm_cache.store.durable import storage_errors


@contextmanager
def saving(doing: str, where: Path) -> Iterator[None]:
    """Turn errors of the file system, of safetensors and of tokenizers into a StorageError.

    Args:
        doing: verb for the message, such as `write`.
        where: path for the message.
    """
    with storage_errors(doing, where):
        try:
            yield
        except safetensors.SafetensorError as error:
            raise _os_error(error, where) from error
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises nothing more particular
                raise
            raise _os_error(error, where) from error


def _os_error(error: Exception, where: Path) -> OSError:
    """Return what a library in Rust says of the file system as the OSError that it was."""
    code = re.search(r"\(os error (\d+)\)", str(error))
    number = None if code is None else int(code[1])
    return OSError(number, first_line(error) if number is None else os.strerror(number), str(where))
