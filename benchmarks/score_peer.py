"""Train one student of a teacher's scores by this project and by sentence-transformers, on the same batches.

    python -m benchmarks.score_peer --stage STAGE --teacher TEACHER --data GLUE

`STAGE` is the folder of a task stage of STS-B (`python -m benchmarks.task_stage`), whose cache has the scores
of pairs of the model in `TEACHER`. Both begin with the same slice of it, and read the same pairs in the same
order; precision, rate, schedule and optimizer are the same, too. Both are scored on STS-B's dev set.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import MSELoss
from torch.utils.data import SequentialSampler

from benchmarks.report import cpu, write_result
from minilm_cache.cache import Cache, open_cache
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import LOGITS
from minilm_cache.train.card import cached_tokenizer
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from minilm_cache.train.sampler import plan_steps

ARCH: Final = "3x384"
MAX_LENGTH: Final = 128
RECIPE: Final[dict[str, Any]] = {
    "objective": "score",
    "arch": (ARCH,),
    "init": "slice",
    "init_layers": "1,4,5",
    "steps": 400,
    "batch_size": 64,
    "lr": 3e-4,
    "dropout": "none",
    "batches": "shuffled",
    "precision": "bfloat16",
    "device": "cpu",
}
_NO_DROPOUT: Final = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


def main() -> None:
    """Train both, score both, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=Path, required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("score-peer"))
    given = parser.parse_args()
    session, cache = Session(given.home), open_cache(given.stage / "cache")
    recipe = {**RECIPE, "init_teacher": given.teacher}
    config = validated(TrainConfig, recipe)
    begun = validated(TrainConfig, {**recipe, "steps": 1, "lr": 1e-12, "warmup": 0.0, "precision": "float32"})
    first = train_students(begun, given.stage / "cache", out=given.home / "begun", session=session)
    ours = train_students(config, given.stage / "cache", out=given.home / "ours", session=session)
    peer = given.home / "peer"
    if not peer.exists():
        pairs = list(_pairs_in_order(cache, config, given.stage / "texts.jsonl"))
        _train_peer(first.student_path(ARCH), pairs, peer)
    scored = evaluate_models(
        validated(EvaluateConfig, {"task": ("stsb",), "data": str(given.data), "as_is": True}),
        [str(ours.student_path(ARCH)), str(peer)],
        out=given.home / "scored",
        session=session,
    )
    rows = {
        name: {
            "pearson": round(summary.scores["dev"]["pearson"].mean, 2),
            "spearman": round(summary.scores["dev"]["spearman"].mean, 2),
        }
        for name, summary in zip(("minilm-cache", "sentence-transformers"), scored.summaries, strict=True)
    }
    write_result("score_peer", {"recipe": {**RECIPE, "arch": ARCH}, "trained_by": rows, "cpu": cpu()})


def _pairs_in_order(cache: Cache, config: TrainConfig, texts: Path) -> Iterator[tuple[str, str, float]]:
    """Yield the pairs of all steps, as this project's trainings read them, with the teacher's scores."""
    tokenizer, known = cached_tokenizer(cache.reader), {}
    for line in texts.read_text().splitlines():
        first, second = json.loads(line)["first"], json.loads(line)["second"]
        ids = tokenizer(first, second, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        known[tuple(ids)] = (first, second)
    (stream,) = plan_steps(config, cache.reader).streams
    numbers = (number for buffer in stream.stream(0) for number in buffer.sequences.tolist())
    assert config.steps is not None
    assert config.batch_size is not None
    for number in islice(numbers, config.steps * config.batch_size):
        sequence = cache[number]
        yield *known[tuple(sequence.input_ids.tolist())], float(sequence.states().values[LOGITS].squeeze())


def _in_order(dataset: Any, batch_size: int, drop_last: bool, **_more: object) -> DefaultBatchSampler:  # noqa: ANN401 - as it is called
    """Return batches of a data set as it is, without drawing."""
    rows: Any = SequentialSampler(dataset)
    return DefaultBatchSampler(rows, batch_size, drop_last)


def _train_peer(begun: Path, pairs: list[tuple[str, str, float]], folder: Path) -> None:
    """Train sentence-transformers' student, and write it as transformers' own model."""
    model = CrossEncoder(str(begun), device="cpu", max_length=MAX_LENGTH, config_kwargs=_NO_DROPOUT)
    columns = dict(zip(("first", "second", "label"), map(list, zip(*pairs, strict=True)), strict=True))
    arguments = CrossEncoderTrainingArguments(
        output_dir=f"{folder}-tuning",
        max_steps=RECIPE["steps"],
        per_device_train_batch_size=RECIPE["batch_size"],
        learning_rate=RECIPE["lr"],
        warmup_steps=0.1,
        weight_decay=0.01,
        max_grad_norm=0.0,
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        batch_sampler=_in_order,
    )
    loss = MSELoss(model, activation_fn=torch.nn.Identity())
    trainer = CrossEncoderTrainer(model, arguments, Dataset.from_dict(columns), loss=loss)
    trainer.train()
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
