"""What each objective needs of a cache: `dump --for` stores it, and training names what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Which = Literal["last", "all"]
"""Which of the teacher's layers, or of its hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is stored for an objective, beside the last layer's relations, which every cache holds."""

    vectors: bool = False
    """Queries, keys and values: codec `vectors`."""
    layers: Which = "last"
    hidden: Which | None = None
    """Hidden states of every token."""
    masked_hidden: Which | None = None
    """The same of sequences as they are read masked."""
    first: Which | None = None
    """Hidden states of each sequence's first token, [CLS]."""
    labels: bool = False
    """Soft labels of masked tokens."""
    all_labels: bool = False
    """Soft labels of all tokens of the masked reading, not of masked ones alone."""
    temperature: float = 1.0
    """Of the labels, where nothing else is asked for."""
    logits: bool = False
    """Of a teacher that classifies sequences."""
    heads: bool = True
    """Whether heads are compared with heads, unless vectors are split anew."""

    def with_(self, other: "Needs") -> "Needs":
        """Return what serves both."""
        return Needs(
            vectors=self.vectors or other.vectors,
            layers=_both(self.layers, other.layers) or "last",
            hidden=_both(self.hidden, other.hidden),
            masked_hidden=_both(self.masked_hidden, other.masked_hidden),
            first=_both(self.first, other.first),
            labels=self.labels or other.labels,
            all_labels=self.all_labels or other.all_labels,
            temperature=max(self.temperature, other.temperature),
            logits=self.logits or other.logits,
        )

    def settings(self) -> dict[str, object]:
        """Return the settings of a dump that stores this, without those that say nothing."""
        found: dict[str, object] = {
            "codec": "vectors" if self.vectors else None,
            "layers": "all" if self.layers == "all" else None,
            "hidden": self.hidden,
            "masked_hidden": self.masked_hidden,
            "first_hidden": self.first,
            "labels": self.labels or None,
            "label_tokens": "all" if self.all_labels else None,
            "label_temperature": self.temperature if self.labels else None,
            "logits": self.logits or None,
        }
        return {name: value for name, value in found.items() if value is not None}


def _both(one: Which | None, other: Which | None) -> Which | None:
    return "all" if "all" in (one, other) else one or other


NEEDS: Final = {
    "minilm": Needs(),
    "minilmv2": Needs(vectors=True),
    "value-mse": Needs(vectors=True),
    "hidden-mse": Needs(hidden="last"),
    "tinybert": Needs(vectors=True, layers="all", hidden="all"),
    "tinybert-prediction": Needs(logits=True, heads=False),
    "distilbert": Needs(masked_hidden="last", labels=True, all_labels=True, temperature=2.0, heads=False),
    "mlm-kd": Needs(labels=True, heads=False),
    "bert-pkd": Needs(first="all", heads=False),
    "mobilebert": Needs(vectors=True, layers="all", hidden="all"),
}
"""By the name of an objective."""
Form = Literal["authors", "paper"]
FORMS: Final = frozenset({"tinybert", "tinybert-prediction", "distilbert", "bert-pkd", "mobilebert"})
"""Objectives whose authors published code that differs from the equations of their paper."""
ObjectiveName = Literal[
    "minilm",
    "minilmv2",
    "value-mse",
    "hidden-mse",
    "tinybert",
    "tinybert-prediction",
    "distilbert",
    "mlm-kd",
    "bert-pkd",
    "mobilebert",
]


def objective_names(asked: object) -> list[str]:
    """Return the names of `minilm,tinybert`, or of a list.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(asked, str | list | tuple):
        raise ValueError(f"--for {asked}: give objectives with commas between them, like minilm,tinybert")  # noqa: TRY004 - pydantic wants it
    return [str(name).strip() for name in (asked.split(",") if isinstance(asked, str) else asked)]


def needs_of(objectives: Sequence[str]) -> Needs:
    """Return what serves several objectives.

    Raises:
        ValueError: one is unknown.
    """
    found = Needs()
    for name in objectives:
        if name not in NEEDS:
            raise ValueError(f"there is no objective {name}; take {', '.join(NEEDS)}")
        found = found.with_(NEEDS[name])
    return found
