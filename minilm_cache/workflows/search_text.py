"""Find the texts of a corpus that are nearest to questions, with a student or another sentence encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch

from minilm_cache.corpus.load import load_corpus
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.classifier import refuse_answers
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import SentenceModel
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import refuse_other_kind, refuse_unreadable
from minilm_cache.train.folder import RunFolder, is_run
from minilm_cache.train.students import finished_record
from minilm_cache.wording import cut_in_words
from minilm_cache.workflows.config import SearchTextConfig

_PART: Final = 512
"""Texts between two looks at whether a stop was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundText:
    """A text that is near to a question."""

    number: int
    """Number of the text in the corpus, counted from 0."""
    score: float
    """Cosine of its vector with that of the question, or their dot product, as the model compares them."""
    text: str


def search_texts(
    config: SearchTextConfig, model: str | Path, questions: Sequence[str] | str, *, session: Session = ALONE
) -> list[list[FoundText]]:
    """Return the nearest texts for each question, the nearest one first.

    Args:
        config: the corpus, and how many texts are read and returned.
        model: name or folder of a sentence encoder, or folder of a run, which stands for its best student by
            held-out loss.
        questions: the questions; one is a list of one.
        session: its progress shows the number of texts. Its `should_stop` is called after each 512 texts;
            True stops.

    Raises:
        CorpusError: the corpus does not exist, cannot be read, or holds no text.
        TeacherError: there is no such model, or a pooling that cannot be computed.
        InvalidConfigError: there is no question, or the model does not say how it pools.
        InterruptedRunError: a stop was requested.
    """
    refuse_other_kind(config, SearchTextConfig)
    model, questions = str(model), [questions] if isinstance(questions, str) else questions
    if not all(question.strip() for question in questions) or not questions:
        raise InvalidConfigError(
            "give a question in quotes, like: minilm-cache search-text mini 'open a file'"
        )
    refuse_unreadable(questions)
    folder = _folder(model, config.revision)
    if is_run(Path(model)):
        session.progress.note(f"searching with {folder.name}, the best student of {model}")
    if not (folder / "modules.json").is_file():
        raise InvalidConfigError(
            f"{model} gives no vectors of texts. Train a student with --objective embedding, or name a "
            "sentence encoder, which has a modules.json."
        )
    refuse_answers(folder, model)
    encoder = SentenceModel(folder, config.max_length)
    corpus = load_corpus(config.corpus, config.text_column, config.documents, home=session.home)
    texts = list(islice(corpus.texts(), config.max_texts))
    if len(texts) < len(corpus.documents):
        session.progress.note(f"searching the first {len(texts):,} of {len(corpus.documents):,} texts")
    session.progress.start("read", len(texts), "texts")
    documents = torch.cat([encoder.encode(part, role="document") for part in session.parts(texts, _PART)])
    if encoder.num_cut:
        session.progress.note(
            cut_in_words(encoder.num_cut, len(texts), "text", most=f"{encoder.max_length} tokens")
        )
    scores = encoder.encode(questions, role="query") @ documents.T
    if not scores.isfinite().all():  # which have no order
        raise TeacherError(f"{model} gives vectors with NaN or infinity. Get its weights again.")
    best = scores.topk(min(config.top, len(texts)))
    return [
        [
            FoundText(number=number, score=score, text=texts[number])
            for score, number in zip(row, numbers, strict=True)
        ]
        for row, numbers in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model; a run stands for its best student.

    Raises:
        InvalidConfigError: all students of the run diverged.
    """
    run = Path(model)
    if not is_run(run):
        return locate_teacher(model, revision).folder
    losses = {student.arch: student.loss_after for student in finished_record(run).trained}
    if not losses:
        raise InvalidConfigError(f"run {run} has no student: all of them diverged. Train again.")
    best = min(losses, key=lambda arch: (losses[arch] is None, losses[arch] or 0.0))
    return RunFolder(path=run).student(best)
