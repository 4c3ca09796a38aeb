"""Entries that codec `topk` keeps of rows: sampled on a CPU and a device, and the largest."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minilm_cache.codecs import sampling
from minilm_cache.codecs.sampling import FIRST_CODE, PPS_RATIO, LogScale, sample_pps
from minilm_cache.codecs.topk import LARGEST_RATIO, scale_ratio, select_largest


@st.composite
def rows_of_probabilities(draw: st.DrawFn) -> Tensor:
    """Rows that sum to 1: peaked, flat, with zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width = draw(st.integers(1, 40))
    scores = torch.randn(draw(st.integers(1, 5)), width, generator=generator)
    return (scores * draw(st.sampled_from([0.0, 1.0, 9.0, 80.0]))).softmax(-1)


@settings(deadline=None)
@given(rows_of_probabilities(), st.integers(1, 20), st.floats(0, 0.999))
def test_sampled_entries_ascend_and_the_largest_are_among_them(probs: Tensor, k: int, draw: float) -> None:
    scale = LogScale(ratio=PPS_RATIO)
    entries = sample_pps(probs, k, draws=torch.full((len(probs), 1), draw), scale=scale)

    assert entries.column.shape == (len(probs), k)
    assert bool((entries.column.diff(dim=-1) >= 0).all())
    assert 0 <= int(entries.column.min()) <= int(entries.column.max()) < probs.shape[-1]
    assert bool(((entries.code == 0).sum(-1) >= 1).all())
    for row, columns in zip(probs, entries.column, strict=True):
        certain = (row > 1 / k + 1e-3).nonzero()[:, 0].tolist()
        assert set(certain) <= set(columns.tolist())


DRAWS = st.one_of(st.floats(0, 0.999), st.sampled_from([0.0, 0.5, 1 - 2**-24]))


@settings(deadline=None)
@given(rows_of_probabilities(), st.integers(1, 64), DRAWS)
def test_a_cpu_and_a_device_draw_the_same_entries(probs: Tensor, k: int, draw: float) -> None:
    draws, scale = torch.full((len(probs), 1), draw), LogScale(ratio=PPS_RATIO)

    for listed, placed in zip(
        sampling._sample_listed(probs, draws, k=k, scale=scale),
        sampling._sample_placed(probs, draws, k=k, scale=scale),
        strict=True,
    ):
        assert listed.tolist() == placed.tolist()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 61])
def test_rows_are_sampled_in_parts_as_they_are_together(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    probs = (torch.randn(num_rows, 4, 9, generator=generator) * 3).softmax(-1)
    probs[-1:, 1:3] = 0  # rows of padding
    draws, scale = torch.rand(num_rows, 4, 1, generator=generator), LogScale(ratio=PPS_RATIO)
    together = sampling._sample_listed(probs.flatten(0, 1), draws.flatten(0, 1), k=5, scale=scale)
    monkeypatch.setattr(sampling, "_CPU_ENTRIES", 20)

    for part, whole in zip(sample_pps(probs, 5, draws=draws, scale=scale), together, strict=True):
        assert torch.equal(part, whole.view(num_rows, 4, 5))


def test_the_least_weight_that_is_kept_has_a_code() -> None:
    scale = LogScale(ratio=PPS_RATIO)
    weights = torch.tensor([scale.smallest]) * (1 + torch.arange(-20, 300, dtype=torch.float32) * 2**-23)
    probs = torch.zeros(len(weights), 4)
    probs[:, 0], probs[:, 2] = 1 - weights, weights
    least = sampling._least_kept(torch.ones(1), torch.ones(1, dtype=torch.int64), k=64, scale=scale)

    assert bool((weights > least).any())
    assert bool((scale.round_down(weights[weights > least]) >= FIRST_CODE).all())
    entries = sample_pps(probs, 64, draws=torch.full((len(weights), 1), 0.5), scale=scale)
    assert bool(((entries.column == 2).sum(-1) >= 1)[weights > least].all())


def test_sampling_leaves_other_threads_as_many_cores_as_they_had() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    together = Barrier(3)

    def num_threads(_: int) -> int:
        together.wait(timeout=60)  # so that each thread runs it once
        return torch.get_num_threads()

    try:
        sample_pps(torch.eye(4), 2, draws=torch.zeros(4, 1), scale=LogScale(ratio=PPS_RATIO))
        assert list(sampling._threads(os.getpid(), 3).map(num_threads, range(3))) == [1, 1, 1]
        with ThreadPoolExecutor(1) as new:
            assert new.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_that_cannot_start_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Thread] = []
    start = Thread.start

    def start_one(thread: Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="new thread"):
        sampling._threads(-1, 2)
    started[0].join(timeout=60)

    assert not started[0].is_alive()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@settings(deadline=None)
@given(rows_of_probabilities(), st.integers(1, 64), DRAWS)
def test_slots_lie_where_numpy_finds_their_positions(probs: Tensor, k: int, draw: float) -> None:
    num_slots, draws = torch.full((len(probs), 1), k), torch.full((len(probs), 1), draw)
    slots = sampling._slots_so_far(probs, k, num_slots=num_slots, draws=draws)

    for row, so_far in zip(probs.numpy().astype(np.float64), slots.numpy(), strict=True):
        ends = row.cumsum() / row.sum() * k
        first = max(draw, 2e-6 * k)  # late enough for the last column to have exactly as many as there are
        expected = np.searchsorted(np.arange(k) + first, ends)
        is_near = np.abs(ends - first - np.rint(ends - first)) < 1e-4
        assert so_far[-1] == k
        assert (np.abs(so_far - expected) <= is_near).all()
        assert (np.diff(so_far, prepend=0)[row == 0] == 0).all()


@settings(deadline=None)
@given(rows_of_probabilities(), st.integers(1, 20))
def test_the_largest_entries_are_those_of_numpy(probs: Tensor, k: int) -> None:
    entries = select_largest(probs, k, LogScale(ratio=LARGEST_RATIO))

    for row, columns, codes in zip(probs.numpy(), entries.column, entries.code, strict=True):
        kept = columns[codes > 0].numpy()
        least = np.sort(row)[::-1][: min(k, len(row))].min()
        assert len(set(kept.tolist())) == len(kept)
        assert (row[kept] >= least - 1e-7).all()


def test_scales_belong_to_ways_of_selecting() -> None:
    assert scale_ratio("pps") == PPS_RATIO
    assert scale_ratio("largest") == LARGEST_RATIO
