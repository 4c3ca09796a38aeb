"""Run the teacher again on a sample of a cache, to check that the cache is of this teacher and this text.

Hashes show a swapped teacher, tokenizer or corpus; the relations themselves show a cache whose hashes are
wrong. Stored relations are not exact copies, so their difference is compared with the codec's noise floor:
the difference of the same sequences when they are encoded anew. It is also compared with what the manifest
claims to have measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minilm_cache.cache import Cache, CachedSequence
from minilm_cache.corpus.load import Corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.template import pair_template_of, template_to_store
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.dump.audit import audit, audit_states
from minilm_cache.dump.reading import SequenceReader
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.complete import pools_texts
from minilm_cache.models.device import choose_device
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.locate import TeacherSource
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import ALONE, Session
from minilm_cache.signals.table import SIGNALS, value_signal
from minilm_cache.storage_schema.identity import Packing, RelationKind
from minilm_cache.storage_schema.manifest import TEACHER_PROMPTS
from minilm_cache.storage_schema.states import Pooling, StatesIdentity

MAX_SHARDS = 16
"""Most shards that are sampled."""
SEQUENCES = 4
"""Sequences that are compared in each of these shards."""
_FACTOR = 2.0
_LEAST = 0.01
"""A shard's KL may be `_FACTOR` times its floor or the measured KL, whichever is smaller, plus `_LEAST` nats,
since sequences differ."""
_BATCH_SIZE = 8
_ERROR_FACTOR = 1.5
_ROUNDED_AWAY = 0.01
_LABELS_AWAY = 1.0
"""Bounds of states: the relative error may be `_ERROR_FACTOR` times the one that they were coded to, or
`_ROUNDED_AWAY` where they were only rounded; the bias of a few labels may be `_LABELS_AWAY` nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDifference:
    """Difference between a relation in a shard and what the teacher gives now."""

    shard: int
    layer: int
    relation: RelationKind
    kl: float
    """KL(stored || teacher), nats."""
    floor: float
    """KL of the same sequences, encoded anew with the cache's codec, nats: its noise floor."""
    measured: float
    """KL that the dump measured on held-out sequences, as the manifest states it, nats."""

    @property
    def is_too_far(self) -> bool:
        """More than other sequences could explain."""
        return self.kl > _FACTOR * min(self.floor, self.measured) + _LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """Difference between a stored state and what the teacher gives now."""

    path: str
    found: float
    """Relative error; for labels the absolute value of the cross-entropy bias, nats."""
    allowed: float
    """Largest allowed value of `found`."""

    @property
    def is_too_far(self) -> bool:
        """More than other sequences could explain."""
        return not self.found <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """Result of running the teacher again."""

    identity: tuple[str, ...]
    """Parts of teacher, tokenizer and corpus that differ from what the manifest states."""
    tokens: tuple[int, ...]
    """Numbers of the shards whose token ids are not those of the corpus."""
    differences: tuple[ShardDifference, ...]
    states: tuple[StateDifference, ...]

    @property
    def wrong_states(self) -> list[str]:
        """Paths of the states that are not the teacher's."""
        return [state.path for state in self.states if state.is_too_far]

    @property
    def damaged_shards(self) -> list[int]:
        """Numbers of the shards to dump again, ascending."""
        too_far = {difference.shard for difference in self.differences if difference.is_too_far}
        return sorted({*self.tokens, *too_far})


def recheck(
    cache: Cache, source: TeacherSource, *, corpus: Corpus | None, device: str | None, session: Session
) -> Recheck:
    """Compare a cache with a teacher, and with a corpus where one is given.

    Args:
        cache: a complete cache.
        source: folder of the teacher.
        corpus: text that the cache should be of. None means that tokens are not compared.
        device: torch device. None means a GPU where there is one.
        session: its progress shows sequences done.

    Raises:
        TeacherError: the teacher cannot be run.
        CacheCorruptError: a file is damaged.
    """
    identity = cache.manifest.identity
    head = None if identity.states is None else identity.states.head
    own_device, is_tf32 = choose_device(device), identity.precision == "tf32"
    teacher = Teacher(
        source,
        own_device,
        layers=(),
        head=head,
        precision="float32" if is_tf32 and own_device.type != "cuda" else identity.precision or "float32",
    )
    differing = _differing_parts(cache, teacher)
    wrong_tokens: tuple[int, ...] = ()
    if corpus is not None:
        if corpus.identity_for(identity.packing.split) != identity.corpus:
            differing.append("the corpus")
        else:
            sequences = SequenceTable(tokenise(corpus, teacher.tokenizer, session=session), identity.packing)
            wrong_tokens = tuple(
                shard
                for shard, numbers in _sample(cache).items()
                if not _has_same_tokens(cache, sequences, numbers)
            )
    has_states = teacher.identity.hidden_size == identity.teacher.hidden_size
    if identity.pooled is not None and not _pools_like(teacher, identity.pooled):
        differing.append("the way the teacher pools")
        has_states = False
    is_alike = _is_alike(cache, teacher)
    return Recheck(
        identity=tuple(differing),
        tokens=wrong_tokens,
        differences=_differences(cache, teacher, session) if is_alike else (),
        states=_state_differences(cache, teacher, session) if is_alike and has_states else (),
    )


def _differing_parts(cache: Cache, teacher: Teacher) -> list[str]:
    """Return what of a teacher, its tokenizer and its prompts differs from what the manifest states."""
    identity, files = cache.manifest.identity, cache.manifest.files
    differing = [
        f"the teacher's {name}"
        for name, value in identity.teacher.model_dump().items()
        if getattr(teacher.identity, name) != value
    ]
    if teacher.tokenizer_sha256 != identity.tokenizer_sha256:
        differing.append("the tokenizer")
    elif not _has_same_template(identity.packing, teacher):
        differing.append("the special tokens that the tokenizer puts around a text")
    has_prompts = TEACHER_PROMPTS in files and identity.pooled is not None
    if has_prompts and teacher.has_other_prompts(cache.reader.attachment(TEACHER_PROMPTS)):
        differing.append("the teacher's prompts or its similarity (`dump` gives the cache those of now)")
    return differing


def _state_differences(cache: Cache, teacher: Teacher, session: Session) -> tuple[StateDifference, ...]:
    """Return the differences between the stored states and the teacher's, on the sample."""
    states = cache.manifest.identity.states
    if states is None:
        return ()
    unknown = [other.name for other in states.others if other.name not in SIGNALS]
    if unknown:
        session.progress.note(f"signals that are not registered here are not compared: {', '.join(unknown)}")
    numbers = [number for sampled in _sample(cache).values() for number in sampled]
    audited = audit_states(
        cache, SequenceReader.of(teacher, states), numbers=numbers, batch_size=_BATCH_SIZE, session=ALONE
    )
    return tuple(
        StateDifference(path=state.path, found=state.relative_error, allowed=_bound(state.path, states))
        if state.relative_error is not None
        else StateDifference(
            path=state.path, found=abs(state.cross_entropy_bias or 0.0), allowed=_LABELS_AWAY
        )
        for state in audited
    )


def _bound(path: str, states: StatesIdentity) -> float:
    """Return the largest relative error that a state of the sample may have."""
    name = next(name for name in states.names if name.folder == path)
    bound = value_signal(name).bound(states)
    return _ROUNDED_AWAY if bound is None else _ERROR_FACTOR * bound.relative_error


def _pools_like(teacher: Teacher, stored: Pooling) -> bool:
    """Return whether a teacher pools like the one of stored vectors."""
    try:
        pooler = teacher.pooler(None if pools_texts(teacher.folder) else stored.mode)
    except (InvalidConfigError, TeacherError):
        return False
    return pooler.has_made(stored, teacher.identity.hidden_size)


def _is_alike(cache: Cache, teacher: Teacher) -> bool:
    """Return whether a teacher has relations of the cache's shape, and can read the cache's token ids."""
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
    """Return the numbers of some sequences for some shards, spread over the cache, by shard."""
    shards = cache.reader.ranges
    chosen = np.unique(np.linspace(0, len(shards) - 1, min(len(shards), MAX_SHARDS)).round().astype(int))
    sample = {}
    for number in chosen.tolist():
        part = shards[number]
        spread = np.linspace(0, part.num_sequences - 1, min(part.num_sequences, SEQUENCES))
        sample[number] = (part.first_sequence + np.unique(spread.round().astype(int))).tolist()
    return sample


def _has_same_tokens(cache: Cache, sequences: SequenceTable, numbers: list[int]) -> bool:
    """Return whether sequences of the cache have the token ids of the corpus."""
    if numbers[-1] >= sequences.num_sequences:
        return False
    return all(
        torch.equal(cache[number].input_ids, torch.from_numpy(sequences.read(number, number + 1).ids[0]))
        for number in numbers
    )


def _differences(cache: Cache, teacher: Teacher, session: Session) -> tuple[ShardDifference, ...]:
    """Return the differences between the stored relations and the teacher's, on the sample."""
    measured = cache.manifest.measured
    assert measured is not None
    sample = _sample(cache)
    session.progress.start("run the teacher again", 2 * sum(map(len, sample.values())), "sequences")
    differences = []
    for shard, numbers in sample.items():
        anew = _encode_anew(cache, teacher, numbers)
        stored_now, floors = (
            audit(cache, teacher, numbers=numbers, batch_size=len(numbers), session=session, stored=stored)
            for stored in (None, anew)
        )
        for now, floor, then in zip(stored_now, floors, measured.fidelity, strict=True):
            differences += [
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
    return tuple(differences)


def _has_same_template(packing: Packing, teacher: Teacher) -> bool:
    """Return whether a cache's texts have the special tokens and segments of a teacher's tokenizer."""
    if packing.pair is not None:  # which text is cut is not the tokenizer's
        return pair_template_of(teacher.tokenizer) == packing.pair.model_copy(update={"cut": None})
    return template_to_store(teacher.tokenizer) == packing.template  # not so in caches of the first releases


def _encode_anew(cache: Cache, teacher: Teacher, numbers: Sequence[int]) -> dict[int, CachedSequence]:
    """Return sequences as a dump with this teacher and the cache's codecs would store them."""
    inputs = Inputs.of([cache[number].input_ids for number in numbers], teacher.tokenizer.pad_token_id)
    inputs = inputs.paired(cache.manifest.identity.packing.pair)
    signals = teacher.relations(inputs, cache.layers)
    rows: dict[str, npt.NDArray[np.generic]] = {"tokens": inputs.ids.numpy()}
    for layer, signal in zip(cache.layers, signals, strict=True):
        encoded = cache.codecs[layer].to(teacher.device).encode(signal, numbers, lengths=inputs.lengths)
        rows |= {path: values.cpu().numpy() for path, values in encoded.items()}
    return {
        number: CachedSequence(cache, number, {path: values[at, :length] for path, values in rows.items()})
        for at, (number, length) in enumerate(zip(numbers, inputs.lengths.tolist(), strict=True))
    }
