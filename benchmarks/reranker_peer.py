"""Measure a student of a reranker's scores by this project and by sentence-transformers, on the same batches.

    python -m benchmarks.reranker_peer --data DATA --home DIR [--seed 1] [--precision float32]
        [--part students|speed|start]

`DIR` is the home of `python -m benchmarks.rerankers`, which makes what is missing. One `3x384` that knows the
teacher's relations is trained by `score` from the cache, and by `CrossEncoderTrainer` with `MSELoss` on the
same pairs in the same order: the same weights to begin with, steps, rate, schedule, optimizer, clipping and
precision. Each call adds the students of one seed, which sets the order of the pairs. `speed` times a step of
both, and compares the cache with the data set that is exported from it. `start` compares the weights of both
after 20 steps in float32, which tells whether they take the same steps.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import MSELoss
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from benchmarks.report import add_to_result, cpu, read_result
from benchmarks.rerankers import BY_SCORE, MAX_LENGTH, ROWS, rank, trained
from minilm_cache import TrainConfig, open_cache, train_students
from minilm_cache.cache import Cache
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import LOGITS
from minilm_cache.train.card import cached_tokenizer
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.trainer import learning_rate
from minilm_cache.workflows.export import export_scores

ARCH: Final = "3x384"
_NAMES: Final = ("minilm-cache", "sentence-transformers")
_TIMED_STEPS, _TURNS = 40, 2
_NO_DROPOUT: Final = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


class _Pair(NamedTuple):
    query: str
    document: str
    score: float


class _Training(NamedTuple):
    begun: Path
    """Folder of the student before its first step."""
    pairs: Sequence[_Pair]
    """All that is read, in this order."""
    recipe: dict[str, Any]


def main() -> None:
    """Train both, measure them, and write what they are worth and what they cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--part", choices=("students", "speed", "start"))
    given = parser.parse_args()
    home, session = given.home, Session(given.home)
    trained(BY_SCORE, given.data, home, session=session)  # makes what is missing
    training = _begin(home, given.seed, given.precision, session=session)
    measured = read_result("rerankers").get("peer", {"runs": {}})
    if given.part in {None, "students"}:
        name = str(given.seed) if given.precision == "bfloat16" else f"{given.seed}, {given.precision}"
        measured["runs"][name] = _students(training, home, name, session=session)
    if given.part in {None, "speed"}:
        measured |= {"seconds_a_step": _seconds_a_step(training, home, session=session)}
        if not (home / "dataset").exists():
            export_scores(home / "cache", home / "dataset", session=session)
        measured["bytes"] = dict(
            zip(_NAMES, map(_num_bytes, (home / "cache", home / "dataset")), strict=True)
        )
    if given.part in {None, "start"}:
        measured["apart_after_20_steps"] = _apart(
            _begin(home, given.seed, "float32", session=session), home, session=session
        )
    add_to_result("rerankers", peer=measured, cpu=cpu())


def _begin(home: Path, seed: int, precision: str, *, session: Session) -> _Training:
    """Return the student of a seed before its first step, and all that it is to read."""
    recipe = {**ROWS[BY_SCORE], "arch": (ARCH,), "init": str(home / "relations"), "seed": seed}
    recipe["precision"] = precision
    still = {**recipe, "steps": 1, "lr": 1e-12, "warmup": 0.0, "precision": "float32"}
    out = home / f"begun-{seed}"
    first = train_students(validated(TrainConfig, still), home / "cache", out=out, session=session)
    cache = open_cache(home / "cache")
    known = _known_pairs(cache, home / "groups.jsonl")
    numbers = _numbers_in_order(cache, validated(TrainConfig, recipe))
    return _Training(first.student_path(ARCH), [_pair(cache, known, each) for each in numbers], recipe)


def _students(training: _Training, home: Path, name: str, *, session: Session) -> dict[str, dict[str, float]]:
    """Train the student of a seed both ways, and return what they are worth."""
    config, out = validated(TrainConfig, training.recipe), home / f"{BY_SCORE}, seed {name}"
    ours = train_students(config, home / "cache", out=out, session=session).student_path(ARCH)
    theirs = home / f"peer-{name}"
    if not theirs.exists():
        _train_peer(training, theirs)
    cache = open_cache(home / "cache")
    known, total = _known_pairs(cache, home / "groups.jsonl"), cache.manifest.num_sequences
    held_out = range(total - cache.manifest.num_held_out, total)
    pairs = [_pair(cache, known, number) for number in held_out]
    scores = rank([str(ours), str(theirs)], home, session=session)[1:]
    return {
        name: {"held_out_error": round(_error(folder, pairs), 3), "ndcg_at_10": round(row.ndcg_at_10.mean, 2)}
        for name, folder, row in zip(_NAMES, (ours, theirs), scores, strict=True)
    }


def _apart(training: _Training, home: Path, *, session: Session) -> float:
    """Return how far apart the students of both are after 20 steps, as a share of how far they have moved."""
    short, out = {**training.recipe, "steps": 20}, home / "start"
    run = train_students(validated(TrainConfig, short), home / "cache", out=out, session=session)
    _train_peer(training._replace(recipe=short), home / "start-peer")
    begun, ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (training.begun, run.student_path(ARCH), home / "start-peer")
    )
    apart, moved = (
        torch.cat([(ours[name] - other[name]).flatten() for name in ours]).norm() for other in (theirs, begun)
    )
    return round(float(apart / moved), 5)


def _error(folder: Path, pairs: Sequence[_Pair]) -> float:
    """Return the mean squared error of a student's scores of pairs."""
    model = CrossEncoder(str(folder), device="cpu", max_length=MAX_LENGTH, activation_fn=torch.nn.Identity())
    scores = model.predict([(pair.query, pair.document) for pair in pairs], show_progress_bar=False)
    return fmean((float(score) - pair.score) ** 2 for score, pair in zip(scores, pairs, strict=True))


def _known_pairs(cache: Cache, groups: Path) -> dict[tuple[int, ...], tuple[str, str]]:
    """Return the texts of all pairs by their token ids."""
    tokenizer, known = cached_tokenizer(cache.reader), {}
    for line in groups.read_text().splitlines():
        group = json.loads(line)
        for document in (*group["positive"], *group["negative"]):
            read = tokenizer(group["query"], document, truncation=True, max_length=MAX_LENGTH)
            known[tuple(read["input_ids"])] = (group["query"], document)
    return known


def _numbers_in_order(cache: Cache, config: TrainConfig) -> Iterator[int]:
    """Yield the numbers of the pairs of all steps, as this project's trainings read them."""
    (stream,) = plan_steps(config, cache.reader).streams
    numbers = (number for buffer in stream.stream(0) for number in buffer.sequences.tolist())
    assert config.steps is not None
    assert config.batch_size is not None
    return islice(numbers, config.steps * config.batch_size)


def _pair(cache: Cache, known: Mapping[tuple[int, ...], tuple[str, str]], number: int) -> _Pair:
    """Return the texts of a pair with the teacher's score."""
    sequence = cache[number]
    score = float(sequence.states().values[LOGITS].squeeze())
    return _Pair(*known[tuple(sequence.input_ids.tolist())], score)


def _seconds_a_step(training: _Training, home: Path, *, session: Session) -> dict[str, float]:
    """Return the seconds of a step of both, the mean of two turns of short trainings, one after the other."""
    short, manifest = {**training.recipe, "steps": _TIMED_STEPS}, open_cache(home / "cache").manifest
    tokens_a_step = short["batch_size"] * manifest.num_tokens / manifest.num_sequences
    total = dict.fromkeys(_NAMES, 0.0)
    for turn in range(_TURNS):
        out = home / f"timed-{turn}"
        run = train_students(validated(TrainConfig, short), home / "cache", out=out, session=session)
        assert run.tokens_per_s is not None
        total["minilm-cache"] += tokens_a_step / run.tokens_per_s
        total["sentence-transformers"] += (
            _train_peer(training._replace(recipe=short), out / "peer") / _TIMED_STEPS
        )
    return {name: round(seconds / _TURNS, 3) for name, seconds in total.items()}


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _in_order(dataset: Any, batch_size: int, drop_last: bool, **_more: object) -> DefaultBatchSampler:  # noqa: ANN401 - as it is called
    """Return batches of a data set as it is, without drawing."""
    rows: Any = SequentialSampler(dataset)
    return DefaultBatchSampler(rows, batch_size, drop_last)


class _Clock(TrainerCallback):
    """Seconds from the first step to the end of the last one, which this project's runs count, too."""

    seconds = 0.0
    _started: float | None = None

    def on_step_begin(self, *_arguments: object, **_more: object) -> None:
        """Start with the first step."""
        self._started = self._started or time.perf_counter()

    def on_step_end(self, *_arguments: object, **_more: object) -> None:
        """Count what has passed."""
        self.seconds = time.perf_counter() - (self._started or 0.0)


def _optimizer(model: torch.nn.Module, config: TrainConfig) -> tuple[AdamW, LambdaLR]:
    """Return AdamW and its rates as this project has them: vectors do not decay, and no rate is 0."""
    assert config.steps is not None
    steps, decays = config.steps, (config.weight_decay, 0.0)
    groups = [
        {
            "params": [each for each in model.parameters() if (each.ndim > 1) == bool(decay)],
            "weight_decay": decay,
        }
        for decay in decays
    ]
    optimizer = AdamW(groups, lr=config.lr, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate(config, step, steps) / config.lr)


def _train_peer(training: _Training, folder: Path) -> float:
    """Write sentence-transformers' student, and return the seconds of its steps."""
    begun, pairs, recipe = training
    model = CrossEncoder(str(begun), device="cpu", max_length=MAX_LENGTH, config_kwargs=_NO_DROPOUT)
    columns = dict(zip(("query", "document", "label"), map(list, zip(*pairs, strict=True)), strict=True))
    arguments = CrossEncoderTrainingArguments(
        output_dir=f"{folder}-tuning",
        max_steps=recipe["steps"],
        per_device_train_batch_size=recipe["batch_size"],
        max_grad_norm=recipe["max_grad_norm"],
        bf16=recipe["precision"] == "bfloat16",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        batch_sampler=_in_order,
    )
    loss, clock = MSELoss(model, activation_fn=torch.nn.Identity()), _Clock()
    trainer = CrossEncoderTrainer(
        model,
        arguments,
        Dataset.from_dict(columns),
        loss=loss,
        callbacks=[clock],
        optimizers=_optimizer(model, validated(TrainConfig, recipe)),
    )
    trainer.train()
    model.save_pretrained(str(folder))
    return clock.seconds


if __name__ == "__main__":
    main()
