"""Examples of tasks, and the sets that a training sees: what every reader of files gives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from minilm_cache.store.fingerprint import sha256_texts

Chosen = TypeVar("Chosen")


@dataclass(frozen=True, slots=True)
class TextExample:
    """One or two texts and what is to be told of them."""

    texts: tuple[str, ...]
    label: float | None
    """The number of a class, or a number on a scale; none: not published."""
    index: str
    """That predictions are told by: the file's own, or its number from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanExample:
    """A question about a context."""

    identifier: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]
    """Where each answer begins in the context, in characters, and its text; none: it has no answer."""


Example = TextExample | SpanExample
E = TypeVar("E", TextExample, SpanExample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track(Generic[E]):
    """What one training learns from, and the sets that it is scored on."""

    name: str
    """Of the language that it trains on; empty where there is but one."""
    train: Sequence[E]
    dev: Mapping[str, Sequence[E]]
    """Sets that settings are chosen by."""
    test: Mapping[str, Sequence[E]]
    """Scored where labels are published."""

    def __post_init__(self) -> None:
        """Sets have examples: readers leave out those that have none."""
        assert all(self.sets().values())

    def unlabelled(self) -> list[str]:
        """Return the names of sets whose labels are not published."""
        return [name for name, examples in self.sets().items() if not is_labelled(examples)]

    def sets(self) -> dict[str, Sequence[E]]:
        """Return all sets but the training set."""
        return {**self.dev, **self.test}

    def subset(self, max_train: int | None, max_scored: int | None) -> "Track[E]":
        """Return a track of at most so many examples, always the same ones; test sets stay whole."""
        dev = {name: some(examples, max_scored) for name, examples in self.dev.items()}
        return Track(name=self.name, train=some(self.train, max_train), dev=dev, test=self.test)

    def sha256(self) -> str:
        """Return the SHA-256 (hex) of every example that scores depend on."""
        return sha256_texts(self._words())

    def _words(self) -> Iterator[str]:
        for name, examples in {"train": self.train, **self.sets()}.items():
            if is_labelled(examples):
                yield name
                yield from map(repr, examples)


def is_labelled(examples: Sequence[Example]) -> bool:
    """Return whether the labels of a set are published; SQuAD's and MLQA's sets all are."""
    first = examples[0]
    return isinstance(first, SpanExample) or first.label is not None


def some(examples: Sequence[Chosen], most: int | None) -> Sequence[Chosen]:
    """Return so many examples, always the same ones, in their order; none: all."""
    if most is None or most >= len(examples):
        return examples
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    return [examples[number] for number in sorted(order[:most].tolist())]
