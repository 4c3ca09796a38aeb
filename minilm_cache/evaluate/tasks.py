"""Downstream tasks: their files in the official layouts, labels, metrics, and the settings of papers.

GLUE (Wang et al. 2019, arXiv 1804.07461), SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018, arXiv 1606.05250
and 1806.03822), XNLI (Conneau et al. 2018, arXiv 1809.05053), MLQA (Lewis et al. 2020, arXiv 1910.07475).
Generated texts: questions of SQuAD (Du et al. 2017, arXiv 1705.00106), XSum (Narayan et al. 2018, arXiv
1808.08745), CNN/DailyMail (See et al. 2017, arXiv 1704.04368), Gigaword (Rush et al. 2015, arXiv 1509.00685).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from minilm_cache.errors import CorpusError
from minilm_cache.models.decoding import Decoding
from minilm_cache.settings import FrozenSettings

_ENDINGS: Final = (".tsv", ".jsonl")

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFile:
    """Names of one set of a task: in tables, in a folder and on the hub."""

    name: str
    """Name in tables and in files of predictions, such as `dev` or `test-m`."""
    stem: str
    """Path in the task's folder without the ending, which is .tsv or .jsonl."""
    split: str
    """Name of the split on the hub."""
    columns: tuple[str, ...] = ()
    """Columns of a file without a header. Empty means that the first line is the header."""
    submission: str | None = None
    """Name of the file for the benchmark's server. None means a name after the task, or after the set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of fine-tuning that a paper searches over."""

    lrs: tuple[float, ...]
    epochs: tuple[int, ...]
    batch_size: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """A task whose examples are one or two texts and a label."""

    card_type: ClassVar[str] = "text-classification"
    """Name of such tasks in model cards of the hub."""
    name: str
    title: str
    """Name in tables, of the folder and of the file for the benchmark's server."""
    texts: tuple[str, ...]
    """Columns of the texts, one or two."""
    label: str = "label"
    """Column of the label."""
    labels: tuple[str, ...] = ()
    """Labels as files spell them, in the order of their numbers. Empty means values on a scale."""
    metrics: tuple[Metric, ...] = ("accuracy",)
    train: SetFile = SetFile(name="train", stem="train", split="train")
    dev: tuple[SetFile, ...] = (SetFile(name="dev", stem="dev", split="validation"),)
    test: tuple[SetFile, ...] = (SetFile(name="test", stem="test", split="test"),)
    scale: tuple[float, float] | None = None
    """Least and greatest value that a benchmark's server takes. None means any."""
    languages: Literal["one", "cross-lingual", "translate-train"] = "one"
    """One language, or several: `cross-lingual` trains on English and scores every language,
    `translate-train` trains and scores each language separately."""
    hub: str = "nyu-mll/glue"
    """Repository of the data on the hub; the configuration is the task's name, or a language."""
    hub_texts: tuple[str, ...] = ()
    """Columns of the texts on the hub. Empty means the same as in files. The label's column is `label`."""
    hub_labels: tuple[str, ...] = ()
    """Names of the labels on the hub, in the same order. Empty means the same as in files."""
    recipe: Recipe = Recipe(lrs=(2e-5, 3e-5, 4e-5, 5e-5), epochs=(3, 4, 5))
    """The grid of MiniLM (Wang et al. 2020, arXiv 2002.10957, section 4.1)."""
    max_length: int = 128
    """Most tokens of an example."""

    def cut(self, max_length: int) -> "TextTask":
        """Return the task with at most `max_length` tokens per example."""
        return replace(self, max_length=max_length)

    @property
    def is_regression(self) -> bool:
        """Whether the label is a value on a scale, not a class."""
        return not self.labels

    def place(self, set_name: str) -> tuple[str, str]:
        """Return the configuration and the split of a set on the hub."""
        if self.languages != "one":
            kind, _, language = set_name.partition("-")
            return language, {"dev": "validation"}.get(kind, kind)
        (split,) = (set_file.split for set_file in (*self.dev, *self.test) if set_file.name == set_name)
        return self.name, split

    def submission(self, set_name: str) -> str:
        """Return the name of the file for the predictions of a set."""
        special = next((set_file.submission for set_file in self.test if set_file.name == set_name), None)
        return special or (f"{self.title}.tsv" if set_name == "test" else f"{set_name}.tsv")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTask:
    """A task whose answers are spans of a context, in files of SQuAD's JSON."""

    card_type: ClassVar[str] = "question-answering"
    name: str
    title: str
    """Name in tables and of the folder."""
    train: str
    """File of the training set."""
    dev: str
    """File of the dev set. With `{lang}` there is one file per language."""
    test: str | None = None
    """File of a test set with published answers, in the same form. None means that there is none."""
    has_unanswerable: bool = False
    """Whether some questions have no answer."""
    hub: str = "rajpurkar/squad"
    """Repository of the dev and test sets on the hub."""
    hub_train: str = "rajpurkar/squad"
    """Repository of the training set on the hub."""
    hub_configuration: str = "plain_text"
    """Configuration of the training set on the hub."""
    recipe: Recipe = Recipe(lrs=(6e-5,), epochs=(3,))
    """Settings of MiniLM on SQuAD 2.0 (Wang et al. 2020, arXiv 2002.10957, section 4.1)."""
    max_length: int = 384
    """Most tokens of a window."""
    stride: int = 128
    """Tokens of a context that two neighbouring windows share."""

    def cut(self, max_length: int) -> "SpanTask":
        """Return the task with windows of `max_length` tokens, a third of which neighbours share."""
        return replace(self, max_length=max_length, stride=max_length // 3)

    def place(self, set_name: str) -> tuple[str, str]:
        """Return the configuration and the split of a set on the hub."""
        kind, _, language = set_name.partition("-")
        split = {"dev": "validation"}.get(kind, kind)
        return (f"mlqa.{language}.{language}" if self.by_language else self.hub_configuration), split

    @property
    def by_language(self) -> bool:
        """Whether there is a set for each language."""
        return "{lang}" in self.dev


class Generation(FrozenSettings):
    """How a model learns to generate texts, and how it generates them."""

    decoding: Decoding
    label_smoothing: float = 0.1
    """Share of a label's probability that is spread over all tokens, from 0 to 1."""
    target_mask_prob: float = 1.0
    """Share of the tokens of a target that are predicted in a step, from 0 to 1."""
    positions: Literal["copied"] | None = None
    """Where the positions of a model that is too short come from: copies of its first ones, in their order.
    None means that such a model is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTask:
    """A task whose answers are generated from a text."""

    card_type: ClassVar[str] = "text-generation"
    name: str
    title: str
    """Name in tables and of the folder."""
    generation: Generation
    """The paper's settings."""
    sources: tuple[str, ...] = ("src",)
    """Columns of the source: a text, or a passage and an answer."""
    target: str = "tgt"
    """Column of the text that is generated."""
    hub: str = ""
    """Repository of the data on the hub. Empty means one's own data, which are not there."""
    hub_configuration: str = "default"
    """Configuration of the data on the hub."""
    hub_sources: tuple[str, ...] = ()
    """Columns of the source on the hub. Empty means the same as in files."""
    hub_target: str = ""
    """Column of the target on the hub."""
    has_spans: bool = False
    """Whether the folder may have SQuAD's JSON, whose questions are generated from passages and answers."""
    recipe: Recipe

    @property
    def max_length(self) -> int:
        """Most tokens of a source."""
        return self.generation.decoding.max_source

    def cut(self, max_length: int) -> "GenerationTask":
        """Return the task with at most `max_length` tokens of a source."""
        decoding = self.generation.decoding.with_changes(max_source=max_length)
        return replace(self, generation=self.generation.with_changes(decoding=decoding))

    def place(self, set_name: str) -> tuple[str, str]:
        """Return the configuration and the split of a set on the hub."""
        return self.hub_configuration, {"dev": "validation"}.get(set_name, set_name)


Task = TextTask | SpanTask | GenerationTask

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
        name="sst2", title="SST-2", texts=("sentence",), labels=_BINARY, hub_labels=("negative", "positive")
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
    TextTask(
        name="stsb",
        title="STS-B",
        texts=_PAIR,
        label="score",
        metrics=("pearson", "spearman"),
        scale=(0.0, 5.0),
    ),
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
        name="wnli", title="WNLI", texts=_PAIR, labels=_BINARY, hub_labels=("not_entailment", "entailment")
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
    GenerationTask(
        name="squad-qg",
        title="SQuAD",
        generation=Generation(
            decoding=Decoding(max_source=464, max_new_tokens=48, num_beams=5, length_penalty=0.0)
        ),
        sources=("src", "answer"),
        hub="lmqg/qg_squad",
        hub_sources=("paragraph", "answer"),
        hub_target="question",
        has_spans=True,
        recipe=Recipe(lrs=(1e-4,), epochs=(10,)),
    ),
    GenerationTask(
        name="xsum",
        title="XSum",
        generation=Generation(
            decoding=Decoding(
                max_source=464, max_new_tokens=48, num_beams=5, length_penalty=0.0, no_repeat_ngram_size=3
            )
        ),
        hub="EdinburghNLP/xsum",
        hub_sources=("document",),
        hub_target="summary",
        recipe=Recipe(lrs=(1e-4,), epochs=(34,), batch_size=64),
    ),
    GenerationTask(
        name="cnndm",
        title="CNN-DailyMail",
        generation=Generation(
            decoding=Decoding(
                max_source=608,
                max_new_tokens=160,
                min_new_tokens=48,
                num_beams=5,
                length_penalty=0.0,
                no_repeat_ngram_size=3,
            ),
            positions="copied",
        ),
        hub="abisee/cnn_dailymail",
        hub_configuration="3.0.0",
        hub_sources=("article",),
        hub_target="highlights",
        recipe=Recipe(lrs=(7e-5,), epochs=(10,), batch_size=64),
    ),
    GenerationTask(
        name="gigaword",
        title="Gigaword",
        generation=Generation(
            decoding=Decoding(max_source=128, max_new_tokens=32, num_beams=5, length_penalty=0.0)
        ),
        hub="Harvard/gigaword",
        hub_sources=("document",),
        hub_target="summary",
        recipe=Recipe(lrs=(1e-4,), epochs=(10,), batch_size=64),
    ),
)
OWN_GENERATION: Final = GenerationTask(
    name="",
    title="",
    generation=Generation(decoding=Decoding(max_source=128, max_new_tokens=48, num_beams=5)),
    recipe=Recipe(lrs=(1e-4,), epochs=(3,)),
)
"""Settings of texts of one's own to generate, without their name."""
OWN_TEXTS: Final = TextTask(name="", title="", texts=("text",))
"""Settings of labelled texts of one's own, without their name."""
TASKS: Final[Mapping[str, Task]] = MappingProxyType({task.name: task for task in _ALL})
"""Tasks by the name that --task takes."""


def task_folder(data: Path, title: str) -> Path:
    """Return the folder of a task: the subfolder of its name, or `data` itself if there is none.

    Raises:
        CorpusError: `data` is not a folder.
    """
    if not data.is_dir():
        raise CorpusError(
            f"--data {data}: no such folder. Give a folder with the published files of {title}, as from "
            "gluebenchmark.com, or hf, which downloads them from the Hugging Face hub."
        )
    within = data / title
    return within if within.is_dir() else data


def find_file(folder: Path, stem: str) -> Path | None:
    """Return the .tsv or .jsonl file of a set. None means that there is no such file."""
    return next((file for ending in _ENDINGS if (file := folder / f"{stem}{ending}").is_file()), None)


def file_of(data: Path, task: TextTask, set_file: SetFile, *, kind: str) -> Path:
    """Return the file of a set of a task in one language.

    Args:
        data: folder in the official layout, or one that holds it under the task's name.
        task: the task.
        set_file: names of the set.
        kind: what the set is for, such as `dev`, for the message.

    Raises:
        CorpusError: there is no such folder, or no such file in it.
    """
    folder = task_folder(data, task.title)
    file = find_file(folder, set_file.stem)
    if file is None:
        raise CorpusError(
            f"{folder} has no {kind} set of {task.title}: neither {set_file.stem}.tsv nor "
            f"{set_file.stem}.jsonl is there. Give the folder in the official layout, or one that holds it "
            f"as {task.title}."
        )
    return file


def named_file(folder: Path, name: str, task: SpanTask) -> Path:
    """Return a file of a task of questions.

    Raises:
        CorpusError: there is no such file.
    """
    if not (folder / name).is_file():
        raise CorpusError(
            f"{folder} has no {name}. Give the folder in the official layout, or one that holds it as "
            f"{task.title}."
        )
    return folder / name
