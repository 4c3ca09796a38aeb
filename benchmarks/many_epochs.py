"""KL of students after 20 epochs over few sequences, from each codec, over one trained online, three seeds.

What a codec leaves out, or draws once for all epochs, a student could learn by heart on a set that it sees
often. So each is judged by the live teacher twice: on the text that it trained on, and on fresh text.

    python -m benchmarks.many_epochs
"""

from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

from benchmarks.inputs import mini_teacher
from benchmarks.report import write_result
from benchmarks.student_quality import live_kl, trained
from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig

ARCH = "3x192"
EPOCHS = 20
TRAIN_SEQUENCES = 160
FRESH_SEQUENCES = 128
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
Judgement = dict[str, dict[str, float]]


def train_and_judge(cache: Cache, fresh: Cache, *, teacher: Teacher, seed: int, online: bool) -> Judgement:
    """Train a student anew, and return its KLs on the text that it trained on and on fresh text."""
    steps = EPOCHS * cache.manifest.num_train // BATCH_SIZE
    config = TrainConfig(arch=(ARCH,), steps=steps, batch_size=BATCH_SIZE, seed=seed)
    trainer = trained(config, cache, teacher, online=online)
    found = {}
    for name, source, numbers in (
        ("training text", cache, range(cache.manifest.num_train)),
        ("fresh text", fresh, range(fresh.manifest.num_train, len(fresh))),
    ):
        reader = BatchReader(
            source, WantedTargets(kinds=()), pad_token=teacher.tokenizer.pad_token_id, device=teacher.device
        )
        found[name] = live_kl(trainer, reader.batches_of(numbers, 16), teacher)
    return found


def summary(runs: list[Judgement], dense: list[Judgement]) -> dict[str, object]:
    """Return means over seeds; ratios are of students of one seed, to that from the dense cache."""
    result: dict[str, object] = {}
    for text in runs[0]:
        ratios = [run[text]["sum"] / other[text]["sum"] for run, other in zip(runs, dense, strict=True)]
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
    """Train one student in each way from each seed, and write the results."""
    teacher = mini_teacher()
    found: dict[str, list[Judgement]] = {}
    sizes: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        home = Path(folder)
        # The whole corpus, of whose order the last documents are held out; the few below are the first ones.
        whole = DumpConfig(teacher="mini", codec="vectors", max_kl=0.5)
        fresh = open_cache(dump_cache(whole, out=home / "fresh", home=home).path)
        few = {"max_tokens": round(TRAIN_SEQUENCES * LENGTH / 0.97), "shard_tokens": 2**15}
        for name, settings in CACHES.items():
            own = DumpConfig(**{**settings.model_dump(exclude_none=True), **few})
            cache = open_cache(dump_cache(own, out=home / name, home=home).path)
            assert cache.manifest.measured is not None
            sizes[name] = round(cache.manifest.measured.bytes_per_token, 1)
            if not found:
                found[name] = [
                    train_and_judge(cache, fresh, teacher=teacher, seed=s, online=False) for s in SEEDS
                ]
                found[ONLINE] = [
                    train_and_judge(cache, fresh, teacher=teacher, seed=s, online=True) for s in SEEDS
                ]
            else:
                found[name] = [
                    train_and_judge(cache, fresh, teacher=teacher, seed=s, online=False) for s in SEEDS
                ]
            write_result(  # after each, since all of them take half an hour
                "many_epochs",
                {
                    "student": ARCH,
                    "epochs": EPOCHS,
                    "train_sequences": cache.manifest.num_train,
                    "fresh_sequences": fresh.manifest.num_held_out,
                    "batch_size": BATCH_SIZE,
                    "seeds": SEEDS,
                    "kl_nats": {way: summary(runs, found["dense"]) for way, runs in found.items()},
                    "bytes_per_token": sizes,
                },
            )


if __name__ == "__main__":
    main()
