"""Targets from a teacher that runs during training, in place of a cache: for comparisons and benchmarks."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.relations.rows import DenseRows, Targets
from minilm_cache.relations.scores import LayerRelations, mean_row_entropy, split_heads
from minilm_cache.storage_schema.identity import RelationKind


def with_live_targets(
    batches: Iterable[StudentBatch], teacher: Teacher, wanted: WantedTargets
) -> Iterator[StudentBatch]:
    """Yield the same batches with the teacher's dense relations, from a forward pass for each batch.

    Args:
        batches: sequences; their targets are replaced.
        teacher: the teacher.
        wanted: which relations of which layers, and how many relation heads. Without layers, those that the
            teacher was loaded with are compared.
    """
    for batch in batches:
        signals = teacher.relations(batch.inputs, wanted.layers or None)
        yield replace(batch, targets=tuple(_targets(signal, wanted) for signal in signals))


def _targets(signal: LayerRelations, wanted: WantedTargets) -> dict[RelationKind, Targets]:
    if wanted.relation_heads is not None:
        signal = LayerRelations(split_heads(signal.vectors, wanted.relation_heads), signal.lengths)
    return {
        kind: Targets(DenseRows(signal.probs(kind)), mean_row_entropy(signal.probs(kind), signal.lengths))
        for kind in wanted.kinds
    }
