"""Similarity of a teacher's and a student's layers: linear CKA and SVCCA of their states on held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import load_model
from minilm_cache.models.teacher import Teacher

Features = npt.NDArray[np.float64]
"""States of one layer, `(tokens, width)`, or one value for each pair of layers, `(left, right)`; float64."""

MAX_TOKENS: Final = 4096
"""Held-out tokens after which no further sequence is read."""
_BATCH_SIZE: Final = 16
_VARIANCE_KEPT: Final = 0.99
"""Share of the variance that the first step of SVCCA, the singular value decomposition, keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSimilarity:
    """Similarity of a student's layers to the teacher's, between 0 and 1.

    Layer 0 is the output of the embedding.
    """

    student: str
    num_tokens: int
    cka: Features
    """Linear CKA, `(teacher layers + 1, student layers + 1)`."""
    svcca: Features
    """Mean canonical correlation, `(teacher layers + 1, student layers + 1)`."""


def linear_cka(left: Sequence[Features], right: Sequence[Features]) -> Features:
    """Return linear centred kernel alignment of each left layer with each right one, `(left, right)`.

    Kornblith et al. 2019, arXiv 1905.00414, section 3: |Y^T X|^2 / (|X^T X| |Y^T Y|), columns centred.
    """
    left, right = [x - x.mean(0) for x in left], [y - y.mean(0) for y in right]
    left_norms, right_norms = ([float(np.linalg.norm(x.T @ x)) for x in side] for side in (left, right))
    cross = [[float(np.linalg.norm(y.T @ x) ** 2) for y in right] for x in left]
    aligned: Features = np.asarray(cross) / np.outer(left_norms, right_norms)
    return aligned


def svcca(left: Sequence[Features], right: Sequence[Features]) -> Features:
    """Return the mean canonical correlation of each left layer with each right one, `(left, right)`.

    Only the directions that hold 99 % of each side's variance are compared (Raghu et al. 2017, arXiv
    1706.05806, section 2). The result tends to 1 where there are few more tokens than directions.
    """
    left_bases, right_bases = ([_principal(layer) for layer in side] for side in (left, right))
    return np.asarray([[_mean_correlation(x, y) for y in right_bases] for x in left_bases])


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
        cache: cache whose held-out sequences are read, up to 4,096 tokens.
        teacher: teacher that the cache was dumped from.
        students: names and folders of the students.

    Raises:
        TeacherError: a folder holds no student.
    """
    ids = held_out_ids(cache)
    if not ids:
        return []
    expected = _states(teacher.model, ids, teacher.device)
    similarities = []
    for name, folder in students:
        model = load_model(folder, attention="sdpa").eval().to(teacher.device)
        states = _states(model, ids, teacher.device)
        similarities.append(
            LayerSimilarity(
                student=name,
                num_tokens=sum(map(len, ids)),
                cka=linear_cka(expected, states),
                svcca=svcca(expected, states),
            )
        )
    return similarities


def held_out_ids(cache: Cache) -> list[torch.Tensor]:
    """Return token ids of held-out sequences until they hold at least 4,096 tokens, or of all of them."""
    sequences: list[torch.Tensor] = []
    for number in range(cache.manifest.num_train, cache.manifest.num_sequences):
        if sum(map(len, sequences)) >= MAX_TOKENS:
            break
        sequences.append(cache[number].input_ids)
    return sequences


@torch.no_grad()
def _states(model: PreTrainedModel, ids: Sequence[torch.Tensor], device: torch.device) -> list[Features]:
    """Return the states of every layer at all tokens that are not padding, `(tokens, width)` each."""
    layers: list[list[torch.Tensor]] = []
    for first in range(0, len(ids), _BATCH_SIZE):
        inputs = Inputs.of(ids[first : first + _BATCH_SIZE], 0).to(device)
        states = model(
            input_ids=inputs.ids, attention_mask=inputs.mask, output_hidden_states=True
        ).hidden_states
        layers.append([state[inputs.valid].cpu() for state in states])
    return [torch.cat(parts).double().numpy() for parts in zip(*layers, strict=True)]
