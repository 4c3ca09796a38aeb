"""Make a cache of what somebody else computed, vectors or scores: a teacher that only its answers tell of.

A Parquet file holds texts and their vectors, or a file of records holds pairs of texts and their scores. A
model's folder gives the tokenizer, and the family and sizes that students are built from; its weights are not
read. Everything else is an ordinary dump, whose reader looks answers up instead of running a teacher.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedConfig

from minilm_cache.corpus.load import Corpus, load_corpus
from minilm_cache.corpus.pairs import PairColumns, read_pairs
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.config import DumpConfig, ImportConfig, refuse_no_file
from minilm_cache.dump.reading import CPU_BATCH, SequenceReader
from minilm_cache.dump.run import DumpResult, write_cache
from minilm_cache.dump.setup import ResolvedDump, identity_and_place
from minilm_cache.errors import CorpusError, InterruptedRunError, TeacherError, first_line
from minilm_cache.models.files import VOLATILE
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import load_tokenizer, read_config
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.prompts import Prompts
from minilm_cache.models.student import check_family_positions
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import LayerRelations
from minilm_cache.relations.signals import Signals
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.identity import TeacherIdentity, canonical_sha256
from minilm_cache.storage_schema.states import LOGITS, MAX_POOLED_WIDTH, POOLED, PoolingMode, SignalName
from minilm_cache.store.durable import refuse_file
from minilm_cache.store.parquet_headers import HeaderError, refuse_bomb

_UNIT: Final = 1e-3
"""Greatest difference from 1 of the length of vectors that count as unit vectors."""


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


def import_vectors(config: ImportConfig, *, out: Path | None = None, session: Session = ALONE) -> DumpResult:
    """Write a cache of texts and vectors that are in a Parquet file.

    Args:
        config: the file, and how students read its texts.
        out: folder of the cache. None means a folder below `home`, named by content.
        session: its home is the folder of caches. Its progress shows tokens done. Its `should_stop` is called
            before each batch; True stops and keeps what is committed.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    of_vectors = {"pooled": True, "pooling": config.pooling, "min_cosine": config.min_cosine}
    dump = _dump_of(config, {**of_vectors, "packing": "records"})
    known, corpus = read_vectors(config, session), load_corpus(config.vectors, config.text_column)
    return _write(config, dump, known, corpus=corpus, out=out, session=session)


def import_scores(config: ImportConfig, *, out: Path | None = None, session: Session = ALONE) -> DumpResult:
    """Write a cache of pairs of texts and scores that are in a file of records.

    Args:
        config: the file, its columns of texts and of scores, and how students read its texts.
        out: folder of the cache. None means a folder below `home`, named by content.
        session: its home is the folder of caches. Its progress shows tokens done. Its `should_stop` is called
            before each batch; True stops and keeps what is committed.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    assert config.pair_columns is not None
    dump = _dump_of(config, {"logits": True, "pair_columns": config.pair_columns})
    corpus = load_corpus(config.vectors, pair_columns=config.pair_columns)
    return _write(config, dump, read_scores(config), corpus=corpus, out=out, session=session)


def _dump_of(config: ImportConfig, more: Mapping[str, object]) -> DumpConfig:
    """Return the settings of a dump that stores what is given."""
    settings = {name: getattr(config, name) for name in _OF_A_DUMP}
    teacher = config.teacher or Path(config.vectors).stem
    named = {"teacher": teacher, "corpus": config.vectors, "codec": "none"}
    return validated(DumpConfig, {**settings, **named, **more})


def _write(
    config: ImportConfig,
    dump: DumpConfig,
    known: TextVectors,
    *,
    corpus: Corpus,
    out: Path | None,
    session: Session,
) -> DumpResult:
    """Write a cache of what is given, which belongs to the documents of a corpus in order."""
    teacher = ImportedTeacher(dump.teacher, config, known)
    if list(corpus.texts()) != list(known.texts):
        raise CorpusError(f"{config.vectors} changed while it was read. Run the same command again.")
    identity, path = identity_and_place(dump, teacher, corpus=corpus, out=out, home=session.home)
    refuse_file(path)
    resolved = ResolvedDump(
        config=dump,
        batch_size=CPU_BATCH,
        teacher=teacher,
        corpus=corpus,
        identity=identity,
        path=path,
        donor=None,
        tokens_of=None,
        imported=config,
    )
    sequences = resolved.sequences(session)
    reader = _VectorReader(
        teacher=teacher,
        states=identity.states,
        masker=None,
        vectors=known.vectors,
        signal=POOLED if dump.pooled else LOGITS,
        sequences=sequences,
    )
    return write_cache(resolved, reader, sequences=sequences, session=session)


_SAME_VECTOR: Final = 0.998
"""Least cosine of the vectors of one text in two rows; a code of `--min-cosine` 0.9995 rounds each."""
_OF_A_DUMP: Final = ("text_column", "max_length", "max_tokens", "shard_tokens", "seed")
"""Settings that an import shares with a dump."""


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
    try:
        with Path(file).open("rb") as opened:
            num_rows = refuse_bomb(opened, (column, config.vector_column))
            opened.seek(0)
            for batch in _batches(opened, config, num_rows, session=session):
                texts += batch.column(column).to_pylist()
                width = blocks[0].shape[1] if blocks else None
                vectors = batch.column(config.vector_column)
                blocks.append(_matrix(vectors, file, first=len(texts) - len(batch), width=width))
    except (OSError, HeaderError, ValueError, pa.ArrowException) as error:  # names of columns may be no UTF-8
        reason = first_line(error)
        raise CorpusError(
            f"cannot read {file}: {reason}. Give a Parquet file of texts and vectors."
        ) from error
    if not blocks:
        raise CorpusError(f"{file} has no rows. Give texts with their vectors.")
    known = np.concatenate(blocks)
    _refuse_rows(texts, known, file)
    return TextVectors(texts=[str(text) for text in texts], vectors=known)


def read_scores(config: ImportConfig) -> TextVectors:
    """Read pairs of texts and their scores, and check every record.

    Raises:
        CorpusError: the file cannot be read, or lacks a column; or a record lacks a text or a score, or has a
            score that is not a number; or a query stands twice with a document and different scores.
    """
    assert config.pair_columns is not None
    refuse_no_file(config)
    file = Path(config.vectors)
    columns = PairColumns.of(config.pair_columns, config.score_columns).seen_in(file)
    texts: list[str] = []
    scores: list[float] = []
    for record in read_pairs(file, columns):
        assert record.score is not None
        texts.append(record.text)
        scores.append(record.score)
    return TextVectors(texts=texts, vectors=np.array(scores, np.float32)[:, None])


def _batches(
    opened: BufferedIOBase, config: ImportConfig, num_rows: int, *, session: Session
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file of texts and vectors, some at a time.

    Raises:
        CorpusError: it lacks a column, or has one of another type.
        InterruptedRunError: a stop was requested.
    """
    parquet = pq.ParquetFile(opened)
    schema, column = parquet.schema_arrow, config.text_column or "text"
    for name in (column, config.vector_column):
        if schema.names.count(name) != 1:
            raise CorpusError(
                f"{config.vectors} has no column {name!r}, or two; it has {', '.join(schema.names)}. Name "
                "the columns: --text-column, --vector-column."
            )
    for batch in parquet.iter_batches(num_rows, columns=[column, config.vector_column], use_threads=False):
        if session.should_stop():
            raise InterruptedRunError("interrupted while vectors are read. Run the same command again.")
        batch.validate(full=True)  # text that is not UTF-8 is an error of Arrow here
        yield batch


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
    zero = ~vectors.any(1)
    if zero.any():
        row = int(np.flatnonzero(zero)[0])
        raise CorpusError(f"{file}: the vector of row {row} (counted from 0) is 0 everywhere. Remove it.")
    first_rows: dict[str, int] = {}
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
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


class _AsGiven(SentencePooler):
    """A pooling whose vectors are given, so their width does not follow from the model."""

    def __init__(self, mode: PoolingMode, width: int, *, normalize: bool) -> None:
        super().__init__(mode, normalize=normalize)
        self._width = width

    def width(self, hidden_size: int) -> int:
        """Return the width of the given vectors."""
        del hidden_size
        return self._width


class ImportedTeacher(Teacher):
    """A teacher that is known by its vectors alone; its tokenizer and sizes are those of another model."""

    def __init__(self, name: str, config: ImportConfig, known: TextVectors) -> None:
        """Read the tokenizer and the configuration of a model.

        Args:
            name: name of the teacher for people.
            config: settings of the import.
            known: texts and vectors.

        Raises:
            TeacherError: there is no such model, or it has no tokenizer.
            InvalidConfigError: it has fewer positions than `max_length`.
        """
        source = locate_teacher(config.tokenizer, without_weights=True)
        self.name, self.folder = name, source.folder
        self.device, self.precision, self.layers = torch.device("cpu"), "float32", ()
        self.tokenizer = load_tokenizer(source.folder)
        self.config: PreTrainedConfig = read_config(source.folder)
        self._known, self._mode = known, config.pooling
        if len(self.tokenizer) > self.config.vocab_size:
            raise TeacherError(
                f"the tokenizer in {source.folder} has {len(self.tokenizer)} tokens, the model only "
                f"{self.config.vocab_size}. Put the tokenizer that belongs to the model there."
            )
        check_family_positions(
            self.config,
            self.folder,
            name=config.tokenizer,
            token=self.tokenizer.cls_token_id,
            max_length=config.max_length,
        )

    @property
    def prompts(self) -> Prompts:
        """Nothing: the prompts in the folder are of another model than the one that made the vectors."""
        return Prompts({}, None)

    @property
    def num_classes(self) -> int:
        """Numbers of an answer: one score."""
        return 1

    @property
    def num_layers(self) -> int:
        """Layers of the model whose sizes students are built from."""
        return int(self.config.num_hidden_layers)

    @cached_property
    def identity(self) -> TeacherIdentity:
        """What identifies the teacher: a hash of its vectors, and the sizes of the other model."""
        return TeacherIdentity(
            model_type=self.config.model_type,
            weights_sha256=self._known.sha256,
            config_sha256=canonical_sha256(self._config()),
            num_layers=self.num_layers,
            hidden_size=self.config.hidden_size,
            num_heads=self.config.num_attention_heads,
            vocab_size=self.config.vocab_size,
        )

    def _config(self) -> dict[str, Any]:
        content: Mapping[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        return {key: value for key, value in content.items() if key not in VOLATILE}

    def refuse_other_texts(self, max_length: int) -> None:
        """Refuse nothing: vectors are given, whatever their model read of a text."""

    def pooler(self, mode: PoolingMode | None) -> SentencePooler:
        """Return the pooling of students, to vectors of the given width."""
        normalize = self._known.is_normalized
        return _AsGiven(mode or self._mode, self._known.vectors.shape[1], normalize=normalize)


@dataclass(frozen=True, slots=True, kw_only=True)
class _VectorReader(SequenceReader):
    """Looks vectors or scores up by the document of a sequence."""

    vectors: npt.NDArray[np.float32]
    signal: SignalName
    sequences: SequenceTable

    def read(
        self,
        inputs: Inputs,
        *,
        numbers: Sequence[int],
        layers: Sequence[int],
        wanted: Sequence[SignalName],
        reading: int = 0,
    ) -> tuple[list[LayerRelations], Signals]:
        """Return what is given of sequences; arguments as for a teacher that runs."""
        del inputs, layers, wanted
        documents = [int(self.sequences.read(number, number + 1).documents[0]) for number in numbers]
        return [], Signals(values={self.signal: torch.from_numpy(self.vectors[documents])}, reading=reading)
