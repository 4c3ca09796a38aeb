"""Loading a corpus by name: documents of one text each, in the same order on every machine, read once.

The text lies in Arrow files on disk, so a corpus may be larger than memory. A document is a record of .jsonl,
.csv, .parquet or a hub data set; in .txt the text between empty lines, which may hold spaces, or a line; in
`python-docs` a docstring or a topic of `pydoc`. A pair of texts is one document.
"""

import ast
import hashlib
import os
import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets.exceptions import DatasetsError
from pydantic import ValidationError

from minilm_cache.corpus.formats import (
    HUB_PREFIX,
    PYTHON_DOCS,
    TEXT,
    Documents,
    corpus_files,
    judged_files,
    parts_of_hub_name,
)
from minilm_cache.corpus.pairs import Known, PairColumns, read_pairs
from minilm_cache.corpus.records import COPIES_OF, Record, Roles, dataset_records, read_records
from minilm_cache.errors import CorpusError, InvalidConfigError, MiniLMCacheError
from minilm_cache.settings import TEXTS_OR_PAIRS
from minilm_cache.storage_schema.documents import StoredDocument
from minilm_cache.storage_schema.identity import CorpusIdentity, canonical_sha256
from minilm_cache.store.checked import sha256_texts
from minilm_cache.store.durable import new_file, storage_errors, write_file

SourceFile = tuple[str, int, int, int, int]
"""Path, size in bytes, inode, and the times of modification and of the last change, ns."""


class _Note(StoredDocument):
    corpus: CorpusIdentity
    num_blank: int
    """Records without text."""
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The files of a corpus, as they are now."""

    asked: tuple[str, ...]
    """Name of the corpus, and the settings that it is read with."""
    paths: tuple[Path, ...]
    files: tuple[SourceFile, ...]

    @classmethod
    def now(cls, asked: Sequence[str], paths: Sequence[Path]) -> "Sources":
        """Look at files.

        Raises:
            OSError: a file has gone.
        """
        stats = ((_name_of(path.resolve()), path.stat()) for path in paths)
        files = tuple(
            (path, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats
        )
        return cls(asked=tuple(asked), paths=tuple(paths), files=files)

    def are_unchanged(self) -> bool:
        """Return whether the files are still as they were."""
        try:
            return Sources.now(self.asked, self.paths).files == self.files
        except OSError:
            return False

    def known(self, home: Path) -> _Note | None:
        """Return what was noted when these very files were read before. None means that they were not."""
        try:
            note = _Note.model_validate_json(self._note(home).read_bytes())
        except (OSError, ValidationError):
            return None
        return note if note.files == self.files else None

    def remember(self, home: Path, corpus: CorpusIdentity, num_blank: int) -> None:
        """Note the identity of the text of these files, and how many records have no text.

        Raises:
            StorageError: the home cannot be written to.
        """
        path = self._note(home)
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(
                path, _Note(corpus=corpus, num_blank=num_blank, files=self.files).to_json(), durable=False
            )

    def _note(self, home: Path) -> Path:
        where = [_name_of(path.resolve().parent) for path in self.paths[:1]]
        return home / "tokens" / "texts" / f"{canonical_sha256([*self.asked, *where])[:32]}.json"


def _name_of(path: Path) -> str:
    """Return a path as text, also where its name is not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def arrow_cache(source: Path) -> str | None:
    """Return the folder for the Arrow files of a folder. None means the default of `datasets`.

    `datasets` itself identifies a file by its path and modification time, and a folder by its name and
    README. A source that was written again, unpacked with the times of its archive, or that has the name of
    another source would be read as the old content. This folder depends on inodes and times of
    change, which only the file system sets.
    """
    if not source.is_dir():
        return None
    return str(arrow_folder([file for file in source.rglob("*") if file.is_file()]))


def arrow_folder(files: Sequence[Path]) -> Path:
    """Return the folder for the Arrow files that are made from files as they are now."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat, real = file.stat(), file.resolve()
        digest.update(os.fsencode(real))
        if file.suffix != real.suffix:  # the name that a user gives says how a file is read
            digest.update(os.fsencode(file.suffix))
        digest.update(f"\0{stat.st_ino}\0{stat.st_ctime_ns}\0{stat.st_size}\0".encode())
    return Path(datasets.config.HF_DATASETS_CACHE) / "by-source" / digest.hexdigest()[:32]


_NOT_DOCUMENTED: Final = frozenset(
    {"site-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
)


def python_files() -> list[Path]:
    """Return the files that are read."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return [file for file in files if _NOT_DOCUMENTED.isdisjoint(file.relative_to(root).parts)]


@cache
def python_docs() -> tuple[str, ...]:
    """Return the docstrings of the standard library (parsed, not imported), then the topics of `pydoc`.

    Two million characters, which take seconds to find: they are kept for the next one who asks.
    """
    topics = pydoc_data.topics.topics
    found = (text for file in python_files() for text in _docstrings(file))
    return (*found, *(topics[name] for name in sorted(topics)))


def _docstrings(file: Path) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text:
                yield text


_BATCH: Final = 1000
"""Documents that are read at a time."""
_BATCH_CHARS: Final = 2**24
"""Characters of documents that are held in memory while a text is read."""
_ARROW_VERSION: Final = "texts 5"
"""Version of how texts are read: notes and Arrow files of others are not used."""
_TEXTS: Final = pa.schema([("text", pa.string()), (COPIES_OF, pa.string())])
_NO_LINES: Final = "--documents lines is about text files, and {name} has none. Leave it out."
_NO_COLUMNS: Final = "--text-column {column}: {name} has no columns. Leave it out."
_CHANGED: Final = "corpus {name} changed while it was read. Run the same command again."


class Corpus:
    """Documents of a corpus, without those that hold no text."""

    def __init__(
        self,
        name: str,
        identity: CorpusIdentity,
        load: Callable[[], datasets.Dataset],
        *,
        prompt: str | None = None,
        num_blank: int = 0,
    ) -> None:
        """Describe a corpus.

        Args:
            name: its name, for messages.
            identity: what identifies its texts, the prompt included.
            load: reads its documents, without the prompt, when they are first asked for.
            prompt: words that stand before every text. None means none.
            num_blank: records that are left out because they hold no text; blank lines do not count.
        """
        self.name, self.identity, self._load, self.prompt = name, identity, load, prompt
        self.num_blank = num_blank
        self.texts_sha256 = identity.sha256
        """Hash of the texts without the prompt."""

    def with_prompt(self, prompt: str | None) -> "Corpus":
        """Return the same texts with words before each of them. None means that nothing is added."""
        if prompt is None:
            return self
        digest = sha256_texts(prompt + text for text in self.texts())
        identity = self.identity.model_copy(update={"sha256": digest})
        prompted = Corpus(
            self.name, identity, lambda: self.documents, prompt=prompt, num_blank=self.num_blank
        )
        prompted.texts_sha256 = self.texts_sha256
        return prompted

    @cached_property
    def documents(self) -> datasets.Dataset:
        """Columns `text` and, where records say which are copies of one text, `COPIES_OF`."""
        return self._load()

    def identity_for(self, split: str | None) -> CorpusIdentity:
        """Return the identity of the corpus; the copies are part of it only if the split depends on them."""
        return self.identity if split else self.identity.model_copy(update={"copies_sha256": None})

    def num_queries(self) -> int:
        """Return the number of different queries in a corpus of groups."""
        column = self.documents.select_columns(COPIES_OF).with_format("arrow")[:][COPIES_OF]
        return int(pc.count_distinct(column).as_py())

    def texts(self) -> Iterator[str]:
        """Yield the documents, in order, without the prompt."""
        return _texts(self.documents)

    def marks(self) -> Iterator[str | None]:
        """Yield what each document is a copy of, in the same order. None means that its record says none."""
        if COPIES_OF not in self.documents.column_names:
            return repeat(None, self.documents.num_rows)
        return (mark for _, batch in text_batches(self.documents) for mark in batch[COPIES_OF].to_pylist())


def load_corpus(
    name: str,
    text_column: str | None = None,
    documents: Documents = "paragraphs",
    *,
    home: Path | None = None,
    roles: Roles | None = None,
    pair_columns: str | None = None,
) -> Corpus:
    """Load a corpus.

    Args:
        name: `python-docs`, a .txt, .md, .jsonl, .csv, .tsv or .parquet file, a folder of such files or in
            BEIR's layout, or `hf:ID[:CONFIG][:SPLIT]`.
        text_column: column of the records that holds the text, or several (`records.read_records`). None
            means `text`.
        documents: what is a document in .txt and .md files.
        home: folder of caches, runs and tokens. A text that was read before, and whose files have not
            changed, is not read until its documents are asked for. None means that it is read now.
        roles: prompts that texts get by a column of theirs. None means none.
        pair_columns: columns of a record's two texts, `first,second`, or of a query and its documents,
            `query,pos+neg`. None means that each document is one text.

    Raises:
        CorpusError: the corpus does not exist, cannot be read, lacks a column, or holds no text.
        InvalidConfigError: a setting does not fit its files, or a role has no prompt.
        StorageError: the home cannot be written to.
    """
    _refuse_columns(name, documents, text_column, roles=roles, pair_columns=pair_columns)
    datasets.disable_progress_bars()
    with _corpus_errors(name):
        hub = _load_hub(name) if name.startswith(HUB_PREFIX) else None
        paths = _source_files(name, hub, text_column=text_column, documents=documents, pairs=pair_columns)
        pair = None if pair_columns is None else _pair_of(name, pair_columns, hub=hub, paths=paths)
        reading = _Reading(text_column, documents, roles, pair)
        asked = [name, text_column or "text", documents, _ARROW_VERSION, *reading.words]
        sources = Sources.now(asked, reading.files(paths))
    known = None if home is None else sources.known(home)

    def read() -> tuple[datasets.Dataset, int]:
        with _corpus_errors(name):
            records = _read(name, hub, paths, reading=reading)
            with_text = _with_text(records, name)
            are_lines = all(path.suffix in TEXT for path in paths)  # blank ones stand between paragraphs
            return with_text, 0 if are_lines else len(records) - len(with_text)

    if known is not None:
        read_again = partial(_read_unchanged, lambda: read()[0], sources, name)
        return Corpus(name, known.corpus, read_again, num_blank=known.num_blank)
    loaded, num_blank = read()
    with _corpus_errors(name):
        identity = _identity_of(loaded, pair)
    if not sources.are_unchanged():
        raise CorpusError(_CHANGED.format(name=name))
    if home is not None:
        sources.remember(home, identity, num_blank)
    return Corpus(name, identity, lambda: loaded, num_blank=num_blank)


def _identity_of(loaded: datasets.Dataset, pair: PairColumns | None) -> CorpusIdentity:
    has_copies = COPIES_OF in loaded.column_names
    return CorpusIdentity(
        sha256=sha256_texts(_texts(loaded)),
        num_documents=len(loaded),
        copies_sha256=sha256_texts(_texts(loaded, COPIES_OF)) if has_copies else None,
        pairs=None if pair is None else True,
        groups=True if pair is not None and pair.are_groups else None,
    )


def _refuse_columns(
    name: str, documents: Documents, text_column: str | None, *, roles: Roles | None, pair_columns: str | None
) -> None:
    """Raise InvalidConfigError for settings of files or of columns that a corpus does not consist of."""
    _columns(text_column)  # each once
    if text_column is not None and pair_columns is not None:
        raise InvalidConfigError(f"{TEXTS_OR_PAIRS}.")
    if documents == "lines" and (name == PYTHON_DOCS or name.startswith(HUB_PREFIX)):
        raise InvalidConfigError(_NO_LINES.format(name=name))
    if name == PYTHON_DOCS and (roles is not None or pair_columns is not None):
        option = "--pair-columns" if roles is None else "--role-column"
        raise InvalidConfigError(f"{option}: {PYTHON_DOCS} has no columns. Leave it out.")


def _pair_of(name: str, columns: str, *, hub: datasets.Dataset | None, paths: Sequence[Path]) -> PairColumns:
    """Return the columns of two texts, after a look at the first record.

    Raises:
        CorpusError: a column is missing.
        InvalidConfigError: they are not columns of pairs.
    """
    asked = PairColumns.of(columns)
    if hub is not None:
        return asked.seen_in(hub, name=name)
    files = [path for path in paths if len(paths) == 1 or path.stat().st_size]
    return asked.seen_in(*files)


class _Reading(NamedTuple):
    """How the records of a corpus become texts."""

    text_column: str | None
    documents: Documents
    roles: Roles | None
    pair: PairColumns | None
    """Columns of two texts that are read together. None means that each document is one text."""

    @property
    def words(self) -> list[str]:
        """What tells these texts from those of the columns alone, in names of what is kept of them."""
        roles = self.roles
        by_role = [] if roles is None else [roles.column, canonical_sha256(dict(roles.prompts))]
        if self.pair is None:
            return by_role
        kind = "group" if self.pair.are_groups else "pair"
        return [*by_role, kind, self.pair.first, *self.pair.seconds]

    def files(self, paths: Sequence[Path]) -> list[Path]:
        """Return files of records, and those that records of judgements are read from."""
        return [*paths, *(each for path in paths if self.pair is not None for each in judged_files(path))]

    def records(self, source: Path | datasets.Dataset, name: str, known: Known) -> Iterator[Record]:
        """Yield the records of a file or of a data set, with their prompts.

        Args:
            source: the file, or the data set.
            name: name of the corpus, for messages.
            known: the pairs of the files before; those of this one are added.
        """
        if self.pair is not None:
            yield from read_pairs(source, self.pair, known, name=name)
            return
        roles, column = self.roles, None if self.roles is None else self.roles.column
        if isinstance(source, Path):
            found = read_records(source, self.text_column, self.documents, role_column=column)
        else:
            found = dataset_records(source, name, self.text_column, role_column=column)
        place = source if isinstance(source, Path) else name
        for number, record in enumerate(found):
            if roles is None:
                yield record
            else:
                where = f"record {number} (counted from 0) of {place}"
                yield replace(record, text=roles.before(record.role, record.text, where))


def _read_unchanged(read: Callable[[], datasets.Dataset], sources: Sources, name: str) -> datasets.Dataset:
    """Read documents whose identity is known from before.

    Raises:
        CorpusError: the files are no longer the same.
    """
    loaded = read()
    if not sources.are_unchanged():
        raise CorpusError(_CHANGED.format(name=name))
    return loaded


def _columns(text_column: str | None) -> list[str]:
    """Return the names of the columns that are asked for, each once."""
    names = [part.strip() for part in (text_column or "text").split(",")]
    if len(set(names)) < len(names):
        raise InvalidConfigError(f"--text-column {text_column}: a column is named twice. Name it once.")
    return names


@contextmanager
def _corpus_errors(name: str) -> Iterator[None]:
    """Turn errors of libraries into a CorpusError."""
    try:
        yield
    except MiniLMCacheError:
        raise
    except (DatasetsError, OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise CorpusError(f"cannot read corpus {name}: {_reason_of(error)}") from error


def _reason_of(error: BaseException) -> str:
    """Return the first line of the innermost cause, which names the real problem in a file."""
    causes: Sequence[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes = [*causes, cause]
    text = str(causes[-1]).strip() or type(causes[-1]).__name__
    return text.splitlines()[0].rstrip(".") + ". Check the file or give another one."


def _with_text(loaded: datasets.Dataset, name: str) -> datasets.Dataset:
    """Return the documents that hold text.

    Raises:
        CorpusError: none has.
    """
    has_text = [_has_text(batch["text"]) for _, batch in text_batches(loaded)]
    chosen = np.flatnonzero(np.concatenate(has_text)) if has_text else np.zeros(0, np.int64)
    if len(chosen) == 0:
        raise CorpusError(f"corpus {name} is empty: it holds no text. Give another one.")
    return loaded if len(chosen) == len(loaded) else loaded.select(chosen)


def _source_files(
    name: str,
    hub: datasets.Dataset | None,
    *,
    text_column: str | None,
    documents: Documents,
    pairs: str | None,
) -> list[Path]:
    """Return the files that a corpus is read from, which must fit the settings."""
    if name == PYTHON_DOCS:
        if text_column is not None:
            raise InvalidConfigError(_NO_COLUMNS.format(column=text_column, name=name))
        return python_files()
    if hub is not None:
        return [Path(file["filename"]) for file in hub.cache_files]
    files = corpus_files(Path(name), pairs=pairs is not None)
    kinds = {file.suffix in TEXT for file in files}
    if documents == "lines" and kinds == {False}:
        raise InvalidConfigError(_NO_LINES.format(name=name))
    if text_column is not None and kinds == {True}:
        raise InvalidConfigError(_NO_COLUMNS.format(column=text_column, name=name))
    return files


def _read(
    name: str, hub: datasets.Dataset | None, paths: Sequence[Path], *, reading: _Reading
) -> datasets.Dataset:
    """Return all records of a corpus, with or without text. One Arrow file holds them, which is made once."""
    if name == PYTHON_DOCS:
        return datasets.Dataset.from_dict({"text": list(python_docs())})
    folder = arrow_folder(reading.files(paths))
    known = [reading.text_column, reading.documents, _ARROW_VERSION]
    if hub is not None:  # its parts may lie in the same files
        known.append(name)
    sources = [path for path in paths if len(paths) == 1 or path.stat().st_size] if hub is None else [hub]
    asked = canonical_sha256([*known, *reading.words])[:16]
    arrow = folder / f"{asked}.arrow"
    if not arrow.is_file():
        says_copies = False
        with storage_errors("write", arrow), new_file(arrow) as out:
            with pa.ipc.new_stream(out, _TEXTS) as writer:
                for batch in _batches(sources, reading, name):
                    says_copies |= any(record.says_copies for record in batch)
                    texts, copies = [record.text for record in batch], [record.copy_of for record in batch]
                    writer.write_batch(pa.record_batch([texts, copies], schema=_TEXTS))
            if says_copies:
                write_file(_copies_mark(arrow), b"", durable=False)
    loaded = datasets.Dataset.from_file(str(arrow))
    return loaded if _copies_mark(arrow).is_file() else loaded.remove_columns(COPIES_OF)


def _copies_mark(arrow: Path) -> Path:
    """Return the file that says that the records of an Arrow file name what they are copies of."""
    return arrow.with_suffix(".copies")


def _batches(
    sources: Sequence[Path | datasets.Dataset], reading: _Reading, name: str
) -> Iterator[list[Record]]:
    """Yield the records of files or of a data set, as many at a time as memory holds."""
    batch: list[Record] = []
    known = Known.nothing()
    size = 0
    for source in sources:
        for record in reading.records(source, name, known):
            batch.append(record)
            size += len(record.text)
            if len(batch) == _BATCH or size >= _BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _load_hub(name: str) -> datasets.Dataset:
    identifier, config, split = parts_of_hub_name(name)
    try:
        loaded = datasets.load_dataset(
            identifier, config, split=split, cache_dir=arrow_cache(Path(identifier)), keep_in_memory=False
        )
    except (DatasetsError, OSError, ValueError) as error:
        reason = " ".join(str(error).splitlines()[:2]).rstrip(".")
        raise CorpusError(
            f"cannot load corpus {name} from the hub: {reason}. Write {HUB_PREFIX}ID:CONFIG:SPLIT, of which "
            "CONFIG and SPLIT (train) may be left out, or name a file."
        ) from error
    assert isinstance(loaded, datasets.Dataset)
    assert loaded.cache_files  # which say whether the text is still the same
    return loaded


def text_batches(documents: datasets.Dataset) -> Iterator[tuple[int, pa.Table]]:
    """Yield documents, some at a time, and the number of the first of them."""
    arrow = documents.with_format("arrow")
    for first in range(0, len(documents), _BATCH):
        yield first, arrow[first : first + _BATCH]


def _has_text(texts: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Return which texts are neither empty nor only white space, `(texts,)`."""
    # Nearly every text has such a character at its beginning; what white space is, Python decides.
    has_text: npt.NDArray[np.bool_] = pc.match_substring_regex(texts, "[!-~]").to_numpy().copy()
    for number in np.flatnonzero(~has_text).tolist():
        text = texts[number].as_py()
        has_text[number] = text != "" and not text.isspace()
    return has_text


def _texts(documents: datasets.Dataset, column: str = "text") -> Iterator[str]:
    for _, batch in text_batches(documents):
        yield from (value or "" for value in batch[column].to_pylist())
