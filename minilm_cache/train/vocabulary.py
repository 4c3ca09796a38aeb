"""Which pieces students have of a cache's tokenizer: all, or those of `--vocab`."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from minilm_cache.cache import Cache
from minilm_cache.errors import CacheCorruptError, InvalidConfigError
from minilm_cache.models.student_tokens import OtherTokenizer, StudentTokens, Vocabulary
from minilm_cache.models.vocabulary import Coverage, Pieces, name_of
from minilm_cache.settings import OF_TEXTS, asked_vocabulary
from minilm_cache.storage_schema.base import REMEDY
from minilm_cache.train.card import cached_tokenizer, student_prompts
from minilm_cache.train.config import TrainConfig
from minilm_cache.wording import counted

_LOOKED_AT: Final = 1024
"""Sequences, the last ones of a cache, in which unknown tokens are counted."""
_LEAST_SHARE: Final = 1e-4
"""Least share of unknown tokens that is written out."""


def student_vocabulary(config: TrainConfig, cache: Cache) -> Vocabulary | None:
    """Return the pieces that students have of a cache's tokenizer. None means all.

    The token ids of the whole cache are read for it, and nothing else.

    Raises:
        InvalidConfigError: the pieces do not exist, or the objective predicts those of the teacher.
        CacheCorruptError: the cache is damaged.
    """
    if config.vocab is None:
        return None
    needs = config.spec.needs
    if needs.labels or needs.masked_hidden is not None:
        raise InvalidConfigError(
            f"--vocab: objective {config.objective} learns of masked tokens, which are pieces of the "
            "teacher's. Leave it out, and trim the student afterwards with `minilm-cache trim`."
        )
    if config.vocab == OF_TEXTS:
        raise InvalidConfigError(
            f"--vocab {OF_TEXTS} goes with trim. A cache has its own text: give --vocab cache."
        )
    asked, pieces = asked_vocabulary(config.vocab), _pieces(cache)
    counts, of_held_out = (
        pieces.counts(_sequences(cache, pieces, are_held_out=held_out)) for held_out in (False, True)
    )
    kept = pieces.chosen(counts, asked.most) if asked.file is None else pieces.listed(asked.file)
    packing = cache.manifest.identity.packing
    return Vocabulary(pieces, counts + of_held_out, kept, num_after=packing.num_after, pair=packing.pair)


def listed_name(config: TrainConfig, cache: Cache) -> str | None:
    """Return the name of the pieces that a file or the folder of a model lists; no sequence is read.

    None means that `--vocab` names neither.
    """
    asked = None if config.vocab is None else asked_vocabulary(config.vocab)
    if asked is None or asked.file is None:
        return None
    return name_of(_pieces(cache).listed(asked.file))


def _pieces(cache: Cache) -> Pieces:
    return Pieces(cached_tokenizer(cache.reader), student_prompts(cache.reader).by_name.values())


def held_out_coverage(vocabulary: Vocabulary, cache: Cache) -> Coverage | None:
    """Return what a vocabulary covers of held-out sequences. None means that there are none."""
    held_out = _sequences(cache, vocabulary.pieces, are_held_out=True)
    return vocabulary.pieces.coverage(vocabulary.kept, held_out)


def unread_in_words(tokens: StudentTokens | None, cache: Cache) -> list[str]:
    """Return which share of a cache's last tokens students cannot read, in words; empty if there are none.

    A donor's tokenizer reads texts that are written from token ids, and an unknown token has no text.
    """
    if not isinstance(tokens, OtherTokenizer) or tokens.left_out is None:
        return []
    num_all = cache.manifest.num_sequences
    looked_at = range(max(0, num_all - _LOOKED_AT), num_all)
    ids = np.concatenate(
        [segment.rows_of("tokens", number) for segment, number in cache.reader.sequences(looked_at)]
    )
    share = float(np.mean(ids == tokens.left_out))
    if not share:
        return []
    said = f"{share:.2%}" if share >= _LEAST_SHARE else "less than 0.01%"
    return [
        f"{said} of the tokens in this cache's last {counted(len(looked_at), 'sequence')} are words that its "
        "tokenizer does not know. Students of this donor learn from texts without these words, and held-out "
        "losses are of such texts"
    ]


def _sequences(cache: Cache, pieces: Pieces, *, are_held_out: bool) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the token ids of a cache's training or held-out sequences, without anything else."""
    num_train, num_all = cache.manifest.num_train, cache.manifest.num_sequences
    for segment, number in cache.reader.sequences(
        range(num_train, num_all) if are_held_out else range(num_train)
    ):
        ids = segment.rows_of("tokens", number).astype(np.int64)
        if ids.max() >= pieces.size or not pieces.known[ids].all():
            raise CacheCorruptError(
                f"{cache.reader.root} holds tokens that its tokenizer does not have. {REMEDY}"
            )
        yield ids
