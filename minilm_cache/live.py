"""The teacher as it answers now, in place of a cache: the online opponent of comparisons and benchmarks."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from minilm_cache.dump.teacher import Teacher
from minilm_cache.relations import DenseRows, Targets, TeacherSignal, mean_row_entropy, split_heads
from minilm_cache.train.batches import StudentBatch, WantedTargets


def with_live_targets(
    batches: Iterable[StudentBatch], teacher: Teacher, wanted: WantedTargets
) -> Iterator[StudentBatch]:
    """Yield the same sequences with the teacher's dense relations, from a forward pass for each batch.

    They are those of the last layer that it is tapped at; `wanted` says which, and how many heads.
    """
    for batch in batches:
        signal = teacher.signals(batch.ids, batch.lengths)[-1]
        if wanted.relation_heads is not None:
            signal = TeacherSignal(split_heads(signal.vectors, wanted.relation_heads), batch.lengths)
        targets = {
            kind: Targets(DenseRows(signal.probs(kind)), mean_row_entropy(signal.probs(kind), batch.lengths))
            for kind in wanted.kinds
        }
        yield replace(batch, targets=targets)
