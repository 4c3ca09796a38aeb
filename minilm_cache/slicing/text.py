"""Calibration text: the sequences that slices are fitted to."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.template import packing_of
from minilm_cache.corpus.tokenise import tokens_of
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.load import load_tokenizer
from minilm_cache.slicing.config import SliceConfig

_MOST_TOKENS = 2**14
"""Most tokens that slices are fitted to; twice as many gain 1 % (docs/adr/0014)."""
_MOST_NUMBERS = _MOST_TOKENS * 384
"""Most numbers in a hidden state of all these tokens, so that wide teachers take little longer."""
CHECKED_SEQUENCES = 64
"""Sequences after those, which the finished slice is compared with its teacher on."""


def num_tokens(hidden_size: int) -> int:
    """Return the number of tokens that a slice is fitted to, given the teacher's hidden size."""
    return min(_MOST_TOKENS, _MOST_NUMBERS // hidden_size)


def of_cache(cache: Cache, most: int) -> list[Int[Tensor, " _"]]:
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
    yielded = 0
    shards = range(len(cache.reader.ranges))
    for segment in chain.from_iterable(cache.reader.segments_of(shard, paths=()) for shard in shards):
        last = min(segment.first_sequence + len(segment.lengths), cache.manifest.num_train)
        for sequence in range(segment.first_sequence, last):
            yield torch.from_numpy(segment.rows_of("tokens", sequence).astype("int64"))
            yielded += segment.length(sequence)
            if yielded >= most:
                return


def of_corpus(config: SliceConfig, folder: Path, most: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return sequences of a corpus to fit to, and further ones to check on; few texts have none of those.

    Args:
        config: settings of the slice.
        folder: folder of the teacher, whose tokenizer reads the text.
        most: number of tokens to fit to.
    """
    tokenizer = load_tokenizer(folder)
    packing = packing_of(
        tokenizer,
        mode="packed",
        max_length=config.max_length,
        max_tokens=most + CHECKED_SEQUENCES * config.max_length,
        seed=0,
        split=None,
    )
    table = SequenceTable(tokens_of(config, tokenizer), packing)
    ids = [torch.from_numpy(row) for row in table.read(0, table.num_sequences).ids]
    num_fitted = max(1, most // config.max_length)
    return ids[:num_fitted], ids[num_fitted:]


def check_text(num_tokens: int, hidden_size: int) -> None:
    """Raise InvalidConfigError if a text has fewer tokens than a student's states have dimensions."""
    if num_tokens < hidden_size:
        raise InvalidConfigError(
            f"a slice of hidden size {hidden_size} is fitted to {hidden_size} tokens at least, and the text "
            f"has {num_tokens}. Give more text, or use --init random."
        )
