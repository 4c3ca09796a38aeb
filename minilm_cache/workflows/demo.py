"""From Python's documentation to two students that search it, on one machine without a network.

The teacher `mini` runs once and leaves relations and pooled vectors in one cache. Two students of different
shapes are trained from its vectors, then teacher and students answer the same questions.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minilm_cache.cache import Cache, open_cache
from minilm_cache.corpus.formats import PYTHON_DOCS
from minilm_cache.corpus.load import load_corpus
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import DumpResult, dump_cache
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.pooling import SentenceModel
from minilm_cache.objectives.several import documents_of
from minilm_cache.report.config import ReportConfig
from minilm_cache.report.page import report_runs
from minilm_cache.session import ALONE, Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import TrainResult, train_students

ARCH = ("3x384", "3x192")
"""Shapes of the two students."""
STEPS = 100
"""Training steps of the students."""
DUMP_TOKENS = 120_000
"""Most tokens that the demo dumps."""
QUESTIONS = (
    "How do I read a file line by line?",
    "run several functions at the same time",
    "turn an object into JSON text",
)
MOST_DOCUMENTS = 2000
"""Most documents that are searched."""
TOP = 10
"""Answers of the teacher that a student is to find."""
SHOWN = 3
"""Answers that are shown of each model."""
_MAX_LENGTH = 64
"""Most tokens that models read of a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searcher:
    """A model that searched the documents."""

    model: str
    path: Path
    """Folder of the model."""
    answers: tuple[tuple[str, ...], ...]
    """First lines of the best documents for each of `QUESTIONS`, the best first."""
    agreement: float
    """Share of the teacher's `TOP` answers that are among the model's, mean over held-out questions."""
    num_parameters: int
    texts_per_s: float
    """Documents that the model makes vectors of in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The cache, the run, and what teacher and students found."""

    dump: DumpResult
    train: TrainResult
    page: Path
    """The report about the run."""
    num_documents: int
    """Documents that were searched."""
    num_questions: int
    """Held-out questions that models are compared on."""
    searchers: tuple[Searcher, ...]
    """The teacher, then the students."""


def run_demo(*, session: Session = ALONE) -> DemoResult:
    """Dump, train and search; dump and training resume or reuse those of an earlier demo.

    Args:
        session: its home is the folder of caches and runs. Its progress shows each task. Its `should_stop` is
            called between steps; True stops.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`.
    """
    dumped = dump_cache(
        DumpConfig.model_validate(
            {
                "teacher": MINI,
                "for": ("minilm", "embedding"),
                "max_tokens": DUMP_TOKENS,
                "max_length": _MAX_LENGTH,
            }
        ),
        session=session,
    )
    trained = train_students(
        TrainConfig(arch=ARCH, objective="embedding", steps=STEPS, precision="float32"),
        dumped.path,
        session=session,
    )
    library = _Library.of(open_cache(dumped.path))
    folders = {MINI: locate_teacher(MINI).folder, **{arch: trained.student_path(arch) for arch in ARCH}}
    session.progress.start("search", len(library.texts) * len(folders), "texts")
    searchers: list[Searcher] = []
    best: npt.NDArray[np.int64] | None = None
    for name, folder in folders.items():
        searcher, answers = library.search(name, folder, expected=best)
        best = answers if best is None else best
        searchers.append(searcher)
        session.progress.advance(len(library.texts))
    page = trained.path / "report.html"
    report_runs([trained.path], ReportConfig(title="demo"), out=page, session=session)
    return DemoResult(
        dump=dumped,
        train=trained,
        page=page,
        num_documents=len(library.texts),
        num_questions=len(library.questions),
        searchers=tuple(searchers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Library:
    """Documents to search, and questions that no student has seen."""

    texts: Sequence[str]
    questions: Sequence[str]
    """First lines of held-out documents."""

    @classmethod
    def of(cls, cache: Cache) -> "_Library":
        """Return documents of the cache's text, and questions from those that are held out."""
        documents = load_corpus(PYTHON_DOCS).documents
        texts = [documents[int(number)]["text"] for number in documents_of(cache)]
        held_out = [_first_line(text) for text in texts[cache.manifest.num_train :]]
        return cls(texts=texts[:MOST_DOCUMENTS], questions=list(dict.fromkeys(held_out)))

    def search(
        self, name: str, folder: Path, *, expected: npt.NDArray[np.int64] | None
    ) -> tuple[Searcher, npt.NDArray[np.int64]]:
        """Search with one model.

        Args:
            name: name of the model.
            folder: folder of the model.
            expected: the teacher's best documents for each question, `(questions, TOP)`. None means that this
                is the teacher.

        Returns:
            What the model found, and its best documents for each held-out question, `(questions, TOP)`.
        """
        model = SentenceModel(folder, _MAX_LENGTH)
        started = time.perf_counter()
        index = model.encode(self.texts)
        seconds = time.perf_counter() - started

        def best(questions: Sequence[str], count: int) -> npt.NDArray[np.int64]:
            scores = model.encode(questions) @ index.T
            return np.asarray(scores.argsort(stable=True, dim=1, descending=True)[:, :count])

        answers = best(self.questions, TOP)
        searcher = Searcher(
            model=name,
            path=folder,
            answers=tuple(
                tuple(_first_line(self.texts[number]) for number in row) for row in best(QUESTIONS, SHOWN)
            ),
            agreement=1.0 if expected is None else _overlap(answers, expected),
            num_parameters=model.num_parameters,
            texts_per_s=len(self.texts) / seconds,
        )
        return searcher, answers


def _overlap(answers: npt.NDArray[np.int64], expected: npt.NDArray[np.int64]) -> float:
    """Return the share of `expected` that is in `answers`, mean over rows."""
    return float(np.mean([np.isin(row, own).mean() for row, own in zip(expected, answers, strict=True)]))


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]
