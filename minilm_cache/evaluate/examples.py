"""Examples of downstream tasks, grouped into the sets of one training. All readers of files return these."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from minilm_cache.store.checked import sha256_texts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextExample:
    """One or two texts and their label."""

    texts: tuple[str, ...]
    label: float | None
    """Number of a class, or a value on a scale. None means that the label is not published."""
    index: str
    """Index that predictions are submitted under: the one in the file, or the example's number from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanExample:
    """A question about a context, and its answers."""

    identifier: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]
    """Start of each answer in the context, in characters, and its text. Empty means that it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationExample:
    """A text, and the one that is to be generated from it."""

    source: tuple[str, ...]
    """The text, or a passage and an answer whose question is generated."""
    target: str


E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Track(Generic[E]):
    """The training set of one fine-tuning, and the sets that it is scored on."""

    name: str
    """Language of the training set. Empty if the task is trained on one language only."""
    train: Sequence[E]
    dev: Mapping[str, Sequence[E]]
    """Dev sets by name. Settings are chosen by their scores."""
    test: Mapping[str, Sequence[E]]
    """Test sets by name. They are scored if their labels are published."""

    def __post_init__(self) -> None:
        """Check that no set is empty: readers leave empty sets out."""
        assert all(self.sets().values())

    def unlabelled(self) -> list[str]:
        """Return the names of sets whose labels are not published."""
        return [name for name, examples in self.sets().items() if not is_labelled(examples)]

    def sets(self) -> dict[str, Sequence[E]]:
        """Return the dev and test sets by name."""
        return {**self.dev, **self.test}

    def subset(self, max_train: int | None, max_scored: int | None) -> "Track[E]":
        """Return a track with smaller sets, which always have the same examples; test sets stay whole.

        Args:
            max_train: most training examples. None means all of them.
            max_scored: most examples of each dev set. None means all of them.
        """
        dev = {name: sample_examples(examples, max_scored) for name, examples in self.dev.items()}
        train = sample_examples(self.train, max_train)
        return Track(name=self.name, train=train, dev=dev, test=self.test)

    def sha256(self) -> str:
        """Return the SHA-256 (hex) of every example that scores depend on."""
        return sha256_texts(self._words())

    def predicted_sha256(self) -> str | None:
        """Return the same of the sets whose labels are not published. None means that there are none."""
        names = set(self.unlabelled())
        return sha256_texts(self._words(names)) if names else None

    def _words(self, names: Collection[str] | None = None) -> Iterator[str]:
        """Yield sets as text: some of them, or all that have labels."""
        for name, examples in {"train": self.train, **self.sets()}.items():
            if is_labelled(examples) if names is None else name in names:
                yield name
                yield from map(repr, examples)


def track_of(name: str, train: Sequence[E], sets: Mapping[str, Sequence[E]]) -> Track[E]:
    """Return a track of sets that are called `dev` or `test`, or by these words and a language."""
    dev, test = ({key: sets[key] for key in sets if key.startswith(kind)} for kind in ("dev", "test"))
    return Track(name=name, train=train, dev=dev, test=test)


def is_labelled(examples: Sequence[object]) -> bool:
    """Return whether the labels of a set are published; those of spans and of generated texts all are."""
    first = examples[0]
    return not isinstance(first, TextExample) or first.label is not None


def sample_examples(examples: Sequence[T], most: int | None) -> Sequence[T]:
    """Return at most `most` examples in their order, always the same ones. None means all of them."""
    if most is None or most >= len(examples):
        return examples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    return [examples[number] for number in sorted(order[:most].tolist())]
