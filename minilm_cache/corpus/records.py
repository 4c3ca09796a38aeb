"""Read the asked-for columns of files, record by record: nothing guesses the types of the others.

A text stays the string that it is, a record that cannot be read is named, and other columns may hold
anything.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from minilm_cache.corpus.formats import (
    TEXT,
    Documents,
    joined_columns,
    joined_text,
    kind_of,
    refuse_other_content,
    separated_otherwise,
)
from minilm_cache.corpus.json_lines import MAX_LINE, SHOWN_COLUMNS, json_names, json_objects
from minilm_cache.errors import CorpusError, InvalidConfigError, first_line
from minilm_cache.store.parquet_headers import HeaderError, refuse_bomb

if TYPE_CHECKING:
    import datasets

COPIES_COLUMN: Final = "document"
"""Column that has equal values where records are copies of one text; `augment` writes it."""
COPIES_OF: Final = "copies of"
"""Column of loaded documents with the values of column `COPIES_COLUMN`."""
_USUAL_NAMES: Final = re.compile(
    "query|question|anchor|documents?|passage|answer|context|(text|sentence)[12]?|premise|hypothesis|positive|"
    "negative|pos|neg|[qp]?id|label|score",
    re.IGNORECASE,
)
"""Names that columns of pairs have, and that no text consists of."""
_ROWS: Final = 1024
_MOST_NULS: Final = 0.05
"""Greatest share of NULs in a text."""


@dataclass(frozen=True, slots=True)
class Record:
    """A text, and what it is a copy of."""

    text: str
    copy_of: str | None
    """Value of column `COPIES_COLUMN`. None means that it has none."""
    says_copies: bool
    """Whether the record's file has that column."""
    role: str | None = None
    """Value of the column that says what the text is for. None means that it says nothing."""
    score: float | None = None
    """Score of a pair of texts. None means that none is read."""


class Roles(NamedTuple):
    """Prompts of texts, by what a column says that each text is for."""

    column: str
    prompts: Mapping[str, str]
    """Prompt of each role."""

    def before(self, role: str | None, text: str, where: str) -> str:
        """Return a text with its prompt; a role that is empty or missing has none.

        Raises:
            InvalidConfigError: the role has no prompt of its own.
        """
        role = (role or "").strip()
        if not role or not text.strip():  # what holds no text must not begin to
            return text
        if role not in self.prompts:
            raise InvalidConfigError(
                f"--role-column {self.column}: {where} has the role {role[:40]!r}, and the teacher's prompts "
                f"are {', '.join(self.prompts) or 'none at all'}. Name one of them, or leave the role empty."
            )
        return self.prompts[role] + text


def read_records(
    file: Path, text_column: str | None, documents: Documents, *, role_column: str | None = None
) -> Iterator[Record]:
    """Yield the records of a file, those of one column after those of the other where several are asked for.

    Args:
        file: a .txt, .md, .jsonl, .csv, .tsv or .parquet file.
        text_column: column with the text, or several: with commas between them each is a document, with plus
            signs they are joined by spaces into one. None means `text`.
        documents: what is a document in .txt and .md files.
        role_column: column that says what a text is for. None means that none is read.

    Raises:
        CorpusError: the file is empty or broken, or lacks a column.
    """
    refuse_other_content(file)
    if file.suffix in TEXT:
        if role_column is not None:
            raise CorpusError(
                f"--role-column {role_column}: {file} is a text file, which has no columns. Leave it out, or "
                "give records (.jsonl, .csv, .tsv, .parquet)."
            )
        split = _lines if documents == "lines" else _paragraphs
        with _text_errors(file), file.open(encoding="utf-8-sig") as opened:
            for text in split(opened):
                yield Record(plain_text(text, file), None, says_copies=False)
        return
    columns = columns_of(file)
    with _text_errors(file):
        if role_column is not None and columns:
            known = columns
            if file.suffix == ".jsonl":  # the first record may leave out what it has nothing to say of
                has_roles = any(role_column in row for _, row in json_objects(file))
                known = [role_column] if has_roles else json_names(file)
            refuse_role_column(file, role_column, known)
        first = islice(json_objects(file), _ROWS) if file.suffix == ".jsonl" else ()
        says_copies = any(COPIES_COLUMN in row for _, row in first)
    read = partial(read_rows, file, by_number=False)
    asked = _asked(text_column, columns)
    yield from _of_columns(file, asked, read, known=columns, role_column=role_column, says_copies=says_copies)


def dataset_records(
    loaded: "datasets.Dataset", name: str, text_column: str | None, *, role_column: str | None = None
) -> Iterator[Record]:
    """Yield the records of a data set, as `read_records` does those of a file.

    Args:
        loaded: the data set.
        name: its name, for messages.
        text_column: column with the text, or several.
        role_column: column that says what a text is for. None means that none is read.

    Raises:
        CorpusError: it lacks a column, or a record has no text.
    """
    known = loaded.column_names
    if role_column is not None:
        refuse_role_column(name, role_column, known)
    read = partial(dataset_rows, loaded, name, named=role_column)
    yield from _of_columns(name, _asked(text_column, known), read, known=known, role_column=role_column)


def _of_columns(
    name: object,
    columns: Sequence[str],
    read: Callable[[Sequence[str]], Iterator[tuple[str, Mapping[str, Any]]]],
    *,
    known: Sequence[str],
    role_column: str | None,
    says_copies: bool = False,
) -> Iterator[Record]:
    """Yield the records of columns of text, one column after the other; some are joined out of several."""
    for column in columns:
        parts = joined_columns(column, known)
        asked = [*(parts or [column]), *([] if role_column is None else [role_column])]
        for number, (where, row) in enumerate(read(list(dict.fromkeys(asked)))):
            if parts is None:
                text = _text(name, column, row[column], number=number, where=where)
            else:
                text = joined_text({part: row[part] for part in parts}, f"{name}: {where}")
            place = f"corpus {name}: {where}"
            role = None if role_column is None else as_key(row[role_column], place)
            copy = as_key(row.get(COPIES_COLUMN), place)
            says = says_copies or COPIES_COLUMN in row
            yield Record(plain_text(whole_text(text, place), name), copy, says, role)


def _text(name: object, column: str, value: object, *, number: int, where: str) -> str:
    """Return the text of a record; raise CorpusError if it has none."""
    if value is None:
        _refuse_no_text(name, column, number=number, names=[column])
    if not isinstance(value, str):
        raise CorpusError(
            f"corpus {name}: column {column!r} of {where} holds {kind_of(value)}, not text. Name another "
            "with --text-column, or store it as text."
        )
    return value


def read_rows(
    file: Path, columns: Sequence[str], option: str = "--text-column", *, by_number: bool = True
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each record of a file is, in words, and its values of some columns, of any type.

    Column `COPIES_COLUMN` is read, too, where there is one. A record of .jsonl that lacks a column, which
    another has, has None there. Columns of .csv and .tsv may be named by number, from 0 on, unless all of
    these numbers are names of columns: the file then has no header.

    Args:
        file: a .jsonl, .csv, .tsv or .parquet file.
        columns: names of the columns.
        option: what names the columns, for messages.
        by_number: whether columns of .csv and .tsv may be named by number.

    Raises:
        CorpusError: the file is empty or broken, or lacks a column.
    """
    refuse_other_content(file)
    with _about(option), _text_errors(file):
        if file.suffix == ".jsonl":
            yield from _json_rows(file, columns)
        elif file.suffix == ".parquet":
            yield from _parquet_rows(file, columns)
        else:
            yield from _csv_columns(file, columns, by_number=by_number)


@contextmanager
def _about(option: str) -> Iterator[None]:
    """Name an option in errors of columns that it names."""
    try:
        yield
    except CorpusError as error:
        raise CorpusError(str(error).replace("--text-column", option)) from error


def columns_of(file: Path) -> list[str]:
    """Return the names of the columns of a file, of .jsonl those of its first record.

    Raises:
        CorpusError: the file is empty or broken.
    """
    refuse_other_content(file)
    with _text_errors(file):
        if file.suffix == ".jsonl":
            return list(next(json_objects(file), (0, {}))[1])
        if file.suffix == ".parquet":
            with file.open("rb") as opened:
                refuse_bomb(opened, ())
            return list(pq.read_schema(file).names)
        with file.open(encoding="utf-8-sig", newline="") as opened:
            return [name.strip() for name in next(_csv_rows(file, opened), [])]


def _json_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    known: set[str] = set()
    for number, (where, row) in enumerate(json_objects(file, *columns)):
        for column in columns:
            if column not in row and column not in known:
                if not any(column in other for _, other in json_objects(file)):
                    _refuse_no_text(file, column, number=number, names=json_names(file))
                known.add(column)
        copies = {COPIES_COLUMN: row[COPIES_COLUMN]} if COPIES_COLUMN in row else {}
        yield where, {**{name: row.get(name) for name in columns}, **copies}


def _csv_columns(
    file: Path, columns: Sequence[str], *, by_number: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open(encoding="utf-8-sig", newline="") as opened:
        rows = _csv_rows(file, opened)
        first = next(rows, [])
        header = [name.strip() for name in first]
        are_numbers = by_number and all(name.isdecimal() for name in columns)
        if header and are_numbers and not set(columns) <= set(header):
            _refuse_header(file, header, columns)
            rows = chain([first], rows)
            header = [str(number) for number in range(len(header))]
        names = _present(file, header, columns)
        for number, row in enumerate(rows):
            yield f"record {number} (counted from 0)", {name: row[header.index(name)] for name in names}


def _refuse_header(file: Path, first: Sequence[str], columns: Sequence[str]) -> None:
    """Raise CorpusError if the first row of a table whose columns are numbered holds names of columns."""
    names = [first[int(column)] for column in columns if int(column) < len(first)]
    if names and all(map(_USUAL_NAMES.fullmatch, names)):
        raise CorpusError(
            f"corpus {file} begins with {', '.join(names)}, which are names of columns and no texts. Give "
            "them in place of numbers, or remove the line."
        )


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if pq.read_metadata(file).num_rows == 0:  # of any schema: writers leave out what they saw no value of
        return
    names = _of_schema(file, pq.read_schema(file), columns)
    with file.open("rb") as opened:
        num_rows = refuse_bomb(opened, names)
        opened.seek(0)
        yield from _arrow_rows(
            file, names, pq.ParquetFile(opened).iter_batches(num_rows, columns=names, use_threads=False)
        )


def dataset_rows(
    loaded: "datasets.Dataset",
    name: str,
    columns: Sequence[str],
    *,
    option: str = "--text-column",
    named: str | None = None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield where each record of a data set is, in words, and its values of some columns (`read_rows`).

    Args:
        loaded: the data set.
        name: its name, for messages.
        columns: names of the columns.
        option: what names the columns, for messages.
        named: column whose classes are given by their names; the number -1 stands for none. None means that
            no column has classes.

    Raises:
        CorpusError: it lacks a column.
    """
    import datasets  # noqa: PLC0415 - it takes a second, which readers of files need not wait

    with _about(option):
        names = _of_schema(name, loaded.features.arrow_schema, columns)
        if COPIES_COLUMN not in columns and not isinstance(
            loaded.features.get(COPIES_COLUMN), datasets.Value
        ):
            names = [each for each in names if each != COPIES_COLUMN]  # lists, objects and classes mark none
        arrow = loaded.select_columns(names).with_format("arrow")
        kind = loaded.features[named] if named is not None else None
        batches = (arrow[first : first + _ROWS] for first in range(0, len(loaded), _ROWS))
        for where, row in _arrow_rows(name, names, batches):
            if named is not None and isinstance(kind, datasets.ClassLabel):
                number = row[named]
                word = kind.int2str(number) if number is not None and number >= 0 else None
                yield where, {**row, named: word}
            else:
                yield where, row


def _of_schema(name: object, schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Return the columns to read; what holds bytes names no text that another is a copy of."""
    names = _present(name, schema.names, columns)
    if (
        COPIES_COLUMN in names
        and COPIES_COLUMN not in columns
        and "binary" in str(schema.field(COPIES_COLUMN).type)
    ):
        names.remove(COPIES_COLUMN)
    return names


def _arrow_rows(
    name: object, names: Sequence[str], batches: Iterable[pa.RecordBatch | pa.Table]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    first = 0
    for batch in batches:
        values = {each: _strings(batch.column(each), name, first) for each in names}
        for at in range(len(batch)):
            yield f"record {first + at} (counted from 0)", {each: found[at] for each, found in values.items()}
        first += len(batch)


def _present(name: object, header: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the columns, and the one that marks copies if it is there.

    Raises:
        CorpusError: one is missing, or stands there twice.
    """
    names = [*columns, *([COPIES_COLUMN] if COPIES_COLUMN in header else [])]
    for column in names:
        if header.count(column) > 1:
            raise CorpusError(f"corpus {name} has two columns of one name: {column}. Rename one.")
        if column not in header:
            _refuse_no_text(name, column, number=0, names=header)
    return list(dict.fromkeys(names))


def refuse_role_column(where: object, column: str, known: Sequence[str]) -> None:
    """Raise CorpusError for a corpus without the column, or for one whose values name copies of texts."""
    if column == COPIES_COLUMN:
        raise CorpusError(
            f"--role-column {column}: equal values of this column mark copies of one text. Rename it."
        )
    if column not in known:
        raise CorpusError(
            f"corpus {where} has no column {column!r}, which names the prompt of each text; it has "
            f"{', '.join(known[:SHOWN_COLUMNS])}. Name another with --role-column, or give text with it."
        )


def _asked(text_column: str | None, known: Sequence[str]) -> list[str]:
    """Return the columns that are asked for; a column may have a comma in its name."""
    name = text_column or "text"
    return [name] if name in known else [part.strip() for part in name.split(",")]


@contextmanager
def _text_errors(file: Path) -> Iterator[None]:
    """Turn errors of reading a file into a CorpusError that names the line, where there are lines."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise CorpusError(f"cannot read corpus {file}: {_bad_bytes(file)}") from error
    except (OSError, pa.ArrowException, HeaderError, csv.Error) as error:
        raise CorpusError(
            f"cannot read corpus {file}: {first_line(error).rstrip('.')}. Check the file or give another one."
        ) from error


def _bad_bytes(file: Path) -> str:
    """Return where the first bytes are that are not UTF-8, and what to do."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                bad = line[error.start : error.start + 1].hex()
                return (
                    f"line {number} is not text in UTF-8 (byte 0x{bad} at position {error.start}). Convert "
                    "the file, for example by `iconv -f ENCODING -t utf-8` (latin1 for Western European "
                    "text)."
                )
    return "it is not text in UTF-8. Convert it, for example by `iconv -f ENCODING -t utf-8`."


def _lines(opened: IO[str]) -> Iterator[str]:
    return (line.rstrip("\n") for line in opened)


def _paragraphs(opened: IO[str]) -> Iterator[str]:
    """Yield the text between empty lines; an empty line may hold spaces.

    Of several empty lines, only the first separates: the next text begins with the others.
    """
    pieces: list[str] = []
    for line in opened:
        if pieces and line.endswith("\n") and line.isspace() and pieces[-1].endswith("\n"):
            yield "".join(pieces).removesuffix("\n")
            pieces = []
        else:
            pieces.append(line)
    if pieces:
        yield "".join(pieces)


def _csv_rows(file: Path, opened: IO[str]) -> Iterator[list[str]]:
    """Yield the header of a .csv or .tsv file, and its rows, which are as long."""
    csv.field_size_limit(min(sys.maxsize, MAX_LINE))
    reader = csv.reader(opened, strict=True)
    if file.suffix == ".tsv":  # as GLUE's files have it: quotes are part of a text
        reader = csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE)
    num_fields: int | None = None
    try:
        for row in reader:
            if len(row) <= 1 and not "".join(row).strip():
                continue
            if num_fields is None:
                num_fields = len(row)
            if len(row) == num_fields:
                yield row
            else:
                raise CorpusError(
                    f"corpus {file}, line {reader.line_num}: {len(row)} fields, where the header has "
                    f"{num_fields}. Put text with commas in quotes (in .tsv, leave tabs out), or use .jsonl "
                    "or .parquet."
                )
    except csv.Error as error:
        raise CorpusError(
            f"cannot read corpus {file}, up to line {reader.line_num}: {first_line(error)}. "
            + ("" if file.suffix == ".tsv" else "Close every quote, and double those within a text.")
        ) from error


def _strings(values: pa.Array | pa.ChunkedArray, name: object, first: int) -> list[str | None]:
    """Return texts; `first` is the number of the first of them.

    Raises:
        CorpusError: one is not UTF-8.
    """
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError as error:
        for number in range(len(values)):
            try:
                values[number].as_py()
            except UnicodeDecodeError:
                raise CorpusError(
                    f"cannot read corpus {name}: record {first + number} (counted from 0) is not text in "
                    "UTF-8. Write it again as text."
                ) from error
        raise


def as_key(value: object, where: str) -> str | None:
    """Return a value as text, as Arrow writes numbers; see `whole_text`.

    Returns:
        The text. None means that the record says nothing: its value is null, NaN, or a blank, which is all
        that a table of text can write.
    """
    if value is None or value != value:  # NaN is no value
        return None
    if isinstance(value, str):
        return whole_text(value, where) if value.strip() else None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    try:
        return str(pa.scalar(value).cast(pa.string()).as_py())
    except (pa.ArrowException, UnicodeDecodeError):
        return json.dumps(value, sort_keys=True, default=str)


def whole_text(text: str, where: str) -> str:
    """Return a text, which may hold no half of a character that JSON wrote in two.

    Args:
        text: the text.
        where: corpus and record, for the message.

    Raises:
        CorpusError: it holds one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"cannot read {where} has half of a character (a lone surrogate). Fix it or remove it."
        ) from error
    return text


def plain_text(text: str, where: object) -> str:
    """Return a text without the mark that some programs begin text with.

    Raises:
        CorpusError: it is full of NULs, so it is text in another encoding, or no text.
    """
    if text.count("\0") > max(1, _MOST_NULS * len(text)):
        raise CorpusError(
            f"corpus {where}: a text is full of NUL characters. Convert the file, for example by "
            "`iconv -f utf-16 -t utf-8`."
        )
    return text.removeprefix("\ufeff")


def _refuse_no_text(corpus: object, column: str, *, number: int, names: Sequence[str]) -> NoReturn:
    """Raise the error of a file without a column, or of a record without a text in it."""
    if column in names:
        raise CorpusError(
            f"corpus {corpus}: record {number} (counted from 0) has no text. "
            "Give it one, remove it, or name another column: --text-column."
        )
    more = "" if len(names) < SHOWN_COLUMNS else ", ..."
    raise CorpusError(
        f"corpus {corpus} has no column {column!r}; it has {', '.join(names[:SHOWN_COLUMNS])}{more}. "
        f"{separated_otherwise(names) or 'Name the right one: --text-column.'}"
    )
