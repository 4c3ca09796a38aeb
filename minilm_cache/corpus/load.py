"""Loading a corpus by name: documents of one text each, in the same order on every machine.

`datasets` reads every format and keeps the text in Arrow files on disk, so a corpus may be larger than
memory. A document is a record of .jsonl, .csv, .parquet or a hub data set; in .txt a paragraph
block, that is, the text between empty lines (a line with a space is not empty), or a line; in `python-docs` a
docstring or a topic of `pydoc`. Records of pairs give two documents each.
"""

import ast
import csv
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets.exceptions import DatasetsError

from minilm_cache.corpus.arrow_cache import arrow_cache
from minilm_cache.errors import CorpusError, InvalidConfigError, MiniLMCacheError
from minilm_cache.storage_schema.identity import CorpusIdentity
from minilm_cache.store.fingerprint import sha256_texts

Documents = Literal["paragraphs", "lines"]
"""What is a document in .txt files."""
PYTHON_DOCS: Final = "python-docs"
HUB_PREFIX: Final = "hf:"
_BUILDERS: Final = {".txt": "text", ".md": "text", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_TEXT: Final = tuple(ending for ending, builder in _BUILDERS.items() if builder == "text")
_NOT_DOCUMENTED: Final = frozenset(
    {"site-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
)
COPIES_COLUMN: Final = "document"
"""Column that has equal values where records are copies of one text; `augment` writes it."""
_COPIES: Final = "copies of"
_NAMES_OR_NUMBERS: Final = frozenset({"string", "large_string", "int64", "int32"})
_BATCH: Final = 1000
"""Documents that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents of a corpus, without those that hold no text."""

    name: str
    documents: datasets.Dataset
    """One column, `text`."""
    identity: CorpusIdentity
    groups: npt.NDArray[np.int64]
    """Number of each document's group, `(documents,)`: equal texts, and records with the same value in column
    `document` (as `augment` writes them), are copies of one text and form one group."""

    def identity_for(self, split: str | None) -> CorpusIdentity:
        """Return the identity of the corpus; the copies are part of it only if the split depends on them."""
        return self.identity if split else self.identity.model_copy(update={"copies_sha256": None})

    def texts(self) -> Iterator[str]:
        """Yield the documents, in order."""
        return _texts(self.documents)


def load_corpus(name: str, text_column: str | None = None, documents: Documents = "paragraphs") -> Corpus:
    """Load a corpus.

    Args:
        name: `python-docs`, a .txt, .md, .jsonl, .csv or .parquet file, a folder of such files, or
            `hf:ID[:CONFIG][:SPLIT]`.
        text_column: column of the records that holds the text, or several with commas between them, whose
            texts are documents of their own. None means `text`.
        documents: what is a document in .txt and .md files.

    Raises:
        CorpusError: the corpus does not exist, cannot be read, lacks the column, or holds no text.
    """
    datasets.disable_progress_bars()
    try:
        loaded = _load(name, text_column, documents)
        _refuse_missing_texts(loaded, name)
        loaded = loaded.filter(_has_text, batched=True, load_from_cache_file=False)
    except MiniLMCacheError:
        raise
    except (DatasetsError, OSError, ValueError, pa.ArrowException) as error:
        raise CorpusError(f"cannot read corpus {name}: {_reason(error)}") from error
    if len(loaded) == 0:
        raise CorpusError(f"corpus {name} is empty: it holds no text. Choose another --corpus.")
    has_copies = _COPIES in loaded.column_names
    identity = CorpusIdentity(
        sha256=sha256_texts(_texts(loaded)),
        num_documents=len(loaded),
        copies_sha256=sha256_texts(_texts(loaded, _COPIES)) if has_copies else None,
    )
    columns = ["text", _COPIES] if has_copies else ["text"]
    groups = _groups([_hashes(loaded, column) for column in columns])
    return Corpus(name=name, documents=loaded.select_columns(["text"]), identity=identity, groups=groups)


def _hashes(documents: datasets.Dataset, column: str) -> npt.NDArray[np.uint64]:
    """Return a hash of each document's value in a column, `(documents,)`; a missing value is unique."""
    hashes = (
        number if value is None else xxhash.xxh3_64_intdigest(value.encode())
        for first, values in _text_batches(documents, column)
        for number, value in enumerate(values.to_pylist(), first)
    )
    return np.fromiter(hashes, dtype=np.uint64, count=len(documents))


def _groups(keys: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.int64]:
    """Return group numbers: documents that share a key, directly or through others, are in one group."""
    numbered = [np.unique(key, return_inverse=True)[1] for key in keys]
    groups = numbered[0].astype(np.int64)
    while True:
        before = groups
        for key_numbers in numbered:
            least = np.full(int(key_numbers.max()) + 1, len(groups), dtype=np.int64)
            np.minimum.at(least, key_numbers, groups)
            groups = least[key_numbers]
        if np.array_equal(groups, before):
            return groups


def _load(name: str, text_column: str | None, documents: Documents) -> datasets.Dataset:
    columns = [part.strip() for part in (text_column or "text").split(",")]
    if documents == "lines" and (name == PYTHON_DOCS or name.startswith(HUB_PREFIX)):
        raise InvalidConfigError(f"--documents lines is about text files, and {name} has none. Leave it out.")
    if name == PYTHON_DOCS:
        if text_column is not None:
            raise InvalidConfigError(
                f"--text-column {text_column}: {PYTHON_DOCS} has no columns. Leave it out."
            )
        return datasets.Dataset.from_dict({"text": list(_python_docs())})
    if name.startswith(HUB_PREFIX):
        return _all_texts(_load_hub(name), name, columns)
    path = Path(name)
    if not path.exists():
        raise CorpusError(
            f"corpus {name} does not exist. Give a file, a folder, {HUB_PREFIX}ID, or {PYTHON_DOCS}."
        )
    files = _files(path)
    datasets.logging.set_verbosity(CRITICAL)  # the raised error describes a broken file
    if documents == "lines" and all(file.suffix not in _TEXT for file in files):
        raise InvalidConfigError(f"--documents lines is about text files, and {name} has none. Leave it out.")
    parts = [_all_texts(_load_file(file, documents), str(file), columns) for file in files]
    shared = set.intersection(*(set(part.column_names) for part in parts))
    return datasets.concatenate_datasets([part.select_columns(sorted(shared)) for part in parts])


def _files(path: Path) -> list[Path]:
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


def _load_file(file: Path, documents: Documents) -> datasets.Dataset:
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
    except (DatasetsError, OSError, ValueError, csv.Error, pa.ArrowException) as error:
        reason = _broken_line(file) or _reason(error)
        raise CorpusError(f"cannot read corpus {file}: {reason}") from error
    assert isinstance(loaded, datasets.Dataset)
    return loaded


def _format_options(file: Path, documents: Documents) -> Mapping[str, Any]:
    """Return the keyword arguments for `datasets` that describe a file's format."""
    if file.suffix in _TEXT:
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


def _load_hub(name: str) -> datasets.Dataset:
    identifier, *rest = name.removeprefix(HUB_PREFIX).split(":")
    if not identifier or len(rest) > 2:  # noqa: PLR2004 - config and split
        raise CorpusError(
            f"corpus {name}: write {HUB_PREFIX}ID, {HUB_PREFIX}ID:CONFIG or {HUB_PREFIX}ID:CONFIG:SPLIT."
        )
    config = rest[0] if rest and rest[0] else None
    split = rest[1] if len(rest) > 1 else "train"
    try:
        loaded = datasets.load_dataset(
            identifier, config, split=split, cache_dir=arrow_cache(Path(identifier))
        )
    except (DatasetsError, OSError, ValueError) as error:
        reason = " ".join(str(error).splitlines()[:2]).rstrip(".")
        raise CorpusError(
            f"cannot load corpus {name} from the hub: {reason}. Write {HUB_PREFIX}ID:CONFIG:SPLIT, of which "
            "CONFIG and SPLIT (train) may be left out, or name a file."
        ) from error
    assert isinstance(loaded, datasets.Dataset)
    return loaded


def _all_texts(loaded: datasets.Dataset, where: str, columns: Sequence[str]) -> datasets.Dataset:
    """Return the texts of one or several columns, one column after the other."""
    return datasets.concatenate_datasets([_only_text(loaded, where, column) for column in columns])


def _only_text(loaded: datasets.Dataset, where: str, column: str) -> datasets.Dataset:
    if column not in loaded.column_names:
        raise CorpusError(
            f"corpus {where} has no column {column!r}; it has {', '.join(loaded.column_names)}. "
            "Name the one with the text: --text-column."
        )
    texts = loaded.select_columns([column])
    if column != "text":
        texts = texts.rename_column(column, "text")
    if getattr(loaded.features.get(COPIES_COLUMN), "dtype", "") in _NAMES_OR_NUMBERS:
        copies = loaded.select_columns([COPIES_COLUMN]).cast_column(COPIES_COLUMN, datasets.Value("string"))
        texts = datasets.concatenate_datasets([texts, copies.rename_column(COPIES_COLUMN, _COPIES)], axis=1)
    kind = getattr(texts.features["text"], "dtype", "")
    if kind == "null":
        _refuse_missing_texts(texts, where)
    if kind not in {"string", "large_string", "string_view"}:
        raise CorpusError(
            f"corpus {where}: column {column!r} holds {kind or 'lists or objects'}, not text. "
            "Name another with --text-column, or store it as text."
        )
    return texts.cast_column("text", datasets.Value("string"))


def _refuse_missing_texts(documents: datasets.Dataset, where: str) -> None:
    for first, column in _text_batches(documents):
        if column.null_count:
            at = first + pc.index(column.is_null(), True).as_py()
            raise CorpusError(
                f"corpus {where}: record {at} (counted from 0) has no text. "
                "Give it one, remove it, or name another column: --text-column."
            )


def _text_batches(documents: datasets.Dataset, column: str = "text") -> Iterator[tuple[int, pa.ChunkedArray]]:
    arrow = documents.with_format("arrow")
    for first in range(0, len(documents), _BATCH):
        yield first, arrow[first : first + _BATCH][column]


def _has_text(batch: Mapping[str, list[Any]]) -> list[bool]:
    return [not text.isspace() and text != "" for text in batch["text"]]


def _texts(documents: datasets.Dataset, column: str = "text") -> Iterator[str]:
    for _, values in _text_batches(documents, column):
        yield from (value or "" for value in values.to_pylist())


def _python_docs() -> Iterator[str]:
    """Yield the docstrings of the standard library (parsed, not imported), then the topics of `pydoc`."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if _NOT_DOCUMENTED.isdisjoint(file.relative_to(root).parts):
            yield from _docstrings(file)
    for name in sorted(topics):
        yield topics[name]


def _docstrings(file: Path) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text:
                yield text


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost cause, which names the real problem in a file."""
    causes: Sequence[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes = [*causes, cause]
    if isinstance(causes[-1], UnicodeDecodeError):
        return "it is not text in UTF-8. Convert it, for example by `iconv -f latin1 -t utf-8`."
    text = str(causes[-1]).strip() or type(causes[-1]).__name__
    return text.splitlines()[0].rstrip(".") + ". Check the file or choose another --corpus."
