"""Least squares behind slices, against plain torch."""

import pytest
import torch
from torch import nn

from minilm_cache.slicing.attention import HeadCut, HeadMaps, rotary_dimensions
from minilm_cache.slicing.solve import (
    corrected,
    fit_norm,
    low_rank,
    principal_directions,
    second_moment,
    with_constant,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_second_moment_is_a_mean_of_outer_products() -> None:
    rows = torch.randn(50, 4)
    expected = torch.stack([torch.outer(row, row) for row in rows]).double().mean(0)
    torch.testing.assert_close(second_moment(rows), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_constant_is_added_for_biases_alone(has_bias: bool) -> None:
    rows = with_constant(torch.randn(5, 3), has_bias=has_bias)
    assert rows.shape == (5, 4 if has_bias else 3)
    assert not has_bias or bool((rows[:, -1] == 1).all())


def test_a_correction_without_ridge_is_torchs_least_squares() -> None:
    features, targets = torch.randn(200, 6), torch.randn(200, 3)
    found = corrected(torch.randn(6, 3), features, targets=targets, ridge=0.0)
    expected = torch.linalg.lstsq(features, targets).solution
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_prior_that_meets_its_targets_stays() -> None:
    features, prior = torch.randn(100, 6), torch.randn(6, 3)
    found = corrected(prior, features, targets=features @ prior, ridge=1e-2)
    torch.testing.assert_close(found, prior, rtol=0, atol=1e-6)


def test_a_strong_ridge_keeps_the_prior() -> None:
    features, prior = torch.randn(100, 6), torch.randn(6, 3)
    found = corrected(prior, features, targets=torch.randn(100, 3), ridge=1e9)
    torch.testing.assert_close(found, prior, rtol=0, atol=1e-6)


def test_fewer_tokens_than_inputs_still_give_finite_numbers() -> None:
    found = corrected(torch.zeros(40, 3), torch.randn(5, 40), targets=torch.randn(5, 3), ridge=1e-2)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_is_recovered(bias: bool) -> None:
    theirs, mine = nn.LayerNorm(8, bias=bias), nn.LayerNorm(8, bias=bias)
    with torch.no_grad():
        theirs.weight.copy_(torch.rand(8) + 0.5)
        if bias:
            theirs.bias.copy_(torch.randn(8))
        inputs = torch.randn(300, 8)
        wanted = theirs(inputs)
        output = fit_norm(mine, inputs, wanted)
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_no_norm_is_left_alone() -> None:
    inputs = torch.randn(4, 8)
    assert fit_norm(nn.Identity(), inputs, torch.randn(4, 8)) is inputs


def test_a_component_without_variance_gives_a_finite_norm() -> None:
    norm = nn.LayerNorm(4)
    with torch.no_grad():
        output = fit_norm(norm, torch.zeros(10, 4), torch.ones(10, 4))
    torch.testing.assert_close(output, torch.ones(10, 4))


def test_low_rank_maps_have_the_least_error() -> None:
    """By Eckart and Young no product of this rank is closer in the weighted norm than the truncated one."""
    inputs = torch.randn(400, 6) @ torch.randn(6, 6)
    moment = second_moment(inputs)
    left, right = torch.randn(6, 5), torch.randn(6, 5)
    new_left, new_right = low_rank(left, right, moment=moment, rank=2)
    root = torch.linalg.cholesky(moment)
    error = root.T @ (left @ right.T - new_left @ new_right.T).double() @ root
    values = torch.linalg.svdvals(root.T @ (left @ right.T).double() @ root)
    assert float(error.norm()) == pytest.approx(float(values[2:].norm()), rel=1e-3)


def test_full_rank_keeps_the_product() -> None:
    left, right = torch.randn(6, 3), torch.randn(6, 3)
    new_left, new_right = low_rank(left, right, moment=second_moment(torch.randn(99, 6)), rank=3)
    torch.testing.assert_close(new_left @ new_right.T, left @ right.T, rtol=1e-3, atol=1e-4)


def test_directions_hold_most_energy_and_full_width_is_the_identity() -> None:
    states = torch.randn(500, 6) * torch.tensor([5.0, 4.0, 1.0, 0.1, 0.1, 0.1])
    basis = principal_directions([states], 3)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3), rtol=0, atol=1e-5)
    assert float((states @ basis).square().sum() / states.square().sum()) > 0.99
    assert torch.equal(principal_directions([states], 6), torch.eye(6))


@pytest.mark.parametrize(("teacher_size", "size"), [(8, 8), (8, 4), (8, 2), (8, 16), (6, 12), (8, 6)])
def test_rotary_dimensions_keep_their_angles(teacher_size: int, size: int) -> None:
    """Pair j of a head of size s turns by theta^(-2j/s), so exponents of pairs must be nearly the same."""
    taken, places = (part.tolist() for part in rotary_dimensions(teacher_size, size))
    assert len(set(taken)) == len(taken) == len(set(places)) == min(teacher_size, size)
    half = len(taken) // 2
    for one, other in zip(taken[:half], places[:half], strict=True):
        assert abs(one / teacher_size - other / size) < 1 / max(teacher_size, size)
    assert [number - teacher_size // 2 for number in taken[half:]] == taken[:half]
    assert [number - size // 2 for number in places[half:]] == places[:half]


def test_wider_rotary_heads_give_the_same_scores() -> None:
    """Scores of rotated queries and keys, by plain rotations in both sizes."""
    maps, inputs = _maps(4, 6), torch.randn(12, 9)
    cut = _cut(4, 12, rotary=True).cut(maps, second_moment(inputs))
    before = _rotated(inputs @ maps.query[:, :6]) @ _rotated(inputs @ maps.key[:, :6]).T / 6**0.5
    after = _rotated(inputs @ cut.query[:, :12]) @ _rotated(inputs @ cut.key[:, :12]).T / 12**0.5
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)


def _rotated(rows: torch.Tensor) -> torch.Tensor:
    """Return rows turned by their positions (RoFormer, eq. 34)."""
    size = rows.shape[1]
    angles = torch.arange(len(rows))[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    first, second = rows.chunk(2, dim=1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1
    )


def _maps(heads: int, size: int) -> HeadMaps:
    width = heads * size
    query, key, value = torch.randn(3, 9, width)
    return HeadMaps(query, key, value, torch.randn(width, 8))


def _cut(heads: int, size: int, *, rotary: bool = False) -> HeadCut:
    return HeadCut(num_teacher_heads=4, num_heads=heads, size=size, is_rotary=rotary, keeps_values=True)


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(("heads", "size"), [(4, 6), (4, 2), (2, 6), (2, 4), (8, 2), (4, 10), (3, 4)])
def test_heads_have_the_students_number_and_size(heads: int, size: int, rotary: bool) -> None:
    cut = _cut(heads, size, rotary=rotary).cut(_maps(4, 6), second_moment(torch.randn(99, 9)))
    assert all(part.shape == (9, heads * size) for part in cut[:3])
    assert cut.output.shape == (heads * size, 8)
    assert all(bool(part.isfinite().all()) for part in cut)


def test_heads_of_the_teachers_size_stay() -> None:
    maps = _maps(4, 6)
    cut = _cut(4, 6).cut(maps, second_moment(torch.randn(99, 9)))
    assert all(torch.equal(new, old) for new, old in zip(cut, maps, strict=True))


def test_fewer_heads_are_those_that_add_most() -> None:
    maps = _maps(4, 6)
    maps.output[:6] *= 1e-3
    cut = _cut(3, 6).cut(maps, second_moment(torch.randn(99, 9)))
    assert torch.equal(cut.query, maps.query[:, 6:])


def test_wider_heads_give_the_same_scores_and_outputs() -> None:
    """Zeros are added, and the scale makes up for the division by the root of the size."""
    maps, inputs = _maps(4, 6), torch.randn(30, 9)
    cut = _cut(4, 10).cut(maps, second_moment(inputs))
    for head in range(4):
        old, new = slice(head * 6, head * 6 + 6), slice(head * 10, head * 10 + 10)
        before = inputs @ maps.query[:, old] @ (inputs @ maps.key[:, old]).T / 6**0.5
        after = inputs @ cut.query[:, new] @ (inputs @ cut.key[:, new]).T / 10**0.5
        torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(cut.value @ cut.output, maps.value @ maps.output, rtol=1e-3, atol=1e-3)


def test_copies_of_a_head_share_its_values() -> None:
    maps, inputs = _maps(4, 6), torch.randn(60, 9)
    cut = _cut(8, 3).cut(maps, second_moment(inputs))
    whole = cut.value @ cut.output
    torch.testing.assert_close(whole, maps.value @ maps.output, rtol=1e-3, atol=1e-3)


def test_values_keep_their_relation() -> None:
    """Scores of values over the root of the new size are close to the teacher's, on strong directions."""
    maps, inputs = _maps(4, 6), torch.randn(400, 9)
    maps.value.mul_(torch.tensor([3.0, 3.0, 3.0, 0.1, 0.1, 0.1]).repeat(4))
    cut = _cut(4, 3).cut(maps, second_moment(inputs))
    before, after = inputs @ maps.value[:, :6], inputs @ cut.value[:, :3]
    old, new = before @ before.T / 6**0.5, after @ after.T / 3**0.5
    assert float((old - new).norm() / old.norm()) < 0.02
