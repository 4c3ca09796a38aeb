"""Writes what a cache holds of texts for other tools: their vectors as a file, their scores as a data set."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from huggingface_hub import DatasetCardData

from minilm_cache.cache import Cache, CachedSequence, open_cache
from minilm_cache.corpus.template import named_template
from minilm_cache.models.inputs import texts_of_pair
from minilm_cache.models.student import class_names
from minilm_cache.models.truncate import saving
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.storage_schema.states import LOGITS, POOLED
from minilm_cache.store.durable import new_file, new_folder, prepare_new, remove_left_of
from minilm_cache.store.layout import refuse_no_answers
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.card import cached_tokenizer
from minilm_cache.wording import rendered

FILES: Final = {"train": "data/train.parquet", "validation": "data/validation.parquet"}
"""Files of a data set by its splits, of which `validation` has what the cache holds out."""
_BATCH = 256
_ROWS: Final = 1024
_CPU = torch.device("cpu")


def text_reader(cache: Cache) -> Callable[[npt.NDArray[Any]], tuple[str, ...]]:
    """Return what writes the text of a sequence's token ids, or its two texts where it is a pair.

    Texts are as the teacher read them: cut, and perhaps in lower case. Unknown words stay, as such.
    """
    tokenizer, packing = cached_tokenizer(cache.reader), cache.manifest.identity.packing
    template, pair = packing.template or named_template(tokenizer), packing.pair

    def read(ids: npt.NDArray[Any]) -> tuple[str, ...]:
        parts: tuple[npt.NDArray[Any], ...] = (ids,)
        if pair is not None:
            parts = texts_of_pair(ids, pair)
        elif template is not None:
            parts = (ids[len(template.before) : len(ids) - len(template.after)],)
        return tuple(str(tokenizer.decode(part)) for part in parts)

    return read


def texts_of(cache: Cache, numbers: Iterable[int]) -> Iterator[tuple[CachedSequence, tuple[str, ...]]]:
    """Yield sequences of a cache by their numbers, each with its text or texts, as `text_reader` does.

    Raises:
        CacheCorruptError: a shard is damaged.
    """
    read = text_reader(cache)
    for number in numbers:
        sequence = cache[number]
        yield sequence, read(sequence.input_ids.numpy())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The file that an export wrote."""

    path: Path
    num_rows: int
    width: int
    """Dimensions of a vector."""


def export_vectors(cache: str | Path, out: Path, *, session: Session = ALONE) -> ExportResult:
    """Write one row for each sequence: its number, text, token ids, vector, and whether it is held out.

    Texts are decoded from token ids, so they are as the teacher read them: cut, and perhaps in lower case.
    A pair has two columns of texts, `first` and `second`.

    Args:
        cache: folder or URL of a cache with pooled vectors.
        out: Parquet file, which must not exist yet.
        session: its home is the folder for local copies of caches at URLs. Its progress shows sequences done.
            Its `should_stop` is called before each batch; True stops, and no file is left.

    Raises:
        InvalidConfigError: the cache has no pooled vectors.
        StorageError: the file exists already, or cannot be written.
        CacheCorruptError: a shard is damaged.
        InterruptedRunError: a stop was requested.
    """
    opened = open_cache(cache, home=session.home)
    refuse_no_answers(cache, opened.manifest.identity, scores=False)
    pooled = opened.manifest.identity.pooled
    assert pooled is not None
    prepare_new(out, "OUT")
    width = pooled.width
    if opened.manifest.labels.role_column is not None or opened.manifest.identity.packing.prompt is not None:
        session.progress.note(
            "texts are written with the prompts that they begin with, and a cache that is imported from the "
            "file has no prompts: its students' texts must begin with them, too"
        )
    session.progress.start("export", len(opened), "sequences")
    remove_left_of(out)
    with (
        saving("write", out),
        new_file(out, replaces=False) as file,
        pq.ParquetWriter(file, (schema := _schema(opened, width)), compression="zstd") as writer,
    ):
        for rows in _rows(opened, schema):
            session.stop_if_asked()
            writer.write_table(rows)
            session.progress.advance(len(rows))
    return ExportResult(path=out, num_rows=len(opened), width=width)


def _schema(cache: Cache, width: int) -> pa.Schema:
    texts = ("text",) if cache.manifest.identity.packing.pair is None else ("first", "second")
    return pa.schema(
        [
            ("sequence", pa.int64()),
            *((name, pa.string()) for name in texts),
            ("input_ids", pa.list_(pa.int32())),
            ("embedding", pa.list_(pa.float32(), width)),
            ("held_out", pa.bool_()),
        ]
    )


def _rows(cache: Cache, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of the file, batch by batch."""
    read, wanted = text_reader(cache), WantedTargets(kinds=(), signals=(POOLED,))
    reader = BatchReader(cache, wanted, pad_token=0, device=_CPU)
    first, num_train = 0, cache.manifest.num_train
    for batch in reader.batches_of(range(len(cache)), _BATCH):
        lengths = batch.inputs.lengths.tolist()
        ids = [row[:length] for row, length in zip(batch.inputs.ids.numpy(), lengths, strict=True)]
        texts = zip(*map(read, ids), strict=True)
        numbers = range(first, first + len(ids))
        flat = pa.array(batch.signals[POOLED].numpy().ravel(), pa.float32())
        columns = [
            pa.array(numbers, pa.int64()),
            *(pa.array(column, pa.string()) for column in texts),
            pa.array(ids, pa.list_(pa.int32())),
            pa.FixedSizeListArray.from_arrays(flat, schema.field("embedding").type.list_size),
            pa.array([number >= num_train for number in numbers], pa.bool_()),
        ]
        yield pa.Table.from_arrays(columns, schema=schema)
        first += len(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresResult:
    """The data set that an export wrote."""

    path: Path
    num_pairs: int
    """Pairs of texts, or texts, that have an answer of the teacher."""
    columns: tuple[str, ...]


def export_scores(cache: str | Path, out: Path, *, session: Session = ALONE) -> ScoresResult:
    """Write a folder with a card that `datasets.load_dataset` opens and the Hugging Face hub takes.

    A row is a query with its documents and their scores, in caches of groups; otherwise a pair of texts, or a
    text, with its score, or its logits where the teacher has several classes. Texts are decoded from token
    ids, so they are as the teacher read them: cut, and perhaps in lower case.

    Args:
        cache: folder or URL of a cache with logits.
        out: folder, which must not exist yet.
        session: its home is the folder for local copies of caches at URLs. Its progress shows sequences done.
            Its `should_stop` is called before each row; True stops, and nothing is left.

    Raises:
        InvalidConfigError: the cache has no logits.
        StorageError: the folder exists already, or cannot be written.
        CacheCorruptError: a shard is damaged.
        InterruptedRunError: a stop was requested.
    """
    opened = open_cache(cache, home=session.home)
    manifest = opened.manifest
    refuse_no_answers(cache, manifest.identity, scores=True)
    num_classes = manifest.identity.num_classes
    assert num_classes is not None
    prepare_new(out, "OUT")
    schema = _schema_of_scores(opened, num_classes)
    session.progress.start("export", len(opened), "sequences")
    first_held_out = manifest.num_train
    numbers = {"train": range(first_held_out), "validation": range(first_held_out, len(opened))}
    files = {split: file for split, file in FILES.items() if len(numbers[split])}
    with saving("write", out), new_folder(out, replaces=False) as new:
        (new / "data").mkdir()
        for split, file in files.items():
            rows = _rows_of_scores(opened, numbers[split], schema, session=session)
            with pq.ParquetWriter(new / file, schema, compression="zstd") as writer:
                while some := list(islice(rows, _ROWS)):
                    writer.write_table(pa.Table.from_pylist(some, schema))
        (new / "README.md").write_text(_card(opened, files, tuple(schema.names)), encoding="utf-8")
    return ScoresResult(path=out, num_pairs=len(opened), columns=tuple(schema.names))


def _schema_of_scores(cache: Cache, num_classes: int) -> pa.Schema:
    corpus, text = cache.manifest.identity.corpus, pa.string()
    answer = ("score", pa.float32()) if num_classes == 1 else ("logits", pa.list_(pa.float32(), num_classes))
    if corpus.groups and num_classes == 1:
        columns = [("query", text), ("documents", pa.list_(text)), ("scores", pa.list_(pa.float32()))]
    elif corpus.pairs:
        columns = [("first", text), ("second", text), answer]
    else:
        columns = [("text", text), answer]
    return pa.schema(columns)


def _rows_of_scores(
    cache: Cache, numbers: range, schema: pa.Schema, *, session: Session
) -> Iterator[dict[str, Any]]:
    """Yield the rows of some sequences."""
    read = _answers(cache, numbers, session=session)
    if "documents" not in schema.names:
        for texts, answer in read:
            answered = answer[0] if schema.names[-1] == "score" else answer
            yield dict(zip(schema.names, (*texts, answered), strict=True))
        return
    for query, pairs in groupby(read, key=lambda pair: pair[0][0]):
        found = [(texts[1], answer[0]) for texts, answer in pairs]
        documents, scores = zip(*found, strict=True)
        yield {"query": query, "documents": list(documents), "scores": list(scores)}


def _answers(
    cache: Cache, numbers: range, *, session: Session
) -> Iterator[tuple[tuple[str, ...], list[float]]]:
    """Yield the texts of each sequence, and the teacher's answer."""
    for sequence, texts in texts_of(cache, numbers):
        session.stop_if_asked()
        yield texts, sequence.states()[LOGITS][0].tolist()
        session.progress.advance(1)


def _card(cache: Cache, files: dict[str, str], columns: tuple[str, ...]) -> str:
    """Return the README.md of the data set."""
    manifest = cache.manifest
    is_ranked = "documents" in columns
    data = DatasetCardData(
        tags=["minilm-cache", "knowledge-distillation"],
        task_categories=["text-ranking" if is_ranked else "text-classification"],
        configs=[
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": file} for split, file in files.items()],
            }
        ],
    )
    return rendered(
        "minilm_cache.workflows",
        "scores.md.jinja",
        data=data.to_yaml(),
        manifest=manifest,
        teacher=manifest.identity.teacher,
        columns=columns,
        classes=list(class_names(cache.reader.attachment(TEACHER_CONFIG), manifest).values())
        if "logits" in columns
        else [],
    )
