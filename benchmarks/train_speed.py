"""Measure tokens per second of training: from a cache, from targets in memory, and with a live teacher.

python -m benchmarks.train_speed [--part ratios|students|lengths|phases|memory]

The teacher is a BERT-base of random weights, drawn wide enough that its distributions are not flat, over
python-docs. Each ratio is one of medians over turns in one run. `in memory` is the upper bound: the same
steps with batches decoded in advance. `usual` has the teacher in the loop as in public trainers
(benchmarks/online.py). `best` is the fastest online loop: both forward passes stop at the last layer's
vectors, attention is sdpa, and all students share one teacher.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModel, BertConfig

from benchmarks.loops import CPU, offline, rates, stream_of, trainers_of, usual
from benchmarks.report import add_to_result, write_result
from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.heldout import with_live_targets

CODECS = ("topk", "vectors")
SHAPES = ("3x384", "4x384", "6x384", "12x384")
GROUPS = (*SHAPES, "+".join(SHAPES))
"""Groups of students that train in one pass."""
SMALL = ("2x96", "3x96", "2x192", "3x192")
LENGTHS = (64, 128, 256, 512)


def save_teacher(folder: Path) -> Path:
    """Write a BERT-base model of random weights, with a real tokenizer, to a folder."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(locate_teacher(MINI).folder)
    model = AutoModel.from_config(BertConfig(vocab_size=len(tokenizer), initializer_range=0.05))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Bench:
    """A teacher, and the folder of caches of it."""

    teacher: Path
    folder: Path

    def cache(self, codec: str, length: int) -> Cache:
        """Return a cache of 2**15 tokens; a second call returns the same cache."""
        path = self.folder / f"{codec}-{length}"
        config = DumpConfig(
            teacher=str(self.teacher), codec=codec, max_length=length, max_tokens=2**15, shard_tokens=2**12
        )
        dump_cache(config, out=path, session=Session(self.folder))
        return open_cache(path)


def ratios(bench: Bench, groups: Sequence[str] = GROUPS) -> dict[str, object]:
    """Compare every way of training for each group of students and batch size."""
    teacher = Teacher(locate_teacher(str(bench.teacher)), CPU)
    caches = {codec: bench.cache(codec, 128) for codec in CODECS}
    result: dict[str, object] = {}
    for group in groups:
        for batch_size in (8, 32):
            config = TrainConfig(arch=tuple(group.split("+")), batch_size=batch_size, buffer_shards=2)
            ways: dict[str, Callable[[], int]] = {}
            with ExitStack() as stack:

                def opened(cache: Cache, targets: WantedTargets, stack: ExitStack = stack) -> Any:  # noqa: ANN401
                    return stack.enter_context(closing(stream_of(cache, config, targets)))  # noqa: B023

                for codec, cache in caches.items():
                    targets = choose_objective(config, cache, arch=config.arch).wanted
                    decoded = list(islice(opened(cache, targets), 4))
                    ways[f"{codec} from disk"] = offline(trainers_of(cache, config), opened(cache, targets))
                    ways[f"{codec} in memory"] = offline(trainers_of(cache, config), cycle(decoded))
                tokens_only = WantedTargets(kinds=())
                live = with_live_targets(opened(cache, tokens_only), teacher, targets)
                ways["best online"] = offline(trainers_of(cache, config), live)
                ways["usual online"] = usual(
                    bench.teacher, cache, config=config, batches=opened(cache, tokens_only)
                )
                measured = rates(ways, 4.0 if batch_size == 8 else 8.0)
            name = f"{group}, batch {batch_size}"
            result[name] = {"tokens_per_s": {way: round(rate) for way, rate in measured.items()}} | {
                codec: {
                    f"over {baseline}": round(measured[f"{codec} from disk"] / measured[way], 2)
                    for baseline, way in {
                        "in memory": f"{codec} in memory",
                        "best online": "best online",
                        "usual online": "usual online",
                    }.items()
                }
                for codec in CODECS
            }
            print(name, result[name], flush=True)
    return result


def students(bench: Bench) -> dict[str, object]:
    """Compare several small students in one pass with one pass per student, and with two in one pass."""
    result: dict[str, object] = {}
    for codec in CODECS:
        cache = bench.cache(codec, 128)
        targets = choose_objective(TrainConfig(arch=SMALL), cache, arch=TrainConfig(arch=SMALL).arch).wanted
        with ExitStack() as stack:
            ways: dict[str, Callable[[], int]] = {}
            for names in (SMALL, SMALL[:2], *((arch,) for arch in SMALL)):
                config = TrainConfig(arch=names, batch_size=32, buffer_shards=2)
                batches = stack.enter_context(closing(stream_of(cache, config, targets)))
                ways["+".join(names)] = offline(trainers_of(cache, config), batches)
            measured = rates(ways, 4.0)
        separate = sum(1 / measured[arch] for arch in SMALL)
        result[codec] = {
            "tokens_per_s": {name: round(rate) for name, rate in measured.items()},
            "one pass over separate passes": round(measured["+".join(SMALL)] * separate, 2),
        }
        print(codec, result[codec], flush=True)
    return result


def lengths(bench: Bench) -> dict[str, object]:
    """Measure the cost of a step of 4096 tokens by the length of its sequences.

    The teacher is the small `mini`: a step does not depend on its depth, and its dump takes seconds.
    """
    bench = Bench(Path(MINI), bench.folder / MINI)
    result: dict[str, object] = {}
    for codec in CODECS:
        with ExitStack() as stack:
            ways: dict[str, Callable[[], int]] = {}
            for length in LENGTHS:
                cache = bench.cache(codec, length)
                config = TrainConfig(arch=("3x384",), batch_size=4096 // length, buffer_shards=2)
                targets = choose_objective(config, cache, arch=config.arch).wanted
                batches = stack.enter_context(closing(stream_of(cache, config, targets)))
                ways[str(length)] = offline(trainers_of(cache, config), batches)
            measured = rates(ways, 4.0)
        result[codec] = {name: round(rate) for name, rate in measured.items()}
        print(codec, result[codec], flush=True)
    return {"tokens_per_s, 3x384, 4096 tokens a step, teacher mini": result}


def phases(bench: Bench) -> dict[str, object]:
    """Measure how the time of a step of a 3x384 student is divided into phases, in per cent."""
    result: dict[str, object] = {}
    for codec in CODECS:
        cache = bench.cache(codec, 128)
        config = TrainConfig(arch=("3x384",), batch_size=32, buffer_shards=2)
        objective = choose_objective(config, cache, arch=config.arch)
        (trainer,) = trainers_of(cache, config)
        learner_objective = trainer.learner.objective
        spent = dict.fromkeys(("wait and decode", "forward", "loss", "backward", "optimizer"), 0.0)
        with closing(stream_of(cache, config, objective.wanted)) as batches:
            next(batches)
            for _ in range(12):
                marks = [time.perf_counter()]
                batch = next(batches)
                marks.append(time.perf_counter())
                reading = trainer.model.train()(batch.inputs, learner_objective.needs.tap)
                marks.append(time.perf_counter())
                loss = learner_objective.losses(learner_objective(reading, batch)).total
                marks.append(time.perf_counter())
                trainer.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                marks.append(time.perf_counter())
                trainer.optimizer.step()
                marks.append(time.perf_counter())
                for name, start, end in zip(spent, marks, marks[1:], strict=False):
                    spent[name] += end - start
        total = sum(spent.values())
        result[codec] = {name: f"{100 * value / total:.1f} %" for name, value in spent.items()}
    return {"share of a step": result}


def memory(bench: Bench) -> dict[str, object]:
    """Measure the peak memory of four steps of a 3x384 student, batch size 32, with a new process per way."""
    peaks = {}
    for codec in CODECS:
        bench.cache(codec, 128)
    for way in (*CODECS, "best online", "usual online"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            peaks[way] = process.submit(peak_bytes, bench, way).result()
    return {"peak_memory_bytes": peaks}


def peak_bytes(bench: Bench, way: str) -> int:
    """Return the peak memory of this process after four steps, in bytes."""
    cache = bench.cache(way if way in CODECS else CODECS[0], 128)
    config = TrainConfig(arch=("3x384",), batch_size=32, buffer_shards=2)
    targets = choose_objective(config, cache, arch=config.arch).wanted
    with closing(stream_of(cache, config, targets if way in CODECS else WantedTargets(kinds=()))) as batches:
        if way == "usual online":
            step = usual(bench.teacher, cache, config=config, batches=batches)
        elif way == "best online":
            teacher = Teacher(locate_teacher(str(bench.teacher)), CPU)
            step = offline(trainers_of(cache, config), with_live_targets(batches, teacher, targets))
        else:
            step = offline(trainers_of(cache, config), batches)
        for _ in range(4):
            step()
    # Not getrusage: after an exec, its value for a child process is still the parent's.
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


PARTS: dict[str, Callable[[Bench], dict[str, object]]] = {
    "ratios": ratios,
    "students": students,
    "lengths": lengths,
    "phases": phases,
    "memory": memory,
}


def main() -> None:
    """Measure the chosen parts, and write one result per part."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="part to measure; may be repeated (default: all parts)"
    )
    parser.add_argument(
        "--students",
        action="append",
        help="group of students for the part ratios; may be repeated (default: all groups)",
    )
    arguments = parser.parse_args()
    parts = arguments.part or list(PARTS)
    with TemporaryDirectory() as folder:
        bench = Bench(save_teacher(Path(folder) / "bert-base"), Path(folder))
        for part in parts:
            if part == "ratios":
                # Groups that an earlier run measured stay in the result.
                measured = ratios(bench, arguments.students or GROUPS)
                add_to_result(f"train_speed_{part}", **measured)
            else:
                write_result(f"train_speed_{part}", PARTS[part](bench))


if __name__ == "__main__":
    main()
