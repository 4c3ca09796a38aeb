"""Stage one on one page: corpus -> sequences -> teacher -> codec -> shards -> sealed cache."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from filelock import FileLock

from minilm_cache import __version__
from minilm_cache.cache import Cache
from minilm_cache.codecs.base import Codec
from minilm_cache.codecs.dense import DenseCodec
from minilm_cache.codecs.topk import TopKCodec
from minilm_cache.config import DumpConfig
from minilm_cache.device import choose_device
from minilm_cache.dump.audit import audit, pad
from minilm_cache.dump.card import cache_card, preview_table
from minilm_cache.dump.corpus import load_corpus
from minilm_cache.dump.sequences import SequenceTable
from minilm_cache.dump.teacher import Teacher, locate_teacher
from minilm_cache.errors import IdentityMismatchError, InterruptedRunError, InvalidConfigError
from minilm_cache.fingerprint import digest_bytes
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.relations import mean_row_entropy
from minilm_cache.storage_schema.arrays import array_specs, token_dtype, zarr_documents
from minilm_cache.storage_schema.manifest import (
    CacheIdentity,
    CacheManifest,
    Labels,
    Measured,
    Packing,
    RelationKind,
)
from minilm_cache.storage_schema.sequences import entropy_column
from minilm_cache.store.layout import (
    MAX_SHARD_BYTES,
    default_shard_tokens,
    shard_bytes,
    split_into_shards,
)
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.verify import is_sound
from minilm_cache.store.writer import CacheWriter

RELATIONS = (RelationKind.ATTENTION, RelationKind.VALUE)

DEFAULT_K = 16
"""Entries per row: students come within 0.3 % of dense targets (benchmarks/student_quality.py)."""

_Rows = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpResult:
    """What a dump did."""

    path: Path
    manifest: CacheManifest
    shards_written: int
    shards_kept: int
    """Shards that others, or an earlier run, have committed."""


def dump(
    config: DumpConfig,
    out: Path | None,
    home: Path,
    *,
    resume: bool = True,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> DumpResult:
    """Run a teacher over a corpus and write its last-layer relations into a cache.

    Args:
        config: what to dump.
        out: folder of the cache; none: below `home`, named by content.
        home: folder of caches.
        resume: take up an unfinished dump in the same folder; if false, the folder must not exist.
        progress: told of tokens done.
        should_stop: asked before each batch.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    progress = progress or Silent()
    teacher = Teacher(locate_teacher(config.teacher, config.revision), choose_device(config.device))
    teacher.check_length(config.max_length)
    corpus = load_corpus(config.corpus, config.text_column)
    progress.note(
        f"teacher {config.teacher} ({teacher.identity.model_type}, {teacher.identity.num_layers} layers, "
        f"hidden {teacher.identity.hidden_size}), corpus {config.corpus} "
        f"({corpus.identity.num_documents} documents)"
    )
    codec = _make_codec(config)
    identity = CacheIdentity(
        teacher=teacher.identity,
        tokenizer_sha256=teacher.tokenizer_sha256,
        corpus=corpus.identity,
        packing=Packing(
            mode=config.packing,
            max_length=config.max_length,
            max_tokens=config.max_tokens,
            seed=config.seed,
        ),
        layers=(teacher.layer,),
        relation_heads=teacher.identity.num_heads,
        relations=RELATIONS,
        codec=codec.parameters,
    )
    path = out or home / "caches" / _name(config, identity)
    if not resume and path.exists():
        raise IdentityMismatchError(
            f"{path} exists. Leave out --no-resume to take it up, or choose another --out."
        )
    sequences = SequenceTable(corpus, teacher.tokenizer, identity.packing)
    attachments = teacher.attachments()
    manifest = _plan(config, identity, sequences, attachments)
    writer = CacheWriter(path, manifest, attachments)
    progress.note(f"cache {path} ({manifest.num_tokens:,} tokens, {len(manifest.shards)} shards)")
    todo = _shards_to_write(writer, config, progress)
    if writer.is_complete and not todo:
        progress.note("this cache is already complete and undamaged: nothing to do")
    job = _Job(config=config, teacher=teacher, codec=codec, sequences=sequences, writer=writer)
    job.write(todo, progress, should_stop)
    with writer.sealing() as ready:
        if ready:
            _seal(writer, teacher, config, progress)
    return DumpResult(
        path=path,
        manifest=writer.manifest,
        shards_written=len(todo),
        shards_kept=len(manifest.shards) - len(todo) - len(writer.missing_shards()),
    )


def _shards_to_write(writer: CacheWriter, config: DumpConfig, progress: Progress) -> list[int]:
    """Return this rank's shards that do not exist yet, or are damaged; the latter are withdrawn."""
    mine = range(config.rank, len(writer.manifest.shards), config.world_size)
    committed = [shard for shard in mine if writer.is_committed(shard)]
    if committed:
        progress.start("check", len(committed), "shards")
    for shard in committed:
        if not is_sound(writer.root, writer.manifest, shard):
            progress.note(f"shard {shard} is damaged and will be written again")
            with writer.claim(shard):
                if not is_sound(writer.root, writer.manifest, shard):  # nobody was faster
                    writer.withdraw(shard)
        progress.advance(1)
    return [shard for shard in mine if not writer.is_committed(shard)]


def _make_codec(config: DumpConfig) -> Codec:
    if config.codec == "dense":
        return DenseCodec(max_length=config.max_length)
    select = config.select or "pps"
    return TopKCodec(
        max_length=config.max_length,
        k=min(DEFAULT_K, config.max_length) if config.k is None else config.k,
        select=select,
        tail=(config.tail or "uniform") if select == "largest" else None,
        seed=config.seed,
    )


def _name(config: DumpConfig, identity: CacheIdentity) -> str:
    teacher, corpus = (_label(name).replace(":", "-") for name in (config.teacher, config.corpus))
    return f"{teacher}-{corpus}-{config.codec}-{identity.fingerprint()[:12]}"


def _label(name: str) -> str:
    """Return a name for people: of a path only its end, since caches travel and paths tell of machines."""
    end = Path(name).resolve().name or "root"
    return "".join(letter if letter.isprintable() else "?" for letter in end)[:64]


def _plan(
    config: DumpConfig, identity: CacheIdentity, sequences: SequenceTable, attachments: Mapping[str, bytes]
) -> CacheManifest:
    """Return the manifest that the dump will fill: everything but what is measured."""
    shard_tokens = config.shard_tokens or default_shard_tokens(identity)
    if shard_bytes(identity, shard_tokens) > MAX_SHARD_BYTES:
        raise InvalidConfigError(
            f"a shard of {shard_tokens} tokens would decode to more than {MAX_SHARD_BYTES >> 20} MiB. "
            "Choose smaller --shard-tokens, or a codec that stores less."
        )
    shards = split_into_shards(sequences.lengths, shard_tokens)
    contents = zarr_documents(identity, len(shards), shard_tokens) | dict(attachments)
    files = {path: digest_bytes(content) for path, content in contents.items()}
    return CacheManifest(
        fingerprint=identity.fingerprint(),
        complete=False,
        labels=Labels(
            teacher=_label(config.teacher),
            corpus=_label(config.corpus),
            created_by=f"minilm-cache {__version__}",
        ),
        identity=identity,
        num_tokens=int(sequences.lengths.sum()),
        num_sequences=len(sequences.lengths),
        num_held_out=sequences.num_held_out,
        shard_tokens=shard_tokens,
        shards=shards,
        files=files,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What it takes to write a shard."""

    config: DumpConfig
    teacher: Teacher
    codec: Codec
    sequences: SequenceTable
    writer: CacheWriter

    def write(self, shards: list[int], progress: Progress, should_stop: ShouldStop) -> None:
        """Write shards; while one is written to disk, the teacher runs on the next."""
        ranges = self.writer.manifest.shards
        progress.start("dump", sum(ranges[n].num_tokens for n in shards), "tokens")
        pending: Future[None] | None = None
        with ThreadPoolExecutor(max_workers=1) as disk:
            for shard in shards:
                lock = self.writer.claim(shard)
                if self.writer.is_committed(shard):  # by another process, since this one looked
                    lock.release()
                    continue
                encoded = self._encode(shard, progress, should_stop)
                if pending is not None:
                    pending.result()
                if encoded is None:
                    lock.release()
                    raise self._interrupted()
                pending = disk.submit(self._write, shard, *encoded, lock)
            if pending is not None:
                pending.result()

    def _write(self, shard: int, rows: _Rows, table: pa.Table, lock: FileLock) -> None:
        try:
            self.writer.write_shard(shard, rows, table, self.config.rank)
        finally:
            lock.release()

    def _interrupted(self) -> InterruptedRunError:
        total = len(self.writer.manifest.shards)
        return InterruptedRunError(
            f"interrupted: {total - len(self.writer.missing_shards())} of {total} shards of "
            f"{self.writer.root} are committed. Run the same command again to go on."
        )

    def _encode(
        self, shard: int, progress: Progress, should_stop: ShouldStop
    ) -> tuple[_Rows, pa.Table] | None:
        """Return a shard's rows and sequence table; none when asked to stop."""
        manifest = self.writer.manifest
        part = manifest.shards[shard]
        tokens = self.sequences.read(part.first_sequence, part.first_sequence + part.num_sequences)
        lengths = np.asarray([len(ids) for ids in tokens.ids])
        starts = np.cumsum(lengths) - lengths
        rows: _Rows = {
            spec.path: np.zeros((part.num_tokens, *spec.row_shape), dtype=spec.dtype)
            for spec in array_specs(manifest.identity)
        }
        rows["tokens"][:] = np.concatenate(tokens.ids).astype(token_dtype(self.teacher.identity.vocab_size))
        entropy = {kind: np.zeros(len(lengths), dtype=np.float32) for kind in RELATIONS}
        # Sequences of one length share a batch: the least padding, and the same batches in every run.
        by_length = np.argsort(lengths, kind="stable")
        for chosen in np.split(
            by_length, range(self.config.batch_size, len(lengths), self.config.batch_size)
        ):
            if should_stop():
                return None
            batch, batch_lengths = pad(
                [torch.from_numpy(tokens.ids[n]) for n in chosen], self.teacher.tokenizer.pad_token_id
            )
            on_device = batch_lengths.to(self.teacher.device)
            relations = self.teacher.relations(batch.to(self.teacher.device), on_device, RELATIONS)
            for kind, probs in relations.items():
                entropy[kind][chosen] = mean_row_entropy(probs, on_device).cpu().numpy()
                stored = self.codec.encode(probs, kind, (part.first_sequence + chosen).tolist(), on_device)
                for name, values in stored.items():
                    target = rows[f"relations/{kind}/{name}"]
                    for at, n in enumerate(chosen):
                        target[starts[n] : starts[n] + lengths[n]] = values[at, : lengths[n]]
            progress.advance(int(batch_lengths.sum()))
        table = {
            "sequence": np.arange(part.first_sequence, part.first_sequence + part.num_sequences),
            "offset": shard * manifest.shard_tokens + starts,
            "length": lengths,
            "document": tokens.documents,
        }
        return rows, pa.table(table | {entropy_column(kind): entropy[kind] for kind in RELATIONS})


def _seal(writer: CacheWriter, teacher: Teacher, config: DumpConfig, progress: Progress) -> None:
    """Measure the finished dump from its bytes on disk, then declare it complete."""
    cache = Cache(CacheReader(writer.root, partial=True))
    progress.note("measuring fidelity on held-out sequences")
    audited = audit(cache, teacher, config.batch_size)
    total = sum(file.size for record in cache.reader.records.values() for file in record.files.values())
    measured = Measured(
        bytes_per_token=total / writer.manifest.num_tokens,
        total_bytes=total,
        fidelity_sequences=audited.num_sequences,
        fidelity=audited.fidelity,
    )
    preview = preview_table(cache, teacher.tokenizer)
    writer.seal(measured, preview, cache_card(writer.manifest, measured))
