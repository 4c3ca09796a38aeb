"""A teacher cut down to some of its layers: Poor Man's BERT (arXiv 2004.03844); saving models."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from minilm_cache.errors import first_line
from minilm_cache.models.arch import read_layers
from minilm_cache.models.generation import copy_decoding
from minilm_cache.models.load import keep_layers, load_with_own_head, quietly
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import copy_pooling
from minilm_cache.models.tokenizer import load_tokenizer, refuse_more_words
from minilm_cache.settings import TruncateConfig
from minilm_cache.store.durable import new_folder, prepare_new, storage_errors


@contextmanager
def saving(doing: str, where: Path) -> Iterator[None]:
    """Turn errors of the file system, of safetensors and of tokenizers into a StorageError.

    Args:
        doing: verb for the message, such as `write`.
        where: path for the message.
    """
    with storage_errors(doing, where), quietly():
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


def truncate(config: TruncateConfig, out: Path) -> tuple[int, ...]:
    """Write a model with only some of its layers, and its tokenizer.

    Args:
        config: the model and the layers to keep.
        out: new folder for the model; it must not exist.

    Returns:
        Numbers of the layers that were kept, counted from 0.

    Raises:
        InvalidConfigError: the model has no such layers, or the folder exists.
        TeacherError: the model does not exist or cannot be loaded.
        StorageError: the folder cannot be written.
    """
    source = locate_teacher(config.teacher, config.revision)
    model = load_with_own_head(source.folder, source.name)
    tokenizer = load_tokenizer(source.folder, has_ends=False)
    refuse_more_words(tokenizer, model, source.folder)
    depth = model.config.num_hidden_layers
    chosen = read_layers(config.layers, depth, "--layers", ascending=False)
    prepare_new(out)
    with saving("write", out), new_folder(out, replaces=False) as folder:
        keep_layers(model, chosen).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        copy_pooling(source.folder, folder, model.config)
        copy_decoding(source.folder, folder, tokenizer)
        (folder / "README.md").write_text(
            f"# {source.name}, layers {', '.join(map(str, chosen))}\n\nOf its {depth} layers, counted "
            "from 0, these are kept, unchanged and untrained.\n",
            encoding="utf-8",
        )
    return chosen
