"""Forward and backward of both relations' losses: hand-written gradients against `F.kl_div`.

python -m benchmarks.relation_loss
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.report import write_result
from minilm_cache.relations import DenseRows, SparseRows, Targets, mean_row_entropy, relation_kl

BATCH, HEADS, LENGTH, ENTRIES = 16, 12, 128, 16
ROUNDS = 15


def main() -> None:
    """Time the losses in turns, and write medians and ratios."""
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
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(ROUNDS + 1):
        for name, loss in losses.items():
            started = time.perf_counter()
            for _ in range(2):  # both relations
                torch.autograd.grad(loss(), scores)
            times[name].append(time.perf_counter() - started)
    seconds = {name: median(values[1:]) for name, values in times.items()}
    write_result(
        "relation_loss",
        {
            "batch": BATCH,
            "heads": HEADS,
            "length": LENGTH,
            "entries": ENTRIES,
            "milliseconds": {name: round(1000 * value, 1) for name, value in seconds.items()},
            "times_faster_than_kl_div": {
                name: round(seconds["F.kl_div"] / value, 2) for name, value in seconds.items()
            },
        },
    )


if __name__ == "__main__":
    main()
