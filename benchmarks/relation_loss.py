"""Time relation losses, forward and backward: ours against `F.kl_div`, and both forms of ours.

python -m benchmarks.relation_loss
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.report import write_result
from minilm_cache.relations.loss import Method, relation_kl, relation_loss
from minilm_cache.relations.scores import (
    DenseRows,
    RowTargets,
    SparseRows,
    Targets,
    VectorRows,
    Vectors,
    mean_row_entropy,
)
from minilm_cache.storage_schema.identity import RelationKind

BATCH, HEADS, LENGTH, ENTRIES = 16, 12, 128, 16
ROUNDS = 15


FORMS: tuple[Method, ...] = ("dense", "sdpa")
SIZES = ((32, 128), (8, 512), (2, 2048), (1, 4096))
"""Batch size and length, in tokens."""
HEAD_SIZE, TEACHER_SIZE = 32, 64


def main() -> None:
    """Time the losses in turns, and write medians and ratios."""
    write_result("relation_loss", {**against_kl_div(), "forms": forms()})


def forms() -> list[dict[str, object]]:
    """Time forward and backward passes of both forms, from a student's vectors, for rows of both codecs."""
    results: list[dict[str, object]] = []
    for batch, length in SIZES:
        generator = torch.Generator().manual_seed(0)
        shape = (batch, HEADS, length, HEAD_SIZE)
        student = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
        teacher = [torch.randn(*shape[:-1], TEACHER_SIZE, generator=generator) for _ in range(3)]
        index = torch.randint(length, (*shape[:-1], ENTRIES), generator=generator)
        rows: dict[str, RowTargets] = {
            "topk": SparseRows(index, torch.full(index.shape, 1 / ENTRIES), None),
            "vectors": VectorRows(as_vectors(teacher), RelationKind.VALUE),
        }
        lengths = torch.full((batch,), length)
        vectors = as_vectors(student)
        entropy = torch.zeros(batch)
        ways: dict[str, Callable[[], Tensor]] = {
            f"{codec}, {form}": partial(
                relation_loss,
                vectors,
                RelationKind.VALUE,
                targets=Targets(row, entropy if codec == "topk" else None),
                lengths=lengths,
                method=form,
            )
            for codec, row in rows.items()
            for form in FORMS
        }
        seconds = in_turns({name: partial(_backward, loss, student[2]) for name, loss in ways.items()}, 5)
        times = {name: round(1000 * value, 1) for name, value in seconds.items()}
        results.append({"batch": batch, "length": length, "milliseconds": times})
        print(results[-1], flush=True)
    return results


def as_vectors(parts: list[Tensor]) -> Vectors:
    """Return queries, keys and values as the vectors of one layer."""
    query, key, value = parts
    return Vectors(query, key, value, None, query.shape[-1] ** -0.5)


def _backward(loss: Callable[[], Tensor], leaf: Tensor) -> None:
    torch.autograd.grad(loss(), leaf)


def in_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, without the first round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)
    return {name: median(values[1:]) for name, values in times.items()}


def against_kl_div() -> dict[str, object]:
    """Time our hand-written gradients against `F.kl_div`."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, LENGTH, LENGTH)
    teacher = torch.randn(shape, generator=generator).softmax(-1)
    scores = torch.randn(shape, generator=generator).requires_grad_()
    lengths = torch.full((BATCH,), LENGTH)
    entropy = mean_row_entropy(teacher, lengths)
    index = torch.randint(LENGTH, (*shape[:-1], ENTRIES), generator=generator)
    sparse = SparseRows(index, torch.full(index.shape, 1 / ENTRIES), None)

    def plain() -> Tensor:
        log_student = scores.log_softmax(-1)
        return functional.kl_div(log_student, teacher, reduction="sum") / (BATCH * HEADS * LENGTH)

    losses: dict[str, Callable[[], Tensor]] = {
        "F.kl_div": plain,
        "dense": lambda: relation_kl(scores, Targets(DenseRows(teacher), entropy), lengths),
        "sparse": lambda: relation_kl(scores, Targets(sparse, entropy), lengths),
    }

    def both_relations(loss: Callable[[], Tensor]) -> None:
        for _ in range(2):
            torch.autograd.grad(loss(), scores)

    seconds = in_turns({name: partial(both_relations, loss) for name, loss in losses.items()}, ROUNDS)
    return {
        "batch": BATCH,
        "heads": HEADS,
        "length": LENGTH,
        "entries": ENTRIES,
        "milliseconds": {name: round(1000 * value, 1) for name, value in seconds.items()},
        "times_faster_than_kl_div": {
            name: round(seconds["F.kl_div"] / value, 2) for name, value in seconds.items()
        },
    }


if __name__ == "__main__":
    main()
