"""Settings of a dump, resolved once: teacher, corpus, identity, folder, and the caches to reuse."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from minilm_cache.cache import Cache
from minilm_cache.codecs.base import RelationCodec
from minilm_cache.corpus.beir import left_out_in_words
from minilm_cache.corpus.formats import num_skipped
from minilm_cache.corpus.load import Corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.dump.config import DumpConfig, ImportConfig
from minilm_cache.dump.identity import identify, name_labels, text_of
from minilm_cache.dump.reading import batch_size_for
from minilm_cache.errors import CorpusError, IdentityMismatchError, InvalidConfigError
from minilm_cache.models.classifier import refuse_several_labels
from minilm_cache.models.device import choose_device
from minilm_cache.models.known import remember_teacher
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import leaves_prompts_out
from minilm_cache.models.tap import Head
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.config import COMPARING
from minilm_cache.session import Session
from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.storage_schema.identity import CacheIdentity, Precision, RelationKind, Split
from minilm_cache.storage_schema.manifest import TEACHER_WEIGHTS
from minilm_cache.storage_schema.states import SignalName, StatesIdentity
from minilm_cache.store.durable import refuse_file
from minilm_cache.store.layout import MANIFEST, cache_name, refuse_begun, refuse_other_cache
from minilm_cache.store.reader import CacheReader, read_manifest
from minilm_cache.wording import counted, differing_values


def open_donor(add: Path, identity: CacheIdentity) -> CacheReader:
    """Open the cache that a dump adds to.

    Args:
        add: folder of that cache.
        identity: identity of the new cache, which is to hold everything that the old one holds.

    Raises:
        MiniLMCacheError: the cache does not exist, is damaged or is not complete.
        IdentityMismatchError: the cache has another teacher, text or codec, or holds something that the new
            one does not.
    """
    donor = CacheReader(add)
    donor_identity = donor.manifest.identity
    free = {"layers", "states"}
    theirs, ours = (each.model_dump(mode="json", exclude=free) for each in (donor_identity, identity))
    differing = [*differing_values(theirs, ours)]
    if not set(donor_identity.layers) <= set(identity.layers):
        differing.append("layers")
    differing += _states_that_differ(donor_identity.states, identity.states)
    if differing:
        raise IdentityMismatchError(
            f"--add {add}: that cache differs in {', '.join(differing)}, and only layers and states can be "
            "added to those that it has. Repeat its settings, with more, or dump without --add."
        )
    return donor


def _states_that_differ(stored: StatesIdentity | None, requested: StatesIdentity | None) -> list[str]:
    """Return the names of what a cache stores and the new one lacks, or stores with other settings."""
    if stored is None:
        return []
    if requested is None:
        return ["states"]
    lacking = [
        name
        for name in ("hidden", "masked_hidden", "first")
        if not set(getattr(stored, name)) <= set(getattr(requested, name))
    ]
    same = ("max_error", "calibration_tokens", "masking", "labels", "num_classes", "pooled")
    lacking += [name for name in same if getattr(stored, name) not in (None, getattr(requested, name))]
    return lacking + ["others"] * any(other not in requested.others for other in stored.others)


def layers_to_write(
    codecs: Sequence[RelationCodec], identity: CacheIdentity, donor: CacheReader | None
) -> dict[int, RelationCodec]:
    """Return the codecs of the layers whose relations are still to be computed."""
    stored = () if donor is None else donor.manifest.identity.layers
    return {layer: codec for layer, codec in zip(identity.layers, codecs, strict=True) if layer not in stored}


def signals_to_write(codec: SignalsCodec | None, donor: CacheReader | None) -> tuple[SignalName, ...]:
    """Return the signals that are still to be computed."""
    if codec is None:
        return ()
    stored = set() if donor is None else {spec.path for spec in donor.specs}
    return tuple(name for name in codec.everything if not stored.issuperset(codec.paths((name,))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDump:
    """What a dump is going to do. Nothing decides about settings after this."""

    config: DumpConfig
    """The settings, with the shard size of the donor or of a complete cache in the folder."""
    batch_size: int
    """Sequences per forward pass of the teacher."""
    teacher: Teacher
    corpus: Corpus
    identity: CacheIdentity
    path: Path
    """Folder of the cache."""
    donor: CacheReader | None
    """A complete cache whose layers and states are reused. None means that everything is computed."""
    tokens_of: Path | None
    """Folder of a complete cache whose token files are linked where they are the same. None means those
    of the donor, or that tokens are written."""
    imported: ImportConfig | None = None
    """Settings of what is given in a file. None means that a teacher runs."""

    def sequences(self, session: Session) -> SequenceTable:
        """Return the corpus as sequences; it is tokenised if that was not done before."""
        tokens = tokenise(self.corpus, self.teacher.tokenizer, session=session)
        return SequenceTable(tokens, self.identity.packing)


def resolve_dump(
    config: DumpConfig,
    *,
    out: Path | None,
    session: Session,
    resume: bool,
    add: Path | None,
    tokens_of: Path | None,
) -> ResolvedDump:
    """Load the teacher and the corpus, and decide what is written where.

    Args:
        config: what to dump.
        out: folder of the cache. None means a folder below `home`, named by content.
        resume: whether the folder may exist.
        add: folder of a complete cache to reuse. None means that everything is computed.
        tokens_of: folder of a complete cache whose token files are linked. None means `add`.
        session: its home is the folder of caches. Its progress shows what was loaded.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; nothing has been written.
    """
    if not resume and out is not None:
        refuse_begun(out)
    teacher, corpus = _load(config, session, like=add or out)
    identity, path = identity_and_place(
        config, teacher, corpus=corpus, out=out, home=session.home, like=add or tokens_of
    )
    if (
        config.precision is None
        and out is None
        and _has_begun_in_float32(config, identity, path, home=session.home)
    ):
        plain = config.with_changes(precision="float32")
        return resolve_dump(plain, out=out, resume=resume, add=add, tokens_of=tokens_of, session=session)
    refuse_file(path)
    _refuse_other_cache(path, identity)
    donor = None if add is None else open_donor(add, identity)
    if donor is not None and TEACHER_WEIGHTS in donor.manifest.files and not config.keep_weights:
        session.progress.note(f"the teacher's weights are kept, as in {add}")
        config = config.with_changes(keep_weights=True)
    if config.keep_weights:
        teacher.refuse_large_weights()
    _remember(session, teacher)
    if not resume:
        refuse_begun(path)
    return ResolvedDump(
        config=_with_shards(config, path, donor),
        batch_size=(config.batch_size or batch_size_for(teacher.identity, config.max_length, teacher.device)),
        teacher=teacher,
        corpus=corpus,
        identity=identity,
        path=path,
        donor=donor,
        tokens_of=tokens_of,
    )


def refuse_other_dump(config: DumpConfig, path: Path, session: Session) -> None:
    """Raise IdentityMismatchError where a folder has the cache of another dump; without a cache, do nothing.

    Args:
        config: settings of the dump, whose teacher is loaded and whose text is read.
        path: folder of the cache.
        session: its home is the folder of caches.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; nothing has been written.
    """
    if (path / MANIFEST).is_file():
        teacher, corpus = _load(config, session, like=path)
        identity, _ = identity_and_place(config, teacher, corpus=corpus, out=path, home=session.home)
        _refuse_other_cache(path, identity)


def _refuse_other_cache(path: Path, identity: CacheIdentity) -> None:
    """Raise IdentityMismatchError where a folder has another cache; without a cache, do nothing."""
    if (path / MANIFEST).is_file():
        there, asked = (each.model_dump(mode="json") for each in (read_manifest(path).identity, identity))
        refuse_other_cache(path, differing_values(there, asked))


def _has_begun_in_float32(config: DumpConfig, identity: CacheIdentity, path: Path, *, home: Path) -> bool:
    """Return whether the home has the same cache in float32 and not in the device's own precision."""
    plain = identity.model_copy(update={"precision": None})
    place = home / "caches" / cache_name(name_labels(config), plain)
    if identity.precision is None or (path / MANIFEST).is_file() or not (place / MANIFEST).is_file():
        return False
    return read_manifest(place).fingerprint == plain.fingerprint()


def _remember(session: Session, teacher: Teacher) -> None:
    """Note where the teacher is, for trainings; a home that cannot be written to does not hold up a dump."""
    try:
        remember_teacher(session.home, teacher.identity.weights_sha256, teacher.folder)
    except OSError as error:
        session.progress.note(
            f"cannot note the teacher's folder in {session.home} ({error.strerror}): "
            "give --init-teacher to train"
        )


def head_for(config: DumpConfig) -> Head | None:
    """Return the head that a teacher must have for a dump. None means that an encoder is enough."""
    if config.logits:
        return "sequences"
    return "tokens" if config.labels else None


def load_teacher(
    config: DumpConfig, *, head: Head | None = None, precision: Precision | None = None
) -> Teacher:
    """Return the teacher of a dump.

    Args:
        config: settings of the dump.
        head: head that the teacher must have. None means that an encoder is enough.
        precision: precision where the settings have none. None means bfloat16 on a GPU, float32 on a CPU.

    Raises:
        InvalidConfigError: it lacks layers or positions, or the device cannot compute as requested.
        TeacherError: it cannot be loaded or tapped.
    """
    device, source = choose_device(config.device), locate_teacher(config.teacher, config.revision)
    chosen = config.precision or precision or ("bfloat16" if device.type == "cuda" else "float32")
    layers = () if config.codec == "none" else config.layers
    teacher = Teacher(source, device, layers=layers, head=head, precision=chosen)
    teacher.check_length(config.max_length)
    if head == "sequences":
        refuse_several_labels(teacher.problem_type, teacher.num_classes, f"teacher {config.teacher}")
    if config.codec == "vectors":
        teacher.refuse_bias()
    if config.compiled:
        teacher.compile_forward()
    return teacher


def _precision_of(cache: Path | None) -> Precision | None:
    """Return the precision of a cache. None means that there is none."""
    if cache is None or not (cache / MANIFEST).is_file():
        return None
    return read_manifest(cache).identity.precision or "float32"


def _load(config: DumpConfig, session: Session, *, like: Path | None) -> tuple[Teacher, Corpus]:
    teacher = load_teacher(config, head=head_for(config), precision=_precision_of(like))
    corpus = text_of(config, teacher, session.home)
    if corpus.prompt is not None:
        own = teacher.prompts
        is_left_out = corpus.prompt == own.of_every_text and not {"query", "document"} & own.by_name.keys()
        without = ", which encode_query and encode_document of such models leave out" if is_left_out else ""
        session.progress.note(f"each text begins with the prompt {corpus.prompt!r}{without}")
    if teacher.reads_padding:
        session.progress.note(
            f"teacher {config.teacher} computes other hidden states beside padding, so it reads sequences "
            "one by one"
        )
    if teacher.prompts.by_name and leaves_prompts_out(teacher.folder):
        session.progress.note(
            f"teacher {config.teacher} leaves its prompts out of its pooling (include_prompt), which "
            "students do not do; they get none of them"
        )
    session.progress.note(
        f"teacher {config.teacher} ({teacher.identity.model_type}, {teacher.identity.num_layers} layers, "
        f"hidden {teacher.identity.hidden_size}), corpus {config.corpus} "
        f"({counted(corpus.identity.num_documents, 'document')})"
    )
    _refuse_no_comparison(config, teacher, corpus)
    if corpus.num_blank:
        session.progress.note(
            f"{config.corpus}: {corpus.num_blank:,} of {corpus.num_blank + corpus.identity.num_documents:,} "
            "records have an empty text, and are left out"
        )
    if config.pair_columns and (left_out := left_out_in_words(config.corpus)):
        session.progress.note(f"{config.corpus}: {left_out}")
    if skipped := num_skipped(config.corpus):
        session.progress.note(
            f"{config.corpus}: {counted(skipped, 'file')} of other kinds, or linked folders, skipped"
        )
    return teacher, corpus


def _refuse_no_comparison(config: DumpConfig, teacher: Teacher, corpus: Corpus) -> None:
    """Raise an error if documents of a query are to be compared, and cannot be.

    Raises:
        CorpusError: records are single pairs, or no query has two documents.
        InvalidConfigError: the teacher gives several numbers for a pair.
    """
    compared = next((name for name in config.serve if name in COMPARING), None)
    if compared is None:
        return
    if not corpus.identity.groups:
        raise CorpusError(
            f"corpus {config.corpus}: its records are single pairs, and {compared} compares the documents of "
            "a query. Give records of queries with several documents (--pair-columns query,documents), or "
            "take --for score."
        )
    if teacher.num_classes > 1:
        raise InvalidConfigError(
            f"--for {compared} takes a teacher that gives one score, and {config.teacher} answers with "
            f"{teacher.num_classes} classes. Take --for score, or a reranker as the teacher."
        )
    if corpus.num_queries() == corpus.identity.num_documents:
        raise CorpusError(
            f"corpus {config.corpus}: every query has one document, and {compared} compares the documents of "
            "a query. Add hard negatives (minilm-cache mine), or take --for score."
        )


def identity_and_place(
    config: DumpConfig,
    teacher: Teacher,
    *,
    corpus: Corpus,
    out: Path | None,
    home: Path,
    like: Path | None = None,
) -> tuple[CacheIdentity, Path]:
    """Return what is dumped, and where.

    Text is held out by document, except in a cache that an older release began, or that shares the sequences
    of such a cache (`like`): those keep the split that they have.
    """
    labels = name_labels(config)
    if like is not None:
        split = read_manifest(like).identity.packing.split
        identity = identify(config, teacher, corpus=corpus, split=split)
        return identity, out or home / "caches" / cache_name(labels, identity)
    earlier: tuple[Split | None, ...] = (None, "documents")
    for split in earlier:
        older = identify(config, teacher, corpus=corpus, split=split)
        place = out or home / "caches" / cache_name(labels, older)
        if (place / MANIFEST).is_file() and read_manifest(place).fingerprint == older.fingerprint():
            return older, place
    identity = identify(config, teacher, corpus=corpus)
    return identity, out or home / "caches" / cache_name(labels, identity)


def _with_shards(config: DumpConfig, path: Path, donor: CacheReader | None) -> DumpConfig:
    """Return settings with the shard size of a donor, or of the cache that is there.

    That one may have been pulled, or begun by an earlier release, which had another default.

    Raises:
        InvalidConfigError: another shard size was requested than the donor's.
    """
    if donor is not None:
        theirs = donor.manifest.shard_tokens
        if config.shard_tokens not in (None, theirs):
            raise InvalidConfigError(
                f"--shard-tokens {config.shard_tokens}: {donor.root}, which is added to, has shards of "
                f"{theirs} tokens. Leave it out, or dump without --add."
            )
        return config.with_changes(shard_tokens=theirs)
    if config.shard_tokens is None and (path / MANIFEST).exists():
        return config.with_changes(shard_tokens=read_manifest(path).shard_tokens)
    return config


PREVIEW_SEQUENCES = 8


def preview_table(cache: Cache, tokenizer: PreTrainedTokenizerFast) -> pa.Table:
    """Return a table of the first sequences: their text, tokens, and the attention of head 0.

    Its row is that of the first token, or in a causal model that of the last one, which sees the others.
    """
    rows, identity = [], cache.manifest.identity
    for number in range(min(PREVIEW_SEQUENCES, len(cache))):
        sequence = cache[number]
        ids = sequence.input_ids.tolist()
        attention = {}
        if identity.has_relations:
            row = sequence.relation(RelationKind.ATTENTION)[0, -1 if identity.is_causal else 0].tolist()
            attention["attention_head0_last_row" if identity.is_causal else "attention_head0_row0"] = row
        rows.append(
            {
                "sequence": number,
                "text": tokenizer.decode(ids),
                "tokens": tokenizer.convert_ids_to_tokens(ids),
            }
            | attention
        )
    return pa.Table.from_pylist(rows)
