"""Writes the texts and vectors of a cache to a Parquet file, for other tools."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from minilm_cache.cache import Cache, open_cache
from minilm_cache.models.truncate import saving
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.store.durable import new_file, refuse_existing, remove_partials
from minilm_cache.store.layout import refuse_no_answers
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.card import cached_tokenizer

_BATCH = 256
_CPU = torch.device("cpu")


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
    states = opened.manifest.identity.states
    assert states is not None
    assert states.pooled is not None
    refuse_existing(out, "OUT")
    width = states.pooled.width
    if opened.manifest.labels.role_column is not None or opened.manifest.identity.packing.prompt is not None:
        session.progress.note(
            "texts are written with the prompts that they begin with, and a cache that is imported from the "
            "file has no prompts: its students' texts must begin with them, too"
        )
    session.progress.start("export", len(opened), "sequences")
    remove_partials(out)
    with (
        saving("write", out),
        new_file(out) as file,
        pq.ParquetWriter(file, _schema(width), compression="zstd") as writer,
    ):
        for rows in _rows(opened, width):
            session.stop_if_asked()
            writer.write_table(rows)
            session.progress.advance(len(rows))
    return ExportResult(path=out, num_rows=len(opened), width=width)


def _schema(width: int) -> pa.Schema:
    return pa.schema(
        [
            ("sequence", pa.int64()),
            ("text", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("embedding", pa.list_(pa.float32(), width)),
            ("held_out", pa.bool_()),
        ]
    )


def _rows(cache: Cache, width: int) -> Iterator[pa.Table]:
    """Yield the rows of the file, batch by batch."""
    tokenizer = cached_tokenizer(cache.reader)
    wanted = WantedTargets(kinds=(), signals=(POOLED,))
    reader = BatchReader(cache, wanted, pad_token=tokenizer.pad_token_id, device=_CPU)
    first, num_train = 0, cache.manifest.num_train
    for batch in reader.batches_of(range(len(cache)), _BATCH):
        lengths = batch.inputs.lengths.tolist()
        ids = [row[:length] for row, length in zip(batch.inputs.ids.tolist(), lengths, strict=True)]
        numbers = range(first, first + len(ids))
        flat = pa.array(batch.signals[POOLED].numpy().ravel(), pa.float32())
        columns = [
            pa.array(numbers, pa.int64()),
            pa.array(tokenizer.batch_decode(ids, skip_special_tokens=True), pa.string()),
            pa.array(ids, pa.list_(pa.int32())),
            pa.FixedSizeListArray.from_arrays(flat, width),
            pa.array([number >= num_train for number in numbers], pa.bool_()),
        ]
        yield pa.Table.from_arrays(columns, schema=_schema(width))
        first += len(ids)
