"""Held-out KL of a student trained from the cache against one trained online on dense targets.

Same seed, steps and batches; every student is judged by the live teacher's dense relations.

    python -m benchmarks.student_quality
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.inputs import KINDS, mini_teacher
from benchmarks.report import write_result
from minilm_cache.cache import Cache, open_cache
from minilm_cache.config import DumpConfig, TrainConfig
from minilm_cache.dump.run import dump
from minilm_cache.dump.teacher import Teacher
from minilm_cache.live import with_live_targets
from minilm_cache.train.batches import BatchReader, StudentBatch
from minilm_cache.train.heldout import MAX_SEQUENCES, held_out_kl
from minilm_cache.train.objective import choose_objective
from minilm_cache.train.run import build_trainers
from minilm_cache.train.sampler import SequenceOrder
from minilm_cache.train.student import parse_arch
from minilm_cache.train.trainer import StudentTrainer

CONFIG = TrainConfig(arch=("3x192",), steps=300, batch_size=16)
STEPS = 300
CACHES = {
    "vectors, KL at most 0.02": DumpConfig(teacher="mini", codec="vectors"),
    "topk pps k=16": DumpConfig(teacher="mini"),
    "topk pps k=8": DumpConfig(teacher="mini", k=8),
    "topk largest k=16, uniform tail": DumpConfig(teacher="mini", select="largest", tail="uniform"),
    "topk largest k=16, renormalised": DumpConfig(teacher="mini", select="largest", tail="renormalise"),
}


def train_student(trainer: StudentTrainer, batches: Iterator[StudentBatch]) -> None:
    """Take every step of the run."""
    for step in range(STEPS):
        trainer.step(next(batches), step)


def judged(trainer: StudentTrainer, cache: Cache, teacher: Teacher) -> dict[str, float]:
    """Return the held-out KL of each relation, to the live teacher's dense rows."""
    reader = BatchReader(cache, (), teacher.tokenizer.pad_token_id, teacher.device)
    tokens = reader.held_out_batches(CONFIG.batch_size, MAX_SEQUENCES)
    (found,) = held_out_kl([trainer], with_live_targets(tokens, teacher, KINDS))
    parts = {str(kind): round(value, 5) for kind, value in found.items()}
    return {**parts, "sum": round(sum(found.values()), 5)}


def main() -> None:
    """Train one student in each way and write the results."""
    teacher = mini_teacher()
    results: dict[str, dict[str, float]] = {}
    sizes: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for name, settings in CACHES.items():
            dumped = dump(settings, Path(folder) / name, Path(folder))
            cache = open_cache(dumped.path)
            assert cache.manifest.measured is not None
            sizes[name] = round(cache.manifest.measured.bytes_per_token, 1)
            order = SequenceOrder(
                shards=cache.manifest.shards,
                num_train=cache.manifest.num_train,
                seed=CONFIG.seed,
                buffer_shards=CONFIG.buffer_shards,
            )
            objective = choose_objective(CONFIG.objective, None, cache.codec.kinds, cache.manifest)
            shape = parse_arch(CONFIG.arch[0], cache.manifest.identity.relation_heads)
            ways = {name: KINDS} if results else {"online dense": (), name: KINDS}
            for way, kinds in ways.items():
                (trainer,) = build_trainers(CONFIG, cache, [shape], objective, STEPS, teacher.device)
                results.setdefault("initial weights", judged(trainer, cache, teacher))
                reader = BatchReader(cache, kinds, teacher.tokenizer.pad_token_id, teacher.device)
                with closing(reader.train_batches(order, CONFIG.batch_size, 0)) as stored:
                    train_student(trainer, stored if kinds else with_live_targets(stored, teacher, KINDS))
                results[way] = judged(trainer, cache, teacher)
    online = results["online dense"]["sum"]
    write_result(
        "student_quality",
        {
            "student": CONFIG.arch[0],
            "steps": STEPS,
            "batch_size": CONFIG.batch_size,
            "lr": CONFIG.lr,
            "held_out_kl_nats": results,
            "over_online": {name: round(value["sum"] / online, 4) for name, value in results.items()},
            "bytes_per_token": sizes,
        },
    )


if __name__ == "__main__":
    main()
