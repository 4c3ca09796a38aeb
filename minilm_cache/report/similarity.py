"""How alike layers of a teacher and a student are: linear CKA and SVCCA of their states on held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.models.load import load_model
from minilm_cache.models.padding import pad
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import key_mask

Features = npt.NDArray[np.float64]
"""Of one layer, `(tokens, width)`, float64; or a figure for each pair of layers."""

MAX_TOKENS: Final = 4096
_BATCH_SIZE: Final = 16
_VARIANCE_KEPT: Final = 0.99
"""By SVCCA's first step, the singular value decomposition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSimilarity:
    """A student's layers beside the teacher's, between 0 and 1; layer 0 is the embedding's output."""

    student: str
    num_tokens: int
    cka: Features
    """`(teacher layers + 1, student layers + 1)`."""
    svcca: Features
    """`(teacher layers + 1, student layers + 1)`."""


def linear_cka(left: Sequence[Features], right: Sequence[Features]) -> Features:
    """Return linear centred kernel alignment of each left layer with each right one, `(left, right)`.

    Kornblith et al. 2019, arXiv 1905.00414, section 3: |Y^T X|^2 / (|X^T X| |Y^T Y|), columns centred.
    """
    left, right = [one - one.mean(0) for one in left], [one - one.mean(0) for one in right]
    own = [[float(np.linalg.norm(one.T @ one)) for one in side] for side in (left, right)]
    cross = [[float(np.linalg.norm(other.T @ one) ** 2) for other in right] for one in left]
    aligned: Features = np.asarray(cross) / np.outer(own[0], own[1])
    return aligned


def svcca(left: Sequence[Features], right: Sequence[Features]) -> Features:
    """Return the mean canonical correlation of each left layer with each right one, `(left, right)`.

    Of the directions that hold 99 % of each side's variance: Raghu et al. 2017, arXiv 1706.05806, section 2.
    With few more tokens than directions it tends to 1.
    """
    bases = [[_principal(one) for one in side] for side in (left, right)]
    return np.asarray([[_mean_correlation(one, other) for other in bases[1]] for one in bases[0]])


def _mean_correlation(left: Features, right: Features) -> float:
    return float(np.clip(np.linalg.svd(left.T @ right, compute_uv=False), 0, 1).mean())


def _principal(features: Features) -> Features:
    """Return an orthonormal basis of the columns that hold 99 % of the variance."""
    basis, singular, _ = np.linalg.svd(features - features.mean(0), full_matrices=False)
    share = np.cumsum(singular**2) / np.sum(singular**2)
    return basis[:, : int(np.searchsorted(share, _VARIANCE_KEPT)) + 1]


def layer_similarity(
    cache: Cache, teacher: Teacher, students: Sequence[tuple[str, Path]]
) -> list[LayerSimilarity]:
    """Compare every layer of a teacher with every layer of students, on held-out sequences.

    Args:
        cache: whose held-out sequences are read, up to 4,096 tokens.
        teacher: of that cache.
        students: names and folders.

    Raises:
        TeacherError: a folder holds no student.
    """
    ids = held_out_ids(cache)
    if not ids:
        return []
    expected = _states(teacher.model, ids, teacher.device)
    found = []
    for name, folder in students:
        model = load_model(folder, attention="sdpa").eval().to(teacher.device)
        states = _states(model, ids, teacher.device)
        found.append(
            LayerSimilarity(
                student=name,
                num_tokens=sum(map(len, ids)),
                cka=linear_cka(expected, states),
                svcca=svcca(expected, states),
            )
        )
    return found


def held_out_ids(cache: Cache) -> list[torch.Tensor]:
    """Return token ids of held-out sequences, up to 4,096 tokens, or a sequence more."""
    found: list[torch.Tensor] = []
    for number in range(cache.manifest.num_train, cache.manifest.num_sequences):
        if sum(map(len, found)) >= MAX_TOKENS:
            break
        found.append(cache[number].input_ids)
    return found


@torch.no_grad()
def _states(model: PreTrainedModel, ids: Sequence[torch.Tensor], device: torch.device) -> list[Features]:
    """Return the states of every layer at all tokens that are not padding."""
    layers: list[list[torch.Tensor]] = []
    for first in range(0, len(ids), _BATCH_SIZE):
        batch, lengths = pad(list(ids[first : first + _BATCH_SIZE]), 0)
        mask = key_mask(lengths, batch.shape[1])
        states = model(
            input_ids=batch.to(device), attention_mask=mask.to(device, torch.int64), output_hidden_states=True
        ).hidden_states
        layers.append([state[mask.to(device)].cpu() for state in states])
    return [torch.cat(parts).double().numpy() for parts in zip(*layers, strict=True)]
