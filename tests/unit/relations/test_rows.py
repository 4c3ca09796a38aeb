"""The forms that a teacher's rows come in, against plain torch."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minilm_cache.relations.scores import (
    DenseRows,
    LayerRelations,
    SparseRows,
    VectorRows,
    densify,
    key_mask,
    mean_row_entropy,
    relation_probs,
    split_heads,
    to_dense,
)
from minilm_cache.relations.signals import DenseLabels, MaskedSequences, SparseLabels, expected, soft_labels
from minilm_cache.signals.table import masked_part
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import LABELS, LOGITS, SignalName, StateFamily
from tests.unit.codecs.test_contract import signal_of

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def plain_entropy(probs: Tensor, lengths: list[int]) -> Tensor:
    """Return mean row entropies with a loop over sequences, heads and rows."""
    means = []
    for sequence, length in zip(probs, lengths, strict=True):
        rows = sequence[:, :length, :length].double()
        means.append(torch.special.entr(rows).sum(-1).mean())
    return torch.stack(means).float()


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 999), st.sampled_from(list(RelationKind)))
def test_vectors_become_the_rows_that_they_stand_for(
    lengths: list[int], seed: int, kind: RelationKind
) -> None:
    signal = signal_of(lengths, seed)
    rows, entropy = densify(VectorRows(signal.vectors, kind), signal.lengths)

    torch.testing.assert_close(rows.probs, relation_probs(signal.vectors, kind, signal.lengths))
    torch.testing.assert_close(entropy, plain_entropy(rows.probs, lengths), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mean_row_entropy(rows.probs, signal.lengths), entropy, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 999))
def test_dense_rows_have_nothing_beyond_a_length(lengths: list[int], seed: int) -> None:
    signal = signal_of(lengths, seed)
    probs = signal.probs(RelationKind.VALUE)
    dense = to_dense(DenseRows(probs), signal.lengths, max(lengths))

    for at, length in enumerate(lengths):
        torch.testing.assert_close(dense[at, :, :length, :length], probs[at, :, :length, :length])
        assert not dense[at, :, length:].any()
        assert not dense[at, :, :, length:].any()


def test_entries_of_one_column_are_added_to_the_base() -> None:
    index = torch.tensor([[[[0, 2, 2]]]])
    weight = torch.tensor([[[[0.2, 0.1, 0.3]]]])
    lengths = torch.tensor([1])

    plain = SparseRows(index[..., :1], weight[..., :1], None)
    assert to_dense(plain, lengths, 1).flatten().tolist() == pytest.approx([0.2])
    whole = SparseRows(index.expand(1, 1, 3, 3), weight.expand(1, 1, 3, 3), torch.full((1, 1, 3), 0.05))
    dense = to_dense(whole, torch.tensor([3]), 3)
    assert dense[0, 0, 0].tolist() == pytest.approx([0.25, 0.05, 0.45])


def test_rows_of_more_heads_are_those_of_vectors_split_anew() -> None:
    signal = signal_of([6, 4])
    halves = split_heads(signal.vectors, 4)

    assert halves.query.shape == (2, 4, 6, 2)
    assert halves.scaling == pytest.approx(2**-0.5)
    torch.testing.assert_close(split_heads(halves, 2).value, signal.vectors.value)
    rows = to_dense(VectorRows(halves, RelationKind.QUERY), signal.lengths, 6)
    first = halves.query[0, 1].float()
    by_hand = (first @ first.T / math.sqrt(2)).softmax(-1)
    torch.testing.assert_close(rows[0, 1], by_hand)


def test_a_relation_is_computed_once() -> None:
    signal = signal_of([5])

    assert signal.probs(RelationKind.KEY) is signal.probs(RelationKind.KEY)


@given(LENGTHS, st.integers(1, 12))
def test_the_mask_of_keys_is_true_up_to_each_length(lengths: list[int], size: int) -> None:
    mask = key_mask(torch.tensor(lengths), size)

    assert mask.tolist() == [[at < length for at in range(size)] for length in lengths]


# States


def test_the_mean_under_sparse_labels_is_that_under_the_dense_ones_they_stand_for() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 7, generator=generator)
    token = torch.tensor([[0, 0, 5], [1, 2, 3], [6, 6, 6]])
    weight = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [0.1, 0.2, 0.7]])
    dense = torch.zeros(3, 7).scatter_add_(1, token, weight)

    torch.testing.assert_close(
        expected(SparseLabels(token, weight), values), expected(DenseLabels(dense), values)
    )


def test_soft_labels_are_a_softmax_at_a_temperature() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0]])

    torch.testing.assert_close(soft_labels(logits, 2.0).probs, torch.softmax(logits / 2, -1))


def test_labels_of_masked_tokens_are_picked_out_of_those_of_all_tokens() -> None:
    chosen = torch.tensor([[False, True, False], [True, False, False]])
    labelled = torch.tensor([[True, True, True], [True, True, False]])
    probs = torch.eye(5)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    everything = replace(MaskedSequences.of(ids, chosen, labelled=labelled), labels=DenseLabels(probs))

    picked = everything.labels_at_chosen()

    assert isinstance(picked, DenseLabels)
    assert torch.equal(picked.probs, probs[[1, 3]])
    assert everything.places.tolist() == [1, 3]
    assert everything.with_labels.tolist() == [0, 1, 2, 3, 4]
    assert everything.label_counts == (3, 2)
    alone = replace(MaskedSequences.of(ids, chosen), labels=DenseLabels(probs[:2]))
    kept = alone.labels_at_chosen()
    assert isinstance(kept, DenseLabels)
    assert torch.equal(kept.probs, probs[:2])
    assert alone.with_labels.tolist() == [1, 3]
    assert alone.label_counts == (1, 1)


def test_only_what_depends_on_masks_is_read_again() -> None:
    masked = SignalName(StateFamily.MASKED, 3)

    assert masked_part((SignalName(StateFamily.HIDDEN, 1), masked, LABELS, LOGITS)) == (masked, LABELS)


def test_a_signal_keeps_the_lengths_that_it_was_made_with() -> None:
    signal = signal_of([4, 2])

    assert isinstance(signal, LayerRelations)
    assert signal.lengths.tolist() == [4, 2]
