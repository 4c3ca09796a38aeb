"""Files that a corpus may consist of: which of a folder are read, and what none of them may hold."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from minilm_cache.errors import CorpusError
from minilm_cache.store.durable import regular_bytes
from minilm_cache.store.layout import described_otherwise

Documents = Literal["paragraphs", "lines"]
"""What is a document in .txt files."""
TEXT: Final = (".txt", ".md")
KNOWN: Final = (*TEXT, ".jsonl", ".parquet", ".csv", ".tsv")
"""Endings of the files that are read; others of a folder are skipped."""
_ARCHIVES: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"(\xb5/\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"SQLite format 3\x00": "SQLite",
    b"%PDF-": "PDF",
    b"\x1f\x9d": "compress",
    b"version https://git-lfs": "git-lfs pointer (fetch the file itself: git lfs pull)",
}
"""First bytes of files that hold no plain text. bzip2 has other digits for smaller blocks."""
_TAR: Final = (257, b"ustar")
_WIDE: Final = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
"""Marks of text in other encodings, longer ones first."""
_LOOKED_AT: Final = 2**16
_MOST_NULS: Final = 0.05
"""Greatest share of NUL bytes in text."""


PYTHON_DOCS: Final = "python-docs"
HUB_PREFIX: Final = "hf:"


def corpus_files(path: Path, *, pairs: bool = False) -> list[Path]:
    """Return the files that are read of a file or a folder.

    Args:
        path: the file or folder.
        pairs: whether pairs of texts are read. A folder in BEIR's layout then gives the judgements to train
            on, which are no texts otherwise.

    Raises:
        CorpusError: it does not exist, none is of a known kind, or there are no judgements to train on.
    """
    if not path.exists():
        raise CorpusError(
            f"corpus {path} does not exist. Give a file, a folder, {HUB_PREFIX}ID, or {PYTHON_DOCS}."
        )
    if path.is_file():
        _refuse_large_letters(path)
        if path.suffix not in KNOWN:
            raise CorpusError(
                f"corpus {path} has the ending {path.suffix!r}; known are {', '.join(KNOWN)}. "
                "Convert it to one of them."
            )
        return [path]
    if not path.is_dir():
        raise CorpusError(f"corpus {path} is neither a file nor a folder. Write the text to a file.")
    judgements = path / "qrels" / "train.tsv"
    if pairs and judged_files(judgements):
        if not judgements.is_file():
            others = sorted(file.name for file in judgements.parent.glob("*.tsv"))
            raise CorpusError(
                f"corpus {path} is in BEIR's layout and has no qrels/train.tsv; it has "
                f"{', '.join(others) or 'none'}. Name the judgements that are to be learnt, like "
                f"{judgements.parent / (others or ['train.tsv'])[0]}."
            )
        return [judgements]
    visible = _visible(path)
    for file in visible:
        _refuse_large_letters(file)
    files = [file for file in visible if _is_text(file) and not judged_files(file)]
    broken = next((file for file in files if not file.exists()), None)
    if broken is not None:
        raise CorpusError(f"corpus {path}: {broken} is a link to a file that does not exist. Remove it.")
    if not files:
        raise CorpusError(
            f"corpus {path} is empty: no {', '.join(KNOWN)} file in this folder. A README.md and linked "
            "folders are not read."
        )
    _refuse_ours(path, files)
    return files


_OURS: Final = (("manifest.json", "zarr.json"), ("run.json", "students"), ("search.json", "round-1"))
"""What a cache, a run and a search have side by side, unlike folders of texts."""


def _refuse_ours(path: Path, files: Sequence[Path]) -> None:
    """Raise CorpusError for files of caches, runs and searches: this program wrote them, and not as texts."""
    holding = {file.parent for file in files}  # few beside files: paths are slow to compare
    folders = {each for folder in holding for each in (folder, *folder.parents) if each.is_relative_to(path)}
    for folder in sorted(folders):
        if any(all((folder / name).exists() for name in names) for names in _OURS):
            raise CorpusError(f"corpus {path}: {folder} holds no texts.{described_otherwise(folder)}")


def _refuse_large_letters(file: Path) -> None:
    """Raise CorpusError for a file that would be passed over because its ending is in capital letters."""
    is_text = file.suffix.lower() in KNOWN and file.name.lower() != "readme.md"
    if is_text and file.suffix not in KNOWN:
        raise CorpusError(
            f"corpus {file}: endings are in small letters. Rename it to "
            f"{file.stem}{file.suffix.lower()}, or move it elsewhere if it is no text of the corpus."
        )


def judged_files(file: Path) -> list[Path]:
    """Return the documents and the queries that a file like `qrels/test.tsv` judges, in BEIR's layout.

    Args:
        file: the file, which need not exist.

    Returns:
        list[Path]: both files; empty if it is no file of judgements.
    """
    beside = texts_beside(file)
    folder = file.absolute().parent
    is_judging = folder.name == "qrels" and file.suffix == ".tsv" and folder.is_dir()
    return list(beside) if is_judging and all(each.is_file() for each in beside) else []


def texts_beside(file: Path) -> tuple[Path, Path]:
    """Return where the documents and the queries of judgements are in BEIR's layout, there or not.

    Args:
        file: the judgements, like `FOLDER/qrels/test.tsv`.
    """
    folder = file.absolute().parent.parent
    return folder / "corpus.jsonl", folder / "queries.jsonl"


def lines_hint(name: str, documents: str) -> str:
    """Return a further sentence for messages that say that a corpus is too short, or nothing.

    Args:
        name: name of the corpus.
        documents: what is a document in its .txt files.
    """
    path = Path(name)
    is_text = path.suffix in TEXT or (path.is_dir() and any(file.suffix in TEXT for file in _visible(path)))
    return " If each line of it is a text of its own, add --documents lines." * (
        is_text and documents == "paragraphs"
    )


def num_skipped(name: str) -> int:
    """Return how many files and linked folders of a folder that is a corpus are not read."""
    return sum(not _is_text(file) for file in _visible(Path(name)))


def _visible(folder: Path) -> list[Path]:
    """Return the files and links below a folder that are not hidden, sorted."""
    files = (file for file in folder.rglob("*") if file.is_file() or file.is_symlink())
    return sorted(
        file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _is_text(file: Path) -> bool:
    """Return whether a file of a folder is read; a README.md describes the folder and is not."""
    return file.suffix in KNOWN and file.name != "README.md" and not file.is_dir()


def parts_of_hub_name(name: str) -> tuple[str, str | None, str]:
    """Return the data set, the configuration and the split of `hf:ID[:CONFIG][:SPLIT]`.

    A configuration of None means the only one.

    Raises:
        CorpusError: the name is none of these.
    """
    identifier, *rest = name.removeprefix(HUB_PREFIX).split(":")
    if not identifier or len(rest) > 2:  # noqa: PLR2004 - config and split
        raise CorpusError(
            f"corpus {name}: write {HUB_PREFIX}ID, {HUB_PREFIX}ID:CONFIG or {HUB_PREFIX}ID:CONFIG:SPLIT."
        )
    return identifier, rest[0] if rest and rest[0] else None, rest[1] if len(rest) > 1 else "train"


def file_of_records(name: str, option: str) -> Path:
    """Return the file of records that an option names.

    Raises:
        CorpusError: it does not exist, or is no file of records.
    """
    path = Path(name)
    if not path.is_file() or path.suffix not in set(KNOWN) - set(TEXT):
        what = "is no file of records" if path.exists() else "does not exist"
        raise CorpusError(f"{option} {name} {what}. Give a .jsonl, .csv, .tsv or .parquet file.")
    return path


def separated_otherwise(names: Sequence[str]) -> str:
    """Return what to do about a table whose only column has several names in it; empty if it is not one."""
    sign = next((sign for sign in ";\t|" if len(names) == 1 and sign in names[0]), None)
    if sign is None:
        return ""
    return f"Its columns stand apart by {sign!r}: write it with commas, as .csv, or with tabs, as .tsv."


def refuse_other_content(file: Path) -> None:
    """Raise CorpusError for a file that is empty, or holds something else than its ending says.

    Text in UTF-16 is named as such, because read in another encoding it would become other text.
    """
    start = regular_bytes(file, _LOOKED_AT, follow_links=True)
    if not start:
        raise CorpusError(f"corpus {file} is empty: the file has no bytes.")
    if file.suffix == ".parquet":
        return
    kind = next((kind for magic, kind in _ARCHIVES.items() if start.startswith(magic)), None)
    if kind is None and start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        kind = "bzip2"
    if kind is None and start[_TAR[0] : _TAR[0] + len(_TAR[1])] == _TAR[1]:
        kind = "tar"
    if kind is not None:
        raise CorpusError(
            f"corpus {file} is no text: it is a file of kind {kind}. Unpack or convert it, and give what it "
            f"holds."
        )
    encoding = next((name for mark, name in _WIDE.items() if start.startswith(mark)), None)
    is_wide = b"\n\0" in start or b"\0\n" in start
    if encoding is None and (is_wide or start.count(0) > max(1, _MOST_NULS * len(start))):
        encoding = "utf-16"
    if encoding is not None:
        raise CorpusError(
            f"corpus {file} is not text in UTF-8, but looks like {encoding.upper()}. Convert it: "
            f"`iconv -f {encoding} -t utf-8 {file.name} > new{file.suffix}`."
        )


def kind_of(value: object) -> str:
    """Return what a JSON value is, in words."""
    kinds: Mapping[type, str] = {
        bool: "true or false",
        list: "a list",
        dict: "an object",
        str: "a text",
        bytes: "bytes",
    }
    number = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return kinds.get(type(value), "nothing" if value is None else number)


def plain_number(value: object) -> float:
    """Return a value of a record as a number. NaN means that it is none.

    Truth values are none, and neither are words that Python alone reads as numbers, such as 1_5.
    """
    words = str(value)
    if value is None or isinstance(value, bool) or not words.isascii() or "_" in words:
        return math.nan
    try:
        return float(words)
    except ValueError:
        return math.nan


def words_of(text: str) -> str:
    """Return a text as texts are compared where white space and capital letters do not count."""
    return " ".join(text.split()).casefold()


def joined_columns(column: str, known: Sequence[str]) -> list[str] | None:
    """Return the columns that a name like `title+body` joins. None means that it is one column."""
    return None if column in known or "+" not in column else [part.strip() for part in column.split("+")]


def joined_text(values: Mapping[str, object], where: str) -> str:
    """Return the texts of several columns as one, with spaces between them; one that is missing is left out.

    Raises:
        CorpusError: none of them is there, or one is not a text.
    """
    texts = {name: value for name, value in values.items() if value is not None}
    other = next((name for name, value in texts.items() if not isinstance(value, str)), None)
    if other is not None:
        raise CorpusError(
            f"corpus {where}: column {other!r} holds {kind_of(texts[other])}, not text. Name "
            "others with --text-column, or store it as text."
        )
    if not texts:
        raise CorpusError(f"corpus {where} has no text in {' or '.join(values)}. Give it one, or remove it.")
    return " ".join(text for text in map(str, texts.values()) if text.strip())
