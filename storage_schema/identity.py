"""What determines the content of a cache: its canonical JSON is hashed into the fingerprint.

It is read from disk and may be hostile, so every field is typed strictly and unknown fields are refused.
"""

import hashlib
import json
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from minilm_cache.storage_schema.base import Sha256, StoredModel
from minilm_cache.storage_schema.states import Pooling, SoftLabels, StatesIdentity

Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]

MAX_LAYERS: Final = 128
"""Most tapped layers of a cache: each has a file in every shard."""
MAX_TOKENS: Final = 2**44
"""Most tokens of a cache: far more than any corpus has, and it bounds arithmetic on hostile sizes."""


Precision = Literal["float32", "tf32", "bfloat16", "int8"]
"""How a teacher computes: in float32, in float32 with products of TF32 (10 bits behind the point), with
weights and activations in bfloat16, or in bfloat16 with the weights of linear layers in 8 bits."""


class RelationKind(StrEnum):
    """Which relation of a layer (MiniLM, Wang et al. 2020, section 3)."""

    ATTENTION = "attention"
    """softmax(Q K^T / sqrt(d_k)), eq. 3."""
    VALUE = "value"
    """softmax(V V^T / sqrt(d_k)), eq. 7."""
    QUERY = "query"
    """softmax(Q Q^T / sqrt(d_k)) (MiniLMv2, Wang et al. 2021)."""
    KEY = "key"
    """softmax(K K^T / sqrt(d_k)) (MiniLMv2)."""


def canonical_sha256(content: object) -> str:
    """Return the SHA-256 (hex) over canonical JSON: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class TeacherIdentity(StoredModel):
    """The teacher, by content."""

    model_type: Name
    """Model family as transformers names it: `bert`, `xlm-roberta`, ..."""
    weights_sha256: Sha256
    """SHA-256 of the safetensors file. For several files: SHA-256 over names and digests, sorted by name."""
    config_sha256: Sha256
    """SHA-256 over the canonical JSON of the model's configuration."""
    num_layers: int = Field(ge=1, le=1024)
    hidden_size: int = Field(ge=1, le=2**16)
    num_heads: int = Field(ge=1, le=1024)
    vocab_size: int = Field(ge=1, le=2**24)


class CorpusIdentity(StoredModel):
    """The text, by content."""

    sha256: Sha256
    """SHA-256 over the UTF-8 bytes of every record, each preceded by its length (8 bytes, little-endian)."""
    num_documents: int = Field(ge=1, le=2**40)
    """Number of records that hold text."""
    copies_sha256: Sha256 | None = None
    """SHA-256, formed like `sha256`, over the values of column `document`: records with the same value are
    copies of one text. None means that the column does not exist, or that the split does not use it."""
    pairs: Literal[True] | None = None
    """True: each record holds two texts, which are hashed as one with U+001E between them. None means one
    text."""

    groups: Literal[True] | None = None
    """True: records are queries with their documents, each of which is a pair; `copies_sha256` is over the
    query of each pair, and pairs of a query follow each other. None means that each record is a text or a
    pair of its own."""

    sections: ClassVar[frozenset[str]] = frozenset({"copies_sha256", "pairs", "groups"})


MAX_SPECIAL: Final = 16
"""Most special tokens that a tokenizer may put around a text."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
PackingMode = Literal["packed", "records", "pairs"]
Split = Literal["documents", "tokens"]


class Template(StoredModel):
    """Special tokens around each text, as the teacher's tokenizer puts them."""

    before: Annotated[tuple[TokenId, ...], Field(max_length=MAX_SPECIAL)]
    """Ids of the tokens before a text."""
    after: Annotated[tuple[TokenId, ...], Field(max_length=MAX_SPECIAL)]
    """Ids of the tokens after a text."""
    separator: TokenId
    """Id of the token between two documents of a packed sequence."""


Truncation = Literal["longest_first", "only_second"]
"""What is cut of a pair of texts that is too long: the longer text first, or the second text alone."""


class PairTemplate(StoredModel):
    """Special tokens around and between two texts, as the teacher's tokenizer puts them."""

    before: Annotated[tuple[TokenId, ...], Field(max_length=MAX_SPECIAL)]
    """Ids of the tokens before the first text."""
    between: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_SPECIAL)]
    """Ids of the tokens between the texts. The first text does not hold the first of them, so its end is
    found again."""
    after: Annotated[tuple[TokenId, ...], Field(max_length=MAX_SPECIAL)]
    """Ids of the tokens after the second text."""
    has_segments: bool
    """Whether the second text and what is after it are in segment 1, and the rest in segment 0."""
    cut: Literal["second"] | None = None
    """`second`: of a pair that is too long, the second text alone is cut, and the first only where it leaves
    no room for one token of the second. None means that the longer text is cut first."""

    sections: ClassVar[frozenset[str]] = frozenset({"cut"})


class Packing(StoredModel):
    """How text became sequences."""

    mode: PackingMode
    """`packed`: documents are joined by the separator and cut to full length. `records`: each sequence is one
    document. `pairs`: each sequence is two texts of one record."""
    max_length: int = Field(ge=4, le=2**16)
    """Most tokens of a sequence, including special tokens."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Most tokens of the cache, including special tokens. None means the whole corpus."""
    seed: int = Field(ge=0, lt=2**63)
    """Seed of the order in which documents are taken."""
    split: Split | None = None
    """`tokens`: whole documents are held out, together with all their copies, which are documents of the same
    text, or of the same tokens as far as sequences hold them. `documents`: the same, by their texts alone
    (caches of earlier releases). None means that the last sequences are held out, wherever a document ends
    (all caches of the first releases)."""

    template: Template | None = None
    """Special tokens around each sequence. None means that they are the tokenizer's `cls_token` before and
    its `sep_token` after, and between documents (all caches of the first releases)."""

    prompt: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Words that stand before every text, in the hash of the corpus, too. None means none."""

    pair: PairTemplate | None = None
    """Special tokens of the mode `pairs`, in place of `template`. None means another mode."""

    sections: ClassVar[frozenset[str]] = frozenset({"split", "template", "prompt", "pair"})

    @property
    def is_by_record(self) -> bool:
        """Whether each sequence is one record: a document, or a pair of texts."""
        return self.mode != "packed"

    @property
    def num_special(self) -> int:
        """Number of special tokens around each sequence; those between two texts are not counted."""
        if self.pair is not None:
            return len(self.pair.before) + len(self.pair.after)
        return 2 if self.template is None else len(self.template.before) + len(self.template.after)

    @property
    def num_after(self) -> int:
        """Number of special tokens after each sequence."""
        if self.pair is not None:
            return len(self.pair.after)
        return 1 if self.template is None else len(self.template.after)

    @property
    def room(self) -> int:
        """Greatest number of tokens of a sequence, without the special ones around it."""
        return self.max_length - self.num_special

    @model_validator(mode="after")
    def _has_room(self) -> "Packing":
        if (self.mode == "pairs") != (self.pair is not None):
            raise ValueError("`pair` goes with mode pairs, and only with it")
        if self.pair is not None and (self.template is not None or self.prompt is not None):
            raise ValueError("a pair has neither a template of single texts nor a prompt")
        if self.room < (1 if self.pair is None else len(self.pair.between) + 2):
            raise ValueError(
                f"sequences of {self.max_length} tokens have no room beside {self.num_special} special ones"
            )
        return self


class TopKParameters(StoredModel):
    """Codec `topk`: k entries per row and relation."""

    name: Literal["topk"] = "topk"
    k: int = Field(ge=1, le=4096)
    """Entries that are stored of each row."""
    select: Literal["pps", "largest"]
    """`pps`: unbiased systematic sampling with probability proportional to size. `largest`: the k largest."""
    tail: Literal["uniform", "renormalise"] | None
    """How `largest` treats the mass that it leaves out. None with `pps`, which leaves none out."""
    weight_ratio: float = Field(gt=1.0, le=2.0)
    """Ratio of neighbouring values of the scale that weights are rounded to."""
    seed: int = Field(ge=0, lt=2**63)
    """Seed of the draw. Together with the sequence's number it makes a dump reproducible."""

    @model_validator(mode="after")
    def _tail_belongs_to_largest(self) -> "TopKParameters":
        if (self.tail is None) == (self.select == "largest"):
            raise ValueError("`tail` goes with select=largest, and only with it")
        return self


class DenseParameters(StoredModel):
    """Codec `dense`: every probability as float16, the exact reference."""

    name: Literal["dense"] = "dense"


class VectorsParameters(StoredModel):
    """Codec `vectors`: queries, keys and values, transform-coded; relations are computed from them."""

    name: Literal["vectors"] = "vectors"
    max_kl: float = Field(gt=0, le=1)
    """Greatest mean KL(teacher || stored) of attention and of value relation, nats."""
    calibration_tokens: int = Field(ge=1, le=2**24)
    """Approximate number of tokens that the code is fitted to; a quarter as many more are for checking."""


class NoRelationsParameters(StoredModel):
    """No codec: the cache stores states and no relations."""

    name: Literal["none"] = "none"


CodecParameters = Annotated[
    TopKParameters | DenseParameters | VectorsParameters | NoRelationsParameters, Field(discriminator="name")
]


def codec_words(codec: CodecParameters) -> str:
    """Return a codec's name and its settings as text."""
    content = codec.model_dump(exclude={"name", "seed", "weight_ratio", "calibration_tokens"})
    return " ".join(
        [codec.name, *(f"{name}={value}" for name, value in content.items() if value is not None)]
    )


class CacheIdentity(StoredModel):
    """What determines the content of a cache, and nothing else."""

    format_version: Literal[1] = 1
    """Version of what determines the content. Format 2 did not change it, so a cache has the same fingerprint
    in both formats."""
    teacher: TeacherIdentity
    tokenizer_sha256: Sha256
    corpus: CorpusIdentity
    packing: Packing
    layers: Annotated[tuple[Annotated[int, Field(ge=0, lt=1024)], ...], Field(max_length=MAX_LAYERS)]
    """Tapped layers, counted from 0, ascending. Only codec `vectors` allows several; `none` has none."""
    relation_heads: int = Field(ge=1, le=1024)
    relations: Annotated[tuple[RelationKind, ...], Field(max_length=2)]
    """Relations that are stored. Empty with codec `vectors`, from which every relation can be computed, and
    with `none`."""
    codec: CodecParameters
    states: StatesIdentity | None = None
    """What is stored in addition to relations. None means nothing."""

    precision: Literal["tf32", "bfloat16", "int8"] | None = None
    """Precision that the teacher computed in. None means float32, in which all caches of 0.1.0 are."""

    mask: Literal["causal"] | None = None
    """Columns that rows of relations see: `causal` means those up to their own. None means all of their
    sequence."""

    sections: ClassVar[frozenset[str]] = frozenset({"states", "precision", "mask"})

    @property
    def is_causal(self) -> bool:
        """Whether rows of relations see columns up to their own alone."""
        return self.mask == "causal"

    @property
    def vectors(self) -> VectorsParameters | None:
        """Parameters of codec `vectors`. None means another codec."""
        return self.codec if isinstance(self.codec, VectorsParameters) else None

    @property
    def last_layer(self) -> int:
        """Last of the tapped layers, counted from 0; that of the teacher where none is tapped."""
        return self.layers[-1] if self.layers else self.teacher.num_layers - 1

    @property
    def num_classes(self) -> int | None:
        """Numbers of the teacher's answer to a sequence. None means that no answers are stored."""
        return None if self.states is None else self.states.num_classes

    @property
    def pooled(self) -> Pooling | None:
        """How sequences are pooled into one vector each. None means that no such vectors are stored."""
        return None if self.states is None else self.states.pooled

    @property
    def labels(self) -> SoftLabels | None:
        """Soft labels of masked tokens. None means that none are stored."""
        return None if self.states is None else self.states.labels

    @property
    def has_relations(self) -> bool:
        """Whether relations are stored, or can be computed from what is stored."""
        return not isinstance(self.codec, NoRelationsParameters)

    @model_validator(mode="after")
    def _relations_go_with_the_codec(self) -> "CacheIdentity":
        if bool(self.relations) == isinstance(self.codec, VectorsParameters | NoRelationsParameters):
            raise ValueError("codecs `vectors` and `none` store no relations, and every other codec does")
        if len({*self.relations}) < len(self.relations):
            raise ValueError("a relation is named twice")
        if self.has_relations != bool(self.layers):
            raise ValueError("codec `none` has no layers, and every other codec has some")
        if self.is_causal and not self.has_relations:
            raise ValueError("a mask goes with relations, and none are stored")
        if not self.has_relations and self.states is None:
            raise ValueError("nothing is stored: neither relations nor states")
        return self

    @model_validator(mode="after")
    def _pairs_are_of_pairs(self) -> "CacheIdentity":
        if bool(self.corpus.pairs) != (self.packing.pair is not None):
            raise ValueError("packing `pairs` goes with a corpus of pairs, and only with it")
        if self.corpus.groups and not self.corpus.pairs:
            raise ValueError("groups are of pairs, and the corpus has none")
        return self

    @model_validator(mode="after")
    def _layers_are_the_teachers(self) -> "CacheIdentity":
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers do not ascend")
        if self.layers and self.layers[-1] >= self.teacher.num_layers:
            raise ValueError(f"the teacher has no layer {self.layers[-1]}")
        if len(self.layers) > 1 and not isinstance(self.codec, VectorsParameters):
            raise ValueError("only codec `vectors` stores several layers")
        return self

    @model_validator(mode="after")
    def _states_are_the_teachers(self) -> "CacheIdentity":
        states = self.states
        if states is not None and states.highest > self.teacher.num_layers:
            raise ValueError(f"the teacher has no hidden state {states.highest}")
        masking = states.masking if states is not None else None
        if masking is not None and masking.mask_token >= self.teacher.vocab_size:
            raise ValueError("the mask is no token of the vocabulary")
        return self

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) over this identity's canonical JSON: sorted keys, no spaces."""
        return canonical_sha256(self.model_dump(mode="json"))
