"""Tokens per second of training, by shape, batch size and length: from the cache, from memory, online."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import torch

from benchmarks.gpu.inputs import Bench
from benchmarks.loops import graphs_for, offline, rates, stream_of, trainers_of, usual
from minilm_cache.cache import Cache
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.relations.loss import Method, relation_loss, scores_bytes
from minilm_cache.relations.scores import DenseRows, Targets, Vectors
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.graph import Graphs, Replayed
from minilm_cache.train.heldout import with_live_targets

WARMUPS = 14
"""Steps before any that is timed: compiling takes three, and graphs are recorded and checked, one after the
other: of decoding, of the teacher, of a student."""
KEPT_BATCHES = 4
"""Batches that are kept in memory, decoded."""
CODEC = "vectors"
FORMS: tuple[Method, ...] = ("dense", "sdpa")
HEADS, HEAD_SIZE = 12, 32
MOST_SCORES_BYTES = 2**32
"""Greatest matrix of scores that forms of the loss are compared with."""


def training(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape, batch size and length.

    Compiling takes a minute for each, so compiled students are timed with the smallest batch, where launches
    cost most, and not for the largest shape.
    """
    is_gpu = bench.device.type == "cuda"
    teacher = Teacher(
        locate_teacher(str(bench.teacher)), bench.device, precision="bfloat16" if is_gpu else "float32"
    )
    for length, size, arch in product(bench.sizes.lengths, bench.sizes.batch_sizes, bench.sizes.arch):
        cache = bench.cache(CODEC, length)
        row: dict[str, Any] = {"arch": arch, "batch_size": size, "length": length, "codec": CODEC}
        config = TrainConfig(arch=(arch,), batch_size=size, buffer_shards=2, device=bench.device.type)
        if is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(bench.device)
        try:
            with ExitStack() as stack:
                is_small = (length, size) == (bench.sizes.lengths[0], bench.sizes.batch_sizes[0])
                compiles = is_gpu and is_small and arch in bench.sizes.arch[:2]
                ways = _ways(bench, cache, config, teacher=teacher, stack=stack, compiles=compiles)
                measured = rates(ways, bench.sizes.seconds, turns=2, warmups=WARMUPS, device=bench.device)
            over = _over(measured)
            row |= {"tokens_per_s": {way: round(rate) for way, rate in measured.items()}, **over}
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        if is_gpu:
            row["peak_bytes_of_all_ways"] = torch.cuda.max_memory_allocated(bench.device)
        yield row


def _ways(
    bench: Bench, cache: Cache, config: TrainConfig, *, teacher: Teacher, stack: ExitStack, compiles: bool
) -> dict[str, Callable[[], int]]:
    """Return the ways of training that are timed in turns."""
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    tokens_only = WantedTargets(kinds=())

    def opened(targets: WantedTargets, graphs: Graphs | None = None) -> Any:  # noqa: ANN401 - a generator
        stream = stream_of(cache, config, targets, device=bench.device, graphs=graphs)
        return stack.enter_context(closing(stream))

    kept = list(islice(opened(wanted), KEPT_BATCHES))
    live = with_live_targets(opened(tokens_only), teacher, wanted)
    compiled = config.with_changes(compiled=True)
    ways = {
        "from the cache": offline(trainers_of(cache, config, bench.device), opened(wanted)),
        "from memory": offline(trainers_of(cache, config, bench.device), cycle(kept)),
        "best online": offline(trainers_of(cache, config, bench.device), live),
        "usual online": usual(
            bench.teacher, cache, config=config, batches=opened(tokens_only), device=bench.device
        ),
    }
    graphs, online = graphs_for(bench.device), graphs_for(bench.device)
    if graphs is not None and online is not None:
        trainers = trainers_of(cache, config, bench.device, graphs=graphs)
        ways["as graphs"] = offline(trainers, opened(wanted, graphs))
        replayed = _replayed_live(opened(tokens_only, online), teacher, wanted, graphs=online)
        ways["online, as graphs"] = offline(trainers_of(cache, config, bench.device, graphs=online), replayed)
    if compiles:
        ways["compiled"] = offline(trainers_of(cache, compiled, bench.device), opened(wanted))
    return ways


def _replayed_live(
    batches: Iterator[StudentBatch], teacher: Teacher, wanted: WantedTargets, *, graphs: Graphs
) -> Iterator[StudentBatch]:
    """Yield batches with a teacher's targets, whose forward pass is a graph, too."""
    at_places: dict[int, Replayed[StudentBatch]] = {}
    for batch in batches:
        if batch.place is None:
            yield _live(batch, teacher, wanted)
            continue
        forward = at_places.setdefault(batch.place, Replayed(graphs))
        stays = forward.is_next_replayed
        yield replace(forward(partial(_live, batch, teacher, wanted)), place=batch.place if stays else None)


def _live(batch: StudentBatch, teacher: Teacher, wanted: WantedTargets) -> StudentBatch:
    return next(with_live_targets([batch], teacher, wanted))


def _over(measured: dict[str, float]) -> dict[str, float]:
    ours = measured["from the cache"]
    return {
        f"over_{way.replace(' ', '_')}": round(ours / rate, 2)
        for way, rate in measured.items()
        if way != "from the cache"
    }


def forms(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield tokens per second of both forms of the loss, which decide `GPU_LIMITS` of relations/loss.py."""
    for length, batch in product(bench.sizes.lengths, bench.sizes.batch_sizes):
        if scores_bytes(batch, HEADS, length) <= MOST_SCORES_BYTES:
            yield {"batch_size": batch, "length": length, "tokens_per_s": _forms_of(bench, batch, length)}


def _forms_of(bench: Bench, batch: int, length: int) -> dict[str, float]:
    parts = [torch.randn(batch, HEADS, length, HEAD_SIZE, device=bench.device) for _ in range(3)]
    for part in parts:
        part.requires_grad_()
    vectors = Vectors(parts[0], parts[1], parts[2], None, HEAD_SIZE**-0.5)
    probs = torch.rand(batch, HEADS, length, length, device=bench.device).softmax(-1)
    targets = Targets(DenseRows(probs), torch.zeros(batch, device=bench.device))
    lengths = torch.full((batch,), length, device=bench.device)

    def step(form: Method) -> int:
        kind = RelationKind.ATTENTION
        relation_loss(vectors, kind, targets=targets, lengths=lengths, method=form).backward()
        return batch * length

    ways: dict[str, Callable[[], int]] = {form: partial(step, form) for form in FORMS}
    return rates(ways, bench.sizes.seconds / 2, turns=2, device=bench.device)
