"""Settings of what is made before a dump: a head for masked tokens, augmented copies of a text."""

from typing import Annotated

from pydantic import Field

from minilm_cache.config import FrozenSettings
from minilm_cache.needs import Form


class HeadConfig(FrozenSettings):
    """Settings of the fit of a head for masked tokens."""

    teacher: str
    """`mini`, an alias, a folder or a hub id."""
    corpus: str = "python-docs"
    """Same as for `dump`."""
    text_column: str | None = None
    """Column of the text in records; None means `text`."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Tokens per sequence, special tokens counted."""
    max_tokens: Annotated[int, Field(ge=4)] | None = None
    """Tokens at most; None means the whole corpus."""
    epochs: Annotated[int, Field(ge=1)] = 3
    """Passes over the text, each masked anew."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences per step."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Learning rate of AdamW at the beginning; it falls linearly to 0."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of weights, order and masks."""
    revision: str | None = None
    """Revision of a teacher from the hub."""
    device: str | None = None
    """torch device; None means a GPU where there is one."""


class AugmentConfig(FrozenSettings):
    """Settings of the augmentation of a corpus (TinyBERT, arXiv 1909.10351, algorithm 1)."""

    teacher: str
    """A model with a head for masked tokens: an alias, a folder or a hub id."""
    corpus: str
    """A file, a folder, or `hf:ID[:CONFIG][:SPLIT]`; each record is a document."""
    text_column: str | None = None
    """Column of the text in records; None means `text`."""
    copies: Annotated[int, Field(ge=1, le=1000)] = 20
    """Copies of each document, N_a in the paper; those that come out alike are kept once."""
    candidates: Annotated[int, Field(ge=1, le=1000)] = 15
    """Words that may stand for one, K in the paper."""
    replace: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Probability that a word is replaced, p_t in the paper."""
    form: Form = "authors"
    """`authors`: as their published code, which leaves out English stop words and words with other letters
    than a to z, reads the document itself as a second segment, and keeps capitals. `paper`: algorithm 1 as
    printed."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Tokens that the model reads of a document; one-piece words beyond them stay."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of what is drawn."""
    revision: str | None = None
    """Revision of a model from the hub."""
    device: str | None = None
    """torch device; None means a GPU where there is one."""
