"""Make caches of many shards: a small dump whose first shard is listed again and again.

There is a commit record for each shard, and the cache is sealed. Files exist only for the shards that are
read later: opening a cache looks at none.
"""

import io
import shutil
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from minilm_cache import TrainConfig
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.storage_schema.documents import CommitRecord, FileDigest
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import INDEX, RANGES, CacheManifest
from minilm_cache.storage_schema.metadata import zarr_documents
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.index import RecordedShards, encode_ranges, write_index
from minilm_cache.store.layout import commit_path, sequences_path
from minilm_cache.store.ranges import Segments, ShardRanges
from minilm_cache.store.reader import CacheReader
from minilm_cache.train.sampler import SequenceOrder

WANTED = WantedTargets(kinds=(RelationKind.ATTENTION, RelationKind.VALUE))


class _Repeated:
    """The sequences of one shard, many times."""

    def __init__(self, lengths: npt.NDArray[np.int64], num_shards: int) -> None:
        self._ends = np.cumsum(np.tile(lengths, num_shards))
        self.num_sequences = len(self._ends)

    def tokens_before(self, number: int) -> int:
        """Return the number of tokens of the first sequences."""
        return int(self._ends[number - 1]) if number else 0

    def sequences_within(self, num_tokens: int) -> int:
        """Return how many first sequences have at most so many tokens."""
        return int(np.searchsorted(self._ends, num_tokens, side="right"))


def make_cache(source: CacheReader, path: Path, num_shards: int, *, whole: bool = False) -> dict[str, float]:
    """Make a cache of so many shards, and return the seconds that planning and sealing it took.

    It has files for all shards if it is `whole`, else for those that are read later.
    """
    part = source.ranges[0]
    sequences = _Repeated(source.table(0)["length"].to_numpy().astype(np.int64), num_shards)
    started = time.perf_counter()
    ranges = ShardRanges.split(sequences, part.num_tokens)
    planned = time.perf_counter() - started
    assert len(ranges) == num_shards
    contents, manifest = begun(source, ranges, source.manifest.shard_tokens)
    shutil.rmtree(path, ignore_errors=True)
    for name, content in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    (path / "commits").mkdir()
    read_later = range(num_shards) if whole else _read_later(manifest, ranges)
    for shard in range(num_shards):
        table = _place_files(source, path, shard) if shard in read_later else None
        record = _record(source, manifest, ranges=ranges, shard=shard, table=table)
        (path / commit_path(shard)).write_bytes(record.to_json())
    started = time.perf_counter()
    index = write_index(path, manifest, RecordedShards(path, manifest, ranges))
    measured = source.manifest.measured
    files = manifest.files | {INDEX: index}
    sealed = manifest.model_copy(update={"complete": True, "measured": measured, "files": files})
    (path / "manifest.json").write_bytes(sealed.to_json())
    sealing = time.perf_counter() - started
    return {"plan_s": round(planned, 3), "seal_s": round(sealing, 2), "index_bytes": index.size}


def begun(
    source: CacheReader, ranges: ShardRanges, shard_tokens: int
) -> tuple[dict[str, bytes], CacheManifest]:
    """Return everything of an unfinished cache but its shards: files by path, and the manifest."""
    manifest = source.manifest
    contents = {
        **{name: source.attachment(name) for name in manifest.files if name not in {RANGES, INDEX}},
        **zarr_documents(
            manifest.identity, manifest.calibration, num_shards=len(ranges), shard_tokens=shard_tokens
        ),
        RANGES: encode_ranges(ranges),
    }
    num_sequences = int(ranges.num_sequences.sum())
    begun_manifest = manifest.model_copy(
        update={
            "complete": False,
            "shard_tokens": shard_tokens,
            "measured": None,
            "num_sequences": num_sequences,
            "num_tokens": int(ranges.num_tokens.sum()),
            "num_held_out": max(1, num_sequences // 50),
            "files": {name: digest_bytes(content) for name, content in contents.items()},
        }
    )
    return contents, begun_manifest


def _record(
    source: CacheReader, manifest: CacheManifest, *, ranges: ShardRanges, shard: int, table: bytes | None
) -> CommitRecord:
    """Return the record of a shard that holds what the first shard of the dump holds.

    A shard without a `table` has no files, and random digests: equal ones would compress to nothing.
    """
    first = source.records[0]
    renamed = {path.replace("/c/0", f"/c/{shard}", 1): digest for path, digest in first.files.items()}
    renamed[sequences_path(shard)] = renamed.pop(sequences_path(0))
    if table is None:
        random = np.random.default_rng(shard)
        renamed = {
            path: FileDigest(size=digest.size, sha256=random.bytes(32).hex(), xxh3_128=random.bytes(16).hex())
            for path, digest in renamed.items()
        }
    else:
        renamed[sequences_path(shard)] = digest_bytes(table)
    return CommitRecord(
        fingerprint=manifest.fingerprint,
        shard=shard,
        attempt="0" * 32,
        rank=0,
        range=ranges[shard],
        tokens_xxh3=first.tokens_xxh3,
        files=renamed,
    )


def _read_later(manifest: CacheManifest, ranges: ShardRanges) -> set[int]:
    """Return the shards that the measurements read: those of the first batches."""
    config = train_config()
    segments = Segments.of(manifest, ranges)
    order = SequenceOrder(
        segments=segments, num_train=manifest.num_train, seed=config.seed, buffer_shards=config.buffer_shards
    )
    first = zip(order.epoch(0), range(3), strict=False)
    return {segments.shard_of(segment) for buffer, _ in first for segment in buffer.segments}


def train_config() -> TrainConfig:
    """Return the training whose first batches are read."""
    return TrainConfig(arch=("3x192",), steps=10, batch_size=16)


def _place_files(source: CacheReader, path: Path, shard: int) -> bytes:
    """Put a shard's files there, those of the dump's first shard; return the table, with its own numbers."""
    for spec in source.specs:
        target = path / spec.shard_path(shard)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.root / spec.shard_path(0), target)
    table, part = source.table(0), source.ranges[0]
    shifts = {"sequence": shard * part.num_sequences, "offset": shard * source.manifest.shard_tokens}
    for name, shift in shifts.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pa.array(table[name].to_numpy() + shift))
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    (path / sequences_path(shard)).parent.mkdir(exist_ok=True)
    (path / sequences_path(shard)).write_bytes(buffer.getvalue())
    return buffer.getvalue()
