"""A task of one's own: a file of texts with labels, as examples to fine-tune on and to be scored by."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from minilm_cache.corpus.formats import kind_of, plain_number
from minilm_cache.errors import CorpusError, InvalidConfigError
from minilm_cache.evaluate.examples import GenerationExample, TextExample, Track
from minilm_cache.evaluate.files import generation_columns, own_rows, read_own_text
from minilm_cache.evaluate.generation_data import read_pairs
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.evaluate.tasks import OWN_GENERATION, OWN_TEXTS, GenerationTask, Metric, TextTask
from minilm_cache.wording import printable

_HELD_OUT: Final = 0.1
"""Share of the texts that are scored where there is no file of them."""
_MOST_CLASSES: Final = 1000
_DECIMAL_COMMA: Final = re.compile(r"[-+]?\d+,(?!\d{3}$)\d+")
_CORRELATIONS: Final[tuple[Metric, ...]] = ("pearson", "spearman")
_MOST_ARE_VALUES: Final = 0.5
"""Share of labels that are numbers above which the others are mistakes, if some numbers are not whole."""


class Row(NamedTuple):
    """A labelled record of a file."""

    texts: tuple[str, ...]
    label: object
    where: str
    """Where it is, in words."""
    number: int
    """Its number in the file, counted from 0."""


def read_own_task(
    file: Path, config: EvaluateConfig, note: Callable[[str], None]
) -> tuple[TextTask | GenerationTask, list[Track[Any]]]:
    """Return the task that a file of texts is, and its examples: with labels, or with texts to generate.

    Raises:
        CorpusError: see `read_labelled` and `read_pairs`.
    """
    columns = generation_columns(file, config)
    if columns is None:
        return read_labelled(file, config, note)
    sources, target = columns
    note(f"{printable(file.name)}: {target} is generated from {' and '.join(sources)}")
    if config.as_is and config.dev is None:
        note(f"{printable(file.name)}: all texts are scored, also those that a model may have been tuned on")
    task, (track,) = _read_generation(file, config, sources=sources, target=target)
    if config.dev is not None and not config.as_is:
        train, dev = ([each.source for each in part] for part in (track.train, track.dev["dev"]))
        note_overlap(file, train, dev, note=note)
    return task, [track]


def note_overlap(
    file: Path, train: Sequence[object], dev: Sequence[object], *, note: Callable[[str], None]
) -> None:
    """Say how many of the texts that are scored are also trained on, where there are some."""
    known = set(train)
    if also := sum(text in known for text in dev):
        note(f"{printable(file.name)}: {also} of the {len(dev)} texts that are scored are also trained on")


def _read_generation(
    file: Path, config: EvaluateConfig, *, sources: Sequence[str], target: str
) -> tuple[GenerationTask, list[Track[GenerationExample]]]:
    """Return the task that a file of texts with texts to generate is, and its examples."""
    train = read_pairs(file, sources, target)
    if config.dev is not None:
        dev = read_pairs(config.dev, sources, target)
    elif config.as_is:
        dev = train
    else:
        known = list(dict.fromkeys(example.source for example in train))
        held_out = _held_out(known, file)
        dev = [example for example in train if example.source in held_out]
        train = [example for example in train if example.source not in held_out]
    title = printable(file.name)
    task = replace(OWN_GENERATION, name=title, title=title, sources=tuple(sources), target=target)
    return task, [Track(name="", train=train, dev={"dev": dev}, test={})]


def read_labelled(
    file: Path, config: EvaluateConfig, note: Callable[[str], None]
) -> tuple[TextTask, list[Track[TextExample]]]:
    """Return the task that a file of labelled texts is, and its examples.

    Labels that are numbers, some of which are not whole, are values on a scale, which models learn by squared
    error; all others are classes. `config.metric` says otherwise.

    Args:
        file: a .csv, .tsv, .jsonl or .parquet file.
        config: names of its columns, the metric, and the file that is scored. Without that file a tenth of
            the texts is scored, always the same ones; equal texts stay together.
        note: shows what was found in the file.

    Raises:
        CorpusError: a file does not exist or is damaged, lacks a column, a text or a label; there is one
            class, or more than 1,000; a label is not among those to train on; or the metric does not suit.
    """
    columns = tuple(part.strip() for part in config.text_columns.split(","))
    train = _rows(file, columns, config.label_column)
    if config.dev is None:
        train, dev = (train, train) if config.as_is else _split(train, file, config.metric)
    else:
        dev = _rows(config.dev, columns, config.label_column)
    if config.dev is not None and not config.as_is:
        note_overlap(file, [row.texts for row in train], [row.texts for row in dev], note=note)
    if config.metric is None:
        _refuse_words_among_values(train)
    labels = [row.label for row in train]
    classes = () if _is_scale(labels, config.metric) else _classes(labels, file)
    task = replace(
        OWN_TEXTS,
        name=printable(file.name),
        title=printable(file.name),
        texts=columns,
        label=config.label_column,
        labels=classes,
        metrics=_metrics(config, classes, file),
    )
    sets = {"train": train, "dev": dev}
    examples = {
        name: [
            TextExample(row.texts, _number(row.label, classes, row.where), str(row.number)) for row in rows
        ]
        for name, rows in sets.items()
    }
    kind = f"{len(classes)} classes ({', '.join(classes[:8])})" if classes else "values on a scale"
    scored = [f"f1 of {classes[-1]}" if metric == "f1" else metric for metric in task.metrics]
    note(f"{task.title}: {kind}, scored by {' and '.join(scored)}")
    if config.as_is and config.dev is None:
        note(f"{task.title}: all of its texts are scored, also those that a model may have been tuned on")
    return task, [Track(name="", train=examples["train"], dev={"dev": examples["dev"]}, test={})]


def _rows(file: Path, columns: Sequence[str], label_column: str) -> list[Row]:
    """Return the records of a file.

    Raises:
        CorpusError: see `read_own_task`; messages name the options of this command.
    """
    return [
        Row(
            tuple(read_own_text(row[name], where) for name in columns),
            _label(row[label_column], where),
            where,
            number,
        )
        for number, (where, row) in enumerate(
            own_rows(file, (*columns, label_column), "--text-columns, --label-column")
        )
    ]


def _label(value: object, where: str) -> object:
    """Return a label; raise CorpusError for a list or an object, which is no name of a class."""
    if isinstance(value, list | tuple | dict | set):
        raise CorpusError(
            f"{where}: label {str(value)[:40]!r} is {kind_of(value)}. A label is one class or one value: "
            "several labels of a text are not learned here. Write each label as a text or a number."
        )
    if isinstance(value, float) and math.isinf(value):
        raise CorpusError(f"{where}: label {value} is no value and no class. Write a number or a word.")
    return value


def _refuse_words_among_values(rows: Sequence[Row]) -> None:
    """Raise CorpusError where most labels are values on a scale, and others are no numbers."""
    labelled = [row for row in rows if _word(row.label)]
    values = np.array([plain_number(row.label) for row in labelled])
    numbers = values[np.isfinite(values)]
    with_comma = [row for row in labelled if _DECIMAL_COMMA.fullmatch(str(row.label))]
    if len(with_comma) > len(labelled) / 2:
        row = with_comma[0]
        raise CorpusError(
            f"{row.where}: label {str(row.label)[:20]!r} has a decimal comma, as most have. Write values "
            "with a point, and classes in words."
        )
    are_values = len(numbers) > _MOST_ARE_VALUES * len(values) and (numbers != np.round(numbers)).any()
    if are_values and len(numbers) < len(values):
        row = labelled[int(np.flatnonzero(~np.isfinite(values))[0])]
        raise CorpusError(
            f"{row.where}: label {str(row.label)[:40]!r} is not a number, and {len(numbers)} of the "
            f"{len(values)} labels are, on a scale. Correct or remove it, or give --metric accuracy if "
            "labels are names of classes."
        )


def _split(rows: Sequence[Row], file: Path, metric: Metric | None) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on, and those that are scored, with all rows of equal texts on one side.

    Rows of a class that has no others stay among those to train on, as nothing could be learned of it.
    """
    held_out = _held_out(list(dict.fromkeys(row.texts for row in rows)), file)
    if not _is_scale([row.label for row in rows], metric):
        learned = {_word(row.label) for row in rows if row.texts not in held_out}
        rare = {row.texts for row in rows if _word(row.label) not in learned}
        held_out = held_out - rare or held_out
    dev = [row for row in rows if row.texts in held_out]
    return [row for row in rows if row.texts not in held_out], dev


def _held_out(known: Sequence[tuple[str, ...]], file: Path) -> set[tuple[str, ...]]:
    """Return the texts that are scored, always the same ones."""
    if len(known) == 1:
        raise CorpusError(f"{file} has one text. Give more, or --dev with others that are scored.")
    order = np.random.default_rng(0).permutation(len(known))
    return {known[at] for at in order[: max(1, round(_HELD_OUT * len(known)))]}


def _is_scale(labels: Sequence[object], metric: Metric | None) -> bool:
    if metric is not None:
        return metric in _CORRELATIONS
    values = np.array([plain_number(label) for label in labels if _word(label)])
    return bool(np.isfinite(values).all() and (values != np.round(values)).any())


def _classes(labels: Sequence[object], file: Path) -> tuple[str, ...]:
    """Return the names of classes, numbers by their value and others by the alphabet."""
    found = {_word(label) for label in labels} - {""}
    if not 1 < len(found) <= _MOST_CLASSES:
        raise CorpusError(
            f"{file} has {len(found):,} different labels to train on, and a classifier has from 2 to "
            f"{_MOST_CLASSES:,}. Name another column (--label-column); give --metric pearson if labels are "
            "values on a scale; or give --task a file with all classes, and this one as --dev."
        )
    values = {word: plain_number(word) for word in found}
    words = sorted(word for word in found if math.isnan(values[word]))  # they have no order as numbers
    return (*sorted(found - {*words}, key=lambda word: (values[word], word)), *words)


def _word(label: Any) -> str:  # noqa: ANN401 - any value of a file
    """Return the name of a class, empty where it is missing; a whole number has one with and without a point.

    Words stay as they are: in a .csv file `0.0` is another class than `0`.
    """
    is_whole = isinstance(label, float) and label.is_integer()
    is_missing = label is None or (isinstance(label, float) and math.isnan(label))
    return "" if is_missing else str(int(label) if is_whole else label).strip()


def _metrics(config: EvaluateConfig, classes: Sequence[str], file: Path) -> tuple[Metric, ...]:
    if config.metric is None:
        return ("accuracy",) if classes else _CORRELATIONS
    if config.metric == "f1" and len(classes) > 2:  # noqa: PLR2004 - the positive one, and the other
        raise InvalidConfigError(
            f"--metric f1 is about the second of two classes, and {file} has {len(classes)}. Take accuracy "
            "or matthews."
        )
    return (config.metric,)


def _number(label: object, classes: Sequence[str], where: str) -> float:
    """Return the number of a class, or the value on a scale.

    Raises:
        CorpusError: it is missing, or is no finite number or no class of the training set.
    """
    word = _word(label)
    if classes and word in classes:
        return float(classes.index(word))
    value = plain_number(label)
    if classes or not math.isfinite(value):
        wanted = f"a class of the training set ({', '.join(classes[:8])})" if classes else "a number"
        raise CorpusError(f"{where}: label {str(label)[:40]!r} is not {wanted}. Correct it.")
    return value
