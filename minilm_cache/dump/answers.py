"""Files of what another model answered: texts and their vectors in Parquet, or pairs of texts and scores."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from minilm_cache.corpus.formats import kind_of
from minilm_cache.corpus.pairs import PairColumns, read_pairs
from minilm_cache.corpus.records import Record, plain_text
from minilm_cache.dump.config import ImportConfig, refuse_no_file
from minilm_cache.errors import CorpusError, MiniLMCacheError, first_line
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.states import MAX_POOLED_WIDTH
from minilm_cache.store.parquet_headers import HeaderError, refuse_bomb

_UNIT: Final = 1e-3
"""Greatest difference from 1 of the length of vectors that count as unit vectors."""
_LENGTHS: Final = (1e-12, 1e12)
"""Least and greatest length of a vector: products of others are lost in float32."""
_SAME_VECTOR: Final = 0.998
"""Least cosine of the vectors of one text in two rows; a code of `--min-cosine` 0.9995 rounds each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVectors:
    """Texts and their vectors, row by row of a file. A score is a vector of one number."""

    texts: Sequence[str]
    vectors: npt.NDArray[np.float32]
    """Vectors, `(texts, width)`."""

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) over the vectors, which stands for the weights of the teacher."""
        return hashlib.sha256(np.ascontiguousarray(self.vectors, "<f4").tobytes()).hexdigest()

    @property
    def is_normalized(self) -> bool:
        """Whether all vectors have length 1."""
        return bool((np.abs(np.linalg.norm(self.vectors, axis=1) - 1) < _UNIT).all())


def read_vectors(config: ImportConfig, session: Session = ALONE) -> TextVectors:
    """Read texts and vectors, and check every row.

    Args:
        config: the file, and its columns.
        session: its `should_stop` is asked before each batch of rows; True stops.

    Raises:
        InterruptedRunError: a stop was requested.
        CorpusError: the file cannot be read, would unpack to far more than it holds, or lacks a column; or a
            row lacks a text or a vector, has a vector of another width or with NaN, or repeats a text with
            another vector.
    """
    file, column = config.vectors, config.text_column or "text"
    refuse_no_file(config)
    texts: list[object] = []
    blocks: list[npt.NDArray[np.float32]] = []
    for some, vectors in _batches(config, column, session=session):
        width = blocks[0].shape[1] if blocks else None
        blocks.append(_matrix(vectors, file, first=len(texts), width=width))
        texts += some
    if not blocks:
        raise CorpusError(f"{file} has no rows. Give texts with their vectors.")
    known = np.concatenate(blocks)
    texts = [plain_text(text, file) if isinstance(text, str) else text for text in texts]
    _refuse_rows(texts, known, file)
    return TextVectors(texts=[str(text) for text in texts], vectors=known)


def read_scores(config: ImportConfig) -> TextVectors:
    """Read pairs of texts and their scores, and check every record.

    Raises:
        CorpusError: the file cannot be read, or lacks a column; or a record lacks a text or a score, or has a
            score that is not a number; or a query stands twice with a document and different scores.
    """
    refuse_no_file(config)
    texts: list[str] = []
    scores: list[float] = []
    for record in _scored(config):
        assert record.score is not None
        texts.append(record.text)
        scores.append(record.score)
    return TextVectors(texts=texts, vectors=np.array(scores, np.float32)[:, None])


def check_answers(config: ImportConfig) -> None:
    """Raise CorpusError if a file of vectors or scores cannot be read, or lacks a column."""
    refuse_no_file(config)
    if config.pair_columns is None:
        next(_batches(config, config.text_column or "text", session=ALONE), None)
        return
    next(_scored(config), None)


def _scored(config: ImportConfig) -> Iterator[Record]:
    assert config.pair_columns is not None
    file = Path(config.vectors)
    yield from read_pairs(file, PairColumns.of(config.pair_columns, config.score_columns).seen_in(file))


def _batches(
    config: ImportConfig, column: str, *, session: Session
) -> Iterator[tuple[list[object], pa.Array]]:
    """Yield the texts and vectors of a file, some rows at a time.

    Raises:
        CorpusError: it cannot be read, would unpack to far more than it holds, lacks a column, or has one of
            another type.
        InterruptedRunError: a stop was requested.
    """
    columns = [column, config.vector_column]
    try:
        with Path(config.vectors).open("rb") as opened:
            num_rows = refuse_bomb(opened, columns)
            opened.seek(0)
            parquet = pq.ParquetFile(opened)
            names = parquet.schema_arrow.names
            lacking = next((name for name in columns if names.count(name) != 1), None)
            if lacking == column and {"first", "second"} <= {*names}:
                raise CorpusError(
                    f"{config.vectors} holds vectors of pairs of texts, and vectors of single texts are "
                    "imported. Export a cache of single texts."
                )
            if lacking is not None:
                raise CorpusError(
                    f"{config.vectors} has no column {lacking!r}, or two; it has {', '.join(names)}. Name "
                    "the columns: --text-column, --vector-column."
                )
            for batch in parquet.iter_batches(num_rows, columns=columns, use_threads=False):
                session.stop_if_asked("interrupted while vectors are read. Run the same command again.")
                batch.validate(full=True)  # text that is not UTF-8 is an error of Arrow here
                yield batch.column(column).to_pylist(), batch.column(config.vector_column)
    except MiniLMCacheError:  # some are ValueErrors
        raise
    except (
        OSError,
        HeaderError,
        ValueError,
        OverflowError,
        pa.ArrowException,
    ) as error:  # names of columns may be no UTF-8
        raise CorpusError(
            f"cannot read {config.vectors}: {first_line(error)}. Give a Parquet file of texts and vectors, "
            "or --pair-columns and --score-columns for records of scores."
        ) from error


def _matrix(column: pa.Array, file: str, *, first: int, width: int | None) -> npt.NDArray[np.float32]:
    """Return a column of lists of numbers as a matrix, checked row by row.

    Args:
        column: the vectors of a batch.
        file: name of the file, for messages.
        first: number of the first row.
        width: number of dimensions of the vectors before. None means that these are the first.
    """
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) and not (
        pa.types.is_fixed_size_list(column.type)
    ):
        raise CorpusError(
            f"{file}: the vectors are {column.type}, not lists of numbers. Store them as lists."
        )
    if not (pa.types.is_integer(column.type.value_type) or pa.types.is_floating(column.type.value_type)):
        raise CorpusError(
            f"{file}: the vectors are lists of {column.type.value_type}, not lists of numbers. Store floats."
        )
    if column.null_count:
        row = first + pc.index(column.is_null(), True).as_py()
        raise CorpusError(
            f"{file}: row {row} (counted from 0) has a text without a vector. Add it or remove it."
        )
    widths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    wanted = int(widths[0]) if width is None else width
    differing = np.flatnonzero(widths != wanted)
    if len(differing) or not wanted:
        row = int(differing[0]) if len(differing) else 0
        raise CorpusError(
            f"{file}: the vector of row {first + row} (counted from 0) has {widths[row]} numbers, that of "
            f"row 0 has {wanted}. All of them must be of one width."
        )
    if wanted > MAX_POOLED_WIDTH:
        raise CorpusError(
            f"{file}: vectors of {wanted:,} numbers are wider than any cache holds ({MAX_POOLED_WIDTH:,}). "
            "Shorten them."
        )
    try:
        flat = column.flatten().cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise CorpusError(f"{file}: the vectors are not lists of numbers: {first_line(error)}.") from error
    return np.ascontiguousarray(flat.reshape(-1, wanted))


def _refuse_rows(texts: Sequence[object], vectors: npt.NDArray[np.float32], file: str) -> None:
    """Raise CorpusError for the first row that cannot be learned from."""
    finite = np.isfinite(vectors).all(1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise CorpusError(
            f"{file}: the vector of row {row} (counted from 0) holds NaN or infinity. Remove it."
        )
    lengths = np.sqrt(np.einsum("rw,rw->r", vectors, vectors, dtype=np.float64))
    odd = (lengths < _LENGTHS[0]) | (lengths > _LENGTHS[1])
    if odd.any():
        row = int(np.flatnonzero(odd)[0])
        what = f"has a length of {lengths[row]:.3g}" if lengths[row] else "is 0 everywhere"
        raise CorpusError(
            f"{file}: the vector of row {row} (counted from 0) {what}. Scale or remove it: vectors have "
            f"lengths from {_LENGTHS[0]:g} to {_LENGTHS[1]:g}."
        )
    first_rows: dict[str, int] = {}
    for row, text in enumerate(texts):
        if text is not None and not isinstance(text, str):
            raise CorpusError(
                f"{file}: the text of row {row} (counted from 0) is {kind_of(text)}. Store texts as strings."
            )
        if text is None or not text.strip():
            raise CorpusError(
                f"{file}: row {row} (counted from 0) has a vector without a text. Add it or remove it."
            )
        known = first_rows.setdefault(text, row)
        if known != row and _cosine(vectors[known], vectors[row]) < _SAME_VECTOR:
            raise CorpusError(
                f"{file}: rows {known} and {row} (counted from 0) have the same text and different vectors. "
                "Remove one of them."
            )


def _cosine(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> float:
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))
