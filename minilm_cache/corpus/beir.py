"""Retrieval data in BEIR's layout: documents, queries, and how right a document is for a query.

A folder has `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`) and files of judgements
like `qrels/test.tsv` (query, document, grade), with a header or without one (Thakur et al. 2021, arXiv
2104.08663). A judgement above 0 says that a document is right.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from minilm_cache.corpus.formats import corpus_files, judged_files, texts_beside
from minilm_cache.corpus.json_lines import json_objects
from minilm_cache.errors import CorpusError, first_line
from minilm_cache.store.durable import open_regular
from minilm_cache.wording import printable

_OF_TREC: Final = 4
"""Columns of TREC's judgements, the second of which says nothing."""
_HEADERS: Final = ("query-id", "qid", "query_id")
"""First words of a file of judgements that are no query."""
_COLUMNS: Final = ("_id", "title", "text", "question", "answer")
"""Columns of which no record may have two values."""
_FIRST_SIGN: Final = 32
"""The first character that is no control character."""
QUERY, POSITIVE, NEGATIVE = "query", "positive", "negative"
"""Columns of the groups that judgements make: a query, its relevant documents, and others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTexts:
    """Queries that something is judged for, documents, and the grades of documents for queries."""

    queries: Mapping[str, str]
    documents: Mapping[str, str]
    """Texts by their `_id`, each after its title."""
    grades: Mapping[str, Mapping[str, int]]
    """For each query, the grades of documents as the file has them, of several grades the highest."""


def read_judged(file: Path, texts: tuple[Path, Path], *, only_judged: bool = False) -> JudgedTexts:
    """Read a file of judgements, with the queries and documents that it names.

    Args:
        file: like `qrels/test.tsv`.
        texts: the files of documents and of queries.
        only_judged: leave out documents that no query names.

    Raises:
        CorpusError: a file is missing or damaged, a record lacks a text, or a judgement is of no query or of
            no document.
    """
    grades, lines = dict[str, dict[str, int]](), dict[str, int]()
    for number, (query, document, grade) in _judgements(file):
        known = grades.setdefault(query, {})
        known[document] = max(grade, known.get(document, grade))
        lines.setdefault(document, number)
    of_documents, of_queries = texts
    documents = _by_name(
        (where, _document(row, where))
        for where, row in json_records(of_documents)
        if not only_judged or text_of(row, "_id", where) in lines
    )
    asked = _by_name((where, _query(row, where)) for where, row in json_records(of_queries))
    lacking = next((name for name in lines if name not in documents), None)
    if lacking is not None:
        raise CorpusError(
            f"{file}, line {lines[lacking]}: there is no document {lacking!r} in {of_documents.name}. "
            "Add it or remove the line."
        )
    asked_for = (query for query, judged in grades.items() if max(judged.values()) > 0)
    unknown = next((query for query in asked_for if query not in asked), None)
    if unknown is not None:
        raise CorpusError(
            f"{file}: there is no query {unknown!r} in {of_queries.name}. Add it or remove the line."
        )
    queries = {query: text for query, text in asked.items() if query in grades}
    return JudgedTexts(queries=queries, documents=documents, grades=grades)


def _by_name(records: Iterable[tuple[str, tuple[str, str]]]) -> dict[str, str]:
    """Return texts by their names, of which each record has one, behind where it is.

    Raises:
        CorpusError: a name has two texts: judgements would be of one of them.
    """
    found: dict[str, str] = {}
    for where, (name, text) in records:
        if found.setdefault(name, text) != text:
            raise CorpusError(
                f"{where}: _id {name!r} was that of another text before. Give each text its own."
            )
    return found


def _document(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the name of a document, and its text after its title; one of the two may be empty."""
    title = text_of(row, "title", where) if row.get("title") not in (None, "") else ""
    has_title_alone = title and not str(row.get("text") or "").strip()
    text = "" if has_title_alone else text_of(row, "text", where)
    return text_of(row, "_id", where), f"{title} {text}".strip()


def _query(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the name of a query, and its text."""
    return text_of(row, "_id", where), text_of(row, "text", where)


def look_at_judged(file: Path) -> None:
    """Raise CorpusError if a first line of judgements, documents or queries is damaged or lacks a text."""
    next(_judgements(file), None)
    for each, read in zip(texts_beside(file), (_document, _query), strict=True):
        for where, row in islice(json_records(each), 1):
            read(row, where)


def judged_groups(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each query of a file of judgements is, in words, and its documents in columns of groups.

    The columns are `query`, `positive` (relevant documents, the best ones first) and `negative` (documents
    whose grade is 0 or less). A query without a relevant document is left out.

    Raises:
        CorpusError: another column is asked for; or same as for `read_judged`.
    """
    refuse_other_columns(file, columns)
    judged = read_judged(file, texts_beside(file), only_judged=True)
    if not any(grade > 0 for grades in judged.grades.values() for grade in grades.values()):
        raise CorpusError(f"{file}: no query has a relevant document, one whose grade is above 0. Add some.")
    for query, text in judged.queries.items():
        grades = judged.grades[query]
        right = [judged.documents[name] for name in best_first(grades) if grades[name] > 0]
        wrong = [judged.documents[name] for name in best_first(grades) if grades[name] <= 0]
        if right:
            row: Mapping[str, Any] = {QUERY: text, POSITIVE: right, NEGATIVE: wrong}
            yield f"query {query}", {name: row[name] for name in columns}


def left_out_in_words(corpus: str) -> str | None:
    """Return how many judged queries of a corpus have no relevant document. None means that each has one.

    Args:
        corpus: name of a corpus of pairs. In another than BEIR's layout nothing is judged.
    """
    path = Path(corpus)
    best = dict[str, int]()
    for file in corpus_files(path, pairs=True) if path.exists() else ():
        for _, (query, _, grade) in _judgements(file) if judged_files(file) else ():
            best[query] = max(grade, best.get(query, grade))
    return unanswered_in_words(sum(grade <= 0 for grade in best.values()), len(best))


def unanswered_in_words(num_unanswered: int, num_judged: int) -> str | None:
    """Return how many judged queries have no relevant document. None means that each has one."""
    if not num_unanswered:
        return None
    return f"{num_unanswered:,} of {num_judged:,} judged queries have no relevant document, and are left out"


def best_first(grades: Mapping[str, int]) -> list[str]:
    """Return the names of documents by their grades, the greatest one first; equal ones as they stand."""
    return sorted(grades, key=lambda document: -grades[document])


def refuse_other_columns(file: Path, columns: Sequence[str]) -> None:
    """Raise CorpusError for a column that the groups of a file of judgements do not have."""
    other = next((name for name in columns if name not in (QUERY, POSITIVE, NEGATIVE)), None)
    if other is not None:
        raise CorpusError(
            f"corpus {file} has no column {other!r}: it has {QUERY}, {POSITIVE} and {NEGATIVE}, out of "
            f"judgements in BEIR's layout. Write --pair-columns {QUERY},{POSITIVE}+{NEGATIVE}."
        )


def _judgements(file: Path) -> Iterator[tuple[int, tuple[str, str, int]]]:
    """Yield the number of each line, and its query, document and grade."""
    try:
        with open_regular(file, follow_links=True) as content:
            opened = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
            for number, row in enumerate(csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                if not row or (number == 1 and row[0] in _HEADERS):
                    continue
                if len(row) != 3 or not re.fullmatch(r"-?[0-9]{1,6}", row[2].strip()):  # noqa: PLR2004 - three columns
                    line = "\t".join(row)
                    trec = " Leave out TREC's second column." if len(line.split()) == _OF_TREC else ""
                    raise CorpusError(
                        f"{file}, line {number} ({printable(line[:60])!r}): give a query, a document and a "
                        f"whole grade, with tabs.{trec}"
                    )
                yield number, (row[0], row[1], int(row[2]))
    except (OSError, UnicodeError, csv.Error) as error:
        raise CorpusError(f"cannot read {file}: {first_line(error)}. It belongs to BEIR's layout.") from error


def json_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each record of a .jsonl file is, and the record.

    Raises:
        CorpusError: the file is missing or damaged.
    """
    try:
        for where, row in json_objects(file, *_COLUMNS):
            yield f"{file}, {where}", row
    except CorpusError:
        raise
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"cannot read {file}: {first_line(error)}. Give records of JSON, one a line."
        ) from error


def text_of(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text of a record.

    Raises:
        CorpusError: it is missing, empty or no text.
    """
    value = row.get(name)
    if name == "_id" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # some files have numbers for names
    if not isinstance(value, str) or not value.strip():
        raise CorpusError(
            f"{where} has no text {name!r}; it has {', '.join(map(str, row)) or 'nothing'}. Add it or remove "
            "the record."
        )
    if name == "_id" and any(ord(sign) < _FIRST_SIGN for sign in value):
        raise CorpusError(f"{where} has a control character in its _id, {value[:40]!r}. Remove it.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where} has half of a character (a lone surrogate). Remove it.") from error
    return value
