"""What a cache may hold in addition to relations: hidden states, pooled vectors, soft labels, logits.

None of it is stored unless it was requested. Hidden states are numbered as in transformers: 0 is the output
of the embeddings, n the output of the n-th layer.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from minilm_cache.storage_schema.base import Sha256, StoredModel

STATES_FOLDER: Final = "states"
LABELS_FOLDER: Final = "labels"
LOGITS_PATH: Final = "states/logits"
READ_PATH: Final = "labels/read"
OTHERS_FOLDER: Final = "signals"
INDEX_PATH: Final = "labels/index"
WEIGHT_PATH: Final = "labels/weight"
MAX_STATES: Final = 129
"""Most hidden states of one family: the outputs of 128 layers and of the embeddings."""


class StateFamily(StrEnum):
    """Which reading of a sequence hidden states are of, and which of its tokens have them."""

    HIDDEN = "hidden"
    """Every token of the sequence, unmasked."""
    MASKED = "masked"
    """Every token of the sequence, read with some of its tokens masked."""
    FIRST = "first"
    """The first token, [CLS], of the unmasked sequence."""
    POOLED = "pooled"
    """One vector of the whole unmasked sequence, as the teacher pools its last hidden states."""


class SignalName(NamedTuple):
    """One signal of a cache: something that the teacher gives, in addition to relations."""

    signal: str
    """A `StateFamily`, `labels`, `logits`, or the name of an `OtherSignal`."""
    number: int = 0
    """Number of the hidden state. 0 for signals of which there is one."""

    @property
    def folder(self) -> str:
        """Path below the cache's root: an array, or the group that contains the arrays."""
        if self.signal in _NUMBERED:
            return f"{STATES_FOLDER}/{self.signal}/{self.number}"
        return _FOLDERS.get(self.signal, f"{OTHERS_FOLDER}/{self.signal}")


_NUMBERED: Final = frozenset({StateFamily.HIDDEN, StateFamily.MASKED, StateFamily.FIRST})
POOLED: Final = SignalName(StateFamily.POOLED)
"""The pooled vector of a sequence."""
LABELS: Final = SignalName("labels")
"""Which tokens of a masked reading are masked, how they are read, and their soft labels if there are some."""
LOGITS: Final = SignalName("logits")
"""The answer of a teacher that classifies sequences."""
_FOLDERS: Final = {
    POOLED.signal: f"{STATES_FOLDER}/{POOLED.signal}",
    LABELS.signal: LABELS_FOLDER,
    LOGITS.signal: LOGITS_PATH,
}


Numbers = Annotated[tuple[Annotated[int, Field(ge=0, le=1024)], ...], Field(max_length=MAX_STATES)]


MAX_READINGS: Final = 64
_READINGS_FOLDER: Final = "readings"


def reading_path(path: str, reading: int) -> str:
    """Return the path of an array of a masked reading; reading 0 has the plain path."""
    return f"{_READINGS_FOLDER}/{reading}/{path}" if reading else path


def plain_path(path: str) -> str:
    """Return the path that an array of any masked reading has in reading 0."""
    return path.split("/", 2)[2] if path.startswith(f"{_READINGS_FOLDER}/") else path


class Masking(StoredModel):
    """Which tokens are masked (BERT, Devlin et al. 2019, arXiv 1810.04805, section 3.1).

    Of the tokens that are not special a share is chosen, at least one; of those chosen the teacher reads the
    mask in 80 %, another token in 10 %, and the token itself in 10 %.
    """

    share: float = Field(gt=0, le=1)
    mask_token: int = Field(ge=0, lt=2**24)
    seed: int = Field(ge=0, lt=2**63)
    readings: int | None = Field(default=None, ge=2, le=MAX_READINGS)
    """How often each sequence is masked anew; epoch e trains on reading e modulo this. None means once."""

    sections: ClassVar[frozenset[str]] = frozenset({"readings"})

    @property
    def num_readings(self) -> int:
        """Number of masked readings of each sequence, at least 1."""
        return self.readings or 1


class SoftLabels(StoredModel):
    """k entries of the teacher's distribution over the vocabulary, at every chosen token, or at all.

    Drawn as codec `topk` draws rows with select=pps: their expectation is the distribution.
    """

    k: int = Field(ge=1, le=4096)
    temperature: float = Field(gt=0, le=100)
    """Number that logits are divided by before the softmax."""
    weight_ratio: float = Field(gt=1.0, le=2.0)
    tokens: Literal["all"] | None = None
    """Tokens that have labels: `all`. None means those that were chosen to be masked."""

    sections: ClassVar[frozenset[str]] = frozenset({"tokens"})


PoolingMode = Literal["mean", "cls", "max", "lasttoken"]
"""How the last hidden states of a sequence become one vector, in the words of sentence-transformers: their
mean, that of the first token, the greatest value of each dimension, or that of the last token."""
POOLING_MODES: Final[tuple[PoolingMode, ...]] = get_args(PoolingMode)


MAX_POOLED_WIDTH: Final = 2**16
"""Most dimensions of a pooled vector."""


class Pooling(StoredModel):
    """How the teacher makes one vector of a sequence, and how closely vectors are stored."""

    mode: PoolingMode
    dense_sha256: Sha256 | None = None
    """SHA-256 over the linear maps that follow the pooling. None means that there are none."""
    normalize: bool
    """True: vectors have length 1."""
    width: int = Field(ge=1, le=MAX_POOLED_WIDTH)
    """Number of dimensions of a vector."""
    min_cosine: float = Field(gt=0, lt=1)
    """Least mean cosine of stored vectors with the teacher's, on the checked sequences."""
    calibration_sequences: int = Field(ge=1, le=2**24)
    """Approximate number of sequences that the code is fitted to; a quarter as many more are for checking."""

    sections: ClassVar[frozenset[str]] = frozenset({"dense_sha256"})

    @property
    def in_words(self) -> str:
        """The pooling, for people."""
        parts = [f"{self.mode} of the last hidden states"]
        parts += ["linear maps"] * (self.dense_sha256 is not None) + ["length 1"] * self.normalize
        return f"pooled vectors of width {self.width} ({', '.join(parts)})"


MAX_OTHERS: Final = 16
"""Most signals of a cache that are not of this release."""
OWN_NAME: Final = r"^[a-z][a-z0-9-]{0,47}$"
"""Pattern of the name of a signal that is not of this release."""


class OtherSignal(StoredModel):
    """A signal that is not of this release: numbers of every token, or of every sequence, as they are."""

    name: str = Field(pattern=OWN_NAME)
    axis: Literal["token", "sequence"]
    """What has a row of numbers."""
    width: int = Field(ge=1, le=2**16)
    """Numbers of a row."""
    dtype: Literal["float16", "float32"]
    settings: Annotated[
        dict[str, int | Annotated[float, Field(allow_inf_nan=False)] | str | bool], Field(max_length=32)
    ] = Field(default_factory=dict)
    """What else determines the numbers."""

    @property
    def as_name(self) -> SignalName:
        """Name among the signals of a cache."""
        return SignalName(self.name)


class StatesIdentity(StoredModel):
    """What a cache holds beside relations, and what determines its content."""

    hidden: Numbers = ()
    masked_hidden: Numbers = ()
    first: Numbers = ()
    max_error: float | None = Field(default=None, gt=0, lt=1)
    """Greatest relative error of hidden states of every token: square root of squared error over variance.
    None means that there are none."""
    calibration_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """Approximate number of tokens that their codes are fitted to; a quarter as many more are for
    checking. None means that there are none."""
    masking: Masking | None = None
    labels: SoftLabels | None = None
    num_classes: int | None = Field(default=None, ge=1, le=2**16)
    """Number of logits of a teacher that classifies sequences. None means that no logits are stored."""
    pooled: Pooling | None = None
    """How sequences are pooled into one vector each. None means that no such vectors are stored."""
    others: Annotated[tuple[OtherSignal, ...], Field(max_length=MAX_OTHERS)] = ()
    """Signals that are not of this release."""

    sections: ClassVar[frozenset[str]] = frozenset(
        {
            "hidden",
            "masked_hidden",
            "first",
            "max_error",
            "calibration_tokens",
            "masking",
            "labels",
            "num_classes",
            "pooled",
            "others",
        }
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "StatesIdentity":
        for numbers in (self.hidden, self.masked_hidden, self.first):
            if list(numbers) != sorted(set(numbers)):
                raise ValueError("numbers of hidden states do not ascend")
        is_coded = bool(self.hidden or self.masked_hidden)
        if is_coded != (self.max_error is not None) or is_coded != (self.calibration_tokens is not None):
            raise ValueError("`max_error` and `calibration_tokens` go with coded states, and only with them")
        if (self.masking is None) == bool(self.labels or self.masked_hidden):
            raise ValueError("`masking` goes with labels and masked states, and only with them")
        names = [other.name for other in self.others]
        if len({*names, *_FOLDERS, *_NUMBERED}) < len([*names, *_FOLDERS, *_NUMBERED]):
            raise ValueError("two signals have the same name")
        if not (is_coded or self.first or self.labels or self.num_classes or self.pooled or self.others):
            raise ValueError("there is no state")
        return self

    @property
    def coded(self) -> tuple[SignalName, ...]:
        """States that are transform-coded: hidden states of every token, and pooled vectors."""
        families = ((StateFamily.HIDDEN, self.hidden), (StateFamily.MASKED, self.masked_hidden))
        names = [SignalName(family, number) for family, numbers in families for number in numbers]
        return (*names, *([POOLED] if self.pooled is not None else []))

    @property
    def names(self) -> tuple[SignalName, ...]:
        """Everything that is stored."""
        first = [SignalName(StateFamily.FIRST, number) for number in self.first]
        labels = [LABELS] if self.masking is not None else []
        classes = [LOGITS] if self.num_classes is not None else []
        return (*self.coded, *first, *labels, *classes, *(other.as_name for other in self.others))

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of everything that is stored: one array or one group of arrays each."""
        return tuple(name.folder for name in self.names)

    @property
    def head(self) -> Literal["tokens", "sequences"] | None:
        """Head that the teacher must have to produce all this. None means that no head is needed."""
        return "tokens" if self.labels is not None else "sequences" if self.num_classes is not None else None

    @property
    def in_words(self) -> str:
        """Everything that is stored, as text for people."""
        parts = [
            f"{what} {', '.join(map(str, numbers))}"
            for what, numbers in (
                ("hidden states", self.hidden),
                ("hidden states of masked readings", self.masked_hidden),
                ("hidden states of first tokens", self.first),
            )
            if numbers
        ]
        if self.labels is not None:
            tokens = "all tokens" if self.labels.tokens == "all" else "masked tokens"
            parts.append(
                f"soft labels of {tokens}, {self.labels.k} entries each, at temperature "
                f"{self.labels.temperature:g}"
            )
        if self.masking is not None and self.masking.readings is not None:
            parts.append(f"{self.masking.readings} masked readings of each sequence")
        if self.num_classes is not None:
            parts.append("scores" if self.num_classes == 1 else f"logits of {self.num_classes} classes")
        if self.pooled is not None:
            parts.append(self.pooled.in_words)
        parts += [f"{other.name} ({other.width} numbers of each {other.axis})" for other in self.others]
        return "; ".join(parts)

    @property
    def num_readings(self) -> int:
        """Number of masked readings of each sequence; 1 if nothing is masked."""
        return 1 if self.masking is None else self.masking.num_readings

    @property
    def highest(self) -> int:
        """Highest number of a hidden state; 0 if there is none."""
        return max((0, *self.hidden, *self.masked_hidden, *self.first))
