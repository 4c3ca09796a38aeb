"""Inputs that several benchmarks share: the embedded teacher and the embedded text."""

import torch
from torch import Tensor

from minilm_cache.corpus.formats import PYTHON_DOCS
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.storage_schema.identity import Packing, RelationKind

KINDS = (RelationKind.ATTENTION, RelationKind.VALUE)


def mini_teacher() -> Teacher:
    """Return the embedded teacher, on the CPU."""
    return Teacher(locate_teacher(MINI), torch.device("cpu"))


def mini_relations(
    teacher: Teacher, length: int, num_tokens: int
) -> tuple[dict[RelationKind, Tensor], Tensor]:
    """Return the relations of the corpus's first full sequences, and their lengths.

    A relation has the shape `(sequences, heads, length, length)`; lengths are in tokens.
    """
    packing = Packing(mode="packed", max_length=length, max_tokens=num_tokens, seed=0)
    sequences = SequenceTable(tokenise(load_corpus(PYTHON_DOCS), teacher.tokenizer), packing)
    batch = sequences.read(0, num_tokens // length)
    ids = torch.stack([torch.from_numpy(row) for row in batch.ids])
    (signal,) = teacher.relations(Inputs.full(ids))
    return {kind: signal.probs(kind) for kind in KINDS}, signal.lengths
