"""Pairs of texts out of records: two columns, or a query and the documents that it is compared with.

A query with several documents is a group: one pair for each document. Pairs of one query are held out
together, and follow each other in a cache.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from minilm_cache.corpus.beir import judged_groups, refuse_other_columns
from minilm_cache.corpus.formats import TEXT, judged_files, kind_of, plain_number, words_of
from minilm_cache.corpus.records import (
    COPIES_COLUMN,
    Record,
    as_key,
    dataset_rows,
    plain_text,
    read_rows,
    whole_text,
)
from minilm_cache.errors import CorpusError, InvalidConfigError
from minilm_cache.storage_schema.identity import Truncation

if TYPE_CHECKING:
    import datasets

BETWEEN: Final = "\x1e"
"""Stands between the two texts of a pair, neither of which holds it."""
_OPTION: Final = "--pair-columns"
_MOST_SCORE: Final = 1e6
"""Scores are float32, and so are the sums of their squares; no model gives one of this size."""
_LIST_AS_TEXT: Final = re.compile(r"""\[\s*['"].*['"]\s*\]""", re.DOTALL)
"""A list of texts as Python or JSON writes it, and with it tools that write tables of lists."""
_SAME_SCORE: Final = 1e-3
"""Greatest difference of two scores of one pair, which other batches of a model explain."""


class PairColumns(NamedTuple):
    """Columns of the texts that are read together."""

    first: str
    """Column of the first text, or of a query."""
    seconds: tuple[str, ...]
    """Columns of the second text, or of the documents of a query."""
    are_groups: bool = False
    """Whether each record is a query with its documents."""
    scores: tuple[str, ...] = ()
    """Columns of the scores of the documents, one for each column of documents, or one for all of them, which
    come in their order. Empty means no scores."""

    @classmethod
    def of(cls, columns: str, scores: str | None = None) -> "PairColumns":
        """Return the columns that are named like `question,sentence` or `query,pos+neg`.

        Args:
            columns: a column, a comma, and another column, or several with + between them.
            scores: columns of scores, with + between them. None means no scores.

        Raises:
            InvalidConfigError: there are more or fewer, or one comes twice.
        """
        names = [part.strip() for part in columns.split(",")]
        seconds = [part.strip() for part in names[-1].split("+")]
        every = [*names[:1], *seconds]
        if len(names) != 2 or not all(every) or len(set(every)) < len(every):  # noqa: PLR2004 - a pair
            raise InvalidConfigError(
                f"--pair-columns {columns}: give two different columns with a comma between them, like "
                "question,sentence, or a query and the columns of its documents, like query,pos+neg."
            )
        of_scores = [] if scores is None else [part.strip() for part in scores.split("+")]
        is_each = len(of_scores) == len(set(of_scores)) and all(of_scores)
        if scores is not None and not (is_each and len(of_scores) in {1, len(seconds)}):
            raise InvalidConfigError(
                f"--score-columns {scores}: give one column for each of {', '.join(seconds)}, with + between "
                "them, like pos_scores+neg_scores, or one column whose lists hold the scores of them all, in "
                "their order."
            )
        return cls(names[0], tuple(seconds), len(seconds) > 1, tuple(of_scores))

    @property
    def every(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (self.first, *self.seconds, *self.scores)

    def seen_in(self, *sources: "Path | datasets.Dataset", name: str = "") -> "PairColumns":
        """Return the columns, of groups if the first record that sources have holds a list of documents.

        Args:
            sources: files, which may be without records, or a data set.
            name: name of the data set, for messages.

        Raises:
            CorpusError: a source is broken, or lacks a column.
        """
        for source in sources:
            if isinstance(source, Path):
                _refuse_text(source, self)
                if judged_files(source):
                    refuse_other_columns(source, self.every)
                    return self._replace(are_groups=True)
            for _, row in _rows(source, self._replace(scores=()), name):
                if row[self.seconds[0]] is None:  # this record says nothing of the others
                    continue
                return self._replace(are_groups=self.are_groups or isinstance(row[self.seconds[0]], list))
        return self


class Known(NamedTuple):
    """What was read before."""

    scores: dict[int, float | None]
    """Scores of pairs, None where there are none, by the hash of both texts."""
    queries: dict[str, str]
    """Queries as they were read first, by `words_of`: their pairs are held out together."""

    @classmethod
    def nothing(cls) -> "Known":
        """Return what is known before the first record."""
        return cls({}, {})


def refuse_uneven_cut(truncation: Truncation | None) -> None:
    """Raise InvalidConfigError if a query with several documents would be cut differently for each."""
    if truncation == "longest_first":
        raise InvalidConfigError(
            "--truncation longest_first cuts a query differently for each of its documents. Leave it out: "
            "documents alone are cut."
        )


def read_pairs(
    source: "Path | datasets.Dataset", columns: PairColumns, known: Known | None = None, *, name: str = ""
) -> Iterator[Record]:
    """Yield the pairs of texts of a file or of a data set, each as one text with `BETWEEN` between them.

    Args:
        source: a .jsonl, .csv, .tsv or .parquet file, judgements in BEIR's layout, or a data set.
        columns: columns of the texts.
        known: pairs that were read before, of other files; those of this one are added. None means none.
        name: name of a data set, for messages.

    Raises:
        CorpusError: the file is empty or broken, lacks a column, or a record lacks a text or a score.
    """
    if isinstance(source, Path):
        _refuse_text(source, columns)
        name = str(source)
    known = Known.nothing() if known is None else known
    for where, row in _rows(source, columns, name):
        yield from pairs_of(row, columns, f"{where} of {name}", known=known)


def _rows(
    source: "Path | datasets.Dataset", columns: PairColumns, name: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each record is, and its columns."""
    option = f"{_OPTION}, --score-columns" if columns.scores else _OPTION
    if not isinstance(source, Path):
        return dataset_rows(source, name, columns.every, option=option)
    if judged_files(source):
        return judged_groups(source, columns.every)
    return read_rows(source, columns.every, option)


def pairs_of(row: Mapping[str, Any], columns: PairColumns, where: str, *, known: Known) -> Iterator[Record]:
    """Yield the pairs of a record: one, or one for each document of a query, in order.

    A document that a query had before, in this record or in another one, is left out.

    Args:
        row: values of the columns; `None` where the record has none.
        columns: columns of the texts.
        where: the record, for messages.
        known: pairs of the records before; those of this one are added.

    Raises:
        CorpusError: it lacks a text or a score, has one of another kind, or another score than before.
    """
    query = _text(row[columns.first], columns.first, where)
    if not columns.are_groups:
        (second,) = columns.seconds
        value = row[second]
        if isinstance(value, list):
            raise CorpusError(
                f"corpus: {where} holds a list in column {second!r}, and the first record holds a text. Let "
                "all records hold lists, or none."
            )
        score = None
        if columns.scores:
            (score,) = _scores(row[columns.scores[0]], columns.scores[0], 1, where=where)
        text = joined_pair((query, _text(value, second, where)), where)
        if columns.scores:
            _is_new(text, score, where, known=known)
        has_copies = COPIES_COLUMN in row and COPIES_COLUMN not in columns.every
        copy = as_key(row[COPIES_COLUMN], f"corpus: {where}") if has_copies else None
        yield Record(text, copy, has_copies, score=score)
        return
    documents = {column: _documents(row[column], column, where) for column in columns.seconds}
    if not documents[columns.seconds[0]]:
        raise CorpusError(
            f"corpus: {where} has a query and no document in column {columns.seconds[0]!r}, whose "
            "documents are the right ones. Add one or remove the record."
        )
    scored = list(documents.values())
    if len(columns.scores) == 1:
        scored = [[text for texts in scored for text in texts]]
    scores: list[float | None] = [None] * sum(map(len, scored))
    if columns.scores:
        of_columns = zip(columns.scores, scored, strict=True)
        scores = [
            score for name, texts in of_columns for score in _scores(row[name], name, len(texts), where=where)
        ]
    first = known.queries.setdefault(words_of(query), query)
    for document, score in zip((text for texts in documents.values() for text in texts), scores, strict=True):
        text = joined_pair((query, document), where)
        as_first = BETWEEN.join((first, document))
        own = text if first.split() != query.split() else None
        if _is_new(as_first, score, where, known=known, own=own):
            yield Record(text, first, says_copies=True, score=score)


def _is_new(text: str, score: float | None, where: str, *, known: Known, own: str | None = None) -> bool:
    """Return whether a pair was not read before, and note it.

    Args:
        text: both texts, the query as it was read first.
        score: its score. None means that there are none.
        where: the record, for messages.
        known: pairs of the records before.
        own: both texts as the record has them, with other capital letters, which a teacher may score
            otherwise. None means that the record has no others.

    Raises:
        CorpusError: it was read with another score.
    """
    key = xxhash.xxh3_64_intdigest(text.encode())
    if key not in known.scores:
        known.scores[key] = score
        return True
    before = known.scores[key]
    differs = (
        score is not None and before is not None and abs(before - score) > _SAME_SCORE * max(1.0, abs(score))
    )
    if differs and own is not None:
        return _is_new(own, score, where, known=known)
    if differs:
        first, second = (part[:40] for part in text.split(BETWEEN))
        raise CorpusError(
            f"corpus: {where} has {first!r} with {second!r} for the second time, with the scores {before:g} "
            f"and {score:g}. Remove one of them."
        )
    return False


def joined_pair(texts: tuple[str, str], where: str) -> str:
    """Return two texts as one.

    Raises:
        CorpusError: one is empty, or holds what stands between them.
    """
    if not all(text.strip() for text in texts):
        raise CorpusError(f"corpus: {where} lacks one of its two texts. Remove it.")
    if any(BETWEEN in text for text in texts):
        raise CorpusError(
            f"corpus: {where} has a text with the control character U+001E, which stands between the texts "
            "of a pair here. Remove it."
        )
    return BETWEEN.join(texts)


def _refuse_text(file: Path, columns: PairColumns) -> None:
    if file.suffix in TEXT:
        raise CorpusError(
            f"--pair-columns {columns.first},{'+'.join(columns.seconds)}: {file} is a text file, which has "
            "no columns. Give records (.jsonl, .csv, .tsv, .parquet)."
        )


def _text(value: object, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(
            f"corpus: {where} holds {kind_of(value)} in column {column!r}, not text. Name another with "
            "--pair-columns, or store it as text."
        )
    is_of_table = where.endswith((".csv", ".tsv"))  # which have no lists
    if is_of_table and _LIST_AS_TEXT.fullmatch(value.strip()):
        raise CorpusError(
            f"corpus: {where} holds a list that was written as text in column {column!r}: {value[:40]!r}. "
            "Write groups as .jsonl or .parquet, which have lists."
        )
    return plain_text(whole_text(value, f"corpus: {where}"), where)


def _documents(value: object, column: str, where: str) -> list[str]:
    """Return the documents of a column of groups: those of a list, one text, or none."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [_text(each, column, where) for each in values]


def _scores(value: object, column: str, count: int, *, where: str) -> list[float]:
    """Return as many scores as there are documents.

    Raises:
        CorpusError: there are more or fewer, or one is not a number, NaN or infinite.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) != count:
        raise CorpusError(
            f"corpus: {where} has {len(values)} scores in column {column!r} for {count} documents. Give one "
            "for each."
        )
    scores = []
    for each in values:
        score = plain_number(each)
        if each is None:
            raise CorpusError(f"corpus: {where} has no score in column {column!r}. Give it one or remove it.")
        if not abs(score) < _MOST_SCORE:
            raise CorpusError(
                f"corpus: {where} has the score {str(each)[:40]!r} in column {column!r}, which is not a "
                "number that a score can be. Correct it or remove the record."
            )
        scores.append(score)
    return scores
