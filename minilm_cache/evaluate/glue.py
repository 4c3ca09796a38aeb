"""Read examples of GLUE and XNLI from a folder in the official layout, or from the hub."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.examples import TextExample, Track, is_labelled, track_of
from minilm_cache.evaluate.files import Columns, Source, load_hub, read_lines, read_table, read_text
from minilm_cache.evaluate.tasks import SetFile, TextTask, file_of, find_file, task_folder

_ENGLISH: Final = "en"
_XTREME: Final = ("sentence1", "sentence2", "gold_label")
_XTREME_UNLABELLED: Final = _XTREME[:2]
_LANGUAGES: Final = ["ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"]
_XNLI_SPLITS: Final = {"dev": "validation", "test": "test"}

Sets = dict[str, list[TextExample]]
"""Examples by set or by language."""


def read_text_task(task: TextTask, source: Source) -> list[Track[TextExample]]:
    """Return the tracks of a task: one, or one for each language that it is trained on.

    Args:
        task: task to read.
        source: source of its data.

    Raises:
        CorpusError: a file is missing or empty, lacks a column, or has a label that the task does not have.
    """
    if task.languages != "one":
        trains, scored = _xnli_hub(task, source) if source.folder is None else _xnli_folder(task, source)
        return _tracks_by_language(task, trains, scored)

    tests = task.test if source.tests else ()
    return [
        Track(
            name="",
            train=_read(task, source, kind="training", set_file=task.train),
            dev={set_file.name: _read(task, source, kind="dev", set_file=set_file) for set_file in task.dev},
            test={
                set_file.name: examples
                for set_file in tests
                if (examples := _read(task, source, kind="test", set_file=set_file))
            },
        )
    ]


def read_dev(task: TextTask, source: Source) -> list[TextExample]:
    """Return the examples of a task's dev sets, for a comparison without training.

    Raises:
        CorpusError: same as for `read_text_task`.
    """
    return [
        example for set_file in task.dev for example in _read(task, source, kind="dev", set_file=set_file)
    ]


def _read(task: TextTask, source: Source, *, kind: str, set_file: SetFile) -> list[TextExample]:
    return (
        _from_hub(task, source, set_file)
        if source.folder is None
        else _from_folder(task, source, kind=kind, set_file=set_file)
    )


def _from_folder(task: TextTask, source: Source, *, kind: str, set_file: SetFile) -> list[TextExample]:
    """Return the examples of a set; those of a missing test set are an empty list."""
    assert source.folder is not None
    if kind == "test" and find_file(task_folder(source.folder, task.title), set_file.stem) is None:
        return []
    file = file_of(source.folder, task, set_file, kind=kind)
    table = read_table(file, set_file.columns, note=source.note if kind == "training" else None)
    return _examples(task, table, where=str(file), texts=task.texts, labelled=kind != "test")


def _from_hub(task: TextTask, source: Source, set_file: SetFile) -> list[TextExample]:
    hub = source.hub or task.hub
    configuration, split = ("ax", "test") if set_file.split == "ax" else (task.name, set_file.split)
    columns = load_hub(hub, configuration, split)
    if columns is not None:
        labelled = set_file not in task.test
        return _hub_examples(task, columns, f"{hub} ({configuration}, {split})", labelled=labelled)
    if set_file in task.test:
        return []
    raise CorpusError(f"{hub} ({configuration}) has no split {split}. Name another: --data hf:ID.")


def _hub_examples(task: TextTask, columns: Columns, where: str, *, labelled: bool) -> list[TextExample]:
    """Return the examples of a split of the hub, whose labels may be names or the usual numbers."""
    named = {**columns, task.label: columns.get("label", ())}
    named.pop("index", None)
    if labelled and not task.is_regression:
        labels: dict[object, str] = {
            **dict(zip(task.hub_labels or task.labels, task.labels, strict=True)),
            **dict(enumerate(task.labels)),
        }
        named[task.label] = [labels.get(label, label) for label in named[task.label]]
    return _examples(task, named, where=where, texts=task.hub_texts or task.texts, labelled=labelled)


def _examples(
    task: TextTask, columns: Columns, *, where: str, texts: Sequence[str], labelled: bool
) -> list[TextExample]:
    required = [*texts, task.label] if labelled else texts
    missing = next((name for name in required if not columns.get(name)), None)
    if missing is not None:
        raise CorpusError(
            f"{where} has no column {missing!r}; it has {', '.join(columns)}. It may be the file of another "
            f"task than {task.title}: give the right --data."
        )
    size = len(columns[texts[0]])
    labels = columns[task.label] if labelled else [None] * size
    indices = columns.get("index", range(size))
    rows = zip(zip(*(columns[name] for name in texts), strict=True), labels, indices, strict=True)
    examples = []
    for number, (values, label, index) in enumerate(rows, 1):
        at = f"{where}, example {number}"
        checked = tuple(read_text(value, at) for value in values)
        examples.append(TextExample(checked, _label(task, label, at) if labelled else None, str(index)))
    return examples


def _label(task: TextTask, label: object, where: str) -> float:
    if not task.is_regression:
        word = str(label)
        if word not in task.labels:
            raise CorpusError(
                f"{where}: label {str(label)!r} is not one of {', '.join(task.labels)}. Correct or remove it."
            )
        return float(task.labels.index(word))
    try:
        value = float(str(label))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CorpusError(
            f"{where}: {task.label} {str(label)!r} is not a finite number. Correct or remove it."
        )
    return value


def _xnli_folder(task: TextTask, source: Source) -> tuple[Sets, Sets]:
    """Return training sets by language, and dev and test sets by name, such as `dev-de`.

    The folder has XTREME's files, one for each set and language.
    """
    assert source.folder is not None
    folder = task_folder(source.folder, task.title)
    trains = _by_language(task, folder, "train")
    scored = {
        f"{name}-{language}": examples
        for name in ("dev", "test")
        for language, examples in _by_language(task, folder, name).items()
        if source.tests or is_labelled(examples)
    }
    if not trains or not any(name.startswith("dev-") for name in scored):
        raise CorpusError(
            f"{folder} is not an XNLI folder: {'dev' if trains else 'train'}-LANGUAGE.tsv is not there. Give "
            "one in XTREME's layout, or --data hf."
        )
    return trains, scored


def _by_language(task: TextTask, folder: Path, name: str) -> Sets:
    """Return the examples of XTREME's files of a set, by language; a test set may have no labels."""
    sets: Sets = {}
    for file in sorted(folder.glob(f"{name}-*.tsv")):
        labelled = name != "test" or read_lines(file)[0].count("\t") + 1 == len(_XTREME)
        table = read_table(file, _XTREME if labelled else _XTREME_UNLABELLED)
        language = file.stem.removeprefix(f"{name}-")
        sets[language] = _examples(task, table, where=str(file), texts=task.texts, labelled=labelled)
    return sets


def _xnli_hub(task: TextTask, source: Source) -> tuple[Sets, Sets]:
    hub = source.hub or task.hub
    trains: Sets = {}
    scored: Sets = {}
    for language in _LANGUAGES:
        for name, split in {"train": "train", **_XNLI_SPLITS}.items():
            if name == "train" and task.languages == "cross-lingual" and language != _ENGLISH:
                continue
            columns = load_hub(hub, language, split)
            if columns is None:
                raise CorpusError(f"{hub} ({language}) has no split {split}. Name another: --data hf:ID.")
            examples = _hub_examples(task, columns, f"{hub} ({language}, {split})", labelled=True)
            (trains if name == "train" else scored)[language if name == "train" else f"{name}-{language}"] = (
                examples
            )
    return trains, scored


def _tracks_by_language(
    task: TextTask, trains: Mapping[str, list[TextExample]], scored: Sets
) -> list[Track[TextExample]]:
    if task.languages == "cross-lingual":
        if _ENGLISH not in trains:
            raise CorpusError(
                f"{task.title} across languages trains on English, whose training set is not there. Add it."
            )
        return [track_of("", trains[_ENGLISH], scored)]
    by_language = {
        language: {name: examples for name, examples in scored.items() if name.endswith(f"-{language}")}
        for language in trains
    }
    lacking = next(
        (language for language, sets in by_language.items() if f"dev-{language}" not in sets), None
    )
    if lacking is not None:
        raise CorpusError(
            f"{task.title} has a training set of {lacking!r}, but no dev set of it. "
            "Add that, or remove the training set."
        )
    return [track_of(language, trains[language], sets) for language, sets in by_language.items()]
