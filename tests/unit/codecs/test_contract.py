"""The rules of `codecs/base.py`, kept by every codec: one set of tests for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minilm_cache.codecs.base import Codec, RelationCodec
from minilm_cache.codecs.rows import DenseCodec
from minilm_cache.codecs.sampling import PPS_RATIO
from minilm_cache.codecs.topk import TopKCodec
from minilm_cache.codecs.transform import fit_state, relative_bound
from minilm_cache.codecs.vectors import calibrate
from minilm_cache.errors import CacheCorruptError
from minilm_cache.relations.scores import (
    LayerRelations,
    RowTargets,
    Vectors,
    WantedRelations,
    key_mask,
    to_dense,
)
from minilm_cache.relations.signals import DenseLabels, MaskedSequences, Signals, SparseLabels
from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import (
    LABELS,
    LOGITS,
    Masking,
    SignalName,
    SoftLabels,
    StateFamily,
    StatesIdentity,
)

MAX_LENGTH = 12
VOCABULARY = 30
WIDTH = 10
HIDDEN = SignalName(StateFamily.HIDDEN, 2)
FIRST = SignalName(StateFamily.FIRST, 1)


def signal_of(lengths: Sequence[int], seed: int = 0) -> LayerRelations:
    """Return random vectors of two heads, with something else beyond each length."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, len(lengths), 2, max(lengths), 4, generator=generator) * 2
    return LayerRelations(Vectors(query, key, value, None, 0.5), torch.tensor(lengths))


def causal_signal_of(lengths: Sequence[int], seed: int = 0) -> LayerRelations:
    """Return the same vectors of a model whose tokens see those before them alone."""
    found = signal_of(lengths, seed)
    return LayerRelations(found.vectors._replace(is_causal=True), found.lengths)


def states_of(lengths: Sequence[int], seed: int = 0) -> Signals:
    """Return random hidden states, labels and answers."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), max(lengths))
    valid = key_mask(torch.tensor(lengths), max(lengths))
    chosen = (torch.rand(size, generator=generator) < 0.4) & valid
    chosen[:, 0] = True
    ids = torch.randint(VOCABULARY, size, generator=generator)
    scores = torch.randn(int(chosen.sum()), VOCABULARY, generator=generator) * 3
    return Signals(
        values={
            HIDDEN: torch.randn(*size, WIDTH, generator=generator),
            FIRST: torch.randn(len(lengths), WIDTH, generator=generator),
            LOGITS: torch.randn(len(lengths), 3, generator=generator),
        },
        masked=replace(MaskedSequences.of(ids, chosen), labels=DenseLabels(scores.softmax(-1))),
    )


def fitted_vectors(content: Callable[[Sequence[int], int], LayerRelations] = signal_of) -> RelationCodec:
    """Return codec `vectors`, fitted to random vectors."""
    signals = [content([12, 9, 12, 5], seed) for seed in range(4)]
    return calibrate(signals[:3], signals[3:], 0.02, layer=1).codec


def fitted_states() -> SignalsCodec:
    """Return the codec of a cache with every sort of state."""
    rows = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(5))
    code, _ = fit_state(rows[:300], rows[300:], relative_bound(0.1))
    identity = StatesIdentity(
        hidden=(2,),
        first=(1,),
        max_error=0.1,
        calibration_tokens=300,
        masking=Masking(share=0.15, mask_token=4, seed=3),
        labels=SoftLabels(k=5, temperature=1.0, weight_ratio=PPS_RATIO),
        num_classes=3,
    )
    return SignalsCodec(parameters=identity, vocab_size=VOCABULARY, codes={HIDDEN: code})


@dataclass(frozen=True)
class Case:
    """A codec, what it stores, and how far what comes back may be away."""

    name: str
    codec: Codec[Any, Any, Any]
    content: Callable[[Sequence[int], int], Any]
    error: float
    """Greatest difference of a probability or a number, on average over the batch."""

    def stored_dtypes(self) -> dict[str, np.dtype[Any]]:
        """Return the types of the arrays of a batch."""
        rows = self.encode([3, 2])
        return {path: array.dtype for path, array in rows.items()}

    def encode(self, lengths: Sequence[int], seed: int = 0, first: int = 0) -> Mapping[str, Any]:
        """Return the rows of a batch whose sequences are numbered from `first`."""
        numbers = range(first, first + len(lengths))
        encoded = self.codec.encode(self.content(lengths, seed), numbers, lengths=torch.tensor(lengths))
        return {path: values.numpy() for path, values in encoded.items()}


CASES = [
    Case("topk", TopKCodec(max_length=MAX_LENGTH, k=5), signal_of, 0.2),
    Case("largest", TopKCodec(max_length=MAX_LENGTH, k=5, select="largest", tail="uniform"), signal_of, 0.05),
    Case(
        "renormalised",
        TopKCodec(max_length=MAX_LENGTH, k=5, select="largest", tail="renormalise"),
        signal_of,
        0.05,
    ),
    Case("long", TopKCodec(max_length=300, k=4), signal_of, 0.2),
    Case("dense", DenseCodec(max_length=MAX_LENGTH), signal_of, 1e-3),
    Case("vectors", fitted_vectors(), signal_of, 0.15),
    Case("causal topk", TopKCodec(max_length=MAX_LENGTH, k=5, is_causal=True), causal_signal_of, 0.2),
    Case(
        "causal largest",
        TopKCodec(max_length=MAX_LENGTH, k=5, select="largest", tail="uniform", is_causal=True),
        causal_signal_of,
        0.05,
    ),
    Case("causal dense", DenseCodec(max_length=MAX_LENGTH, is_causal=True), causal_signal_of, 1e-3),
    Case("causal vectors", fitted_vectors(causal_signal_of), causal_signal_of, 0.15),
    Case("states", fitted_states(), states_of, 0.2),
]
every_codec = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_relation_codec = pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.name)
LENGTHS = st.lists(st.integers(2, MAX_LENGTH), min_size=1, max_size=4)


def tensors(case: Case, rows: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return rows as a reader hands them out: tensors, and token ids for what needs them."""
    ids = {"tokens": torch.zeros(len(lengths), max(lengths), dtype=torch.int64)}
    return ids | {path: torch.from_numpy(np.ascontiguousarray(array)) for path, array in rows.items()}


def flat(rows: Mapping[str, Tensor], lengths: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Return rows as a shard holds them, token after token, and each token's sequence length."""
    valid = key_mask(torch.tensor(lengths), max(lengths))
    sizes = torch.tensor(lengths)[:, None].expand(-1, max(lengths))[valid]
    return {path: values[valid] for path, values in rows.items()}, sizes


def numbers_of(decoded: Any, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return what came back as named tensors, whatever the codec."""
    if isinstance(decoded, Signals):
        named = {name.folder: values for name, values in decoded.values.items()}
        if decoded.masked is not None:
            named["chosen"] = decoded.masked.chosen
            if isinstance(decoded.masked.labels, SparseLabels):
                named |= {"token": decoded.masked.labels.token, "weight": decoded.masked.labels.weight}
        return named
    size = torch.tensor(lengths)
    return {str(kind): to_dense(rows, size, max(lengths)) for kind, rows in decoded.items()}


@every_codec
def test_a_codec_keeps_the_protocol(case: Case) -> None:
    assert isinstance(case.codec, Codec)
    assert isinstance(case.codec, RelationCodec) == (case.name != "states")


@every_codec
def test_paths_are_those_of_the_arrays_that_are_written(case: Case) -> None:
    rows = case.encode([7, 4])

    assert set(case.codec.paths(case.codec.everything)) == set(rows)
    assert all(array.shape[:2] == (2, 7) for array in rows.values())


@every_codec
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_what_was_written_is_accepted_and_comes_back(case: Case, lengths: list[int], seed: int) -> None:
    content = case.content(lengths, seed)
    rows = tensors(case, case.encode(lengths, seed), lengths)
    own, sizes = flat(rows, lengths)

    case.codec.check(own, sizes)
    decoded = case.codec.decode(rows, case.codec.everything, lengths=torch.tensor(lengths))

    valid = key_mask(torch.tensor(lengths), max(lengths))
    if isinstance(content, Signals):
        assert isinstance(decoded, Signals)
        difference = (decoded[HIDDEN] - content[HIDDEN])[valid]
        assert float(difference.square().mean().sqrt()) < case.error
        torch.testing.assert_close(decoded[FIRST], content[FIRST], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(decoded[LOGITS], content[LOGITS])
        assert decoded.masked is not None
        assert content.masked is not None
        assert torch.equal(decoded.masked.chosen, content.masked.chosen)
        assert torch.equal(
            decoded.masked.ids[decoded.masked.chosen], content.masked.ids[content.masked.chosen]
        )
        return
    for kind, stored in decoded.items():
        dense = to_dense(stored, torch.tensor(lengths), max(lengths))
        expected = content.probs(kind) * valid[:, None, :, None]
        assert float((dense - expected).abs().mean()) < case.error
        torch.testing.assert_close(dense.sum(-1), expected.sum(-1), atol=5e-3, rtol=0)


@every_codec
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(2, MAX_LENGTH), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_a_sequence_is_stored_the_same_in_any_batch(case: Case, lengths: list[int], seed: int) -> None:
    """Batches depend on the machine; the bytes of a cache must not."""
    whole = case.encode(lengths, seed, first=10)
    at, length = len(lengths) - 1, lengths[-1]
    alone = case.codec.encode(
        _part(case.content(lengths, seed), at, length), [10 + at], lengths=torch.tensor([length])
    )

    for path, values in alone.items():
        array, stored = values.numpy(), whole[path][at, :length]
        # Products of other shapes may round otherwise: rarely, a number is the next one to it.
        if array.dtype == np.int16 or path.endswith("/weight"):
            assert np.abs(array[0].astype(int) - stored.astype(int)).max() <= 1
        elif array.dtype == np.float16:
            np.testing.assert_allclose(array[0], stored, rtol=2**-10, atol=2**-24, err_msg=path)
        else:
            np.testing.assert_array_equal(array[0], stored, err_msg=path)


def _part(content: Any, at: int, length: int) -> Any:
    """Return one sequence of a batch, as if it had been read alone."""
    if isinstance(content, LayerRelations):
        vectors = content.vectors
        own = [part[at : at + 1, :, :length] for part in (vectors.query, vectors.key, vectors.value)]
        alone = Vectors(own[0], own[1], own[2], None, vectors.scaling, is_causal=vectors.is_causal)
        return LayerRelations(alone, torch.tensor([length]))
    masked = content.masked
    first, count = sum(masked.label_counts[:at]), masked.label_counts[at]
    unlabelled = MaskedSequences.of(masked.ids[at : at + 1, :length], masked.chosen[at : at + 1, :length])
    return replace(
        content,
        values={
            HIDDEN: content[HIDDEN][at : at + 1, :length],
            FIRST: content[FIRST][at : at + 1],
            LOGITS: content[LOGITS][at : at + 1],
        },
        masked=replace(unlabelled, labels=DenseLabels(masked.labels.probs[first : first + count])),
    )


@every_codec
def test_what_stands_beyond_a_sequence_is_ignored(case: Case) -> None:
    lengths = [9, 4]
    rows = tensors(case, case.encode(lengths), lengths)
    noisy = {path: values.clone() for path, values in rows.items()}
    for values in noisy.values():
        values[1, 4:] = values[0, 4:9] if len(values.shape) > 1 else values[1, 4:]

    plain = case.codec.decode(rows, case.codec.everything, lengths=torch.tensor(lengths))
    other = case.codec.decode(noisy, case.codec.everything, lengths=torch.tensor(lengths))

    valid = key_mask(torch.tensor(lengths), 9)
    for name, values in numbers_of(plain, lengths).items():
        again = numbers_of(other, lengths)[name]
        if values.shape[:2] == valid.shape:
            values, again = values[valid], again[valid]
        torch.testing.assert_close(values, again, msg=name)


@every_relation_codec
def test_a_part_of_the_relations_needs_its_own_arrays_alone(case: Case) -> None:
    lengths = [6, 3]
    rows = tensors(case, case.encode(lengths), lengths)
    kind = RelationKind.VALUE
    wanted = WantedRelations((kind,))
    needed = {path: rows[path] for path in case.codec.paths(wanted)}
    decoded: dict[RelationKind, RowTargets] = case.codec.decode(needed, wanted, lengths=torch.tensor(lengths))
    everything = case.codec.decode(rows, case.codec.everything, lengths=torch.tensor(lengths))

    assert list(decoded) == [kind]
    torch.testing.assert_close(
        numbers_of(decoded, lengths)["value"], numbers_of(everything, lengths)["value"]
    )
    assert case.codec.paths(WantedRelations(())) == ()
    assert case.codec.decode({}, WantedRelations(()), lengths=torch.tensor(lengths)) == {}


def test_a_part_of_the_states_needs_its_own_arrays_alone() -> None:
    case, lengths = CASES[-1], [6, 3]
    rows = tensors(case, case.encode(lengths), lengths)
    parts: list[tuple[SignalName, int]] = [(FIRST, 1), (LOGITS, 1), (LABELS, 3)]
    for name, number in parts:
        wanted = (name,)
        paths = case.codec.paths(wanted)
        assert len(paths) == number
        needed = {path: rows[path] for path in (*paths, "tokens")}
        decoded = case.codec.decode(needed, wanted, lengths=torch.tensor(lengths))
        assert set(decoded.values) == {*wanted} - {LABELS}
        assert (decoded.masked is not None) == (name == LABELS)


@every_codec
def test_codes_of_another_sequence_are_drawn_anew(case: Case) -> None:
    """Draws depend on the number of a sequence, and on nothing else that is not its content."""
    first, again, other = (case.encode([12, 12], first=number) for number in (0, 0, 7))

    for path, array in first.items():
        np.testing.assert_array_equal(array, again[path])
    draws = {"topk", "causal topk", "long", "states"}
    assert (case.name in draws) == any((array != other[path]).any() for path, array in first.items())


DAMAGE: list[tuple[str, str, float]] = [
    ("topk", "relations/attention/weight", 255),
    ("topk", "relations/value/gap", 200),
    ("topk", "relations/attention/weight", 3),
    ("largest", "relations/attention/weight", 255),
    ("largest", "relations/value/gap", 200),
    ("long", "relations/value/gap_high", 9),
    ("dense", "relations/attention/probability", 2.0),
    ("dense", "relations/value/probability", -0.5),
    ("dense", "relations/value/probability", float("nan")),
    ("vectors", "/codes", -(2**15)),
    ("causal topk", "relations/value/gap", 1),  # a column after the row's own
    ("causal largest", "relations/attention/gap", 1),
    ("states", "states/hidden/2/codes", -(2**15)),
    ("states", "states/first/1", float("inf")),
    ("states", "states/logits", float("nan")),
    ("states", "labels/read", VOCABULARY + 1),
    ("states", "labels/index", VOCABULARY),
    ("states", "labels/weight", 255),
]


@pytest.mark.parametrize(("name", "path", "value"), DAMAGE)
def test_rows_that_no_codec_writes_are_refused(name: str, path: str, value: float) -> None:
    case = next(case for case in CASES if case.name == name)
    lengths = [8, 5]
    rows = tensors(case, case.encode(lengths), lengths)
    (damaged,) = [stored for stored in rows if stored.endswith(path)] or [path]
    rows[damaged] = rows[damaged].clone()
    rows[damaged][0, 0] = value
    own, sizes = flat(rows, lengths)

    with pytest.raises(CacheCorruptError):
        case.codec.check(own, sizes)
    with pytest.raises(CacheCorruptError):  # also where not everything is read
        case.codec.check({path: values for path, values in own.items() if _belongs(path, damaged)}, sizes)


def _belongs(path: str, damaged: str) -> bool:
    """Return whether an array is of the same relation, state or labels."""
    return path.rsplit("/", 1)[0] == damaged.rsplit("/", 1)[0]


@every_relation_codec
def test_only_codecs_that_say_so_are_unbiased(case: Case) -> None:
    """The mean over many draws is the teacher's row: exactly for the codecs that claim it."""
    assert isinstance(case.codec, RelationCodec)
    assert case.codec.is_unbiased == (case.name.removeprefix("causal ") in {"topk", "long", "dense"})
    if not case.name.endswith("topk"):
        return
    lengths = [MAX_LENGTH]
    signal = case.content(lengths, 0)
    total = torch.zeros(1, 2, MAX_LENGTH, MAX_LENGTH)
    draws = 400
    for number in range(draws):
        rows = case.codec.encode(signal, [number], lengths=torch.tensor(lengths))
        decoded = case.codec.decode(
            tensors(case, rows, lengths),
            WantedRelations((RelationKind.ATTENTION,)),
            lengths=torch.tensor(lengths),
        )
        total += to_dense(decoded[RelationKind.ATTENTION], torch.tensor(lengths), MAX_LENGTH)
    away = (total / draws - signal.probs(RelationKind.ATTENTION)).abs()
    assert float(away.mean()) < 0.01


@every_codec
def test_a_codec_is_frozen(case: Case) -> None:
    with pytest.raises((AttributeError, TypeError)):
        case.codec.layer = 3  # type: ignore[attr-defined]
