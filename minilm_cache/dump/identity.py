"""What a dump will write, decided before anything is written: identity, name, shards, files."""

from collections.abc import Mapping
from pathlib import Path

from minilm_cache.codecs.rows import ROW_RELATIONS
from minilm_cache.codecs.sampling import PPS_RATIO
from minilm_cache.codecs.topk import scale_ratio
from minilm_cache.corpus.load import Corpus, load_corpus
from minilm_cache.corpus.records import Roles
from minilm_cache.corpus.sequences import SHARE, SequenceTable
from minilm_cache.corpus.template import packing_of, refuse_long_prompt
from minilm_cache.dump.config import (
    DEFAULT_K,
    DEFAULT_LABEL_K,
    DEFAULT_MAX_ERROR,
    DEFAULT_MAX_KL,
    DEFAULT_MIN_COSINE,
    Chosen,
    DumpConfig,
    ImportConfig,
)
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.arch import refuse_no_state
from minilm_cache.models.prompts import chosen_prompt
from minilm_cache.models.teacher import Teacher
from minilm_cache.models.tokenizer import mask_token
from minilm_cache.signals.table import own_signal
from minilm_cache.storage_schema.arrays import array_specs
from minilm_cache.storage_schema.documents import MAX_RECORD_BYTES, MAX_SHARDS
from minilm_cache.storage_schema.identity import (
    CacheIdentity,
    CodecParameters,
    DenseParameters,
    NoRelationsParameters,
    Packing,
    Split,
    TopKParameters,
    VectorsParameters,
)
from minilm_cache.storage_schema.manifest import RANGES, CacheManifest, Calibration, Labels
from minilm_cache.storage_schema.metadata import zarr_documents
from minilm_cache.storage_schema.states import Masking, Pooling, SoftLabels, StatesIdentity
from minilm_cache.storage_schema.versions import RELEASE
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.index import encode_ranges
from minilm_cache.store.layout import (
    MAX_FILE_BYTES,
    MAX_SEGMENT_BYTES,
    decoded_bytes,
    default_shard_tokens,
    file_bytes,
    segment_tokens,
)
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.wording import printable

CALIBRATION_TOKENS = 2**15
"""Tokens that codec `vectors` is fitted to."""
STATE_CALIBRATION_TOKENS = 2**13
"""Tokens that the codes of hidden states are fitted to."""
CALIBRATION_SEQUENCES = 2**12
"""Sequences that the code of pooled vectors is fitted to."""
_RECORD_FILE_BYTES = 240
"""Most bytes that the path and digest of a file take in a commit record."""


def text_of(config: DumpConfig, teacher: Teacher, home: Path) -> Corpus:
    """Return the text of a dump, with the prompt that its teacher's texts get.

    Raises:
        CorpusError: the text cannot be read.
        InvalidConfigError: the teacher has no such prompt.
        TeacherError: what it declares of its prompts is damaged, or it leaves them out of its pooling.
    """
    roles = None
    if config.role_column is not None:
        roles = Roles(config.role_column, teacher.prompts.by_name)
    has_default = config.packing == "records" and roles is None
    prompt = chosen_prompt(
        teacher.folder, name=config.prompt_name, text=config.prompt, has_default=has_default
    )
    if (prompt or roles) and config.pooled and not teacher.pooler(config.pooling).includes_prompt:
        raise TeacherError(
            f"teacher {config.teacher} leaves the tokens of a prompt out of its pooling (include_prompt), "
            "which is not done here. Take another teacher, or texts without a prompt."
        )
    corpus = load_corpus(
        config.corpus,
        config.text_column,
        config.documents,
        home=home,
        roles=roles,
        pair_columns=config.pair_columns,
    )
    if roles is not None:
        plain = load_corpus(config.corpus, config.text_column, config.documents, home=home)
        corpus.texts_sha256 = plain.texts_sha256
        for prompt_of_role in roles.prompts.values():
            if len(prompt_of_role) >= config.max_length and any(
                text.startswith(prompt_of_role) for text in corpus.texts()
            ):
                refuse_long_prompt(teacher.tokenizer, prompt_of_role, max_length=config.max_length)
    return corpus.with_prompt(prompt)


def packing_for(
    config: DumpConfig, teacher: Teacher, corpus: Corpus, *, split: Split | None = "tokens"
) -> Packing:
    """Return how the text of a dump becomes sequences; see `packing_of`."""
    packing = packing_of(
        teacher.tokenizer,
        mode=config.packing,
        max_length=config.max_length,
        max_tokens=config.max_tokens,
        seed=config.seed,
        split=split,
        prompt=corpus.prompt,
        has_groups=bool(corpus.identity.groups),
        truncation=config.truncation,
    )
    teacher.refuse_segments(packing.pair)
    return packing


def identify(
    config: DumpConfig, teacher: Teacher, *, corpus: Corpus, split: Split | None = "tokens"
) -> CacheIdentity:
    """Return the identity of the cache: everything that determines its content.

    Args:
        config: what to dump.
        teacher: the loaded teacher.
        corpus: the text.
        split: how text is held out. None means as in the first releases, for caches that they began.
    """
    parameters = codec_parameters(config)
    return CacheIdentity(
        teacher=teacher.identity,
        tokenizer_sha256=teacher.tokenizer_sha256,
        corpus=corpus.identity_for(split),
        packing=packing_for(config, teacher, corpus, split=split),
        layers=teacher.layers,
        relation_heads=teacher.identity.num_heads,
        relations=() if config.codec in ("vectors", "none") else ROW_RELATIONS,
        codec=parameters,
        states=_states(config, teacher),
        precision=None if teacher.precision == "float32" else teacher.precision,
        mask="causal" if teacher.layers and teacher.has_causal_relations else None,
    )


def _states(config: DumpConfig, teacher: Teacher) -> StatesIdentity | None:
    """Return what is stored in addition to relations. None means that only relations are stored."""
    hidden = _numbers("--hidden", config.hidden, teacher)
    masked = _numbers("--masked-hidden", config.masked_hidden, teacher)
    first = _numbers("--first-hidden", config.first_hidden, teacher)
    if first:
        teacher.refuse_first_token("--first-hidden")
    if not config.has_states:
        return None
    is_masked, is_coded = bool(masked) or config.labels, bool(hidden or masked)
    return StatesIdentity(
        hidden=hidden,
        masked_hidden=masked,
        first=first,
        max_error=(config.max_error or DEFAULT_MAX_ERROR) if is_coded else None,
        calibration_tokens=STATE_CALIBRATION_TOKENS if is_coded else None,
        masking=(
            Masking(
                share=SHARE,
                mask_token=mask_token(teacher.tokenizer),
                seed=config.seed,
                readings=None if config.maskings == 1 else config.maskings,
            )
            if is_masked
            else None
        ),
        labels=(
            SoftLabels(
                k=config.label_k or DEFAULT_LABEL_K,
                temperature=config.label_temperature or 1.0,
                weight_ratio=PPS_RATIO,
                tokens="all" if config.label_tokens == "all" else None,
            )
            if config.labels
            else None
        ),
        num_classes=_num_classes(config, teacher) if config.logits else None,
        pooled=_pooling(config, teacher) if config.pooled else None,
        others=tuple(own_signal(name).described(teacher.identity) for name in config.signal),
    )


def _num_classes(config: DumpConfig, teacher: Teacher) -> int:
    teacher.refuse_other_texts(config.max_length)
    return teacher.num_classes


def _pooling(config: DumpConfig, teacher: Teacher) -> Pooling:
    pooler = teacher.pooler(config.pooling)
    teacher.refuse_other_texts(config.max_length)
    return pooler.identity(
        teacher.identity.hidden_size,
        min_cosine=DEFAULT_MIN_COSINE if config.min_cosine is None else config.min_cosine,
        calibration_sequences=CALIBRATION_SEQUENCES,
    )


def _numbers(option: str, chosen: Chosen | None, teacher: Teacher) -> tuple[int, ...]:
    """Return the numbers of the hidden states that an option chooses.

    Raises:
        InvalidConfigError: the teacher has no such state.
    """
    last = teacher.num_layers
    if chosen is None:
        return ()
    if isinstance(chosen, str):
        return (last,) if chosen == "last" else tuple(range(last + 1))
    refuse_no_state(chosen, last, option=option, teacher=teacher.name)
    return chosen


def codec_parameters(config: DumpConfig) -> CodecParameters:
    """Return the parameters of the requested codec, with defaults filled in."""
    if config.codec == "none":
        return NoRelationsParameters()
    if config.codec == "dense":
        return DenseParameters()
    if config.codec == "vectors":
        return VectorsParameters(
            max_kl=config.max_kl or DEFAULT_MAX_KL, calibration_tokens=CALIBRATION_TOKENS
        )
    select = config.select or "pps"
    return TopKParameters(
        k=min(DEFAULT_K, config.max_length) if config.k is None else config.k,
        select=select,
        tail=(config.tail or "uniform") if select == "largest" else None,
        weight_ratio=scale_ratio(select),
        seed=config.seed,
    )


def name_labels(config: DumpConfig) -> Labels:
    """Return the readable names that a cache carries."""
    return Labels(
        teacher=_label(config.teacher),
        corpus=_label(config.corpus),
        created_by=f"minilm-cache {RELEASE}",
        text_column=None if config.text_column is None else printable(config.text_column)[:512],
        documents="lines" if config.documents == "lines" else None,
        role_column=None if config.role_column is None else printable(config.role_column)[:512],
        pair_columns=None if config.pair_columns is None else printable(config.pair_columns)[:512],
        revision=None if config.revision is None else printable(config.revision)[:512],
    )


def _label(name: str) -> str:
    """Return a readable name; only the end of a path, since paths reveal details of a machine."""
    return printable(Path(name).resolve().name or "root")[:64]


def plan_manifest(
    config: DumpConfig,
    identity: CacheIdentity,
    *,
    calibration: Calibration | None,
    sequences: SequenceTable,
    attachments: Mapping[str, bytes],
    texts_sha256: str,
    imported: ImportConfig | None = None,
) -> tuple[CacheManifest, ShardRanges]:
    """Return the manifest of a dump, everything but what is measured at its end, and its shards.

    Args:
        config: what to dump.
        identity: identity of the cache.
        calibration: how the codes were fitted. None means that nothing is fitted.
        sequences: the corpus as sequences.
        attachments: content of the files that are not shards, by path in the cache.
        texts_sha256: hash of the corpus without a prompt.
        imported: settings of what was given in a file. None means that a teacher ran.

    Raises:
        InvalidConfigError: a shard or a commit record would be too large, or there would be too many shards.
    """
    shard_tokens = config.shard_tokens or default_shard_tokens(identity, calibration, sequences.num_tokens)
    ranges = ShardRanges.split(sequences, shard_tokens)
    _refuse_large_shards(identity, calibration, shard_tokens)
    if len(ranges) > MAX_SHARDS:
        raise InvalidConfigError(
            f"{len(ranges):,} shards of {shard_tokens} tokens are more than the {MAX_SHARDS:,} allowed. "
            f"Choose --shard-tokens {2 * shard_tokens} or more."
        )
    contents = {
        **zarr_documents(identity, calibration, num_shards=len(ranges), shard_tokens=shard_tokens),
        RANGES: encode_ranges(ranges),
        **attachments,
    }
    files = {path: digest_bytes(content) for path, content in contents.items()}
    _refuse_many_files(len(array_specs(identity, calibration)) + 1)
    has_prompt = identity.packing.prompt is not None or config.role_column is not None
    named: dict[str, object] = {"texts_sha256": texts_sha256 if has_prompt else None}
    if imported is not None:
        scores = imported.score_columns
        named |= {"imported": True, "score_columns": None if scores is None else printable(scores)[:512]}
    manifest = CacheManifest(
        fingerprint=identity.fingerprint(),
        complete=False,
        labels=name_labels(config).model_copy(update=named),
        identity=identity,
        num_tokens=sequences.num_tokens,
        num_sequences=sequences.num_sequences,
        num_held_out=sequences.num_held_out,
        held_out_by=sequences.held_out_by,
        cut=sequences.cut,
        shard_tokens=shard_tokens,
        calibration=calibration,
        files=files,
    )
    return manifest, ranges


def _refuse_large_shards(identity: CacheIdentity, calibration: Calibration | None, shard_tokens: int) -> None:
    """Raise InvalidConfigError for shards whose files, or segments, are too large for stores or memory."""
    if file_bytes(identity, calibration, shard_tokens) > MAX_FILE_BYTES:
        raise InvalidConfigError(
            f"--shard-tokens {shard_tokens}: files of shards could exceed {MAX_FILE_BYTES >> 30} GiB, which "
            "not every store can copy. Choose a smaller number (not with --add: dump anew)."
        )
    at_once = min(shard_tokens, segment_tokens(identity, calibration))
    if decoded_bytes(identity, calibration, at_once) > MAX_SEGMENT_BYTES:
        raise InvalidConfigError(
            f"{at_once} tokens, which are in memory at once, would decode to more than "
            f"{MAX_SEGMENT_BYTES >> 20} MiB. Choose smaller --shard-tokens (not with --add: dump anew), or a "
            "codec that stores less."
        )


def _refuse_many_files(num_files: int) -> None:
    """Raise InvalidConfigError if a shard has more files than its commit record can name."""
    if num_files * _RECORD_FILE_BYTES > MAX_RECORD_BYTES:
        raise InvalidConfigError(
            f"each shard would have {num_files} files, more than {MAX_RECORD_BYTES // _RECORD_FILE_BYTES}, "
            "which a commit record can name. Store fewer layers, hidden states or --maskings."
        )
