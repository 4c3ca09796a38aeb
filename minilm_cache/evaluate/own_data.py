"""Queries, documents and right answers of one's own: for retrieval, for mining and for rerankers."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.settings import FurtherTexts, refuse_no_data
from minilm_cache.session import Session

_LOOKED_FOR: Final = 200
"""Most right documents that are looked for in further texts, which takes milliseconds for each megabyte."""
_HEADERS: Final = ("query-id", "qid", "query_id")
"""First words of a file of right documents that are no query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """Queries, documents, and which documents are right for a query."""

    queries: Mapping[str, str]
    documents: Mapping[str, str]
    right: Mapping[str, Mapping[str, int]]
    """For each query, the grade of each document that is right, above 0."""


def own_data(path: Path, beside: FurtherTexts, *, session: Session) -> OwnData:
    """Return the data that settings name, with the documents of a corpus beside those of the data.

    A text of the corpus that is a document already, but for white space, is not added again.

    Args:
        path: folder in BEIR's layout, or a .jsonl file.
        beside: which corpus is searched, too.
        session: its home is the folder of what is kept of texts from the hub. Its progress shows how many
            right documents stand in a text of the corpus, which counts as wrong.

    Raises:
        CorpusError: same as for `read_own_data`, or the corpus cannot be read.
    """
    data = read_own_data(path)
    if beside.corpus is None:
        return data
    from minilm_cache.corpus.load import load_corpus  # noqa: PLC0415 - it takes seconds

    corpus = load_corpus(beside.corpus, beside.text_column, beside.documents, home=session.home)
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
            f"{num_parts} of {len(right)} right documents of {path.name} stand in longer ones of "
            f"{beside.corpus}, and finding these counts as wrong. Take whole documents as answers."
        )
    return replace(data, documents={**added, **data.documents})


def _num_parts(right: Iterable[str], further: Iterable[str]) -> int:
    """Return how many documents stand, as whole words, in a further text."""
    joined = f" {' | '.join(further)} "
    return sum(f" {' '.join(document.split())} " in joined for document in right)


def read_own_data(path: Path) -> OwnData:
    """Read a folder in BEIR's layout (Thakur et al. 2021, arXiv 2104.08663), or a file of questions.

    Args:
        path: a folder with `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`) and
            `qrels/test.tsv` (query, document, grade), or a .jsonl file whose records have `question` and
            `answer`.

    Raises:
        CorpusError: a file is missing or damaged, a record lacks a text, or a query lacks a right document.
    """
    refuse_no_data(path)
    data = _of_folder(path) if path.is_dir() else _of_questions(path)
    lacking = next((query for query in data.queries if not data.right.get(query)), None)
    if lacking is not None or not data.queries:
        what = "there is no query" if lacking is None else f"query {lacking!r} has no right document"
        raise CorpusError(f"--retrieval {path}: {what}. Add it or remove the query.")
    return data


def _of_questions(path: Path) -> OwnData:
    queries, documents, right = dict[str, str](), dict[str, str](), dict[str, dict[str, int]]()
    numbers: dict[str, str] = {}
    for where, row in _records(path):
        question, answer = (_text(row, name, where) for name in ("question", "answer"))
        number = numbers.setdefault(f"d{answer}", f"d{len(documents)}")
        query = numbers.setdefault(f"q{question}", f"q{len(queries)}")
        queries[query], documents[number] = question, answer
        right.setdefault(query, {})[number] = 1
    return OwnData(queries=queries, documents=documents, right=right)


def _of_folder(path: Path) -> OwnData:
    corpus = list(_records(path / "corpus.jsonl"))
    titled = [(_text(row, "_id", where), str(row.get("title") or ""), row, where) for where, row in corpus]
    documents = {name: f"{title} {_text(row, 'text', where)}".strip() for name, title, row, where in titled}
    asked = {
        _text(row, "_id", where): _text(row, "text", where) for where, row in _records(path / "queries.jsonl")
    }
    right: dict[str, dict[str, int]] = {}
    file = path / "qrels" / "test.tsv"
    for number, row in enumerate(_rows(file), 1):
        if not row or (number == 1 and row[0] in _HEADERS):
            continue
        if len(row) != 3 or not re.fullmatch(r"-?[0-9]{1,6}", row[2].strip()):  # noqa: PLR2004 - three columns
            raise CorpusError(
                f"{file}, line {number}: give a query, a document and a whole grade, with tabs."
            )
        if row[1] not in documents:
            raise CorpusError(
                f"{file}, line {number}: there is no document {row[1]!r} in corpus.jsonl. Add it or remove "
                "the line."
            )
        if int(row[2]) > 0:
            right.setdefault(row[0], {})[row[1]] = int(row[2])
    judged = {query: text for query, text in asked.items() if query in right}
    unknown = next((query for query in right if query not in asked), None)
    if unknown is not None:
        raise CorpusError(
            f"{file}: there is no query {unknown!r} in queries.jsonl. Add it or remove the line."
        )
    return OwnData(queries=judged, documents=documents, right=right)


def _rows(file: Path) -> Iterator[list[str]]:
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            yield from csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE)
    except (OSError, UnicodeError, csv.Error) as error:
        raise CorpusError(f"cannot read {file}: {error}. It belongs to BEIR's layout.") from error


def _records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each record of a .jsonl file is, and the record."""
    where = str(file)
    try:
        with file.open(encoding="utf-8-sig") as opened:
            for number, line in enumerate(opened, 1):
                where = f"{file}, line {number}"
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise CorpusError(f"{where} holds no record. Write one object a line.")
                    yield where, row
    except json.JSONDecodeError as error:
        raise CorpusError(
            f"cannot read {where}: {error.msg} (column {error.colno}). Give records of JSON, one a line."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorpusError(f"cannot read {where}: {error}. Give records of JSON, one a line.") from error


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise CorpusError(
            f"{where} has no text {name!r}; it has {', '.join(map(str, row)) or 'nothing'}. Add it or remove "
            "the record."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where} has half of a character (a lone surrogate). Remove it.") from error
    return value
