"""Measure a student of a cross-encoder's scores: STS-B with 2,000 labelled pairs.

    python -m benchmarks.pair_scores --data DATA

`mini`, read as a classifier (without its pooling), is fine-tuned on 2,000 of STS-B's training pairs. It then
scores all of the training pairs and as many again, made of sentences of the training set that share a rare
word; no further label is read. A `3x384` learns these scores. Both are scored on the dev set, without the
sigmoid that `CrossEncoder` puts over a model that does not say otherwise; one seed.
"""

import argparse
import csv
import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import CrossEncoder

from benchmarks.report import cpu, write_result
from minilm_cache import DumpConfig, TrainConfig, dump_cache, train_students
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.session import Session
from minilm_cache.settings import validated

LABELLED: Final = 2000
MAX_LENGTH: Final = 128
TUNED: Final = {"epochs": (3,), "lr": (5e-5,), "precision": "bfloat16", "max_dev": 200}
TRAINED: Final = {"steps": 1000, "batch_size": 32, "lr": 3e-4, "dropout": "none", "batches": "by-length"}
_RARE_WORDS: Final = 4
POOLING: Final = ("modules.json", "1_Pooling", "2_Normalize", "sentence_bert_config.json")
"""What of a folder of sentence-transformers makes it a sentence encoder."""


def main() -> None:
    """Fine-tune, score, train, and write what both are worth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("pair-scores"))
    given = parser.parse_args()
    home, session = given.home, Session(given.home)
    plain, text = home / "mini", home / "pairs.jsonl"
    if not plain.exists():
        left_out = shutil.ignore_patterns(*POOLING)
        shutil.copytree(locate_teacher(MINI).folder, plain, ignore=left_out)
    train, dev = (_rows(given.data / "glue/STS-B" / f"{part}.tsv") for part in ("train", "dev"))
    pairs = _pairs(train)
    text.write_text("".join(json.dumps({"a": one, "b": other}) + "\n" for one, other in pairs))
    tuned = {**TUNED, "task": ("stsb",), "data": str(given.data / "glue"), "max_train": LABELLED}
    config = validated(EvaluateConfig, {**tuned, "keep_models": True})
    evaluate_models(config, [str(plain)], out=home / "tuned", session=session)
    (teacher,) = (file.parent for file in (home / "tuned").rglob("model.safetensors"))
    dumped = {"teacher": str(teacher), "corpus": str(text), "pair_columns": "a,b", "max_length": MAX_LENGTH}
    cache = dump_cache(
        validated(DumpConfig, {**dumped, "codec": "none", "logits": True}),
        out=home / "cache",
        session=session,
    )
    learned = {**TRAINED, "objective": "tinybert-prediction", "arch": ("3x384",), "init": "slice"}
    learned |= {"init_layers": "1,4,5", "precision": "bfloat16"}
    run = train_students(validated(TrainConfig, learned), cache.path, out=home / "run", session=session)
    folders = {"teacher": teacher, "3x384": run.student_path("3x384")}
    scores = {name: _scores(folder, dev) for name, folder in folders.items()}
    settings = {"labelled": LABELLED, "pairs": len(pairs), "cpu": cpu(), **TRAINED}
    write_result("pair_scores", {**settings, "scores": scores})


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8-sig", newline="") as opened:
        rows = list(csv.DictReader(opened, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row for row in rows if row.get("sentence2")]


def _pairs(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs of the training set, and for each of its sentences another that shares a rare word."""
    given = [(row["sentence1"], row["sentence2"]) for row in rows]
    texts = sorted({text for pair in given for text in pair})
    having: dict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        for word in set(text.lower().split()):
            having[word].append(number)
    drawn, more = np.random.default_rng(0), list[tuple[str, str]]()
    for number, text in enumerate(texts):
        words = sorted(sorted(set(text.lower().split())), key=lambda word: len(having[word]))[:_RARE_WORDS]
        others = [other for word in words for other in having[word] if other != number]
        if others:
            more.append((text, texts[int(drawn.choice(others))]))
    return [pair for pair in [*given, *more] if all(text.strip() for text in pair)]


def _scores(folder: Path, rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the correlations of a model's scores with people's, times 100."""
    encoder = CrossEncoder(
        str(folder), device="cpu", max_length=MAX_LENGTH, activation_fn=torch.nn.Identity()
    )
    found = encoder.predict([(row["sentence1"], row["sentence2"]) for row in rows], show_progress_bar=False)
    people = [float(row["score"]) for row in rows]
    correlations = {"pearson": pearsonr(found, people)[0], "spearman": spearmanr(found, people)[0]}
    return {name: round(100 * float(value), 2) for name, value in correlations.items()}


if __name__ == "__main__":
    main()
