"""Measure a student of a reranker's scores by this project and by sentence-transformers, from one cache.

    python -m benchmarks.reranker_peer --home DIR

`DIR` is the home of `python -m benchmarks.rerankers`. One `3x384` is trained by `score` from the cache, and
by `CrossEncoderTrainer` with `MSELoss` from a data set of the same texts and scores: the same weights to
begin with, batch, steps, rate, schedule and precision, but batches in another order. One seed.
"""

import argparse
import time
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset, concatenate_datasets, load_dataset
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import MSELoss

from benchmarks.report import add_to_result, cpu
from benchmarks.rerankers import CANDIDATES, CROSS, MAX_LENGTH
from minilm_cache import TrainConfig, open_cache, train_students
from minilm_cache.evaluate.reranking import compare_rerankers
from minilm_cache.evaluate.settings import RerankConfig
from minilm_cache.models.locate import MINI
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.workflows.export import export_scores

ARCH: Final = "3x384"
_NAMES: Final = ("minilm-cache", "sentence-transformers")
_TIMED_STEPS, _TURNS = 40, 2
_DROPOUT: Final = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def main() -> None:
    """Train both, measure them, and write what they are worth and what they cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    home = parser.parse_args().home
    session, cache = Session(home), home / "cache"
    recipe = {**CROSS["score"], "arch": (ARCH,)}
    begun = {**recipe, "steps": 1, "lr": 1e-12, "warmup": 0.0, "precision": "float32"}
    first = train_students(validated(TrainConfig, begun), cache, out=home / "begun", session=session)
    ours = train_students(validated(TrainConfig, recipe), cache, out=home / "alone", session=session)
    if not (home / "dataset").exists():
        export_scores(cache, home / "dataset", session=session)
    theirs, _ = _train_peer(first.student_path(ARCH), home, recipe)
    ranked = {"retrieval": home / "test", "max_length": MAX_LENGTH, "first_stage": MINI}
    config = validated(RerankConfig, {**ranked, "candidates": CANDIDATES})
    models = [str(ours.student_path(ARCH)), str(theirs)]
    scores = compare_rerankers(config, models, session=session)[1:]
    seconds = _seconds_a_step(first.student_path(ARCH), home, recipe, session=session)
    peer = {
        name: {"ndcg_at_10": round(row.ndcg_at_10.mean, 2), "seconds_a_step": round(seconds[name], 3)}
        for name, row in zip(_NAMES, scores, strict=True)
    }
    sizes = {"cache": _num_bytes(cache), "data set": _num_bytes(home / "dataset")}
    add_to_result("rerankers", peer=peer, bytes=sizes, cpu=cpu())


def _seconds_a_step(begun: Path, home: Path, recipe: dict[str, Any], *, session: Session) -> dict[str, float]:
    """Return the seconds of a step of both, the mean of two turns of short trainings, one after the other."""
    short, manifest = {**recipe, "steps": _TIMED_STEPS}, open_cache(home / "cache").manifest
    tokens_a_step = recipe["batch_size"] * manifest.num_tokens / manifest.num_sequences
    total = dict.fromkeys(_NAMES, 0.0)
    for turn in range(_TURNS):
        out = home / f"timed-{turn}"
        run = train_students(validated(TrainConfig, short), home / "cache", out=out, session=session)
        assert run.tokens_per_s is not None
        total["minilm-cache"] += tokens_a_step / run.tokens_per_s
        total["sentence-transformers"] += (
            _train_peer(begun, out, short, dataset=home / "dataset")[1] / _TIMED_STEPS
        )
    return {name: seconds / _TURNS for name, seconds in total.items()}


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _train_peer(
    begun: Path, home: Path, recipe: dict[str, Any], *, dataset: Path | None = None
) -> tuple[Path, float]:
    """Return the folder of sentence-transformers' student, and the seconds of its training."""
    model = CrossEncoder(
        str(begun), device="cpu", max_length=MAX_LENGTH, config_kwargs=dict.fromkeys(_DROPOUT, 0.0)
    )
    groups = concatenate_datasets(list(load_dataset(str(dataset or home / "dataset")).values()))
    pairs = [
        (row["query"], document, score)
        for row in groups
        for document, score in zip(row["documents"], row["scores"], strict=True)
    ]
    columns = dict(zip(("query", "document", "label"), map(list, zip(*pairs, strict=True)), strict=True))
    arguments = CrossEncoderTrainingArguments(
        output_dir=str(home / "peer-tuning"),
        max_steps=recipe["steps"],
        per_device_train_batch_size=recipe["batch_size"],
        learning_rate=recipe["lr"],
        warmup_steps=0.1,
        weight_decay=0.01,
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    loss = MSELoss(model, activation_fn=torch.nn.Identity())
    trainer = CrossEncoderTrainer(model, arguments, Dataset.from_dict(columns), loss=loss)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    folder = home / "peer"
    model.save_pretrained(str(folder))
    return folder, seconds


if __name__ == "__main__":
    main()
