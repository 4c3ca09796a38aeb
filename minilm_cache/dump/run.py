"""Stage one as a whole: corpus -> sequences -> teacher -> codec -> shards -> sealed cache."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from minilm_cache.cache import Cache, row_checker
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.audit import audit, audit_sequences, audit_states
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.fit import CodecFitter
from minilm_cache.dump.identity import plan_manifest
from minilm_cache.dump.reading import SequenceReader
from minilm_cache.dump.setup import (
    PREVIEW_SEQUENCES,
    ResolvedDump,
    layers_to_write,
    preview_table,
    resolve_dump,
    signals_to_write,
)
from minilm_cache.dump.shards import ShardJob
from minilm_cache.errors import CacheCorruptError, ShardBusyError
from minilm_cache.models.device import enough_memory
from minilm_cache.models.prompts import Prompts
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import refuse_other_kind
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import (
    INDEX,
    TEACHER_PROMPTS,
    TEACHER_WEIGHTS,
    CacheManifest,
    Measured,
)
from minilm_cache.store.card import attach, seal_with_preview
from minilm_cache.store.catalogue import find_cache
from minilm_cache.store.checked import is_damaged
from minilm_cache.store.creation import creating
from minilm_cache.store.index import committed_shards
from minilm_cache.store.layout import MANIFEST, below
from minilm_cache.store.pull import pull
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.urls import refuse_no_folder
from minilm_cache.store.writer import CacheWriter
from minilm_cache.wording import Made, Place, counted


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DumpResult(Made):
    """Result of a dump."""

    path: Path
    """Folder of the cache; a cache in a store has none when the dump ends."""
    manifest: CacheManifest
    shards_written: int
    shards_kept: int
    """Shards that other ranks or an earlier run have committed, or that were pulled."""
    num_shards: int
    """Shards of the whole cache."""
    url: str | None = None
    """URL of the cache. None means that it is in the folder `path`."""

    @property
    def place(self) -> str:
        """Where the cache is: its URL or its folder."""
        return self.url or str(self.path)

    def __fspath__(self) -> str:
        return self.place

    def describe(self) -> dict[str, object]:
        """Return the lines of its description, by the names that people read."""
        manifest = self.manifest
        measured = manifest.measured
        return {
            "cache": self.place,
            "teacher": manifest.labels.teacher,
            "tokens": f"{manifest.num_tokens:,} in {counted(manifest.num_sequences, 'sequence')}",
            "bytes per token": "-" if measured is None else f"{measured.bytes_per_token:.1f}",
            "shards": f"{self.num_shards}, of which {self.shards_written} were written now",
        }


def dump_cache(
    config: DumpConfig,
    *,
    out: str | Path | None = None,
    session: Session = ALONE,
    resume: bool = True,
    cache_store: str | None = None,
    tokens_of: Place | None = None,
    add: Place | None = None,
) -> DumpResult:
    """Run a teacher over a corpus and write its tapped layers' relations into a cache.

    Args:
        config: what to dump.
        out: folder of the cache. None means a folder below `home`, named by content.
        resume: resume an unfinished dump in the same folder; if false, the folder must not exist.
        cache_store: URL of a store. A cache of the same fingerprint there is pulled instead of computed. None
            means that no store is searched.
        tokens_of: folder of a complete cache, whose token files are linked where they are the same. None
            means that tokens are written.
        add: folder of a complete cache to add to: everything that it holds is linked or copied, and only
            the rest is computed. None means that everything is computed.
        session: its home is the folder of caches. Its progress shows tokens done. Its `should_stop` is called
            before each batch; True stops the dump and keeps what is committed.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    refuse_other_kind(config, DumpConfig)
    out, add, tokens_of = (None if path is None else Path(path) for path in (out, add, tokens_of))
    resolved = resolve_dump(config, out=out, resume=resume, add=add, tokens_of=tokens_of, session=session)
    path, config = resolved.path, resolved.config
    if cache_store is not None and not (path / MANIFEST).exists():
        refuse_no_folder(cache_store, "--cache-store (MINILM_CACHE_STORE)")
        pulled = _pull_if_there(cache_store, resolved.identity, path=path, session=session)
        if pulled is not None:
            return _completed(pulled, resolved, session)
    return write_cache(
        resolved,
        SequenceReader.of(resolved.teacher, resolved.identity.states),
        sequences=resolved.sequences(session),
        session=session,
    )


def write_cache(
    resolved: ResolvedDump,
    reader: SequenceReader,
    *,
    sequences: SequenceTable,
    session: Session,
    writer_type: Callable[..., CacheWriter] = CacheWriter,
) -> DumpResult:
    """Write what is missing of a cache whose settings are resolved.

    Args:
        resolved: what the cache is to hold, and where.
        reader: what reads sequences, such as a teacher.
        sequences: the corpus as sequences.
        writer_type: makes what writes the cache, with the arguments of `CacheWriter`.
        session: its progress shows tokens done. Its `should_stop` is called before each batch; True stops and
            keeps what is committed.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    fitter = CodecFitter(
        identity=resolved.identity,
        reader=reader,
        sequences=sequences,
        batch_size=resolved.batch_size,
        session=session,
    )
    # Ranks on different machines would fit different codecs: all ranks use the codecs of the first.
    several = resolved.config.world_size > 1
    with enough_memory(resolved.teacher.device, f"Choose a --batch-size below {resolved.batch_size}"):
        with creating(resolved.path, session) if several else nullcontext():
            job = _begin(resolved, fitter, writer_type)
        with closing(job.writer):
            return _write_shards(job, resolved.path, session=session)


def _completed(pulled: DumpResult, resolved: ResolvedDump, session: Session) -> DumpResult:
    """Add to a cache that was pulled what is outside its identity."""
    manifest = pulled.manifest
    stored = stored_prompts(pulled.path, manifest)
    for path, content in outside_identity(resolved.teacher, stored, config=resolved.config, session=session):
        manifest = attach(pulled.path, manifest, path=path, content=content)
    return replace(pulled, manifest=manifest)


def stored_prompts(root: Path, manifest: CacheManifest) -> bytes | None:
    """Return the content of a cache's file of prompts, empty if damaged. None means that it has none."""
    if TEACHER_PROMPTS not in manifest.files:
        return None
    file = below(root, TEACHER_PROMPTS)
    return file.read_bytes() if file.is_file() and not is_damaged(root, manifest, TEACHER_PROMPTS) else b""


def outside_identity(
    teacher: Teacher, stored: bytes | None, *, config: DumpConfig, session: Session
) -> Iterator[tuple[str, bytes]]:
    """Yield the files that a complete cache is to have anew, as its identity says nothing of them.

    These are prompts and a similarity of the teacher that are others than those in the cache, which students
    would get, and weights that are to be kept.

    Args:
        teacher: the teacher as it is now.
        stored: content of the cache's file of prompts. None means that it has none.
        config: settings of the dump.
        session: its progress says that prompts are replaced.

    Raises:
        TeacherError: a weight is too large for float16.
    """
    if teacher.has_other_prompts(stored):
        session.progress.note(
            "the teacher's prompts or its similarity are others than in this cache, which gets those of now"
        )
        yield TEACHER_PROMPTS, teacher.prompts_file or Prompts({}).to_json()
    if config.keep_weights:
        yield TEACHER_WEIGHTS, teacher.half_weights()


def _write_shards(job: ShardJob, path: Path, *, session: Session) -> DumpResult:
    """Write the missing and damaged shards of this rank, and seal the cache if every shard exists."""
    writer, config = job.writer, job.config
    session.progress.note(
        f"cache {path} ({writer.manifest.num_tokens:,} tokens, shards: {len(writer.ranges)})"
    )
    todo = _shards_to_write(writer, config, session)
    if writer.is_complete and not todo:
        session.progress.note("this cache is already complete and undamaged: nothing to do")
    written = job.write(todo, session)
    _finish(job, session)
    return DumpResult(
        path=path,
        manifest=writer.manifest,
        shards_written=written,
        shards_kept=len(writer.ranges) - written - len(writer.missing_shards()),
        num_shards=len(writer.ranges),
    )


def _begin(resolved: ResolvedDump, fitter: CodecFitter, writer_type: Callable[..., CacheWriter]) -> ShardJob:
    """Fit the codecs, and create the cache or open the unfinished one."""
    identity, donor = resolved.identity, resolved.donor
    fitted = fitter.codecs(resolved.path, donor)
    attachments = resolved.teacher.attachments() | dict(fitted.attachments)
    manifest, ranges = plan_manifest(
        resolved.config,
        identity,
        calibration=fitted.calibration,
        sequences=fitter.sequences,
        attachments=attachments,
        texts_sha256=resolved.corpus.texts_sha256,
        imported=resolved.imported,
    )
    tokens = donor if resolved.tokens_of is None else CacheReader(resolved.tokens_of)
    writer = writer_type(
        resolved.path, manifest, ranges=ranges, attachments=attachments, tokens_of=tokens, parts_of=donor
    )
    device = fitter.reader.teacher.device
    return ShardJob(
        config=resolved.config,
        batch_size=resolved.batch_size,
        reader=fitter.reader,
        codecs={
            layer: codec.to(device)
            for layer, codec in layers_to_write(fitted.codecs, identity, donor).items()
        },
        states=None if fitted.states is None else fitted.states.to(device),
        wanted=signals_to_write(fitted.states, donor),
        sequences=fitter.sequences,
        writer=writer,
    )


def _finish(job: ShardJob, session: Session) -> None:
    """Seal the cache if every shard exists, and write a damaged preview again."""
    writer, teacher = job.writer, job.reader.teacher
    is_whole = writer.is_complete and not writer.has_damaged_preview
    has_others = teacher.has_other_prompts(stored_prompts(writer.root, writer.manifest))
    if is_whole and not job.config.keep_weights and not has_others:
        return  # nothing is written, so that the folder may be another user's
    if is_whole and not job.config.keep_weights and not os.access(writer.root, os.W_OK):
        session.progress.note(
            "the teacher's prompts or its similarity are others than in this cache, which you may not change"
        )
        return
    with writer.sealing() as ready:
        if ready:
            _seal(writer, job.reader, batch_size=job.batch_size, session=session)
        elif writer.has_damaged_preview:
            session.progress.note("the preview is damaged and is written again")
            preview = preview_table(Cache(CacheReader(writer.root)), teacher.tokenizer)
            writer.manifest = seal_with_preview(writer.root, writer.manifest, preview)
        if writer.is_complete:
            stored = stored_prompts(writer.root, writer.manifest)
            for path, content in outside_identity(teacher, stored, config=job.config, session=session):
                writer.attach(path, content)


def _pull_if_there(
    cache_store: str, identity: CacheIdentity, *, path: Path, session: Session
) -> DumpResult | None:
    """Pull a cache from a store. None means that the store does not have it."""
    url = find_cache(cache_store, identity.fingerprint())
    session.progress.note(
        f"this cache is {'not in' if url is None else 'to be pulled from'} {url or cache_store}"
    )
    if url is None:
        return None
    pulled = pull(url, path, session=session)
    kept = pulled.shards_copied + pulled.shards_kept
    return DumpResult(
        path=path, manifest=pulled.manifest, shards_written=0, shards_kept=kept, num_shards=kept
    )


def _shards_to_write(writer: CacheWriter, config: DumpConfig, session: Session) -> list[int]:
    """Return the numbers of this rank's shards that are missing or damaged; damaged shards are withdrawn."""
    if writer.has_damaged_index:
        _unseal_by_records(writer, session)
    mine, missing = range(config.rank, len(writer.ranges), config.world_size), set(writer.missing_shards())
    committed = [shard for shard in mine if shard not in missing]
    check_rows = row_checker if config.check == "full" else None
    damaged = writer.damaged(committed, check_rows=check_rows, session=session) if committed else []
    for shard in damaged:
        session.progress.note(f"shard {shard} is damaged and will be written again")
        with suppress(ShardBusyError), writer.claim(shard):
            # Another process may have written it again, or is doing so.
            if writer.damaged([shard], check_rows=check_rows, session=ALONE):
                writer.withdraw(shard)
    return sorted(missing.intersection(mine) | set(damaged))


def _unseal_by_records(writer: CacheWriter, session: Session) -> None:
    """Make a cache whose index is damaged an unfinished one, whose shards are those with commit records.

    Raises:
        CacheCorruptError: it has no records, since it is a copy.
    """
    if not committed_shards(writer.root, len(writer.ranges)):
        raise CacheCorruptError(
            f"{writer.root / INDEX} is damaged, and a copy of a cache has no commit records to write it "
            "from. Remove the folder and fetch the cache again, or choose another --out."
        )
    session.progress.note("the index of this cache is damaged and is written again")
    writer.unseal()


def _seal(writer: CacheWriter, reader: SequenceReader, *, batch_size: int, session: Session) -> None:
    """Measure the finished dump from its bytes on disk, then mark it as complete."""
    teacher = reader.teacher
    cache = Cache(CacheReader(writer.root, partial=True))
    numbers = audit_sequences(cache.manifest.num_train, len(cache))
    shown = range(min(PREVIEW_SEQUENCES, len(cache)))
    writer.fetch(sorted({writer.ranges.shard_of(number) for number in (*shown, *numbers)}))
    identity = writer.manifest.identity
    passes = identity.has_relations + (identity.states is not None)
    session.progress.start("measure fidelity", passes * len(numbers), "sequences")
    fidelity = audit(cache, teacher, numbers=numbers, batch_size=batch_size, session=session)
    total = sum(cache.reader.records.bytes_by_name().values())
    measured = Measured(
        bytes_per_token=total / writer.manifest.num_tokens,
        total_bytes=total,
        fidelity_sequences=len(numbers),
        fidelity=fidelity,
        states=audit_states(cache, reader, numbers=numbers, batch_size=batch_size, session=session),
    )
    preview = preview_table(cache, teacher.tokenizer)
    writer.seal(measured, preview)
