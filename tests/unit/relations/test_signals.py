"""Masked sequences and labels, against plain indexing by masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.relations.signals import (
    DenseLabels,
    MaskedSequences,
    SparseLabels,
    expected,
    places_of,
    soft_labels,
)


def masked_of(seed: int, *, all_labels: bool) -> tuple[MaskedSequences, torch.Tensor, torch.Tensor]:
    """Return masked sequences of a random batch, and True at the valid and at the chosen tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (3,), generator=generator)
    valid = torch.arange(7) < lengths[:, None]
    chosen = valid & (torch.rand(3, 7, generator=generator) < 0.4)
    ids = torch.randint(0, 30, (3, 7), generator=generator)
    return MaskedSequences.of(ids, chosen, labelled=valid if all_labels else None), valid, chosen


@given(seed=st.integers(0, 2**20), all_labels=st.booleans())
def test_places_choose_what_a_mask_does(seed: int, all_labels: bool) -> None:
    masked, valid, chosen = masked_of(seed, all_labels=all_labels)
    values = torch.randn(3, 7, 5)
    labelled = valid if all_labels else chosen

    assert torch.equal(values.flatten(0, 1)[masked.places], values[chosen])
    assert torch.equal(values.flatten(0, 1)[masked.with_labels], values[labelled])
    assert list(masked.label_counts) == labelled.sum(-1).tolist()
    assert torch.equal(masked.of_chosen(values[labelled]), values[chosen])


@pytest.mark.parametrize("all_labels", [True, False])
def test_labels_of_chosen_tokens_are_theirs(all_labels: bool) -> None:
    masked, valid, chosen = masked_of(1, all_labels=all_labels)
    token, weight = torch.randint(0, 30, (3, 7, 2)), torch.rand(3, 7, 2)
    labelled = valid if all_labels else chosen
    with_labels = MaskedSequences(
        ids=masked.ids,
        chosen=masked.chosen,
        places=masked.places,
        with_labels=masked.with_labels,
        label_counts=masked.label_counts,
        labels=SparseLabels(token[labelled], weight[labelled]),
    )
    labels = with_labels.labels_at_chosen()

    assert masked.labels_at_chosen() is None
    assert isinstance(labels, SparseLabels)
    assert torch.equal(labels.token, token[chosen])
    assert torch.equal(labels.weight, weight[chosen])
    assert with_labels.to(torch.device("cpu")).labels == with_labels.labels


def test_sparse_labels_expect_what_the_same_dense_ones_do() -> None:
    token, weight = torch.randint(0, 9, (4, 3)), torch.rand(4, 3)
    dense = torch.zeros(4, 9).scatter_add_(-1, token, weight)
    values = torch.randn(4, 9)

    plain = (dense * values).sum(-1)
    torch.testing.assert_close(expected(SparseLabels(token, weight), values), plain)
    torch.testing.assert_close(expected(DenseLabels(dense), values), plain)


def test_labels_are_softened_in_float32() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0]], dtype=torch.bfloat16)
    probs = soft_labels(logits, 2.0).probs

    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, torch.tensor([[0.5, 1.5, -1.0]]).softmax(-1))


def test_places_are_those_of_one_row() -> None:
    assert places_of(torch.tensor([[False, True], [True, False]])).tolist() == [1, 2]
