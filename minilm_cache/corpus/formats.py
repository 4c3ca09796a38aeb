"""Files that a corpus may consist of: which of a folder's files are read, and how each format is."""

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetsError

from minilm_cache.corpus.arrow_cache import arrow_cache
from minilm_cache.errors import CorpusError

Documents = Literal["paragraphs", "lines"]
"""What is a document in .txt files."""
_BUILDERS: Final = {".txt": "text", ".md": "text", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
TEXT: Final = tuple(ending for ending, builder in _BUILDERS.items() if builder == "text")


def corpus_files(path: Path) -> list[Path]:
    """Return the files that are read of a file or a folder.

    Raises:
        CorpusError: none is of a known kind.
    """
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise CorpusError(
                f"corpus {path} has the ending {path.suffix!r}; known are {', '.join(_BUILDERS)}. "
                "Convert it to one of them."
            )
        return [path]
    files = [file for file in _visible(path) if _is_text(file)]
    if not files:
        raise CorpusError(f"corpus {path} is empty: no {', '.join(_BUILDERS)} file in this folder.")
    return files


def num_skipped(name: str) -> int:
    """Return how many files of a folder that is a corpus are not read, because they are of other kinds."""
    return sum(not _is_text(file) for file in _visible(Path(name)))


def _visible(folder: Path) -> list[Path]:
    """Return the files below a folder that are not hidden, sorted."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(
        file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _is_text(file: Path) -> bool:
    """Return whether a file of a folder is read; a README.md describes the folder and is not."""
    return file.suffix in _BUILDERS and file.name != "README.md"


def load_file(file: Path, documents: Documents) -> datasets.Dataset:
    """Return the records of a file.

    Raises:
        CorpusError: the file is empty or broken.
    """
    if file.stat().st_size == 0:
        raise CorpusError(f"corpus {file} is empty: the file has no bytes.")
    # An absolute pattern is taken literally once its own special characters are escaped.
    pattern = re.sub(r"([*?\[\]])", r"[\1]", str(file.resolve()))
    try:
        loaded = datasets.load_dataset(
            _BUILDERS[file.suffix],
            data_files={"train": pattern},
            split="train",
            cache_dir=arrow_cache(file),
            **_format_options(file, documents),
        )
    except CorpusError:
        raise
    except (DatasetsError, OSError, ValueError, csv.Error, pa.ArrowException) as error:
        reason = _broken_line(file) or reason_of(error)
        raise CorpusError(f"cannot read corpus {file}: {reason}") from error
    assert isinstance(loaded, datasets.Dataset)
    return loaded


def _format_options(file: Path, documents: Documents) -> Mapping[str, Any]:
    """Return the keyword arguments for `datasets` that describe a file's format."""
    if file.suffix in TEXT:
        return {"sample_by": "line" if documents == "lines" else "paragraph"}
    if file.suffix != ".csv":
        return {}
    # By default, pandas takes surplus fields of a row as names of rows, and reads texts like "None" and
    # "007" as a missing value and as a number.
    header = _csv_header(file)
    features = datasets.Features({name: datasets.Value("string") for name in header})
    return {"index_col": False, "keep_default_na": False, "features": features}


def _csv_header(file: Path) -> list[str]:
    """Return the names of the columns of a .csv file, after checking that every row has as many fields."""
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines)
        rows = (row for row in reader if len(row) > 1 or "".join(row).strip())
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise CorpusError(f"corpus {file} has two columns of one name: {', '.join(header)}. Rename one.")
        for row in rows:
            if len(row) != len(header):
                raise CorpusError(
                    f"corpus {file}, line {reader.line_num}: {len(row)} fields, where the header has "
                    f"{len(header)}. Put text with commas in quotes, or use .jsonl or .parquet."
                )
    return header


def _broken_line(file: Path) -> str | None:
    """Return which line of a .jsonl file is not JSON. None means another format or another reason."""
    if file.suffix != ".jsonl":
        return None
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            _ = line.strip() and json.dumps(json.loads(line), ensure_ascii=False).encode()
        except ValueError as error:
            return f"line {number} is not JSON: {error}. Fix it or remove it."
    return None


def reason_of(error: BaseException) -> str:
    """Return the first line of the innermost cause, which names the real problem in a file."""
    causes: Sequence[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes = [*causes, cause]
    if isinstance(causes[-1], UnicodeDecodeError):
        return "it is not text in UTF-8. Convert it, for example by `iconv -f latin1 -t utf-8`."
    text = str(causes[-1]).strip() or type(causes[-1]).__name__
    return text.splitlines()[0].rstrip(".") + ". Check the file or choose another --corpus."
