"""Least squares and bases that slices are fitted by."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

_LEAST = 1e-12
"""Least variance that is divided by."""


def second_moment(features: Float[Tensor, "tokens size"]) -> Float[Tensor, "size size"]:
    """Return the mean of x x^T over tokens, float64: its factors need more than single precision."""
    wide = features.double()
    moment: Tensor = wide.T @ wide / len(wide)
    return moment


def with_constant(
    features: Float[Tensor, "tokens size"], *, has_bias: bool
) -> Float[Tensor, "tokens inputs"]:
    """Return features with a last column of ones, which a bias belongs to, or as they are without a bias."""
    return torch.cat([features, features.new_ones(len(features), 1)], 1) if has_bias else features


def corrected(
    prior: Float[Tensor, "inputs outputs"],
    features: Float[Tensor, "tokens inputs"],
    *,
    targets: Float[Tensor, "tokens outputs"],
    ridge: float,
) -> Float[Tensor, "inputs outputs"]:
    """Return the matrix M that minimises |features M - targets|^2 + strength |M - prior|^2.

    A prior that meets its targets stays as it is, up to rounding.

    Args:
        prior: matrix to begin with.
        features: inputs of the linear map.
        targets: its wanted outputs.
        ridge: strength, as a share of the mean power of an input.
    """
    # Single precision is enough here, and several times faster where units are many.
    moment = (features.T @ features).double() / len(features)
    moment.diagonal().add_(ridge * moment.diagonal().mean() + _LEAST)
    missing = features.T @ (targets - features @ prior) / len(features)
    change: Tensor = torch.linalg.solve(moment, missing.double()).to(prior.dtype)
    return prior + change


def fit_norm(
    norm: nn.Module, inputs: Float[Tensor, "tokens size"], targets: Float[Tensor, "tokens size"]
) -> Float[Tensor, "tokens size"]:
    """Give a LayerNorm the weight and bias of least squared error in each component, and return its output.

    What is no LayerNorm is left as it is: the first layer of ModernBERT has none.
    """
    if isinstance(norm, nn.LayerNorm):
        normed: Tensor = nn.functional.layer_norm(inputs, norm.normalized_shape, eps=norm.eps)
        middle, wanted = normed.mean(0), targets.mean(0)
        has_bias = isinstance(norm.bias, nn.Parameter)
        if not has_bias:
            middle, wanted = torch.zeros_like(middle), torch.zeros_like(wanted)
        centred = normed - middle
        power = centred.square().sum(0).clamp(min=_LEAST)
        weight = (centred * (targets - wanted)).sum(0) / power
        norm.weight.copy_(weight)
        if has_bias:
            norm.bias.copy_(wanted - weight * middle)
    output: Tensor = norm(inputs)
    return output


def low_rank(
    left: Float[Tensor, "inputs size"],
    right: Float[Tensor, "inputs size"],
    *,
    moment: Float[Tensor, "inputs inputs"],
    rank: int,
) -> tuple[Float[Tensor, "inputs rank"], Float[Tensor, "inputs rank"]]:
    """Return matrices L, R of fewer columns, with x^T L R^T y closest to x^T left right^T y.

    Closest in the mean square over independent inputs x, y of this second moment: the singular values of
    the product, weighted with a root of the moment on both sides (as in SliceGPT's use of PCA, arXiv
    2401.15024, for products of two maps).
    """
    root = torch.linalg.cholesky(moment + _rounding(moment))
    product = root.T @ left.double() @ right.double().T @ root
    u, s, vh = torch.linalg.svd(product)
    halves = s[:rank].sqrt()
    new_left = torch.linalg.solve_triangular(root.T, u[:, :rank] * halves, upper=True)
    new_right = torch.linalg.solve_triangular(root.T, vh[:rank].T * halves, upper=True)
    return new_left.to(left.dtype), new_right.to(right.dtype)


def _rounding(moment: Tensor) -> Tensor:
    """Return a diagonal that keeps a second moment positive definite in spite of rounding."""
    return torch.eye(len(moment), dtype=moment.dtype) * (1e-6 * moment.diagonal().mean() + _LEAST)


def principal_directions(
    states: Sequence[Float[Tensor, "tokens hidden"]], size: int
) -> Float[Tensor, "hidden size"]:
    """Return an orthonormal basis of the directions with the most energy, the strongest first.

    Means are not subtracted: a student's LayerNorm divides by the length of the whole state, so the basis
    must hold what that length consists of. At full width the basis is the identity, because a LayerNorm
    does not commute with a rotation.
    """
    width = states[0].shape[1]
    if size == width:
        return torch.eye(width)
    moment = torch.stack([second_moment(state) for state in states]).sum(0)
    _, vectors = torch.linalg.eigh(moment)
    basis: Tensor = vectors[:, -size:].flip(1).to(states[0].dtype)
    return basis
