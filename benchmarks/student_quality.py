"""Measure held-out KL of students trained from each codec and online on dense targets, with three seeds.

A seed sets initial weights, dropout and the order of sequences, so students of one seed differ only in their
targets. Every student is compared with the live teacher's dense relations.

    python -m benchmarks.student_quality
"""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

from benchmarks.inputs import KINDS, mini_teacher
from benchmarks.plots import plot_student_quality
from benchmarks.report import write_result
from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.heldout import MAX_SEQUENCES, held_out_losses, with_live_targets
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer

ARCH = "3x192"
STEPS = 300
SEEDS = (0, 1, 2)
ONLINE = "online dense"
CACHES = {
    "vectors, KL at most 0.015": DumpConfig(teacher="mini", codec="vectors", max_kl=0.015),
    "topk pps k=16": DumpConfig(teacher="mini", codec="topk"),
    "vectors, KL at most 0.02": DumpConfig(teacher="mini", codec="vectors", max_kl=0.02),
    "topk pps k=8": DumpConfig(teacher="mini", k=8),
    "topk largest k=16, uniform tail": DumpConfig(teacher="mini", select="largest", tail="uniform"),
}


def train_and_measure(cache: Cache, teacher: Teacher, seed: int, *, online: bool) -> dict[str, float]:
    """Train a new student, and return its held-out KLs in nats."""
    config = TrainConfig(arch=(ARCH,), steps=STEPS, batch_size=16, seed=seed)
    return held_out_kl(train_student(config, cache, teacher, online=online), cache, teacher)


def train_student(config: TrainConfig, cache: Cache, teacher: Teacher, *, online: bool) -> StudentTrainer:
    """Train the one student of a configuration from a cache, or with the teacher at every step."""
    identity, steps = cache.manifest.identity, config.steps
    assert steps is not None
    plan = plan_steps(config, cache.reader)
    objective = choose_objective(config, cache, arch=config.arch)
    shape = parse_arch(config.arch[0], identity.relation_heads)
    (trainer,) = build_trainers(
        config, cache, shapes=[shape], objective=objective, steps=steps, ranks=Ranks.alone(teacher.device)
    )
    stored_targets = WantedTargets(kinds=()) if online else objective.wanted
    reader = BatchReader(
        cache, stored_targets, pad_token=teacher.tokenizer.pad_token_id, device=teacher.device
    )
    with closing(reader.train_batches(plan, 0)) as stored:
        batches = with_live_targets(stored, teacher, WantedTargets(kinds=KINDS)) if online else stored
        for step in range(steps):
            trainer.step(next(batches), step)
    return trainer


def held_out_kl(trainer: StudentTrainer, cache: Cache, teacher: Teacher) -> dict[str, float]:
    """Return the held-out KL of each relation to the live teacher's dense rows, in nats."""
    reader = BatchReader(
        cache, WantedTargets(kinds=()), pad_token=teacher.tokenizer.pad_token_id, device=teacher.device
    )
    tokens = reader.held_out_batches(16, MAX_SEQUENCES)
    return live_kl(trainer, tokens, teacher)


def live_kl(trainer: StudentTrainer, tokens: Iterable[StudentBatch], teacher: Teacher) -> dict[str, float]:
    """Return the KL of each relation to the live teacher's dense rows, and their sum, in nats."""
    (kls,) = held_out_losses(
        [trainer.evaluate], with_live_targets(tokens, teacher, WantedTargets(kinds=KINDS))
    )
    return {**{str(kind): value for kind, value in kls.items()}, "sum": sum(kls.values())}


def summary(runs: list[dict[str, float]], online: list[dict[str, float]]) -> dict[str, object]:
    """Return means and standard deviations over seeds, and ratios to the online student of the same seed."""
    sums = [run["sum"] for run in runs]
    ratios = [run["sum"] / online_run["sum"] for run, online_run in zip(runs, online, strict=True)]
    return {
        "attention": round(mean(run["attention"] for run in runs), 5),
        "value": round(mean(run["value"] for run in runs), 5),
        "sum": round(mean(sums), 5),
        "sum_stdev": round(stdev(sums), 5),
        "over_online": round(mean(sums) / mean(run["sum"] for run in online), 4),
        "over_online_by_seed": [round(ratio, 4) for ratio in ratios],
    }


def main() -> None:
    """Train one student per way and seed, and write the results."""
    teacher = mini_teacher()
    runs_by_way: dict[str, list[dict[str, float]]] = {}
    sizes: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for name, settings in CACHES.items():
            cache = open_cache(
                dump_cache(settings, out=Path(folder) / name, session=Session(Path(folder))).path
            )
            assert cache.manifest.measured is not None
            sizes[name] = round(cache.manifest.measured.bytes_per_token, 1)
            if not runs_by_way:
                runs_by_way[ONLINE] = [train_and_measure(cache, teacher, seed, online=True) for seed in SEEDS]
            runs_by_way[name] = [train_and_measure(cache, teacher, seed, online=False) for seed in SEEDS]
            write_result(  # after each cache, since all of them take an hour
                "student_quality",
                {
                    "student": ARCH,
                    "steps": STEPS,
                    "batch_size": 16,
                    "seeds": SEEDS,
                    "held_out_kl_nats": {
                        way: summary(runs, runs_by_way[ONLINE]) for way, runs in runs_by_way.items()
                    },
                    "bytes_per_token": sizes,
                },
            )
            plot_student_quality()


if __name__ == "__main__":
    main()
