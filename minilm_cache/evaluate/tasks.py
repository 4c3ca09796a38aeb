"""What the downstream tasks are: their files in the official layouts, labels, metrics, and papers' settings.

GLUE (Wang et al. 2019, arXiv 1804.07461), SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018, arXiv 1606.05250
and 1806.03822), XNLI (Conneau et al. 2018, arXiv 1809.05053), MLQA (Lewis et al. 2020, arXiv 1910.07475).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFile:
    """Where one set of examples of a task lies."""

    name: str
    """As tables and files of predictions have it: dev, test-m."""
    stem: str
    """Path in the task's folder without its ending, .tsv or .jsonl."""
    split: str
    """On the hub."""
    columns: tuple[str, ...] = ()
    """Of a file whose first line is no header; none: it is one."""
    submission: str | None = None
    """File that the benchmark's server wants; none: named after the task, or after the set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of fine-tuning that papers search over."""

    lrs: tuple[float, ...]
    epochs: tuple[int, ...]
    batch_size: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """A task whose examples are one or two texts and a label."""

    name: str
    title: str
    """Of its folder and of its submission."""
    texts: tuple[str, ...]
    label: str = "label"
    """Column of the label."""
    labels: tuple[str, ...] = ()
    """As files write them, in the order of their numbers; none: the label is a number on a scale."""
    metrics: tuple[Metric, ...] = ("accuracy",)
    train: SetFile = SetFile(name="train", stem="train", split="train")
    dev: tuple[SetFile, ...] = (SetFile(name="dev", stem="dev", split="validation"),)
    test: tuple[SetFile, ...] = (SetFile(name="test", stem="test", split="test"),)
    languages: Literal["one", "cross-lingual", "translate-train"] = "one"
    """Train on English and score every language, or train and score each language apart."""
    hub: str = "nyu-mll/glue"
    """Repository of the data on the hub; the configuration is the task's name, or a language."""
    hub_texts: tuple[str, ...] = ()
    """Columns of the texts on the hub, where they are others; that of the label is `label`."""
    hub_labels: tuple[str, ...] = ()
    """Names of the labels there, where they are others, in the same order."""
    recipe: Recipe = Recipe(lrs=(2e-5, 3e-5, 4e-5, 5e-5), epochs=(3, 4, 5))
    """The grid of MiniLM (Wang et al. 2020, arXiv 2002.10957, section 4.1)."""
    max_length: int = 128

    def cut(self, max_length: int) -> "TextTask":
        """Return the task with sequences of so many tokens at most."""
        return replace(self, max_length=max_length)

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number on a scale."""
        return not self.labels

    def place(self, set_name: str) -> tuple[str, str]:
        """Return the configuration and the split that a set is on the hub."""
        if self.languages != "one":
            kind, _, language = set_name.partition("-")
            return language, {"dev": "validation"}.get(kind, kind)
        (found,) = (one for one in (*self.dev, *self.test) if one.name == set_name)
        return self.name, found.split

    def submission(self, set_name: str) -> str:
        """Return the name of the file of predictions of a set."""
        own = next((one.submission for one in self.test if one.name == set_name), None)
        return own or (f"{self.title}.tsv" if set_name == "test" else f"{set_name}.tsv")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTask:
    """A task whose answers are spans of a context, in SQuAD's JSON."""

    name: str
    title: str
    train: str
    """File of the training set."""
    dev: str
    """File; with `{lang}`, one for each language that is there."""
    test: str | None = None
    """Likewise, of a test set whose answers are published."""
    has_unanswerable: bool = False
    hub: str = "rajpurkar/squad"
    """Repository of the scored sets on the hub."""
    hub_train: str = "rajpurkar/squad"
    hub_configuration: str = "plain_text"
    """Of the training set there."""
    recipe: Recipe = Recipe(lrs=(6e-5,), epochs=(3,))
    """Of MiniLM on SQuAD 2.0 (Wang et al. 2020, arXiv 2002.10957, section 4.1)."""
    max_length: int = 384
    stride: int = 128
    """Tokens of a context that two neighbouring windows share."""

    def cut(self, max_length: int) -> "SpanTask":
        """Return the task with windows of so many tokens, that share a third of them."""
        return replace(self, max_length=max_length, stride=max_length // 3)

    def place(self, set_name: str) -> tuple[str, str]:
        """Return the configuration and the split that a set is on the hub."""
        kind, _, language = set_name.partition("-")
        split = {"dev": "validation"}.get(kind, kind)
        return (f"mlqa.{language}.{language}" if self.by_language else self.hub_configuration), split

    @property
    def by_language(self) -> bool:
        """Whether there is a set for each language."""
        return "{lang}" in self.dev


Task = TextTask | SpanTask

_PAIR: Final = ("sentence1", "sentence2")
_BINARY: Final = ("0", "1")
_NLI: Final = ("entailment", "neutral", "contradiction")
_TWO_WAY: Final = ("entailment", "not_entailment")
_COLA: Final = ("source", "label", "mark", "sentence")
_XNLI: Final = TextTask(
    name="xnli",
    title="XNLI",
    texts=_PAIR,
    label="gold_label",
    labels=_NLI,
    languages="cross-lingual",
    hub="facebook/xnli",
    hub_texts=("premise", "hypothesis"),
)
_ALL: Final[tuple[Task, ...]] = (
    TextTask(
        name="cola",
        title="CoLA",
        texts=("sentence",),
        labels=_BINARY,
        hub_labels=("unacceptable", "acceptable"),
        metrics=("matthews",),
        train=SetFile(name="train", stem="train", split="train", columns=_COLA),
        dev=(SetFile(name="dev", stem="dev", split="validation", columns=_COLA),),
    ),
    TextTask(
        name="sst2",
        title="SST-2",
        texts=("sentence",),
        labels=_BINARY,
        hub_labels=("negative", "positive"),
    ),
    TextTask(
        name="mrpc",
        title="MRPC",
        texts=("#1 String", "#2 String"),
        label="Quality",
        labels=_BINARY,
        hub_labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        hub_texts=_PAIR,
    ),
    TextTask(
        name="qqp",
        title="QQP",
        texts=("question1", "question2"),
        label="is_duplicate",
        labels=_BINARY,
        hub_labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
    ),
    TextTask(name="stsb", title="STS-B", texts=_PAIR, label="score", metrics=("pearson", "spearman")),
    TextTask(
        name="mnli",
        title="MNLI",
        texts=_PAIR,
        label="gold_label",
        labels=_NLI,
        dev=(
            SetFile(name="dev-m", stem="dev_matched", split="validation_matched"),
            SetFile(name="dev-mm", stem="dev_mismatched", split="validation_mismatched"),
        ),
        test=(
            SetFile(name="test-m", stem="test_matched", split="test_matched", submission="MNLI-m.tsv"),
            SetFile(
                name="test-mm", stem="test_mismatched", split="test_mismatched", submission="MNLI-mm.tsv"
            ),
            SetFile(name="test-ax", stem="../diagnostic/diagnostic", split="ax", submission="AX.tsv"),
        ),
        hub_texts=("premise", "hypothesis"),
    ),
    TextTask(name="qnli", title="QNLI", texts=("question", "sentence"), labels=_TWO_WAY),
    TextTask(name="rte", title="RTE", texts=_PAIR, labels=_TWO_WAY),
    TextTask(
        name="wnli",
        title="WNLI",
        texts=_PAIR,
        labels=_BINARY,
        hub_labels=("not_entailment", "entailment"),
    ),
    _XNLI,
    replace(_XNLI, name="xnli-translate-train", languages="translate-train"),
    SpanTask(name="squad", title="SQuAD", train="train-v1.1.json", dev="dev-v1.1.json"),
    SpanTask(
        name="squad2",
        title="SQuAD2.0",
        train="train-v2.0.json",
        dev="dev-v2.0.json",
        has_unanswerable=True,
        hub="rajpurkar/squad_v2",
        hub_train="rajpurkar/squad_v2",
        hub_configuration="squad_v2",
    ),
    SpanTask(
        name="mlqa",
        title="MLQA_V1",
        train="train-v1.1.json",
        dev="dev/dev-context-{lang}-question-{lang}.json",
        test="test/test-context-{lang}-question-{lang}.json",
        hub="facebook/mlqa",
        recipe=Recipe(lrs=(3e-5,), epochs=(2,)),
    ),
)
TASKS: Final[Mapping[str, Task]] = MappingProxyType({task.name: task for task in _ALL})
"""By name, as --task takes them."""
