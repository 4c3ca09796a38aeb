"""Run the teacher again on a sample of a cache: is it the teacher, and the text, that the cache says it is?

Hashes tell a swapped teacher, tokenizer or corpus; the relations themselves tell a cache whose hashes lie.
What is stored is no exact copy, so the difference is shown beside the codec's noise floor: what it makes of
the same sequences when they are encoded anew. What the manifest claims to have measured binds it, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minilm_cache.cache import Cache, CachedSequence
from minilm_cache.corpus.load import Corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.audit import audit
from minilm_cache.dump.audit_states import audit_states
from minilm_cache.dump.reading import SequenceReader
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.device import choose_device
from minilm_cache.models.load import locate_teacher
from minilm_cache.models.padding import pad
from minilm_cache.models.teacher import Teacher
from minilm_cache.progress import Progress
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import StatesIdentity

MAX_SHARDS = 16
SEQUENCES = 4
"""Looked at in each of these shards."""
_FACTOR = 2.0
_LEAST = 0.01
"""A shard's KL may be so many times the least it should be, plus so many nats: sequences differ."""
_BATCH_SIZE = 8
_ERROR_FACTOR = 1.5
_ROUNDED_AWAY = 0.01
_LABELS_AWAY = 1.0
"""Relative error of states: so many times what they were coded to, or so much where they were only rounded;
bias of a few labels, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDifference:
    """How far a shard is from what the teacher says now."""

    shard: int
    layer: int
    relation: RelationKind
    kl: float
    """KL(stored || teacher), nats."""
    floor: float
    """The same of these sequences, encoded anew with the cache's codec: its noise floor."""
    measured: float
    """The same, as the manifest says the dump measured it on held-out sequences."""

    @property
    def is_too_far(self) -> bool:
        """More than other sequences could explain."""
        return self.kl > _FACTOR * min(self.floor, self.measured) + _LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """How far something beside relations is from what the teacher says now."""

    path: str
    found: float
    """Relative error; of labels the size of the cross-entropy bias, nats."""
    allowed: float

    @property
    def is_too_far(self) -> bool:
        """More than other sequences could explain."""
        return not self.found <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """What running the teacher again has shown."""

    identity: tuple[str, ...]
    """What of teacher, tokenizer and corpus is not what the cache says it was made with."""
    tokens: tuple[int, ...]
    """Shards whose token ids are not those of the corpus."""
    differences: tuple[ShardDifference, ...]
    states: tuple[StateDifference, ...]

    @property
    def wrong_states(self) -> list[str]:
        """What beside relations is not the teacher's."""
        return [one.path for one in self.states if one.is_too_far]

    @property
    def damaged_shards(self) -> list[int]:
        """Shards to dump again."""
        return sorted({*self.tokens, *(one.shard for one in self.differences if one.is_too_far)})


def recheck(
    cache: Cache, teacher_name: str, *, corpus: Corpus | None, device: str | None, progress: Progress
) -> Recheck:
    """Compare a cache with a teacher, and with a corpus where one is given.

    Args:
        cache: a complete one.
        teacher_name: as `dump` takes it.
        corpus: what the cache should be of.
        device: torch device; none: a GPU where there is one.
        progress: told of sequences done.

    Raises:
        TeacherError: the teacher cannot be run.
        CacheCorruptError: a file is damaged.
    """
    identity = cache.manifest.identity
    head = None if identity.states is None else identity.states.head
    teacher = Teacher(locate_teacher(teacher_name), choose_device(device), head=head)
    differing = [
        f"the teacher's {name}"
        for name, value in identity.teacher.model_dump().items()
        if getattr(teacher.identity, name) != value
    ]
    if teacher.tokenizer_sha256 != identity.tokenizer_sha256:
        differing.append("the tokenizer")
    wrong_tokens: tuple[int, ...] = ()
    if corpus is not None:
        if corpus.identity_for(identity.packing.split) != identity.corpus:
            differing.append("the corpus")
        else:
            sequences = SequenceTable(corpus, teacher.tokenizer, identity.packing)
            wrong_tokens = tuple(
                shard for shard, numbers in _sample(cache).items() if not _same(cache, sequences, numbers)
            )
    is_alike = _is_alike(cache, teacher)
    return Recheck(
        identity=tuple(differing),
        tokens=wrong_tokens,
        differences=_differences(cache, teacher, progress) if is_alike else (),
        states=_state_differences(cache, teacher) if is_alike else (),
    )


def _state_differences(cache: Cache, teacher: Teacher) -> tuple[StateDifference, ...]:
    """Return how far states are from the teacher's, on the sample."""
    states = cache.manifest.identity.states
    if states is None:
        return ()
    numbers = [number for some in _sample(cache).values() for number in some]
    found = audit_states(cache, SequenceReader.of(teacher, states), numbers=numbers, batch_size=_BATCH_SIZE)
    coded = {name.folder for name in states.coded}
    return tuple(
        StateDifference(path=one.path, found=one.relative_error, allowed=_bound(one.path in coded, states))
        if one.relative_error is not None
        else StateDifference(path=one.path, found=abs(one.cross_entropy_bias or 0.0), allowed=_LABELS_AWAY)
        for one in found
    )


def _bound(is_coded: bool, states: StatesIdentity) -> float:
    """Return the relative error that a sample may have."""
    return _ERROR_FACTOR * (states.max_error or 0.0) if is_coded else _ROUNDED_AWAY


def _is_alike(cache: Cache, teacher: Teacher) -> bool:
    """Return whether a teacher has relations of the cache's shape, for ids such as the cache's."""
    identity = cache.manifest.identity
    shape = ("num_layers", "num_heads", "vocab_size")
    if any(getattr(teacher.identity, name) != getattr(identity.teacher, name) for name in shape):
        return False
    try:
        teacher.check_length(identity.packing.max_length)
    except InvalidConfigError:
        return False
    return True


def _sample(cache: Cache) -> dict[int, list[int]]:
    """Return some sequences of some shards, spread over the cache."""
    shards = cache.manifest.shards
    chosen = np.unique(np.linspace(0, len(shards) - 1, min(len(shards), MAX_SHARDS)).round().astype(int))
    found = {}
    for number in chosen.tolist():
        part = shards[number]
        spread = np.linspace(0, part.num_sequences - 1, min(part.num_sequences, SEQUENCES))
        found[number] = (part.first_sequence + np.unique(spread.round().astype(int))).tolist()
    return found


def _same(cache: Cache, sequences: SequenceTable, numbers: list[int]) -> bool:
    if numbers[-1] >= len(sequences.lengths):
        return False
    return all(
        torch.equal(cache[number].input_ids, torch.from_numpy(sequences.read(number, number + 1).ids[0]))
        for number in numbers
    )


def _differences(cache: Cache, teacher: Teacher, progress: Progress) -> tuple[ShardDifference, ...]:
    measured = cache.manifest.measured
    assert measured is not None
    teacher.tap(cache.layers)
    sample = _sample(cache)
    progress.start("run the teacher again", 2 * sum(map(len, sample.values())), "sequences")
    found = []
    for shard, numbers in sample.items():
        anew = _encode_anew(cache, teacher, numbers)
        found_now = audit(
            cache.__getitem__, teacher, numbers=numbers, batch_size=len(numbers), progress=progress
        ).fidelity
        floors = audit(
            anew.__getitem__, teacher, numbers=numbers, batch_size=len(numbers), progress=progress
        ).fidelity
        for now, floor, then in zip(found_now, floors, measured.fidelity, strict=True):
            found += [
                ShardDifference(
                    shard=shard,
                    layer=now.layer,
                    relation=kind,
                    kl=now.relations[kind].kl_stored_to_teacher,
                    floor=floor.relations[kind].kl_stored_to_teacher,
                    measured=then.relations[kind].kl_stored_to_teacher,
                )
                for kind in now.relations
            ]
    return tuple(found)


def _encode_anew(cache: Cache, teacher: Teacher, numbers: Sequence[int]) -> dict[int, CachedSequence]:
    """Return sequences as a dump with this teacher and the cache's codecs would store them."""
    ids, lengths = pad([cache[number].input_ids for number in numbers], teacher.tokenizer.pad_token_id)
    signals = teacher.signals(ids.to(teacher.device), lengths.to(teacher.device))
    rows: dict[str, npt.NDArray[np.generic]] = {"tokens": ids.numpy()}
    for layer, signal in zip(teacher.layers, signals, strict=True):
        rows |= cache.codecs[layer].encode(signal, numbers, lengths=signal.lengths)
    return {
        number: CachedSequence(cache, number, {path: values[at, :length] for path, values in rows.items()})
        for at, (number, length) in enumerate(zip(numbers, lengths.tolist(), strict=True))
    }
