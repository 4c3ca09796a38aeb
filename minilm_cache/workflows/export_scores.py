"""Writes the texts and scores of a cache as a data set, so that a teacher's scores can be given to others."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCardData

from minilm_cache.cache import Cache, open_cache
from minilm_cache.models.student import class_names
from minilm_cache.models.truncate import saving
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.storage_schema.states import LOGITS
from minilm_cache.store.durable import new_folder, refuse_existing
from minilm_cache.store.layout import refuse_no_answers
from minilm_cache.wording import rendered
from minilm_cache.workflows.texts import texts_of

FILES: Final = {"train": "data/train.parquet", "validation": "data/validation.parquet"}
"""Files of a data set by its splits, of which `validation` has what the cache holds out."""
_ROWS: Final = 1024


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
    states = manifest.identity.states
    assert states is not None
    assert states.num_classes is not None
    refuse_existing(out, "OUT")
    schema = _schema(opened, states.num_classes)
    session.progress.start("export", len(opened), "sequences")
    first_held_out = manifest.num_train
    numbers = {"train": range(first_held_out), "validation": range(first_held_out, len(opened))}
    files = {split: file for split, file in FILES.items() if len(numbers[split])}
    with saving("write", out), new_folder(out) as new:
        (new / "data").mkdir()
        for split, file in files.items():
            rows = _rows(opened, numbers[split], schema, session=session)
            with pq.ParquetWriter(new / file, schema, compression="zstd") as writer:
                while some := list(islice(rows, _ROWS)):
                    writer.write_table(pa.Table.from_pylist(some, schema))
        (new / "README.md").write_text(_card(opened, files, tuple(schema.names)))
    return ScoresResult(path=out, num_pairs=len(opened), columns=tuple(schema.names))


def _schema(cache: Cache, num_classes: int) -> pa.Schema:
    corpus, text = cache.manifest.identity.corpus, pa.string()
    answer = ("score", pa.float32()) if num_classes == 1 else ("logits", pa.list_(pa.float32(), num_classes))
    if corpus.groups and num_classes == 1:
        columns = [("query", text), ("documents", pa.list_(text)), ("scores", pa.list_(pa.float32()))]
    elif corpus.pairs:
        columns = [("first", text), ("second", text), answer]
    else:
        columns = [("text", text), answer]
    return pa.schema(columns)


def _rows(cache: Cache, numbers: range, schema: pa.Schema, *, session: Session) -> Iterator[dict[str, Any]]:
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
