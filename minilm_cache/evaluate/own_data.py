"""Queries, documents and right answers of one's own: for retrieval, for mining and for rerankers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from minilm_cache.corpus.beir import json_records, read_judged, text_of, unanswered_in_words
from minilm_cache.corpus.formats import judged_files, texts_beside, words_of
from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.settings import RetrievalData, refuse_no_data
from minilm_cache.session import Session

_LOOKED_FOR: Final = 200
"""Maximum relevant documents that are looked for in further texts: it takes milliseconds for a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """Queries, documents, and which documents are right for a query."""

    queries: Mapping[str, str]
    documents: Mapping[str, str]
    right: Mapping[str, Mapping[str, int]]
    """For each query, the grade of each document that is right, above 0."""
    num_unanswered: int = 0
    """Judged queries without a relevant document, which are left out."""

    def is_itself(self, query: str, document: str) -> bool:
        """Return whether a document is the query, and was not judged: it is never an answer.

        In some data sets each query is a document, too, under the same name and perhaps with a title. BEIR's
        own evaluation leaves it out (`ignore_identical_ids`).
        """
        if query != document or document in self.right[query]:
            return False
        return words_of(self.documents[document]).endswith(words_of(self.queries[query]))


def own_data(named: RetrievalData, *, session: Session) -> OwnData:
    """Return the data that settings name, with the documents of a corpus beside those of the data.

    A text of the corpus that is a document already, but for white space, is not added again.

    Args:
        named: the data, and which corpus is searched, too.
        session: its home is the folder of what is kept of texts from the hub. Its progress shows how many
            queries are left out, and how many relevant documents stand in a text of the corpus, which counts
            as wrong.

    Raises:
        CorpusError: same as for `read_own_data`, or the corpus cannot be read.
    """
    data = read_own_data(named)
    if left_out := unanswered_in_words(data.num_unanswered, data.num_unanswered + len(data.queries)):
        session.progress.note(f"{named.judged}: {left_out}")
    if named.beside is None:
        return data
    from minilm_cache.corpus.load import load_corpus  # noqa: PLC0415 - it takes seconds

    corpus = load_corpus(named.beside, named.text_column, named.documents, home=session.home)
    known = {" ".join(text.split()) for text in data.documents.values()}
    further = {" ".join(text.split()): text.strip() for text in corpus.texts()}
    name = "corpus"
    while any(document.startswith(f"{name} ") for document in data.documents):
        name += "+"
    texts = [text for words, text in further.items() if words not in known]
    added = {f"{name} {number}": text for number, text in enumerate(texts)}
    right = sorted({document for documents in data.right.values() for document in documents})[:_LOOKED_FOR]
    if num_parts := _num_parts([data.documents[document] for document in right], further.keys() - known):
        session.progress.note(
            f"{num_parts} of {len(right)} relevant documents of {named.judged} stand in longer ones of "
            f"{named.beside}, and finding these counts as wrong. Take whole documents as answers."
        )
    return replace(data, documents={**added, **data.documents})


def _num_parts(right: Iterable[str], further: Iterable[str]) -> int:
    """Return how many documents stand, as whole words, in a further text."""
    joined = f" {' | '.join(further)} "
    return sum(f" {' '.join(document.split())} " in joined for document in right)


def read_own_data(named: RetrievalData) -> OwnData:
    """Read a folder in BEIR's layout (Thakur et al. 2021, arXiv 2104.08663), its files, or questions.

    Args:
        named: the data: a folder in BEIR's layout, whose judgements are those of `qrels/test.tsv`; another
            file of judgements in it, like `FOLDER/qrels/train.tsv`; files of queries, documents and
            judgements anywhere; or a .jsonl file whose records have `question` and `answer`.

    Raises:
        CorpusError: a file is missing or damaged, a record lacks a text, or a query has no relevant document.
    """
    path = named.judged
    assert path is not None
    where = f"--qrels {path}" if named.qrels is not None else f"--retrieval {path}"
    if named.qrels is not None and named.queries is not None and named.corpus is not None:
        data = _of_judgements(named.qrels, (Path(named.corpus), named.queries))
    elif path.is_dir() or judged_files(path):
        file = path / "qrels" / "test.tsv" if path.is_dir() else path
        data = _of_judgements(file, texts_beside(file))
    else:
        refuse_no_data(path)
        data = _of_questions(path)
    lacking = next((query for query in data.queries if not data.right.get(query)), None)
    if not data.queries:
        raise CorpusError(f"{where}: no query has a relevant document. Add some.")
    if lacking is not None:
        raise CorpusError(f"{where}: query {lacking!r} has no relevant document. Add it or remove the query.")
    return data


def _of_questions(path: Path) -> OwnData:
    queries, documents, right = dict[str, str](), dict[str, str](), dict[str, dict[str, int]]()
    numbers: dict[str, str] = {}
    for where, row in json_records(path):
        if lacking := [name for name in ("question", "answer") if name not in row]:
            raise CorpusError(
                f"{where} lacks {' and '.join(lacking)}; it has {', '.join(map(str, row)) or 'nothing'}. "
                "Name its texts question and answer, or give a folder in BEIR's layout."
            )
        question, answer = (text_of(row, name, where) for name in ("question", "answer"))
        number = numbers.setdefault(f"d{answer}", f"d{len(documents)}")
        query = numbers.setdefault(f"q{question}", f"q{len(queries)}")
        queries[query], documents[number] = question, answer
        right.setdefault(query, {})[number] = 1
    return OwnData(queries=queries, documents=documents, right=right)


def _of_judgements(file: Path, texts: tuple[Path, Path]) -> OwnData:
    judged = read_judged(file, texts)
    graded = {
        query: {document: grade for document, grade in grades.items() if grade > 0}
        for query, grades in judged.grades.items()
    }
    right = {query: grades for query, grades in graded.items() if grades}
    queries = {query: text for query, text in judged.queries.items() if query in right}
    num_unanswered = len(judged.queries) - len(queries)
    return OwnData(queries=queries, documents=judged.documents, right=right, num_unanswered=num_unanswered)
