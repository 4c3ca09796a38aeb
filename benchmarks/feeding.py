"""Measure what feeds a GPU: gathering, reading, writing by threads, and the host's part of a dump's batch.

    python -m benchmarks.feeding

It needs two cores with nothing else to do. Rates are medians over turns; figures of one and two threads come
from the same run. The caches are of teachers of width 384 (12 heads) and 768 (BERT-base's shape), with random
weights and a text of random words, at length 128.
"""

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.inputs import BASE, Sizes, prepare
from benchmarks.loops import CPU
from benchmarks.report import write_result
from minilm_cache.cache import Cache
from minilm_cache.codecs.topk import TopKCodec
from minilm_cache.models.inputs import Inputs
from minilm_cache.objectives.check import choose_objective
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.store.reader import Segment
from minilm_cache.store.shards import ShardEncoder
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig

LENGTH, BATCH, TURNS = 128, 32, 7
SIZES = Sizes(
    teacher={**BASE, "hidden_size": 384, "num_hidden_layers": 1, "intermediate_size": 1536},
    tokens=2**17,
    dump_tokens=2**17,
    arch=("3x384",),
    batch_sizes=(BATCH,),
    lengths=(LENGTH,),
    seconds=0,
)
CACHES = {"topk, 12 heads": ("topk", 384), "vectors, 384": ("vectors", 384), "vectors, 768": ("vectors", 768)}


def main() -> None:
    """Measure every cache, and write the result."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"length": LENGTH, "batch": BATCH, "tokens": SIZES.tokens}
    with TemporaryDirectory() as folder:
        benches = {
            width: prepare(Path(folder, str(width)), CPU, _sizes(width))
            for width in sorted({width for _, width in CACHES.values()})
        }
        for name, (codec, width) in CACHES.items():
            cache = benches[width].cache(codec, LENGTH)
            segments = [
                segment
                for shard in range(len(cache.reader.ranges))
                for segment in cache.reader.segments_of(shard)
            ]
            result[name] = {
                "gather_tokens_per_s": round(_gather(cache, segments)),
                "read": _by_threads(partial(_read, cache)),
                "write": _by_threads(partial(_write, cache, segments)),
            }
            print(name, result[name], flush=True)
        result["host_ms_of_a_batch"] = _host_ms()
    write_result("feeding", result)


def _sizes(width: int) -> Sizes:
    return replace(SIZES, teacher={**SIZES.teacher, "hidden_size": width})


def _gather(cache: Cache, segments: list[Segment]) -> float:
    """Return tokens per second of one thread that copies shuffled sequences into batches."""
    config = TrainConfig(arch=("3x384",), batch_size=BATCH)
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    reader = BatchReader(cache, wanted, pad_token=0, device=CPU)
    by_number = dict(enumerate(segments))
    order = np.random.default_rng(0).permutation(cache.manifest.num_sequences)[: BATCH * 24]
    rates = []
    for _ in range(TURNS):
        started, tokens = time.perf_counter(), 0
        for first in range(0, len(order), BATCH):
            batch = reader._gather([(by_number, order[first : first + BATCH], 0)])  # noqa: SLF001 - what is timed
            tokens += batch.counts["tokens"]
        rates.append(tokens / (time.perf_counter() - started))
    return median(rates)


def _by_threads(work: Callable[[ThreadPoolExecutor], int]) -> dict[str, float]:
    """Return tokens per second with one and two threads, in turns, and what the second one adds."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(TURNS):
        for count, measured in rates.items():
            with ThreadPoolExecutor(count) as threads:
                started = time.perf_counter()
                tokens = work(threads)
                measured.append(tokens / (time.perf_counter() - started))
    one, two = median(rates[1]), median(rates[2])
    return {"one_thread": round(one), "two_threads": round(two), "scales_by": round(two / one, 2)}


def _read(cache: Cache, threads: ThreadPoolExecutor) -> int:
    """Read, check and decode every segment, and return the tokens."""
    config = TrainConfig(arch=("3x384",), batch_size=BATCH)
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    reader = BatchReader(cache, wanted, pad_token=0, device=CPU)
    numbers = range(len(cache.reader.ranges) * cache.reader.segments.per_shard)
    read = threads.map(reader._read, list(numbers) * 4)  # noqa: SLF001 - what is timed
    return sum(int(segment.lengths.sum()) for segment in read)


def _write(cache: Cache, segments: list[Segment], threads: ThreadPoolExecutor) -> int:
    """Encode the arrays of every segment as a shard does, and return the tokens."""
    tokens = 0
    for segment in segments:
        encoders = {
            spec.path: ShardEncoder(io.BytesIO(), spec, cache.manifest.shard_tokens)
            for spec in cache.reader.specs
            if spec.path in segment.rows and spec.path != "tokens"
        }
        for file in [encoder.append_by(threads, segment.rows[path]) for path, encoder in encoders.items()]:
            file.result()
        tokens += int(segment.lengths.sum())
    return tokens


def _host_ms() -> dict[str, float]:
    """Return milliseconds of what the CPU does for a batch of `topk` while a device computes: medians."""
    codec = TopKCodec(max_length=LENGTH)
    lengths = torch.full((BATCH,), LENGTH)
    shape = torch.Size((BATCH, 12, LENGTH, LENGTH))
    rows = [torch.arange(LENGTH) for _ in range(BATCH)]
    stored = {path: np.zeros((2**15, 12, 16), np.uint8) for path in ("gap", "weight", "gap2", "weight2")}
    arrived = {path: np.ones((BATCH * LENGTH, 12, 16), np.uint8) for path in stored}
    places = np.random.default_rng(0).permutation(2**15)[: BATCH * LENGTH].reshape(BATCH, LENGTH)

    def draw() -> None:
        for kind in (RelationKind.ATTENTION, RelationKind.VALUE):
            codec._draws(kind, range(BATCH), lengths=lengths, shape=shape)  # noqa: SLF001 - what is timed

    def assemble() -> None:
        for path, values in arrived.items():
            stored[path][places.ravel()] = values

    parts: dict[str, Callable[[], object]] = {
        "draw": draw,
        "pad": partial(Inputs.of, rows, 0),
        "assemble_rows": assemble,
    }
    spent = {}
    for name, work in parts.items():
        seconds = []
        for _ in range(30):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        spent[name] = round(1e3 * median(seconds), 3)
    return {**spent, "sum": round(sum(spent.values()), 3)}


if __name__ == "__main__":
    main()
