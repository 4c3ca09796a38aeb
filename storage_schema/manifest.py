"""The manifest of a cache, and what a finished dump measured of itself.

It is read from disk and may be hostile, so every field is typed strictly and unknown fields are refused.
"""

import math
from collections.abc import Collection
from typing import Annotated, ClassVar, Final, Literal

from pydantic import FailFast, Field, model_validator

from minilm_cache.storage_schema.base import Sha256, StoredModel
from minilm_cache.storage_schema.documents import (
    MAX_FILE_BYTES,
    MAX_TOTAL_BYTES,
    FileDigest,
    RelativePath,
    ShardRange,
    StoredDocument,
)
from minilm_cache.storage_schema.identity import (
    MAX_LAYERS,
    MAX_TOKENS,
    CacheIdentity,
    Name,
    RelationKind,
    VectorsParameters,
)
from minilm_cache.storage_schema.states import POOLED, SignalName, StateFamily
from minilm_cache.storage_schema.versions import FORMAT_VERSION

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Fidelity(StoredModel):
    """What was stored against what the teacher says, on held-out sequences read back from disk.

    Means over relation heads and valid rows, in nats.
    """

    kl_teacher_to_stored: Finite | None
    """KL(teacher || stored). None means infinite: a sparse row leaves out columns that the teacher has."""
    kl_stored_to_teacher: Finite
    """KL(stored || teacher)."""
    mass_kept: Finite
    """Probability that the teacher puts on the stored columns, 0 to 1."""
    cross_entropy_bias: Finite
    """Mean of sum_j (stored_j - teacher_j) log teacher_j; 0 in expectation if the codec is unbiased."""


def require_both(relations: Collection[RelationKind]) -> None:
    """Raise ValueError unless the relations are attention and value relation."""
    if set(relations) != {RelationKind.ATTENTION, RelationKind.VALUE}:
        raise ValueError("figures are not of attention and value relation")


class LayerFidelity(StoredModel):
    """Fidelity of one tapped layer."""

    layer: int = Field(ge=0, lt=1024)
    relations: dict[RelationKind, Fidelity]
    """Fidelity of the attention and of the value relation."""

    @model_validator(mode="after")
    def _covers_both_relations(self) -> "LayerFidelity":
        require_both(self.relations)
        return self


class StateFidelity(StoredModel):
    """How faithful something beside relations is, on held-out sequences read back from disk."""

    path: Annotated[str, Field(max_length=128)]
    """Path of its array, or of the group that contains its arrays."""
    bytes_per_token: float = Field(ge=0, le=MAX_FILE_BYTES)
    """Bytes of its shard files, per token of the cache."""
    relative_error: Finite | None = None
    """Square root of the squared error over the variance of the teacher's values. For first tokens and
    logits, which hardly differ from sequence to sequence, and for pooled vectors the squared values replace
    the variance. None for labels."""
    cross_entropy_bias: Finite | None = None
    """Mean of sum_j (stored_j - teacher_j) log teacher_j over labels, nats; 0 in expectation. None for
    everything but labels."""
    cosine: Finite | None = None
    """Mean cosine of stored vectors with the teacher's. None for everything but pooled vectors."""

    sections: ClassVar[frozenset[str]] = frozenset({"cosine"})


class Measured(StoredModel):
    """What a finished dump measured of itself."""

    bytes_per_token: float = Field(gt=0, le=MAX_FILE_BYTES)
    """Bytes of all shard files (arrays and sequence tables) per token."""
    total_bytes: int = Field(ge=0, le=MAX_TOTAL_BYTES)
    """Bytes of all shard files."""
    fidelity_sequences: int = Field(ge=1, le=MAX_TOKENS)
    """Number of held-out sequences that the fidelity was measured on."""
    fidelity: Annotated[tuple[LayerFidelity, ...], Field(max_length=MAX_LAYERS)]
    """One entry for each tapped layer, in order; empty where no relations are stored."""
    states: Annotated[tuple[StateFidelity, ...], Field(max_length=1024)] = ()
    """One entry for each of `StatesIdentity.paths`, in order."""

    sections: ClassVar[frozenset[str]] = frozenset({"states"})


MAX_MANIFEST_BYTES: Final = 8 * 2**20
"""Longest manifest: one of format 1 may list about 80,000 shards. Refusing a manifest that was made to fill
memory takes about sixty times its size."""

_VECTORS_FOLDER: Final = "vectors"
_SMALL_CHUNKS: Final = ("basis/c/0/0", "step/c/0", "analysis/c/0/0", "gain/c/0", "mean/c/0")
PREVIEW: Final = "preview/sequences.parquet"
RANGES: Final = "index/ranges.parquet"
"""Sequences and tokens of each shard."""
INDEX: Final = "index/shards.parquet"
"""What each shard of a complete cache consists of."""
TEACHER_FOLDER: Final = "teacher"
TEACHER_CONFIG: Final = "teacher/config.json"
TEACHER_WEIGHTS: Final = "teacher/model.safetensors"
"""Weights of the teacher in float16, if a cache keeps them (`dump --keep-weights`)."""
PROMPTS_FILE: Final = "config_sentence_transformers.json"
"""File of a teacher's prompts, in a folder of sentence-transformers and in `TEACHER_FOLDER`."""
TEACHER_PROMPTS: Final = f"{TEACHER_FOLDER}/{PROMPTS_FILE}"
OUTSIDE: Final = frozenset({TEACHER_WEIGHTS, TEACHER_PROMPTS})
"""Files that a cache may have or lack, and get anew, as its identity says nothing of them."""
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
"""Files that a tokenizer may consist of; other files in its folder could change how it is loaded."""


_MAX_HEADS_WIDTH: Final = 8
"""Most width of all heads of a layer, over the teacher's hidden size; readers decode to this width."""


def layer_folder(layer: int) -> str:
    """Return the path of the group of a layer's arrays (codec `vectors`)."""
    return f"{_VECTORS_FOLDER}/{layer}"


MAX_SCALING: Final = 2.0**20
"""Greatest factor of query-key products."""


class LayerCalibration(StoredModel):
    """How codec `vectors` was fitted to one layer."""

    layer: int = Field(ge=0, lt=1024)
    components: int = Field(ge=1, le=2**18)
    """Number of codes of a token."""
    head_size: int = Field(ge=1, le=2**16)
    scaling: float = Field(gt=0, le=MAX_SCALING)
    """Factor that query-key products are multiplied by."""
    window: int | None = Field(ge=0, le=2**16)
    """Positions to each side that the teacher's attention sees. None means all."""
    kl: dict[RelationKind, Annotated[float, Field(ge=0, le=1)]]
    """Mean KL(teacher || stored) of attention and of value relation on the checked sequences, nats."""

    @model_validator(mode="after")
    def _covers_both_relations(self) -> "LayerCalibration":
        require_both(self.kl)
        return self


class StateCalibration(StoredModel):
    """How a code was fitted to a hidden state of every token, or to pooled vectors."""

    family: StateFamily
    number: int = Field(ge=0, le=1024)
    components: int = Field(ge=1, le=2**16)
    """Number of codes of a token."""
    error: float = Field(ge=0, le=1)
    """Relative error on the checked sequences: square root of squared error over variance. For pooled vectors
    1 less their mean cosine with the teacher's."""

    @property
    def name(self) -> SignalName:
        """Name of the state."""
        return SignalName(self.family, self.number)


class Calibration(StoredModel):
    """How codec `vectors` was fitted to the tapped layers, and codes to hidden states."""

    num_fitted: int = Field(ge=1, le=MAX_TOKENS)
    """Number of sequences, from the first on, that the codes were fitted to."""
    num_checked: int = Field(ge=1, le=MAX_TOKENS)
    """Number of sequences after those that the step was chosen on."""
    layers: Annotated[tuple[LayerCalibration, ...], Field(max_length=MAX_LAYERS)]
    """One entry for each tapped layer, in order. Empty with every codec but `vectors`."""
    states: Annotated[tuple[StateCalibration, ...], Field(max_length=2 * MAX_LAYERS + 2)] = ()
    """One entry for each hidden state of every token and for pooled vectors, in order."""

    sections: ClassVar[frozenset[str]] = frozenset({"states"})

    def of_layer(self, layer: int) -> LayerCalibration:
        """Return how the code was fitted to a tapped layer."""
        return next(fitted for fitted in self.layers if fitted.layer == layer)


class Labels(StoredModel):
    """Names for people; they do not enter the fingerprint."""

    teacher: Name
    corpus: Name
    created_by: Name
    text_column: Name | None = None
    """Column of records that holds the text. None means `text`, or a cache of the first releases, which did
    not record it."""
    documents: Literal["lines"] | None = None
    """`lines`: documents are the lines of .txt files. None means paragraphs."""
    imported: Literal[True] | None = None
    """True: vectors or scores were given in a file, and no teacher ran. None means a dump."""
    revision: Name | None = None
    """Revision of a teacher from the hub. None means the newest, or a cache of the first releases, which
    did not record it."""
    role_column: Name | None = None
    """Column of records that named the prompt of each text, which is part of the text in the hash of the
    corpus. None means that all texts have the same prompt, or none."""
    pair_columns: Name | None = None
    """Columns of the two texts of each record, with a comma between them. None means that records are single
    texts."""
    score_columns: Name | None = None
    """Columns of the scores of imported pairs, with + between them. None means that no scores were given."""
    texts_sha256: Sha256 | None = None
    """Hash of the corpus as in its identity, without the prompt. None means that there is no prompt, or a
    cache of an earlier release."""

    sections: ClassVar[frozenset[str]] = frozenset(
        {
            *("text_column", "documents", "imported", "revision"),
            *("role_column", "pair_columns", "score_columns", "texts_sha256"),
        }
    )


class CutText(StoredModel):
    """What is missing of texts that are longer than a sequence."""

    texts: int = Field(ge=1, le=2**40)
    """Number of texts whose ends are missing."""
    tokens: int = Field(ge=1, le=MAX_TOKENS)
    """Number of tokens that are missing."""
    of_tokens: int = Field(ge=1, le=MAX_TOKENS)
    """Number of tokens of all texts, without special tokens."""

    @property
    def in_words(self) -> str:
        """How much of the text is missing, for people."""
        noun = "text" if self.texts == 1 else "texts"
        share = 100 * self.tokens / self.of_tokens
        return f"{share:.1f} % of the tokens, at the ends of {self.texts:,} {noun} longer than --max-length"


class CacheManifest(StoredDocument):
    """All that describes a cache."""

    format_version: Literal[1, 2] = FORMAT_VERSION
    fingerprint: Sha256
    complete: bool
    """True only if every shard is committed."""
    labels: Labels
    identity: CacheIdentity
    num_tokens: int = Field(ge=1, le=MAX_TOKENS)
    """Number of tokens of all sequences, without the slack at the end of each shard."""
    num_sequences: int = Field(ge=1, le=MAX_TOKENS)
    num_held_out: int = Field(ge=0, le=MAX_TOKENS)
    """Number of sequences, at the end, that are never trained on."""
    held_out_by: Literal["documents", "sequences"] | None = None
    """`documents`: no document, and no copy of a document, is both held out and trained on. `sequences`: the
    corpus has too few documents for that, so the last sequences are held out, wherever a document ends. None
    means the same as `sequences`."""
    cut: CutText | None = None
    """What is missing of the texts of packing `records`. None means that every text is whole, or that it is
    not known (packing `packed`, and caches of earlier releases)."""
    shard_tokens: int = Field(ge=64, le=2**26)
    """Rows of a shard in every array; a power of two."""
    shards: Annotated[tuple[ShardRange, ...], FailFast(), Field(max_length=2**20)] = ()
    """What each shard holds, in format 1. Empty in format 2, where `index/ranges.parquet` says it."""
    calibration: Calibration | None = None
    """Calibration of codec `vectors` and of coded states. None means that neither is stored."""
    files: dict[RelativePath, FileDigest]
    """Files outside the shards: array metadata, the teacher's configuration and tokenizer, the tables of
    shards, the preview."""
    measured: Measured | None = None
    """What the finished dump measured. None until the cache is complete."""

    sections: ClassVar[frozenset[str]] = frozenset({"held_out_by", "shards", "cut"})

    @property
    def texts_sha256(self) -> str:
        """Hash of the texts, without a prompt before them, by which caches of other teachers are compared."""
        return self.labels.texts_sha256 or self.identity.corpus.sha256

    @model_validator(mode="after")
    def _is_consistent(self) -> "CacheManifest":
        if self.fingerprint != self.identity.fingerprint():
            raise ValueError("fingerprint is not the hash of the identity")
        if self.shard_tokens & (self.shard_tokens - 1):
            raise ValueError("shard_tokens is not a power of two")
        if self.shard_tokens < self.identity.packing.max_length:
            raise ValueError("shard_tokens is less than max_length")
        if self.num_held_out >= self.num_sequences:
            raise ValueError("every sequence is held out")
        if self.complete != (self.measured is not None):
            raise ValueError("`measured` goes with complete=true, and only with it")
        return self

    @model_validator(mode="after")
    def _names_its_shards(self) -> "CacheManifest":
        lists = bool(self.shards)
        tables = {RANGES, INDEX} & self.files.keys()
        if lists != (self.format_version == 1):
            raise ValueError("`shards` goes with format 1, and only with it")
        expected = set() if lists else {RANGES, INDEX} if self.complete else {RANGES}
        if tables != expected:
            raise ValueError(f"{RANGES} goes with format 2, and {INDEX} with complete=true in it")
        next_sequence = 0
        for shard in self.shards:
            if shard.first_sequence != next_sequence:
                raise ValueError("shards do not follow each other without gap or overlap")
            if not shard.num_sequences <= shard.num_tokens <= self.shard_tokens:
                raise ValueError("a shard holds more tokens than it has room for, or empty sequences")
            next_sequence += shard.num_sequences
        totals = (next_sequence, sum(shard.num_tokens for shard in self.shards))
        if lists and totals != (self.num_sequences, self.num_tokens):
            raise ValueError("the shards do not add up to the totals")
        return self

    @model_validator(mode="after")
    def _names_no_other_file(self) -> "CacheManifest":
        known = {TEACHER_CONFIG, TEACHER_WEIGHTS, TEACHER_PROMPTS, PREVIEW, RANGES, INDEX}
        known |= {f"{TEACHER_FOLDER}/{name}" for name in TOKENIZER_FILES}
        if self.calibration is not None:
            folders = [layer_folder(fitted.layer) for fitted in self.calibration.layers]
            folders += [state.name.folder for state in self.calibration.states]
            known |= {f"{folder}/{chunk}" for folder in folders for chunk in _SMALL_CHUNKS}
        unknown = [
            path for path in self.files if path not in known and path.rsplit("/", 1)[-1] != "zarr.json"
        ]
        if unknown:
            raise ValueError(f"{unknown[0]} is no file of the format")
        return self

    @model_validator(mode="after")
    def _calibration_is_of_what_is_coded(self) -> "CacheManifest":
        codec = self.identity.codec
        layers = self.identity.layers if isinstance(codec, VectorsParameters) else ()
        states = self.identity.states.coded if self.identity.states is not None else ()
        calibration = self.calibration
        if (calibration is None) == bool(layers or states):
            raise ValueError("`calibration` goes with codec `vectors` and hidden states, and only with them")
        if calibration is not None:
            if tuple(fitted.layer for fitted in calibration.layers) != layers:
                raise ValueError("calibration.layers names other layers than identity.layers")
            if tuple(state.name for state in calibration.states) != states:
                raise ValueError("calibration.states names other states than identity.states")
            if calibration.num_fitted + calibration.num_checked > self.num_train:
                raise ValueError("the calibration used sequences that are held out")
            self._check_bounds(calibration)
        return self

    def _check_bounds(self, calibration: Calibration) -> None:
        codec, states = self.identity.codec, self.identity.states
        most = _MAX_HEADS_WIDTH * self.identity.teacher.hidden_size
        for layer in calibration.layers:
            if self.identity.relation_heads * layer.head_size > most:
                raise ValueError("the calibration has heads that are too wide for the teacher")
            if isinstance(codec, VectorsParameters) and max(layer.kl.values()) > codec.max_kl:
                raise ValueError("the calibration does not keep to the codec's max_kl")
        for state in calibration.states:
            assert states is not None
            width, bound = self.identity.teacher.hidden_size, states.max_error
            if state.name == POOLED and states.pooled is not None:
                width, bound = states.pooled.width, 1 - states.pooled.min_cosine
            if state.components > width:
                raise ValueError("a coded state has more components than dimensions")
            if bound is not None and state.error > bound:
                raise ValueError("the calibration does not keep to the bound of a coded state")

    @model_validator(mode="after")
    def _fidelity_is_of_what_is_stored(self) -> "CacheManifest":
        if self.measured is None:
            return self
        if [layer.layer for layer in self.measured.fidelity] != list(self.identity.layers):
            raise ValueError("measured.fidelity names other layers than identity.layers")
        stored = self.identity.states.paths if self.identity.states is not None else ()
        if [state.path for state in self.measured.states] != list(stored):
            raise ValueError("measured.states names other states than identity.states")
        return self

    @property
    def num_train(self) -> int:
        """Number of sequences that may be trained on: those numbered 0 to num_train - 1."""
        return self.num_sequences - self.num_held_out

    @property
    def kl_over_max(self) -> float | None:
        """Greatest measured KL of codec `vectors` divided by `max_kl`, which held on the checked sequences.

        Above 1 the bound does not hold on the held-out sequences. Infinity where a stored row has zeros that
        the teacher's row has not. None with another codec, or before the cache is complete.
        """
        codec = self.identity.codec
        if not isinstance(codec, VectorsParameters) or self.measured is None:
            return None
        figures = [figure for layer in self.measured.fidelity for figure in layer.relations.values()]
        divergences = [figure.kl_teacher_to_stored for figure in figures]
        return max(math.inf if each is None else each for each in divergences) / codec.max_kl

    @property
    def held_out_in_words(self) -> str:
        """Text that says how many sequences are held out, and whether their documents are also trained on."""
        if not self.num_held_out:
            return "none held out"
        by = {
            "documents": "whole documents with all their copies",
            "sequences": "the ends of documents, or copies, that are also trained on: too few others",
            None: "the last ones, wherever a document ends",
        }[self.held_out_by]
        return f"{self.num_held_out:,} held out ({by})"

    @property
    def measured_on(self) -> str:
        """Text that says how many sequences of which kind fidelity was measured on."""
        assert self.measured is not None
        number = self.measured.fidelity_sequences
        noun = "sequence" if number == 1 else "sequences"
        if self.num_held_out:
            return f"{number} held-out {noun}"
        return f"{number} training {noun} (none is held out)"
