"""The teacher as it answers now, in place of a cache: the online opponent of comparisons and benchmarks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from minilm_cache.dump.teacher import Teacher
from minilm_cache.relations import DenseRows, Targets, mean_row_entropy
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.batches import StudentBatch


def with_live_targets(
    batches: Iterable[StudentBatch], teacher: Teacher, kinds: Sequence[RelationKind]
) -> Iterator[StudentBatch]:
    """Yield the same sequences with the teacher's dense relations, from a forward pass for each batch.

    They are those of its last tapped layer.
    """
    for batch in batches:
        signal = teacher.signals(batch.ids, batch.lengths)[-1]
        targets = {
            kind: Targets(DenseRows(signal.probs(kind)), mean_row_entropy(signal.probs(kind), batch.lengths))
            for kind in kinds
        }
        yield replace(batch, targets=targets)
