"""Texts of a cache, written from its token ids."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy.typing as npt

from minilm_cache.cache import Cache, CachedSequence
from minilm_cache.corpus.template import named_template
from minilm_cache.models.inputs import texts_of_pair
from minilm_cache.train.card import cached_tokenizer


def texts_of(cache: Cache, numbers: Iterable[int]) -> Iterator[tuple[CachedSequence, tuple[str, ...]]]:
    """Yield sequences of a cache by their numbers, each with its text, or its two texts where it is a pair.

    Texts are as the teacher read them: cut, and perhaps in lower case. Unknown words stay, as such.

    Raises:
        CacheCorruptError: a shard is damaged.
    """
    tokenizer, packing = cached_tokenizer(cache.reader), cache.manifest.identity.packing
    template, pair = packing.template or named_template(tokenizer), packing.pair
    for number in numbers:
        sequence = cache[number]
        ids = sequence.input_ids.numpy()
        parts: tuple[npt.NDArray[Any], ...] = (ids,)
        if pair is not None:
            parts = texts_of_pair(ids, pair)
        elif template is not None:
            parts = (ids[len(template.before) : len(ids) - len(template.after)],)
        yield sequence, tuple(str(tokenizer.decode(part)) for part in parts)
