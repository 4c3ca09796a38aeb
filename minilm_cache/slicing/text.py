"""Calibration text: the sequences that slices are fitted to."""

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.load import load_tokenizer
from minilm_cache.slicing.config import SliceConfig
from minilm_cache.storage_schema.identity import Packing

NUM_TOKENS = 2**14
"""Tokens that slices are fitted to; twice as many gain 1 % (docs/adr/0014)."""
CHECKED_SEQUENCES = 64
"""Sequences after those, which the finished slice is compared with its teacher on."""


def of_cache(cache: Cache, most: int = NUM_TOKENS) -> list[Int[Tensor, " _"]]:
    """Return the first training sequences of a cache, `most` tokens or all.

    Documents are shuffled when a cache is made, so the first ones are a sample. Only their token ids are
    read; the reader does not count them, because a slice is made once for all trainings.
    """
    counted = cache.reader.bytes_read
    try:
        return list(_first_sequences(cache, most))
    finally:
        cache.reader.bytes_read = counted


def _first_sequences(cache: Cache, most: int) -> Iterator[Int[Tensor, " _"]]:
    """Yield the first training sequences of a cache until they have `most` tokens."""
    num_tokens = 0
    for number in range(cache.manifest.num_shards):
        shard = cache.reader.shard(number, paths=())
        last = min(shard.first_sequence + len(shard.lengths), cache.manifest.num_train)
        for sequence in range(shard.first_sequence, last):
            yield torch.from_numpy(shard.rows_of("tokens", sequence).astype("int64"))
            num_tokens += shard.length(sequence)
            if num_tokens >= most:
                return


def of_corpus(config: SliceConfig, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return sequences of a corpus to fit to, and further ones to check on; few texts have none of those.

    Args:
        config: settings of the slice.
        folder: folder of the teacher, whose tokenizer reads the text.
    """
    tokenizer = load_tokenizer(folder)
    packing = Packing(
        mode="packed",
        max_length=config.max_length,
        max_tokens=NUM_TOKENS + CHECKED_SEQUENCES * config.max_length,
        seed=0,
        split=None,
    )
    table = SequenceTable(load_corpus(config.corpus, config.text_column), tokenizer, packing)
    ids = [torch.from_numpy(row.astype("int64")) for row in table.read(0, len(table.lengths)).ids]
    most = max(1, NUM_TOKENS // config.max_length)
    return ids[:most], ids[most:]


def check_text(num_tokens: int, hidden_size: int) -> None:
    """Raise InvalidConfigError if a text has fewer tokens than a student's states have dimensions."""
    if num_tokens < hidden_size:
        raise InvalidConfigError(
            f"a slice of hidden size {hidden_size} is fitted to {hidden_size} tokens at least, and the text "
            f"has {num_tokens}. Give more text, or use --init random."
        )
