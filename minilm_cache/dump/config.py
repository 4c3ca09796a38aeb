"""What a dump is made from: teacher, text, codec, states."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.config import JsonDict

from minilm_cache.errors import CorpusError
from minilm_cache.objectives.config import COMPARING
from minilm_cache.objectives.spec import Form, needs_of, objective_names
from minilm_cache.settings import (
    ColumnSettings,
    CorpusSettings,
    DeviceSettings,
    FrozenSettings,
    PromptSettings,
    RevisionSettings,
    SequenceSettings,
    TeacherSettings,
    option_of,
)
from minilm_cache.storage_schema.identity import MAX_LAYERS, MAX_TOKENS, Precision, Truncation
from minilm_cache.storage_schema.states import MAX_OTHERS, MAX_READINGS, PoolingMode

Chosen = Literal["last", "all"] | tuple[int, ...]
"""The teacher's last layer or hidden state, all of them, or those with these numbers."""
MIN_SHARD_TOKENS = 64
DEFAULT_K = 16
"""Entries per row: students are within 0.3 % of dense targets after one epoch, within 1.6 % on their training
text after 20 (benchmarks/student_quality.py, benchmarks/many_epochs.py)."""
DEFAULT_MAX_KL = 0.005
"""Nats: after 20 epochs students are within 0.5 % of dense targets (benchmarks/many_epochs.py)."""
DEFAULT_MAX_ERROR = 0.1
"""Relative error of hidden states: losses come within 1 % of the teacher's (docs/objectives.md)."""
DEFAULT_MIN_COSINE = 0.9995
"""Mean cosine of stored pooled vectors with the teacher's."""
DEFAULT_LABEL_K = 32
"""Entries of each soft label."""
_DETECTED: Final[JsonDict] = {"default": "detected from torchrun or SLURM"}


def _read_numbers(value: object, most: int) -> object:
    """Return numbers given as `2,5,8` or as a list, ascending, and the words `last` and `all` as they are."""
    if value in ("last", "all", None):
        return value
    parts = value.split(",") if isinstance(value, str) else value
    numbers = [str(part).strip() for part in parts] if isinstance(parts, Sequence) else []
    if not all(number.isdecimal() and int(number) <= most for number in numbers):
        numbers = []
    if not numbers or len(set(map(int, numbers))) < len(numbers):
        raise ValueError(
            f"give last, all, or different numbers from 0 to {most} with commas between them, like 2,5,8"
        )
    return tuple(sorted(map(int, numbers)))


class TextSettings(PromptSettings, SequenceSettings):
    """How text becomes sequences."""

    packing: Literal["packed", "records", "pairs"] = "packed"
    """Join documents to full length (`packed`), or make one sequence of each document (`records`, the default
    with `--for embedding`) or of each pair of texts (`pairs`, the default with `--pair-columns`)."""
    truncation: Truncation | None = None
    """What is cut of a pair that is too long: the longer text first (`longest_first`), or the second alone
    (`only_second`), so that a question stays whole. None means longest_first, and only_second for queries
    with several documents."""

    @model_validator(mode="after")
    def _pairs_are_of_columns(self) -> "TextSettings":
        if self.packing == "pairs" and self.pair_columns is None:
            raise ValueError("--packing pairs needs --pair-columns. Add it, or choose another --packing")
        if self.packing != "pairs" and self.pair_columns is not None:
            raise ValueError(
                f"--packing {self.packing} does not go with --pair-columns, which make sequences of pairs"
            )
        if self.truncation is not None and self.pair_columns is None:
            raise ValueError(
                "--truncation needs --pair-columns: a single text is always cut at its end. Leave it out"
            )
        return self

    @model_validator(mode="after")
    def _prompt_is_of_documents(self) -> "TextSettings":
        given = self.given_options("prompt", "prompt_name", "role_column")
        if given and self.packing != "records":
            raise ValueError(
                f"{given[0]} needs --packing records, because a prompt stands before a whole document. Add "
                f"it, or leave out {given[0]}"
            )
        return self


class CodecSettings(FrozenSettings):
    """How relations are stored."""

    group = "Relations"
    codec: Literal["topk", "vectors", "dense", "none"] = "vectors"
    """How relations are stored; `none` stores none. With `--k`, `--select` or `--tail` the default is `topk`,
    with `--for embedding` alone it is `none`."""
    max_kl: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Maximum mean KL(teacher, stored) of each relation with codec `vectors`, nats. "
        f"None means {DEFAULT_MAX_KL}.",
    )
    layers: Chosen = "last"
    """Layers to store: `last`, `all`, or numbers from 0 on like 2,5,8. Several need codec `vectors`."""
    k: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description=f"Entries per row of codec `topk`. None means {DEFAULT_K}."
    )
    select: Literal["pps", "largest"] | None = None
    """Which entries codec `topk` keeps: an unbiased sample (`pps`) or the largest. None means `pps`."""
    tail: Literal["uniform", "renormalise"] | None = None
    """What stands for the entries that `--select largest` leaves out. None means `uniform`."""

    @field_validator("layers", mode="before")
    @classmethod
    def _read_layers(cls, value: object) -> object:
        return _read_numbers(value, MAX_LAYERS - 1)

    @model_validator(mode="after")
    def _options_go_with_the_codec(self) -> "CodecSettings":
        given = self.given_options("k", "select", "tail")
        if given and self.codec != "topk":
            raise ValueError(f"{given[0]} goes with --codec topk, not with {self.codec}")
        if self.codec != "vectors" and self.max_kl is not None:
            raise ValueError(f"--max-kl goes with --codec vectors, not with {self.codec}")
        if self.tail is not None and self.select != "largest":
            raise ValueError("--tail needs --select largest. Add it, or leave out --tail")
        if self.codec == "none" and self.layers != "last":
            raise ValueError("--layers are those of relations, which --codec none does not store")
        several = self.layers == "all" or (self.layers != "last" and len(self.layers) > 1)
        if several and self.codec != "vectors":
            raise ValueError(f"several --layers go with --codec vectors, not with {self.codec}")
        return self


class StateSettings(FrozenSettings):
    """What is stored in addition to relations."""

    group = "Signals"
    hidden: Chosen | None = None
    """Hidden states of every token to store: `last`, `all`, or numbers. 0 is the output of the embeddings, n
    that of the n-th layer."""
    masked_hidden: Chosen | None = None
    """Hidden states of every token of sequences that are read with tokens masked: `last`, `all`, or
    numbers."""
    first_hidden: Chosen | None = None
    """Hidden states of each sequence's first token, [CLS], alone: `last`, `all`, or numbers."""
    max_error: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Greatest relative error of hidden states of every token, between 0 and 1. "
        f"None means {DEFAULT_MAX_ERROR}.",
    )
    labels: bool = False
    """Store soft labels of masked tokens."""
    label_tokens: Literal["masked", "all"] | None = None
    """Tokens that have soft labels. None means `masked`, and `all` with `--for distilbert`."""
    maskings: Annotated[int, Field(ge=1, le=MAX_READINGS)] | None = None
    """Masked readings of each sequence, which the epochs of a training take in turn. None means 1."""
    label_k: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None,
        description=f"Tokens of the vocabulary that each soft label keeps. None means {DEFAULT_LABEL_K}.",
    )
    label_temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """What the teacher's logits are divided by before the softmax of labels. None means 1, and 2 with `--for
    distilbert`."""
    logits: bool = False
    """Store the logits of a teacher that classifies sequences."""
    signal: tuple[str, ...] = Field((), max_length=MAX_OTHERS)
    """Signals of your own to store, by the names that they are registered under (`register_signal`)."""
    pooled: bool = False
    """Store one vector of each sequence, as the teacher pools its last hidden states."""
    pooling: PoolingMode | None = None
    """How a teacher without a modules.json pools: `mean`, `cls` (the first token), `max` or `lasttoken`. None
    means as its folder says, and an error where it says nothing."""
    min_cosine: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Least mean cosine of stored pooled vectors with the teacher's. "
        f"None means {DEFAULT_MIN_COSINE}.",
    )

    @field_validator("hidden", "masked_hidden", "first_hidden", mode="before")
    @classmethod
    def _read_hidden(cls, value: object) -> object:
        return _read_numbers(value, MAX_LAYERS)

    @property
    def has_states(self) -> bool:
        """Whether states, labels, logits or vectors of texts are stored, for which the whole teacher runs."""
        states = (self.hidden, self.masked_hidden, self.first_hidden)
        return states != (None, None, None) or bool(self.labels or self.logits or self.pooled or self.signal)

    @model_validator(mode="after")
    def _states_fit_together(self) -> "StateSettings":
        needed = {
            **dict.fromkeys(("label_k", "label_temperature", "label_tokens"), ("labels",)),
            **dict.fromkeys(("pooling", "min_cosine"), ("pooled",)),
            "maskings": ("labels", "masked_hidden"),
            "max_error": ("hidden", "masked_hidden"),
        }
        for name, others in needed.items():
            if getattr(self, name) is not None and all(
                getattr(self, other) in (None, False) for other in others
            ):
                flag, *flags = map(option_of, (name, *others))
                which = "it" if len(flags) == 1 else "one of them"
                raise ValueError(f"{flag} needs {' or '.join(flags)}. Add {which}, or leave out {flag}")
        if len(set(self.signal)) < len(self.signal):
            raise ValueError(f"signal {', '.join(self.signal)}: name each signal once")
        if self.logits and (self.labels or self.masked_hidden is not None):
            raise ValueError(
                "--logits cannot be combined with --labels or --masked-hidden: a teacher that classifies "
                "sequences has no head for masked tokens. Leave out one of them"
            )
        return self


class SpeedSettings(DeviceSettings):
    """How the teacher computes."""

    precision: Precision | None = None
    """Precision of the teacher: `float32`, `tf32` (NVIDIA GPUs), `bfloat16`, or `int8`, which holds weights
    of linear layers in 8 bits and computes in bfloat16. A cache of another precision is another cache.
    None means the precision of the cache that is resumed or added to; of a new cache, bfloat16 on a GPU and
    float32 on a CPU."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Sequences per forward pass of the teacher. None means as many as a quarter of a GPU's free memory
    holds, at most 1024, and 32 on a CPU."""
    compiled: Annotated[bool, Field(json_schema_extra={"flag": "--compile"})] = False
    """Compile the teacher by torch.compile: a GPU then launches a whole forward pass at once."""


class DumpConfig(TeacherSettings, TextSettings, CodecSettings, StateSettings, SpeedSettings):
    """Settings of a dump: everything but the folder that it is written to."""

    group = "Writing"
    serve: Annotated[tuple[str, ...], Field(alias="for", exclude=True)] = ()
    """Objectives that the cache is to serve, like minilm,tinybert,mlm-kd: what they need is stored."""
    shard_tokens: Annotated[int, Field(ge=MIN_SHARD_TOKENS, le=2**26)] | None = None
    """Tokens per shard, a power of two. None means 262144, fewer where a shard would decode to over 256 MiB,
    and more for a corpus of more than 20,000 such shards."""
    keep_weights: bool = False
    """Keep the teacher's weights in the cache, in float16, so that students can be cut from them wherever the
    cache is."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of documents and of what codec `topk` draws."""
    rank: Annotated[int, Field(ge=0, json_schema_extra=_DETECTED)] = 0
    """Number of this process, counted from 0: of 8 processes, number 2 writes shards 2, 10, 18 and so on,
    then those that other processes of the same folder have not begun."""
    world_size: Annotated[int, Field(ge=1, json_schema_extra=_DETECTED)] = 1
    """Number of processes that write this cache."""
    check: Literal["sizes", "full"] = "sizes"
    """What is checked of the shards that are there when a dump is resumed: the sizes of their files, or
    every byte and row. Shards that do not pass are written again."""

    @property
    def needs_vectors(self) -> bool:
        """Whether the objectives to serve need codec `vectors`."""
        return needs_of(self.serve).vectors

    @model_validator(mode="before")
    @classmethod
    def _read_objectives(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read `for`, the objectives that the cache is to serve, as the settings that they need."""
        given = {name: value for name, value in values.items() if value is not None}
        served = objective_names(given.pop("for", given.pop("serve", ())))
        needs = needs_of(served)
        if "codec" not in given and not needs.vectors and {"k", "select", "tail"} & given.keys():
            given["codec"] = "topk"
        if given.get("codec") == "none" and served and needs.relations:
            raise ValueError("--for asks for relations, which --codec none does not store; leave it out")
        if given.get("codec", "vectors") != "vectors" and needs.vectors:
            raise ValueError(f"--for asks for codec vectors; leave out --codec {given['codec']}")
        of_pairs = {"packing": "pairs"} if "pair_columns" in given else {}
        return {**needs.settings(), **of_pairs, **given, "for": served}

    @model_validator(mode="after")
    def _fits_together(self) -> "DumpConfig":
        compared = next((name for name in self.serve if name in COMPARING), None)
        if compared is not None and self.pair_columns is None:
            raise ValueError(
                f"--for {compared} compares the documents of a query: name their columns, like "
                "--pair-columns query,documents"
            )
        if self.logits and self.packing == "packed":
            raise ValueError(
                "--logits goes with --packing records or pairs: an answer is about one document, or one pair"
            )
        if self.codec == "none" and not self.has_states:
            raise ValueError(
                "--codec none stores no relations, and nothing else is asked for. Add --for embedding, "
                "--logits or another signal"
            )
        if self.pooled and self.packing == "packed":
            raise ValueError(
                "--pooled goes with --packing records or pairs: a vector is about one document, or one pair"
            )
        if self.k is not None and self.k > self.max_length:
            raise ValueError(
                f"--k {self.k} is above --max-length {self.max_length}: a row has no more entries"
            )
        if self.rank >= self.world_size:
            raise ValueError(f"--rank {self.rank} is not below --world-size {self.world_size}")
        if self.shard_tokens is not None and self.shard_tokens & (self.shard_tokens - 1):
            raise ValueError(f"--shard-tokens {self.shard_tokens} is not a power of two")
        if self.shard_tokens is not None and self.shard_tokens < self.max_length:
            raise ValueError(f"--shard-tokens {self.shard_tokens} is below --max-length {self.max_length}")
        return self


class ImportConfig(FrozenSettings):
    """Settings of an import of texts and vectors, or of pairs of texts and scores."""

    group = "Import"
    vectors: str
    """Parquet file of texts and their vectors, or .jsonl, .parquet, .csv or .tsv file of pairs and scores."""
    tokenizer: str
    """Model whose tokenizer, family and sizes students have: `mini`, a folder or a hub id. Its weights are
    not read."""
    teacher: str | None = None
    """Name of the model that computed the vectors or scores, for `info` and cards; no such model is loaded.
    None means the name of the file."""
    pair_columns: Annotated[str, Field(min_length=3, max_length=512)] | None = None
    """Columns of pairs of texts that have scores, like question,answer or, of a query and its documents,
    query,pos+neg. None means that the file holds texts and vectors."""
    score_columns: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Columns of the scores, one for each column of documents, like pos_scores+neg_scores. None means that
    the file holds texts and vectors."""
    text_column: str | None = None
    """Column of the texts with vectors. None means `text`."""
    vector_column: str = "embedding"
    """Column of the vectors, lists of numbers."""
    pooling: PoolingMode = "mean"
    """How students pool."""
    prompt: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Words that students read before every text with a vector. None means the texts alone."""
    min_cosine: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description=f"Least mean cosine of stored vectors with given ones. None means {DEFAULT_MIN_COSINE}.",
    )
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Most tokens that students read of a text, special tokens included."""
    max_tokens: Annotated[int, Field(ge=4, le=MAX_TOKENS)] | None = None
    """Most tokens to take in all. None means all texts."""
    shard_tokens: Annotated[int, Field(ge=MIN_SHARD_TOKENS, le=2**26)] | None = None
    """Tokens per shard, a power of two. None means 262144, and more for many texts."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of texts."""

    @model_validator(mode="after")
    def _scores_are_of_pairs(self) -> "ImportConfig":
        if (self.pair_columns is None) != (self.score_columns is None):
            raise ValueError("--pair-columns and --score-columns go together: give both, or neither")
        given = self.given_options("text_column", "vector_column", "pooling", "prompt", "min_cosine")
        if given and self.score_columns is not None:
            raise ValueError(f"{given[0]} is about vectors, and --score-columns asks for scores")
        return self


class VerifyConfig(ColumnSettings, RevisionSettings, DeviceSettings):
    """Settings of a verification."""

    group = "Verification"
    full: bool = False
    """Read and hash every byte, and decode every array."""
    teacher: str | None = None
    """Run this teacher again on a sample, and compare. None means that no teacher is run."""
    corpus: str | None = None
    """With `--teacher`: the text that the cache should be of. None means that tokens are not compared."""

    @model_validator(mode="after")
    def _options_go_with_a_teacher(self) -> "VerifyConfig":
        others = (self.corpus, self.text_column, self.device, self.revision, self.documents)
        if self.teacher is None and others != (None, None, None, None, "paragraphs"):
            raise ValueError(
                "--corpus, --text-column, --documents, --revision and --device go with --teacher, and only "
                "with it"
            )
        return self


class HeadConfig(TeacherSettings, SequenceSettings):
    """Settings of the fit of a head for masked tokens."""

    group = "Fit"
    epochs: Annotated[int, Field(ge=1)] = 3
    """Passes over the text, each with other tokens masked."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences per step."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Learning rate of AdamW at the beginning; it falls linearly to 0."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of weights, order and masks."""


class AugmentConfig(TeacherSettings, CorpusSettings):
    """Settings of the augmentation of a corpus (TinyBERT, arXiv 1909.10351, algorithm 1)."""

    group = "Augmentation"
    corpus: str
    """The text: a file, a folder, or `hf:ID[:CONFIG][:SPLIT]`; each record is a document."""
    pair_columns: Annotated[str, Field(min_length=3, max_length=512)] | None = None
    """Columns of pairs of texts like question,sentence, both of which get copies. None means single texts."""
    copies: Annotated[int, Field(ge=1, le=1000)] = 20
    """Copies of each document, N_a in the paper; copies that are equal are kept once."""
    candidates: Annotated[int, Field(ge=1, le=1000)] = 15
    """Words that may replace a word, K in the paper."""
    replace: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Probability that a word is replaced, p_t in the paper."""
    form: Form = "authors"
    """The authors' published code (`authors`), which leaves out English stop words and words with letters
    other than a to z, reads the document itself as a second segment, and keeps capitals; or algorithm 1 as
    printed (`paper`)."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Tokens that the model reads of a document; words beyond them are not replaced."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the random replacements."""


PLANNED = frozenset(
    {"codec", "k", "max_kl", "select", "tail", "rank", "world_size", "shard_tokens", "signal", "check"}
)
"""Settings of a dump that a plan chooses itself, or has no use for."""


class PlanConfig(FrozenSettings):
    """Which settings a plan compares, on how much text."""

    group = "Plan"
    k: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (8, 16)
    """Entries per row of codec `topk` to compare. Repeat the option for several values."""
    max_kl: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.02, 0.015, 0.005)
    """Mean KL of each relation of codec `vectors` to compare, nats. Repeat the option for several values."""
    dense: bool = True
    """Compare codec `dense`, the exact reference, too."""
    sample_tokens: Annotated[int, Field(ge=512)] = 65_536
    """Approximate number of tokens that are dumped as a sample."""
    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """Choose the most faithful setting of at most this many bytes. None means that all are
    shown and none is chosen."""


def refuse_no_file(config: ImportConfig) -> None:
    """Raise CorpusError if what is to be imported is no file."""
    if not Path(config.vectors).is_file():
        wanted = (
            "a Parquet file of texts and vectors"
            if config.score_columns is None
            else "records of pairs of texts and their scores"
        )
        raise CorpusError(f"{config.vectors} is not a file. Give {wanted}.")
