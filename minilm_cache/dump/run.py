"""Stage one on one page: corpus -> sequences -> teacher -> codec -> shards -> sealed cache."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from minilm_cache.cache import Cache, row_checker
from minilm_cache.corpus.load import Corpus, load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.add import (
    head_for,
    layers_to_write,
    open_donor,
    states_to_write,
    with_shards_of,
)
from minilm_cache.dump.audit import audit, audit_sequences
from minilm_cache.dump.audit_states import audit_states
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.fit import CodecFitter
from minilm_cache.dump.identity import identify, name_labels, plan_manifest
from minilm_cache.dump.preview import preview_table
from minilm_cache.dump.reading import SequenceReader
from minilm_cache.dump.shards import ShardJob
from minilm_cache.errors import IdentityMismatchError
from minilm_cache.models.device import choose_device
from minilm_cache.models.load import locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import CacheManifest, Measured
from minilm_cache.store.catalogue import find_cache
from minilm_cache.store.creation import creating
from minilm_cache.store.durable import refuse_file
from minilm_cache.store.layout import MANIFEST, cache_name
from minilm_cache.store.preview import has_damaged_preview, seal_with_preview
from minilm_cache.store.pull import pull
from minilm_cache.store.reader import CacheReader, read_manifest
from minilm_cache.store.verify import unsound_shards
from minilm_cache.store.writer import CacheWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpResult:
    """What a dump did."""

    path: Path
    manifest: CacheManifest
    shards_written: int
    shards_kept: int
    """Shards that others, or an earlier run, have committed, or that were pulled."""


def dump_cache(  # noqa: PLR0913 - what is dumped, where, and who is told: each a thing of its own
    config: DumpConfig,
    out: Path | None,
    home: Path,
    *,
    resume: bool = True,
    cache_store: str | None = None,
    tokens_of: Path | None = None,
    add: Path | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> DumpResult:
    """Run a teacher over a corpus and write its tapped layers' relations into a cache.

    Args:
        config: what to dump.
        out: folder of the cache; none: below `home`, named by content.
        home: folder of caches.
        resume: take up an unfinished dump in the same folder; if false, the folder must not exist.
        cache_store: URL of a store where a cache of the same fingerprint is looked for, and pulled from,
            before anything is computed.
        tokens_of: a finished cache, whose token files are linked where they are the same.
        add: a finished cache that this one is to hold, and more: whatever it holds is linked or copied, and
            only the rest is computed.
        progress: told of tokens done.
        should_stop: asked before each batch.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    progress = progress or Silent()
    teacher, corpus = _load(config, progress)
    identity, path = _identity_and_place(config, teacher, corpus, out, home, add or tokens_of)
    refuse_file(path)
    donor = None if add is None else open_donor(add, identity)
    if not resume and path.exists():
        raise IdentityMismatchError(
            f"{path} exists. Leave out --no-resume to take it up, or choose another --out."
        )
    config = _as_begun(config, path, donor)
    if cache_store is not None and not (path / MANIFEST).exists():
        pulled = _pull_if_there(cache_store, identity, path, progress, should_stop)
        if pulled is not None:
            return pulled
    sequences = SequenceTable(corpus, teacher.tokenizer, identity.packing)
    reader = SequenceReader.of(teacher, identity.states)
    fitter = CodecFitter(
        identity=identity,
        reader=reader,
        sequences=sequences,
        batch_size=config.batch_size,
        progress=progress,
        should_stop=should_stop,
    )
    # Ranks on unlike machines would fit unlike codecs: the first one's is everybody's.
    with creating(path, progress, should_stop) if config.world_size > 1 else nullcontext():
        fitted = fitter.codecs(path, donor)
        attachments = teacher.attachments() | dict(fitted.attachments)
        manifest = plan_manifest(config, identity, fitted.calibration, sequences, attachments)
        tokens = donor if tokens_of is None else CacheReader(tokens_of)
        writer = CacheWriter(path, manifest, attachments, tokens, donor)
    progress.note(f"cache {path} ({manifest.num_tokens:,} tokens, {len(manifest.shards)} shards)")
    todo = _shards_to_write(writer, config, progress)
    if writer.is_complete and not todo:
        progress.note("this cache is already complete and undamaged: nothing to do")
    job = ShardJob(
        config=config,
        reader=reader,
        codecs=layers_to_write(fitted.codecs, identity, donor),
        states=fitted.states,
        wanted=states_to_write(fitted.states, donor),
        sequences=sequences,
        writer=writer,
    )
    job.write(todo, progress, should_stop)
    with writer.sealing() as ready:
        if ready:
            _seal(writer, reader, config, progress)
        elif writer.is_complete and has_damaged_preview(writer.root, writer.manifest):
            progress.note("the preview is damaged and is written again")
            preview = preview_table(Cache(CacheReader(writer.root)), teacher.tokenizer)
            seal_with_preview(writer.root, writer.manifest, preview)
    return DumpResult(
        path=path,
        manifest=writer.manifest,
        shards_written=len(todo),
        shards_kept=len(manifest.shards) - len(todo) - len(writer.missing_shards()),
    )


def _load(config: DumpConfig, progress: Progress) -> tuple[Teacher, Corpus]:
    source = locate_teacher(config.teacher, config.revision)
    teacher = Teacher(source, choose_device(config.device), config.layers, head_for(config))
    teacher.check_length(config.max_length)
    corpus = load_corpus(config.corpus, config.text_column)
    progress.note(
        f"teacher {config.teacher} ({teacher.identity.model_type}, {teacher.identity.num_layers} layers, "
        f"hidden {teacher.identity.hidden_size}), corpus {config.corpus} "
        f"({corpus.identity.num_documents} documents)"
    )
    return teacher, corpus


def _identity_and_place(
    config: DumpConfig,
    teacher: Teacher,
    corpus: Corpus,
    out: Path | None,
    home: Path,
    like: Path | None,
) -> tuple[CacheIdentity, Path]:
    """Return what is dumped, and where.

    Text is held out by document, except in a cache that an older release began, or that shares the sequences
    of such a cache (`like`): those keep the split that they have.
    """
    labels = name_labels(config)
    if like is not None:
        identity = identify(config, teacher, corpus, read_manifest(like).identity.packing.split)
        return identity, out or home / "caches" / cache_name(labels, identity)
    older = identify(config, teacher, corpus, None)
    place = out or home / "caches" / cache_name(labels, older)
    if (place / MANIFEST).is_file() and read_manifest(place).fingerprint == older.fingerprint():
        return older, place
    identity = identify(config, teacher, corpus)
    return identity, out or home / "caches" / cache_name(labels, identity)


def _as_begun(config: DumpConfig, path: Path, donor: CacheReader | None) -> DumpConfig:
    """Return settings with the shards of a donor, or of a complete cache, which may have been pulled."""
    if donor is not None:
        config = with_shards_of(config, donor)
    if (path / MANIFEST).exists():
        there = read_manifest(path)
        if there.complete and config.shard_tokens is None:
            return config.model_copy(update={"shard_tokens": there.shard_tokens})
    return config


def _pull_if_there(
    cache_store: str, identity: CacheIdentity, path: Path, progress: Progress, should_stop: ShouldStop
) -> DumpResult | None:
    """Pull a cache from a store; none: it is not there."""
    url = find_cache(cache_store, identity.fingerprint())
    progress.note(f"this cache is {'not in' if url is None else 'to be pulled from'} {url or cache_store}")
    if url is None:
        return None
    pulled = pull(url, path, progress, should_stop)
    kept = len(pulled.manifest.shards)
    return DumpResult(path=path, manifest=pulled.manifest, shards_written=0, shards_kept=kept)


def _shards_to_write(writer: CacheWriter, config: DumpConfig, progress: Progress) -> list[int]:
    """Return this rank's shards that do not exist yet, or are damaged; the latter are withdrawn."""
    mine = range(config.rank, len(writer.manifest.shards), config.world_size)
    committed = [shard for shard in mine if writer.is_committed(shard)]
    for shard in _unsound(writer, committed, progress) if committed else ():
        progress.note(f"shard {shard} is damaged and will be written again")
        with writer.claim(shard):
            if _unsound(writer, [shard], Silent()):  # nobody was faster
                writer.withdraw(shard)
    return [shard for shard in mine if not writer.is_committed(shard)]


def _unsound(writer: CacheWriter, shards: Sequence[int], progress: Progress) -> list[int]:
    return unsound_shards(writer.root, writer.manifest, shards, progress, row_checker)


def _seal(writer: CacheWriter, reader: SequenceReader, config: DumpConfig, progress: Progress) -> None:
    """Measure the finished dump from its bytes on disk, then declare it complete."""
    teacher = reader.teacher
    cache = Cache(CacheReader(writer.root, partial=True))
    numbers = audit_sequences(cache)
    progress.start("measure fidelity", len(numbers), "sequences")
    audited = audit(cache.__getitem__, teacher, numbers, config.batch_size, progress)
    total = sum(file.size for record in cache.reader.records.values() for file in record.files.values())
    measured = Measured(
        bytes_per_token=total / writer.manifest.num_tokens,
        total_bytes=total,
        fidelity_sequences=audited.num_sequences,
        fidelity=audited.fidelity,
        states=audit_states(cache, reader, numbers, config.batch_size),
    )
    preview = preview_table(cache, teacher.tokenizer)
    writer.seal(measured, preview)
