"""Small data of downstream tasks in their official layouts, that a tiny model can learn."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fixtures import Command
from tests.support import WORDS

LEARNABLE = WORDS[:2]
"""A text of class 1 is made of the one, of class 0 of the other."""
LANGUAGES = ("en", "de")
SHORT = ("--max-length", 32)


def evaluated(command: Command, *arguments: object) -> dict[str, Any]:
    """Run an evaluation of short texts, and return the JSON that it printed."""
    code, out, err = command("evaluate", *arguments, "--device", "cpu", "--json", *SHORT)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def _text(generator: random.Random, label: int) -> str:
    return " ".join([LEARNABLE[label]] * generator.randint(2, 5))


def write_lines(file: Path, rows: Sequence[Sequence[object]]) -> None:
    """Write a .tsv as benchmarks do."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")


def write_sst2(folder: Path, num_train: int = 64, num_dev: int = 16) -> Path:
    """Write SST-2, with a test set without labels."""
    generator = random.Random(0)
    for name, count in (("train", num_train), ("dev", num_dev)):
        rows = [(_text(generator, number % 2), number % 2) for number in range(count)]
        write_lines(folder / f"{name}.tsv", [("sentence", "label"), *rows])
    test = [(number, _text(generator, number % 2)) for number in range(6)]
    write_lines(folder / "test.tsv", [("index", "sentence"), *test])
    return folder


def write_glue(root: Path) -> Path:
    """Write every task of GLUE, in its own columns, under the name of its folder."""
    generator = random.Random(1)
    write_sst2(root / "SST-2")
    cola = [("src", number % 2, "", _text(generator, number % 2)) for number in range(32)]
    write_lines(root / "CoLA/train.tsv", cola)
    write_lines(root / "CoLA/dev.tsv", cola[:8])
    write_lines(root / "CoLA/test.tsv", [("index", "sentence"), (0, "ba"), (1, "be")])
    two_way = ("entailment", "not_entailment")
    nli = ("entailment", "neutral", "contradiction")
    tables: dict[str, tuple[tuple[str, ...], str, tuple[object, ...]]] = {
        "MRPC": (("#1 ID", "#2 ID", "#1 String", "#2 String"), "Quality", (0, 1)),
        "QQP": (("id", "qid1", "qid2", "question1", "question2"), "is_duplicate", (0, 1)),
        "STS-B": (("index", "genre", "sentence1", "sentence2"), "score", (0.0, 5.0, 2.5)),
        "QNLI": (("index", "question", "sentence"), "label", two_way),
        "RTE": (("index", "sentence1", "sentence2"), "label", two_way),
        "WNLI": (("index", "sentence1", "sentence2"), "label", (0, 1)),
    }
    for title, (columns, label, labels) in tables.items():
        _write_pairs(root / title, columns, label, labels, generator, {"train": "train", "dev": "dev"})
        _write_pairs(root / title, columns, None, labels, generator, {"test": "test"})
    columns = ("index", "genre", "sentence1", "sentence2")
    scored = {name: name for name in ("train", "dev_matched", "dev_mismatched")}
    _write_pairs(root / "MNLI", columns, "gold_label", nli, generator, scored)
    tests = {name: name for name in ("test_matched", "test_mismatched")}
    _write_pairs(root / "MNLI", columns, None, nli, generator, tests)
    _write_pairs(root / "diagnostic", columns, None, nli, generator, {"diagnostic": "diagnostic"})
    return root


def _write_pairs(
    folder: Path,
    columns: tuple[str, ...],
    label: str | None,
    labels: tuple[object, ...],
    generator: random.Random,
    files: dict[str, str],
) -> None:
    for name in files:
        rows = []
        for number in range(12):
            texts = [_text(generator, number % 2), _text(generator, 0)]
            row = [number] * (len(columns) - 2) + texts
            rows.append(row if label is None else [*row, labels[number % len(labels)]])
        write_lines(folder / f"{name}.tsv", [(*columns, *([label] if label else [])), *rows])


def write_xnli(folder: Path, languages: Sequence[str] = LANGUAGES, *, test_labels: bool = False) -> Path:
    """Write XNLI as XTREME has it, with or without the labels of its test sets."""
    generator = random.Random(2)
    labels = ("entailment", "neutral", "contradiction")
    for name in ("train", "dev", "test"):
        rows = [(_text(generator, at % 2), _text(generator, 0), labels[at % 3]) for at in range(12)]
        kept = rows if name != "test" or test_labels else [row[:2] for row in rows]
        for language in languages:
            write_lines(folder / f"{name}-{language}.tsv", kept)
    return folder


def squad_document(num_questions: int, *, unanswerable: bool) -> dict[str, object]:
    """Return SQuAD's JSON; the answer is the one learnable word of a context."""
    generator = random.Random(3)
    paragraphs = []
    for number in range(num_questions):
        words = [generator.choice(WORDS[10:]) for _ in range(12)]
        is_impossible = unanswerable and number % 3 == 0
        at = generator.randrange(12)
        if not is_impossible:
            words[at] = LEARNABLE[0]
        start = len(" ".join(words[:at])) + (at > 0)
        answers = [] if is_impossible else [{"text": LEARNABLE[0], "answer_start": start}]
        question = {
            "id": f"q{number}",
            "question": "be bi",
            "answers": answers,
            "is_impossible": is_impossible,
        }
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    return {"version": "x", "data": [{"title": "t", "paragraphs": paragraphs}]}


def write_squad(folder: Path, version: str, num_train: int = 24, num_dev: int = 9) -> Path:
    """Write SQuAD 1.1 or 2.0."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", num_train), ("dev", num_dev)):
        document = squad_document(count, unanswerable=version == "2.0")
        (folder / f"{name}-v{version}.json").write_text(json.dumps(document))
    return folder


def write_mlqa(folder: Path) -> Path:
    """Write MLQA of two languages, and SQuAD to train on."""
    write_squad(folder, "1.1")
    for name in ("dev", "test"):
        for language in LANGUAGES:
            file = folder / name / f"{name}-context-{language}-question-{language}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(squad_document(6, unanswerable=False)))
    return folder
