"""Read texts with the texts to generate from them: published layouts, files of one's own, and the hub."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.examples import GenerationExample, SpanExample, Track
from minilm_cache.evaluate.files import Source, load_hub, own_rows, read_json, read_lines, read_text
from minilm_cache.evaluate.squad import read_span_task
from minilm_cache.evaluate.tasks import TASKS, GenerationTask, SpanTask, task_folder

_STEMS: Final = {"train": ("train",), "dev": ("dev", "val", "valid", "validation"), "test": ("test",)}
"""Names of the files of a set, without their endings."""
_RECORDS: Final = (".jsonl", ".json")
"""Endings of files with a JSON object a line, as s2s-ft of UniLM has them."""
_LINES: Final = (
    (".source", ".target"),
    (".src", ".tgt"),
    (".article.txt", ".title.txt"),
    (".article.filter.txt", ".title.filter.txt"),
)
"""Endings of two files with a text a line: BART's (XSum, CNN/DailyMail), fairseq's, and Gigaword's."""


def read_generation_task(task: GenerationTask, source: Source) -> list[Track[GenerationExample]]:
    """Return the one track of a task.

    Args:
        task: task to read.
        source: source of its data; test sets are read where it says so.

    Raises:
        CorpusError: a file is missing, empty or damaged, lacks a column, or has an empty text.
    """
    names = ("train", "dev", "test") if source.tests else ("train", "dev")
    if source.folder is None:
        sets = {name: _from_hub(task, source.hub or task.hub, name) for name in names}
    else:
        folder = task_folder(source.folder, task.title)
        sets = {name: _from_folder(task, folder, name) for name in names}
        if task.has_spans and not any(sets.values()):
            return [_of_spans(source)]
    missing = next((name for name in ("train", "dev") if not sets[name]), None)
    if missing is not None:
        where = source.folder or source.hub or task.hub
        raise CorpusError(
            f"{where} has no {missing} set of {task.name}. Give a folder with "
            f"{_STEMS[missing][0]}.jsonl (columns {', '.join((*task.sources, task.target))}), or with "
            f"{_STEMS[missing][0]}.source and {_STEMS[missing][0]}.target."
        )
    test = {"test": sets["test"]} if sets.get("test") else {}
    return [Track(name="", train=sets["train"], dev={"dev": sets["dev"]}, test=test)]


def read_pairs(file: Path, sources: Sequence[str], target: str) -> list[GenerationExample]:
    """Return the records of a file of one's own.

    Args:
        file: a .csv, .tsv, .jsonl or .parquet file.
        sources: columns of the source, one or two.
        target: column of the text that is generated.

    Raises:
        CorpusError: the file does not exist or is damaged, lacks a column, or has an empty text.
    """
    rows = own_rows(file, (*sources, target), "--text-columns, --target-column")
    return [_example(row, where, sources=sources, target=target) for where, row in rows]


def _from_folder(task: GenerationTask, folder: Path, name: str) -> list[GenerationExample]:
    """Return the examples of a set. They are empty if the folder has none of its files."""
    for stem in _STEMS[name]:
        for ending in _RECORDS:
            file = folder / f"{stem}{ending}"
            if file.is_file():
                return _of_records(task, file)
        for of_source, of_target in _LINES:
            files = folder / f"{stem}{of_source}", folder / f"{stem}{of_target}"
            if files[0].is_file():
                return _of_lines(*files)
    return []


def _of_records(task: GenerationTask, file: Path) -> list[GenerationExample]:
    rows = [
        (f"{file}, line {number}", read_json(line, f"{file}, line {number},"))
        for number, line in enumerate(read_lines(file), 1)
    ]
    # UniLM's files have the passage and the answer as one text.
    sources = [name for name in task.sources if any(isinstance(row, dict) and name in row for _, row in rows)]
    return [_example(row, where, sources=sources or task.sources, target=task.target) for where, row in rows]


def _of_lines(of_source: Path, of_target: Path) -> list[GenerationExample]:
    if not of_target.is_file():
        raise CorpusError(f"{of_source} has no {of_target.name} beside it. Fetch both again.")
    sources, targets = read_lines(of_source), read_lines(of_target)
    if len(sources) != len(targets):
        raise CorpusError(
            f"{of_source} has {len(sources):,} lines, and {of_target.name} {len(targets):,}. Fetch both "
            "again."
        )
    return [
        _example(
            {"src": text, "tgt": target},
            f"{of_source} and {of_target.name}, line {number}",
            sources=("src",),
            target="tgt",
        )
        for number, (text, target) in enumerate(zip(sources, targets, strict=True), 1)
    ]


def _example(row: Any, where: str, *, sources: Sequence[str], target: str) -> GenerationExample:  # noqa: ANN401
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where}: not a JSON object. Fetch the file again.")
    missing = next((name for name in (*sources, target) if row.get(name) is None), None)
    if missing is not None:
        has = ", ".join(map(str, row)) or "nothing"
        raise CorpusError(f"{where}: there is no {missing!r}; it has {has}. Correct it.")
    texts = {name: read_text(row[name], where) for name in (*sources, target)}
    empty = next((name for name, text in texts.items() if not text.strip()), None)
    if empty is not None:
        raise CorpusError(f"{where}: {empty} is empty. Remove the record.")
    return GenerationExample(source=tuple(texts[name] for name in sources), target=texts[target])


def _from_hub(task: GenerationTask, hub: str, name: str) -> list[GenerationExample]:
    configuration, split = task.place(name)
    table = load_hub(hub, configuration, split)
    if table is None:
        return []
    names = (*(task.hub_sources or task.sources), task.hub_target or task.target)
    where = f"{hub} ({configuration}, {split})"
    missing = next((column for column in names if column not in table), None)
    if missing is not None:
        raise CorpusError(f"{where} has no column {missing!r}; it has {', '.join(table)}. Name another.")
    rows = (
        dict(zip(names, values, strict=True)) for values in zip(*(table[each] for each in names), strict=True)
    )
    return [
        _example(row, f"{where}, example {number}", sources=names[:-1], target=names[-1])
        for number, row in enumerate(rows, 1)
    ]


def _of_spans(source: Source) -> Track[GenerationExample]:
    """Return the questions of SQuAD's JSON; each is generated from its passage and its first answer."""
    spans = TASKS["squad"]
    assert isinstance(spans, SpanTask)
    (track,) = read_span_task(spans, source)
    dev = {name: _questions(examples) for name, examples in track.dev.items()}
    return Track(name="", train=_questions(track.train), dev=dev, test={})


def _questions(examples: Iterable[SpanExample]) -> list[GenerationExample]:
    return [
        GenerationExample(source=(example.context, example.answers[0][1]), target=example.question.strip())
        for example in examples
        if example.question.strip()
    ]
