"""Read examples of SQuAD and MLQA, from SQuAD's JSON or from the hub."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from minilm_cache.errors import CorpusError, first_line
from minilm_cache.evaluate.examples import SpanExample, Track, track_of
from minilm_cache.evaluate.files import Source, load_hub, read_json, read_lines, read_text
from minilm_cache.evaluate.tasks import SpanTask, named_file, task_folder

LANGUAGES: Final = ("ar", "de", "en", "es", "hi", "vi", "zh")
"""Languages of MLQA (Lewis et al. 2020, arXiv 1910.07475)."""


def read_span_task(task: SpanTask, source: Source) -> list[Track[SpanExample]]:
    """Return the one track of a task.

    Args:
        task: task to read.
        source: source of its data.

    Raises:
        CorpusError: a file is missing, empty or damaged, or an answer is not at its position in the context.
    """
    if source.folder is None:
        return [_from_hub(task, source.hub)]
    folder = task_folder(source.folder, task.title)
    train = _read_file(task, folder, task.train)
    if not any(example.answers for example in train):
        raise CorpusError(
            f"{folder / task.train} has no question with an answer: nothing can be learned. "
            "Give the whole file."
        )
    dev = _read_sets(task, folder, name="dev", file=task.dev)
    if not dev:
        raise CorpusError(f"{folder} has no {task.dev.format(lang='LANGUAGE')}. Give the official layout.")
    test = {} if task.test is None else _read_sets(task, folder, name="test", file=task.test)
    return [Track(name="", train=train, dev=dev, test=test)]


def _read_sets(task: SpanTask, folder: Path, *, name: str, file: str) -> dict[str, list[SpanExample]]:
    if not task.by_language:
        return {name: _read_file(task, folder, file)}
    files = {language: file.format(lang=language) for language in LANGUAGES}
    return {
        f"{name}-{language}": _read_file(task, folder, path)
        for language, path in files.items()
        if (folder / path).is_file()
    }


def _read_file(task: SpanTask, folder: Path, name: str) -> list[SpanExample]:
    file = named_file(folder, name, task)
    document = read_json("\n".join(read_lines(file)), str(file))
    examples = _examples(_rows(document), task, str(file))
    if not examples:
        raise CorpusError(f"{file} holds no question. Fetch it again.")
    return examples


def _examples(rows: Iterable[dict[str, Any]], task: SpanTask, where: str) -> list[SpanExample]:
    try:
        examples = [_example(row, task, where) for row in rows]
    except CorpusError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise CorpusError(f"cannot read {where} as SQuAD's JSON: {reason}. Fetch it again.") from error
    known: set[str] = set()
    for example in examples:
        if example.identifier in known:
            raise CorpusError(f"{where}: two questions have the id {example.identifier!r}. Fetch it again.")
        known.add(example.identifier)
    return examples


def _rows(document: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON of a file
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield {**question, "context": paragraph["context"]}


def _example(row: dict[str, Any], task: SpanTask, where: str) -> SpanExample:
    identifier, context, question = (read_text(row[name], where) for name in ("id", "context", "question"))
    listed = () if row.get("is_impossible") else row["answers"]
    answers = tuple((int(answer["answer_start"]), read_text(answer["text"], where)) for answer in listed)
    for start, text in answers:
        if context[start : start + len(text)] != text:
            raise CorpusError(
                f"{where}, question {identifier}: answer {text[:40]!r} is not at character {start} of its "
                "context. Fetch the file again."
            )
    if not answers and not task.has_unanswerable:
        raise CorpusError(
            f"{where}, question {identifier}: no answer. {task.title} has one for each question."
        )
    return SpanExample(identifier=identifier, question=question, context=context, answers=answers)


def _from_hub(task: SpanTask, hub: str | None) -> Track[SpanExample]:
    def read(repository: str, configuration: str, split: str) -> list[SpanExample]:
        table = load_hub(repository, configuration, split)
        where = f"{repository} ({configuration}, {split})"
        if table is None:
            raise CorpusError(f"{where} is not on the hub. Give a folder: --data DIR.")
        columns = [name for name in ("id", "context", "question", "answers") if name in table]
        rows = zip(*(table[name] for name in columns), strict=True)
        named = (dict(zip(columns, values, strict=True)) for values in rows)
        return _examples(({**row, "answers": _hub_answers(row)} for row in named), task, where)

    usual = hub or task.hub
    source = task.hub_train if task.by_language or hub is None else hub
    train = read(source, task.hub_configuration, "train")
    if not task.by_language:
        dev = read(usual, task.hub_configuration, "validation")
        return Track(name="", train=train, dev={"dev": dev}, test={})
    sets = {
        f"{name}-{language}": read(usual, f"mlqa.{language}.{language}", split)
        for language in LANGUAGES
        for name, split in (("dev", "validation"), ("test", "test"))
    }
    return track_of("", train, sets)


def _hub_answers(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of a row of the hub as SQuAD's JSON has them."""
    answers = row["answers"]
    pairs = zip(answers["answer_start"], answers["text"], strict=True)
    return [{"answer_start": start, "text": text} for start, text in pairs]
