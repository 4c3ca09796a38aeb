"""Sentence encoders that tests share, written by sentence-transformers itself."""

from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from torch import nn


def save_encoder(
    folder: Path,
    mode: str,
    *,
    dense: nn.Module | None = None,
    normalize: bool = True,
    width: int = 32,
    max_length: int = 32,
) -> None:
    """Save the tiny teacher of a folder again as sentence-transformers does, with a pooling."""
    modules: list[nn.Module] = [
        Transformer(str(folder), max_seq_length=max_length),
        Pooling(width, pooling_mode=mode),
    ]
    if dense is not None:
        modules.append(Dense(width, 24, activation_function=dense))
    modules += [Normalize()] * normalize
    SentenceTransformer(modules=modules).save_pretrained(str(folder), create_model_card=False)
