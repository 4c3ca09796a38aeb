"""A teacher cut down to some of its layers: Poor Man's BERT (Sajjad et al. 2020, arXiv 2004.03844)."""

from pathlib import Path

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.config import TruncateConfig
from minilm_cache.models.load import keep_layers, load_model, load_tokenizer, locate_teacher
from minilm_cache.models.saving import saving
from minilm_cache.store.durable import new_folder, refuse_existing


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
    model, tokenizer = load_model(source.folder), load_tokenizer(source.folder)
    depth = model.config.num_hidden_layers
    chosen = tuple(int(part) if part.strip().isdecimal() else depth for part in config.layers.split(","))
    if max(chosen) >= depth or len(set(chosen)) < len(chosen):
        raise InvalidConfigError(
            f"--layers {config.layers}: give different numbers from 0 to {depth - 1}, with commas between "
            "them."
        )
    refuse_existing(out)
    with saving("write", out), new_folder(out) as folder:
        keep_layers(model, chosen).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(
            f"# {source.name}, layers {', '.join(map(str, chosen))}\n\nOf its {depth} layers, counted "
            "from 0, these are kept, unchanged and untrained.\n"
        )
    return chosen
