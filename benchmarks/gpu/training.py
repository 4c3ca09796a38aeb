"""Tokens per second of training, by shape, batch size and length: from the cache, from memory, online."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.inputs import Bench
from benchmarks.loops import graphs_for, offline, rates, stream_of, trainers_of, usual
from minilm_cache.cache import Cache
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.relations.loss import Method, relation_loss, scores_bytes
from minilm_cache.relations.scores import SparseRows, Targets, VectorRows, Vectors, densify
from minilm_cache.relations.trust import has_kernels
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
FORMS: tuple[Method, ...] = ("dense", "sdpa", "fused")
CODECS = ("vectors", "topk", "dense")
HEADS, HEAD_SIZE, TEACHER_SIZE, ENTRIES = 12, 32, 64, 16
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
    """Yield tokens per second and errors of each form of the loss, for targets of every kind.

    They decide `GPU_LIMITS` of relations/loss.py. The student's vectors are bfloat16. Errors are those
    of their gradients, as a share of the norm that form `dense` gives for the same numbers in float32.
    """
    for length, batch, codec in product(bench.sizes.lengths, bench.sizes.batch_sizes, CODECS):
        if scores_bytes(batch, HEADS, length) <= MOST_SCORES_BYTES:
            row = {"batch_size": batch, "length": length, "codec": codec}
            yield row | _forms_of(bench, batch, length, codec=codec)


def _forms_of(bench: Bench, batch: int, length: int, *, codec: str) -> dict[str, dict[str, float]]:
    student = _random_vectors(bench, batch, length, size=HEAD_SIZE, dtype=torch.bfloat16)
    teacher = _random_vectors(bench, batch, length, size=TEACHER_SIZE, dtype=torch.float32)
    targets = _targets_of(VectorRows(teacher, RelationKind.ATTENTION), codec, bench.device)
    lengths = torch.full((batch,), length, device=bench.device)
    parts = [part.requires_grad_() for part in student[:2]]

    def loss(vectors: Vectors, form: Method) -> Tensor:
        return relation_loss(vectors, RelationKind.ATTENTION, targets=targets, lengths=lengths, method=form)

    def step(form: Method) -> int:
        loss(student, form).backward()
        return batch * length

    used = [form for form in FORMS if form != "fused" or (codec != "dense" and has_kernels(bench.device))]
    wide = [part.detach().float().requires_grad_() for part in student[:3]]
    exact = torch.autograd.grad(
        loss(Vectors(wide[0], wide[1], wide[2], None, student.scaling), "dense"), wide[:2]
    )
    errors: dict[str, float] = {}
    for form in used:
        found = torch.autograd.grad(loss(student, form), parts)
        errors[form] = round(float(torch.stack(list(map(_error, found, exact))).max()), 5)
    ways: dict[str, Callable[[], int]] = {form: partial(step, form) for form in used}
    rate = rates(ways, bench.sizes.seconds / 4, turns=2, device=bench.device)
    return {"tokens_per_s": rate, "errors_of_gradients": errors}


def _error(found: Tensor, exact: Tensor) -> Tensor:
    error: Tensor = (found.float() - exact).norm() / exact.norm()
    return error


def _random_vectors(bench: Bench, batch: int, length: int, *, size: int, dtype: torch.dtype) -> Vectors:
    """Return vectors as a model makes them: heads of a token are side by side in memory."""
    generator = torch.Generator(bench.device).manual_seed(size)
    shape = (3, batch, length, HEADS, size)
    parts = torch.randn(shape, device=bench.device, generator=generator).to(dtype).transpose(2, 3)
    return Vectors(parts[0], parts[1], parts[2], None, size**-0.5)


def _targets_of(rows: VectorRows, codec: str, device: torch.device) -> Targets:
    """Return rows as a codec gives them."""
    batch, _, length, _ = rows.vectors.query.shape
    lengths = torch.full((batch,), length, device=device)
    if codec == "vectors":
        return Targets(rows, None)
    dense, entropy = densify(rows, lengths)
    if codec == "dense":
        return Targets(dense, entropy)
    index = torch.multinomial(dense.probs.flatten(0, 2), ENTRIES, replacement=True)
    index = index.view(*dense.probs.shape[:3], ENTRIES)
    weight = torch.full(index.shape, 1 / ENTRIES, device=device)
    return Targets(SparseRows(index, weight, None), entropy)
