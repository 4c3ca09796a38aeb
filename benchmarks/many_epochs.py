"""Measure KL of students after 20 epochs over few sequences, from each codec and online, with three seeds.

A codec's errors are the same in every epoch, so a student could memorise them on a small training set. So
each student is compared with the live teacher twice: on the text that it trained on, and on fresh text.

    python -m benchmarks.many_epochs
"""

from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

from benchmarks.inputs import mini_teacher
from benchmarks.report import write_result
from benchmarks.student_quality import live_kl, train_student
from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.session import Session
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig

ARCH = "3x192"
EPOCHS = 20
TRAIN_SEQUENCES = 160
BATCH_SIZE = 8
SEEDS = (0, 1, 2)
LENGTH = 128
ONLINE = "online dense"
CACHES = {
    "dense": DumpConfig(teacher="mini", codec="dense"),
    "topk pps k=16": DumpConfig(teacher="mini", codec="topk"),
    "vectors, KL at most 0.005": DumpConfig(teacher="mini", codec="vectors", max_kl=0.005),
    "vectors, KL at most 0.01": DumpConfig(teacher="mini", codec="vectors", max_kl=0.01),
    "vectors, KL at most 0.015": DumpConfig(teacher="mini", codec="vectors", max_kl=0.015),
}
KLByText = dict[str, dict[str, float]]
"""KLs in nats, by text and by relation."""


def train_and_measure(cache: Cache, fresh: Cache, *, teacher: Teacher, seed: int, online: bool) -> KLByText:
    """Train a new student, and return its KLs on the text that it trained on and on fresh text."""
    steps = EPOCHS * cache.manifest.num_train // BATCH_SIZE
    config = TrainConfig(arch=(ARCH,), steps=steps, batch_size=BATCH_SIZE, seed=seed)
    trainer = train_student(config, cache, teacher, online=online)
    kls = {}
    for name, source, numbers in (
        ("training text", cache, range(cache.manifest.num_train)),
        ("fresh text", fresh, range(fresh.manifest.num_train, len(fresh))),
    ):
        reader = BatchReader(
            source, WantedTargets(kinds=()), pad_token=teacher.tokenizer.pad_token_id, device=teacher.device
        )
        kls[name] = live_kl(trainer, reader.batches_of(numbers, 16), teacher)
    return kls


def summary(runs: list[KLByText], dense: list[KLByText]) -> dict[str, object]:
    """Return means over seeds, and ratios to the student of the same seed from the dense cache."""
    result: dict[str, object] = {}
    for text in runs[0]:
        ratios = [
            run[text]["sum"] / dense_run[text]["sum"] for run, dense_run in zip(runs, dense, strict=True)
        ]
        result[text] = {
            "attention": round(mean(run[text]["attention"] for run in runs), 5),
            "value": round(mean(run[text]["value"] for run in runs), 5),
            "sum": round(mean(run[text]["sum"] for run in runs), 5),
            "over_dense": round(mean(ratios), 4),
            "over_dense_stdev": round(stdev(ratios), 4),
            "over_dense_by_seed": [round(ratio, 4) for ratio in ratios],
        }
    return result


def main() -> None:
    """Train one student per way and seed, and write the results."""
    teacher = mini_teacher()
    runs_by_way: dict[str, list[KLByText]] = {}
    sizes: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        home = Path(folder)
        # Fresh text: the last documents of the whole corpus are held out, while training uses the first ones.
        whole = DumpConfig(teacher="mini", codec="vectors", max_kl=0.5)
        fresh = open_cache(dump_cache(whole, out=home / "fresh", session=Session(home)).path)
        few = {"max_tokens": round(TRAIN_SEQUENCES * LENGTH / 0.97), "shard_tokens": 2**15}
        for name, settings in CACHES.items():
            config = DumpConfig(**{**settings.model_dump(exclude_none=True), **few})
            cache = open_cache(dump_cache(config, out=home / name, session=Session(home)).path)
            assert cache.manifest.measured is not None
            sizes[name] = round(cache.manifest.measured.bytes_per_token, 1)
            is_first = not runs_by_way
            runs_by_way[name] = [
                train_and_measure(cache, fresh, teacher=teacher, seed=seed, online=False) for seed in SEEDS
            ]
            if is_first:
                runs_by_way[ONLINE] = [
                    train_and_measure(cache, fresh, teacher=teacher, seed=seed, online=True) for seed in SEEDS
                ]
            write_result(  # after each cache, since all of them take half an hour
                "many_epochs",
                {
                    "student": ARCH,
                    "epochs": EPOCHS,
                    "train_sequences": cache.manifest.num_train,
                    "fresh_sequences": fresh.manifest.num_held_out,
                    "batch_size": BATCH_SIZE,
                    "seeds": SEEDS,
                    "kl_nats": {
                        way: summary(runs, runs_by_way["dense"]) for way, runs in runs_by_way.items()
                    },
                    "bytes_per_token": sizes,
                },
            )


if __name__ == "__main__":
    main()
