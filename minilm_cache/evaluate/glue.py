"""Examples of GLUE and XNLI: from a folder in the official layout, or from the hub."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.examples import TextExample, Track, is_labelled
from minilm_cache.evaluate.files import Columns, find_file, load_hub, read_lines, read_table
from minilm_cache.evaluate.tasks import SetFile, TextTask

_ENGLISH: Final = "en"
_XTREME: Final = ("sentence1", "sentence2", "gold_label")
_XTREME_UNLABELLED: Final = _XTREME[:2]
_TRANSLATED_COLUMNS: Final = {"premise": "sentence1", "hypo": "sentence2", "label": "gold_label"}
"""Of multinli.train.LANGUAGE.tsv in XNLI-MT-1.0."""
_OTHER_WORDS: Final = {"contradictory": "contradiction"}
"""As XNLI-MT-1.0 writes a label."""
_XNLI_SPLITS: Final = {"dev": "validation", "test": "test"}

Sets = dict[str, list[TextExample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where data are, and what is wanted of them."""

    folder: Path | None
    """In the official layout, or one that holds it under the task's name; none: the hub."""
    hub: str | None
    """Repository on the hub, of the usual one's columns; none: the usual one."""
    unlabelled: bool
    """Read test sets whose labels are not published, too."""
    note: Callable[[str], None]
    """Told what the user should know."""


def read_text_task(task: TextTask, source: Source) -> list[Track[TextExample]]:
    """Return the tracks of a task: one, or one for each language that it is trained on.

    Args:
        task: which.
        source: of its data.

    Raises:
        CorpusError: a file is not there, is empty, lacks a column, or holds a label that the task has not.
    """
    if task.languages != "one":
        trains, scored = _xnli_hub(task, source) if source.folder is None else _xnli_folder(task, source)
        return _tracks_by_language(task, trains, scored)

    tests = task.test if source.unlabelled else ()
    return [
        Track(
            name="",
            train=_read(task, source, kind="training", one=task.train),
            dev={one.name: _read(task, source, kind="dev", one=one) for one in task.dev},
            test={one.name: found for one in tests if (found := _read(task, source, kind="test", one=one))},
        )
    ]


def read_dev(task: TextTask, source: Source) -> list[TextExample]:
    """Return the examples of a task's dev sets, for those who train on none.

    Raises:
        CorpusError: as `read_text_task`.
    """
    return [example for one in task.dev for example in _read(task, source, kind="dev", one=one)]


def _read(task: TextTask, source: Source, *, kind: str, one: SetFile) -> list[TextExample]:
    return (
        _from_hub(task, source, one)
        if source.folder is None
        else _from_folder(task, source, kind=kind, one=one)
    )


def task_folder(data: Path, title: str) -> Path:
    """Return the folder of a task: the one given, or the one of its name within."""
    if not data.is_dir():
        raise CorpusError(f"--data {data}: no such folder. Give one in the official layout, or hf.")
    within = data / title
    return within if within.is_dir() else data


def _from_folder(task: TextTask, source: Source, *, kind: str, one: SetFile) -> list[TextExample]:
    """Read a set; a test set may be missing, which is no example."""
    assert source.folder is not None
    folder = task_folder(source.folder, task.title)
    file = find_file(folder, one.stem)
    if file is not None:
        table = read_table(file, one.columns, note=source.note if kind == "training" else None)
        return _examples(task, table, where=str(file), texts=task.texts, labelled=kind != "test")
    if kind == "test":
        return []
    raise CorpusError(
        f"{folder} has no {kind} set of {task.title}: neither {one.stem}.tsv nor {one.stem}.jsonl is "
        f"there. Give the folder in the official layout, or one that holds it as {task.title}."
    )


def _from_hub(task: TextTask, source: Source, one: SetFile) -> list[TextExample]:
    hub = source.hub or task.hub
    configuration, split = ("ax", "test") if one.split == "ax" else (task.name, one.split)
    found = load_hub(hub, configuration, split)
    if found is not None:
        labelled = one not in task.test
        return _hub_examples(task, found, f"{hub} ({configuration}, {split})", labelled=labelled)
    if one in task.test:
        return []
    raise CorpusError(f"{hub} ({configuration}) has no split {split}. Name another: --data hf:ID.")


def _hub_examples(task: TextTask, found: Columns, where: str, *, labelled: bool) -> list[TextExample]:
    """Read labels that are named there, or numbered as usual."""
    named = {**found, task.label: found.get("label", ())}
    named.pop("index", None)
    if labelled and not task.is_regression:
        words: dict[object, str] = {
            **dict(zip(task.hub_labels or task.labels, task.labels, strict=True)),
            **dict(enumerate(task.labels)),
        }
        named[task.label] = [words.get(one, one) for one in named[task.label]]
    return _examples(task, named, where=where, texts=task.hub_texts or task.texts, labelled=labelled)


def _examples(
    task: TextTask, found: Columns, *, where: str, texts: Sequence[str], labelled: bool
) -> list[TextExample]:
    wanted = [*texts, task.label] if labelled else texts
    missing = next((name for name in wanted if not found.get(name)), None)
    if missing is not None:
        raise CorpusError(
            f"{where} has no column {missing!r}; it has {', '.join(found)}. Is it the file of another task "
            f"than {task.title}?"
        )
    size = len(found[texts[0]])
    labels = found[task.label] if labelled else [None] * size
    indices = found.get("index", range(size))
    rows = zip(zip(*(found[name] for name in texts), strict=True), labels, indices, strict=True)
    examples = []
    for number, (words, label, index) in enumerate(rows, 1):
        at = f"{where}, example {number}"
        read = tuple(read_text(word, at) for word in words)
        examples.append(TextExample(read, _label(task, label, at) if labelled else None, str(index)))
    return examples


def read_text(value: object, where: str) -> str:
    """Return a value that is a text which can be written as UTF-8.

    Raises:
        CorpusError: it is none.
    """
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise CorpusError(f"{where}: {str(value)[:40]!a} is no text. Fetch the file again.")


def _label(task: TextTask, label: object, where: str) -> float:
    if not task.is_regression:
        word = _OTHER_WORDS.get(str(label), str(label))
        if word not in task.labels:
            raise CorpusError(f"{where}: label {str(label)!r} is none of {', '.join(task.labels)}.")
        return float(task.labels.index(word))
    try:
        value = float(str(label))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CorpusError(f"{where}: {task.label} {str(label)!r} is no number.")
    return value


def _xnli_folder(task: TextTask, source: Source) -> tuple[Sets, Sets]:
    """Read XTREME's files, one for each set and language, or those of XNLI-1.0 and XNLI-MT-1.0."""
    assert source.folder is not None
    folder = task_folder(source.folder, task.title)
    trains = _by_language(task, folder, "train")
    scored = {
        f"{name}-{language}": examples
        for name in ("dev", "test")
        for language, examples in (
            _by_language(task, folder, name) or _from_column(task, folder, name)
        ).items()
        if source.unlabelled or is_labelled(examples)
    }
    for file in sorted(
        [*folder.glob("multinli.train.*.tsv"), *folder.glob("*/multinli/multinli.train.*.tsv")]
    ):
        found = read_table(file)
        named = {_TRANSLATED_COLUMNS.get(name, name): values for name, values in found.items()}
        trains.setdefault(
            file.name.split(".")[2], _examples(task, named, where=str(file), texts=task.texts, labelled=True)
        )
    if not trains or not any(name.startswith("dev-") for name in scored):
        lacking = (
            "dev-LANGUAGE.tsv or xnli.dev.tsv" if trains else "train-LANGUAGE.tsv or multinli.train.*.tsv"
        )
        raise CorpusError(
            f"{folder} is no XNLI: {lacking} is not there. Give a folder in XTREME's layout, or one with "
            "XNLI-1.0 and XNLI-MT-1.0."
        )
    return trains, scored


def _by_language(task: TextTask, folder: Path, name: str) -> Sets:
    """Read XTREME's files of a set; those of a test set may have no labels."""
    found: Sets = {}
    for file in sorted(folder.glob(f"{name}-*.tsv")):
        labelled = name != "test" or read_lines(file)[0].count("\t") + 1 == len(_XTREME)
        table = read_table(file, _XTREME if labelled else _XTREME_UNLABELLED)
        language = file.stem.removeprefix(f"{name}-")
        found[language] = _examples(task, table, where=str(file), texts=task.texts, labelled=labelled)
    return found


def _from_column(task: TextTask, folder: Path, name: str) -> Sets:
    """Read a set of XNLI-1.0, whose languages are a column."""
    file = find_file(folder, f"xnli.{name}") or find_file(folder / "XNLI-1.0", f"xnli.{name}")
    if file is None:
        return {}
    table = read_table(file)
    examples = _examples(task, table, where=str(file), texts=task.texts, labelled=True)
    languages = table.get("language", ())
    if len(languages) != len(examples):
        raise CorpusError(f"{file} has no column 'language'. Give xnli.{name}.tsv of XNLI-1.0.")
    found: Sets = {}
    for language, example in zip(languages, examples, strict=True):
        found.setdefault(str(language), []).append(example)
    return found


def _xnli_hub(task: TextTask, source: Source) -> tuple[Sets, Sets]:
    hub = source.hub or task.hub
    trains: Sets = {}
    scored: Sets = {}
    for language in (
        "ar",
        "bg",
        "de",
        "el",
        "en",
        "es",
        "fr",
        "hi",
        "ru",
        "sw",
        "th",
        "tr",
        "ur",
        "vi",
        "zh",
    ):
        for name, split in {"train": "train", **_XNLI_SPLITS}.items():
            if name == "train" and task.languages == "cross-lingual" and language != _ENGLISH:
                continue
            found = load_hub(hub, language, split)
            if found is None:
                raise CorpusError(f"{hub} ({language}) has no split {split}. Name another: --data hf:ID.")
            examples = _hub_examples(task, found, f"{hub} ({language}, {split})", labelled=True)
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
                f"{task.title} across languages trains on English, whose training set is not there."
            )
        return [_track("", trains[_ENGLISH], scored)]
    own = {
        language: {name: examples for name, examples in scored.items() if name.endswith(f"-{language}")}
        for language in trains
    }
    lacking = next((language for language, sets in own.items() if f"dev-{language}" not in sets), None)
    if lacking is not None:
        raise CorpusError(f"{task.title} has a training set of {lacking!r}, and no dev set of it.")
    return [_track(language, trains[language], sets) for language, sets in own.items()]


def _track(name: str, train: list[TextExample], scored: Sets) -> Track[TextExample]:
    def those(prefix: str) -> Sets:
        return {name: examples for name, examples in scored.items() if name.startswith(prefix)}

    return Track(name=name, train=train, dev=those("dev-"), test=those("test-"))
