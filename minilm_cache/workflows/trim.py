"""A model with a smaller vocabulary: the pieces that a text needs, and a tokenizer that cuts it as before."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.corpus.tokens import Tokens
from minilm_cache.models.generation import copy_decoding
from minilm_cache.models.load import load_with_own_head
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import copy_pooling, num_map_weights
from minilm_cache.models.prompts import read_prompts
from minilm_cache.models.tokenizer import load_tokenizer, refuse_more_words
from minilm_cache.models.truncate import saving
from minilm_cache.models.vocabulary import Coverage, Pieces, trim_model
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import TrimConfig, asked_vocabulary
from minilm_cache.store.durable import new_folder, prepare_new
from minilm_cache.wording import rendered

_ASIDE: Final = 10
"""Every tenth document is set aside to measure coverage, by pieces that are chosen from the others."""
_BATCH: Final = 1000
_NOTHING: Final = "interrupted before a model was written. Run the same command again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed:
    """A model with a smaller vocabulary."""

    path: Path
    num_pieces: int
    pieces_before: int
    num_parameters: int
    parameters_before: int
    coverage: Coverage | None
    """What pieces that are chosen from nine tenths of the text cover of the rest. None means that a file
    listed them, or that the text is one document."""


def trim(config: TrimConfig, out: Path, *, session: Session = ALONE) -> Trimmed:
    """Write a model, its tokenizer and its pooling with a smaller vocabulary.

    Args:
        config: the model, the text, and which pieces are kept.
        out: new folder for the model; it must not exist.
        session: its home keeps the tokens of the text. Its progress shows documents done, and its
            `should_stop` is called between them.

    Raises:
        InvalidConfigError: the pieces that are asked for do not exist, or the folder does.
        TeacherError: the model does not exist, or its vocabulary cannot be trimmed.
        CorpusError: the text cannot be read.
        InterruptedRunError: a stop was requested.
        StorageError: the folder cannot be written.
    """
    prepare_new(out)
    asked = asked_vocabulary(config.vocab)
    source = locate_teacher(config.model, config.revision)
    prompts = read_prompts(source.folder).by_name.values()
    pieces, coverage = Pieces(load_tokenizer(source.folder, has_ends=False), prompts), None
    if asked.file is not None:
        kept = pieces.listed(asked.file)
    else:
        corpus = load_corpus(config.corpus, config.text_column, config.documents, home=session.home)
        tokens = tokenise(corpus, pieces.tokenizer, session=session)
        numbers = np.arange(len(tokens.ends))
        aside = numbers % _ASIDE == _ASIDE - 1
        counts, of_aside = (
            pieces.counts(_documents(tokens, numbers[chosen], session)) for chosen in (~aside, aside)
        )
        kept = pieces.chosen(counts + of_aside, asked.most)
        of_others = pieces.chosen(counts, asked.most)
        coverage = pieces.coverage(of_others, _documents(tokens, numbers[aside], session))
    if len(kept) == pieces.size:
        session.progress.note(f"all {pieces.size:,} pieces are kept: the model is a copy of {source.name}")
    session.stop_if_asked(_NOTHING)
    model = load_with_own_head(source.folder, source.name)
    refuse_more_words(pieces.tokenizer, model, source.folder)
    smaller = trim_model(model, kept)
    result = Trimmed(
        path=out,
        num_pieces=len(kept),
        pieces_before=pieces.size,
        num_parameters=smaller.num_parameters() + num_map_weights(source.folder),
        parameters_before=model.num_parameters() + num_map_weights(source.folder),
        coverage=coverage,
    )
    session.stop_if_asked(_NOTHING)
    with saving("write", out), new_folder(out, replaces=False) as folder:
        smaller.save_pretrained(folder)
        tokenizer = pieces.trimmed(kept)
        tokenizer.save_pretrained(folder)
        copy_pooling(source.folder, folder, smaller.config)
        copy_decoding(source.folder, folder, tokenizer)
        card = rendered("minilm_cache.workflows", "trim.md.jinja", source=source.name, trimmed=result)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return result


def _documents(
    tokens: Tokens, numbers: npt.NDArray[np.int64], session: Session
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the token ids of documents."""
    session.progress.start("count", len(numbers), "documents")
    for part in session.parts(numbers.tolist(), _BATCH, _NOTHING):
        yield from tokens.read(np.asarray(part, np.int64))
