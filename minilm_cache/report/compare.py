"""How close trained students are to a teacher that runs now: exact KLs on a cache's held-out sequences.

A run records KLs to what its cache holds: after a teacher assistant, these are KLs to the assistant. The KLs
computed here are all to one teacher, so that students of several caches and of several stages can be compared
with each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from minilm_cache.cache import Cache
from minilm_cache.errors import IdentityMismatchError
from minilm_cache.models.complete import pools_texts
from minilm_cache.models.load import load_model
from minilm_cache.models.pooling import SentenceEncoder
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.base import Losses
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.check import Objective
from minilm_cache.storage_schema.states import LABELS
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.heldout import (
    MAX_SEQUENCES,
    HeldOutLosses,
    batch_size,
    held_out_losses,
    with_live_targets,
)
from minilm_cache.train.trainer import read
from minilm_cache.wording import differing_values

_BATCH_SIZE = 16


def load_student(folder: Path, device: torch.device) -> TappedModel:
    """Load a trained student in evaluation mode.

    Raises:
        TeacherError: the folder holds no such model.
    """
    return TappedModel(load_model(folder)).eval().requires_grad_(requires_grad=False).to(device)


def is_teacher_of(teacher: Teacher, cache: Cache) -> bool:
    """Return whether a cache holds the relations of this teacher."""
    expected = cache.manifest.identity
    return teacher.identity == expected.teacher and teacher.tokenizer_sha256 == expected.tokenizer_sha256


def check_is_teacher_of(teacher: Teacher, cache: Cache) -> None:
    """Raise IdentityMismatchError if a cache holds the relations of another teacher."""
    if not is_teacher_of(teacher, cache):
        expected, given = cache.manifest.identity, teacher.identity
        differing = list(differing_values(expected.teacher.model_dump(), given.model_dump()))
        differing += ["tokenizer"] * (teacher.tokenizer_sha256 != expected.tokenizer_sha256)
        raise IdentityMismatchError(
            f"teacher {teacher.name} (weights {given.weights_sha256[:12]}) is not the one of "
            f"{cache.reader.root} ({cache.manifest.labels.teacher}, weights "
            f"{expected.teacher.weights_sha256[:12]}): they differ in {', '.join(differing)}. Give the "
            "teacher that the cache was dumped from."
        )


def live_held_out_kl(
    cache: Cache, teacher: Teacher, *, objective: Objective, students: Sequence[Path]
) -> list[HeldOutLosses] | list[None]:
    """Return each student's KL(teacher || student), nats, on held-out sequences.

    Args:
        cache: cache whose held-out sequences are read, at most 256.
        teacher: teacher that the cache was dumped from.
        objective: objective that names the relations, the layer and the number of relation heads.
        students: folders of the students.

    Returns:
        The losses of each student by relation. None for each student where nothing is held out.

    Raises:
        IdentityMismatchError: the cache was dumped from another teacher.
        TeacherError: a folder holds no student.
    """
    check_is_teacher_of(teacher, cache)
    manifest = cache.manifest
    if not manifest.num_held_out:
        return [None] * len(students)
    wanted = objective.wanted
    wanted = replace(wanted, layers=wanted.layers or (manifest.identity.last_layer,))
    measures = [_loss_function(load_student(folder, teacher.device), objective) for folder in students]
    reader = BatchReader(
        cache, WantedTargets(kinds=()), pad_token=teacher.tokenizer.pad_token_id, device=teacher.device
    )
    tokens = reader.held_out_batches(
        batch_size(wanted, manifest, teacher.at_once(_BATCH_SIZE)), MAX_SEQUENCES
    )
    return held_out_losses(measures, with_live_targets(tokens, teacher, wanted))


def _loss_function(student: TappedModel, objective: Objective) -> Callable[[StudentBatch], Losses]:
    """Return a function that computes a student's losses on one batch."""
    module = objective.of(student)

    def losses(batch: StudentBatch) -> Losses:
        return module.losses(module(read(student, module, batch), batch, "dense"))

    return losses


@torch.no_grad()
def held_out_cosine(cache: Cache, teacher: Teacher, students: Sequence[Path]) -> list[float | None]:
    """Return 1 less the mean cosine of each student's vectors with the teacher's, on held-out sequences.

    The teacher runs again for this. The vectors in a cache are rounded, so that students would seem to be the
    closer the coarser their cache is.

    Args:
        cache: cache with pooled vectors; at most 256 of its held-out sequences are read.
        teacher: teacher that the cache was dumped from.
        students: folders of sentence encoders.

    Returns:
        A number between 0 and 2 for each student. None for each where nothing is held out.

    Raises:
        IdentityMismatchError: the cache was dumped from another teacher, or from one that pools otherwise.
        TeacherError: a folder holds no sentence encoder.
    """
    check_is_teacher_of(teacher, cache)
    encoders = [SentenceEncoder.load(folder).to(teacher.device) for folder in students]
    pooled, last = cache.manifest.identity.pooled, teacher.num_layers
    assert pooled is not None, "the caller looks for it"
    pooler = teacher.pooler(None if pools_texts(teacher.folder) else pooled.mode)
    if not pooler.has_made(pooled, teacher.identity.hidden_size):
        raise IdentityMismatchError(
            f"teacher {teacher.name} pools otherwise than when {cache.reader.root} was dumped. Give the "
            "folder that it was dumped from."
        )
    reader = BatchReader(
        cache, WantedTargets(kinds=()), pad_token=teacher.tokenizer.pad_token_id, device=teacher.device
    )
    sums, count = [0.0] * len(encoders), 0
    for batch in reader.held_out_batches(teacher.at_once(_BATCH_SIZE), MAX_SEQUENCES):
        expected = pooler(teacher.read(batch.inputs, Tap(hidden=(last,))).hidden[last], batch.inputs.lengths)
        count += len(expected)
        for index, encoder in enumerate(encoders):
            vectors = encoder(batch.inputs.ids, batch.inputs.valid.long(), batch.inputs.segments)
            sums[index] += float((1 - torch.cosine_similarity(vectors, expected)).sum())
    return [total / count if count else None for total in sums]


@torch.no_grad()
def masked_agreement(cache: Cache, teacher: Teacher, students: Sequence[Path]) -> list[float]:
    """Return how often students predict masked tokens like the teacher, on held-out sequences.

    This is the share of masked tokens, between 0 and 1, where a student's likeliest token is the teacher's.
    The teacher runs again for this: the labels in a cache are a sample, whose likeliest token may be another.

    Args:
        cache: cache with masked readings; at most 256 of its held-out sequences are read.
        teacher: teacher that the cache was dumped from, loaded with its head for masked tokens.
        students: folders of models that have a head for masked tokens.

    Raises:
        IdentityMismatchError: the cache was dumped from another teacher.
        TeacherError: a folder holds no model with a head for masked tokens.
    """
    check_is_teacher_of(teacher, cache)
    models = [TappedModel(load_model(folder, "tokens")).eval().to(teacher.device) for folder in students]
    tap = Tap(head="tokens")
    wanted = WantedTargets(kinds=(), signals=(LABELS,))
    reader = BatchReader(cache, wanted, pad_token=teacher.tokenizer.pad_token_id, device=teacher.device)
    same, count = [0] * len(models), 0
    for batch in reader.held_out_batches(teacher.at_once(_BATCH_SIZE), MAX_SEQUENCES):
        masked = batch.signals.masked
        assert masked is not None
        inputs = batch.inputs.with_ids(masked.ids)
        reading = teacher.read(inputs, tap, masked.places)
        assert reading.logits is not None
        expected = reading.logits.argmax(-1)
        count += len(expected)
        for index, model in enumerate(models):
            logits = model(inputs, tap, masked.places).logits
            same[index] += int((logits.argmax(-1) == expected).sum())
    return [num_same / max(count, 1) for num_same in same]
