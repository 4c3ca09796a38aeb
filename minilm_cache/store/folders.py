"""Say what a folder is that was given in place of another one: a cache, a run, a model."""

from pathlib import Path

from minilm_cache.store.layout import MANIFEST


def described_otherwise(folder: Path) -> str:
    """Return a sentence on what a folder is, and on the command that takes it; empty where nothing is known.

    The sentence begins with a space, to follow a message that says what the folder is not.
    """
    if (folder / MANIFEST).is_file():
        return " It is a cache: `minilm-cache info` shows it, and `train` takes it."
    if (folder / "run.json").is_file():
        students = ", ".join(str(file.parent) for file in sorted(folder.glob("students/*/config.json")))
        models = f" Its students are models: {students}." if students else " It has no trained student yet."
        return f" It is a run: `minilm-cache info` shows it.{models}"
    if (folder / "config.json").is_file():
        return " It is a model: `dump --teacher`, `evaluate`, `speed` and `embeddings` take it."
    return ""
