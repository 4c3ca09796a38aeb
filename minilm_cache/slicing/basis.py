"""The directions of a teacher's hidden states that a narrower student keeps."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.slicing.solve import second_moment


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
