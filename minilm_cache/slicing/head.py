"""Cuts the head for masked tokens of a teacher to the width of a student."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.slicing.forward import Calibration, inputs_of
from minilm_cache.slicing.parts import whole
from minilm_cache.slicing.solve import corrected, fit_norm, with_constant

_NAMES: Final = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm"),
    "xlm-roberta": ("lm_head.dense", "lm_head.layer_norm"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm"),
    "distilbert": ("vocab_transform", "vocab_layer_norm"),
}
"""The linear map and the norm of the head, by family. ModernBERT's map has no bias and stays as drawn."""
_SHIFT: Final = 4.0
"""Added to units of variance 1, so that GELU hardly changes them; the norm after it takes it away again."""
_RIDGE: Final = 1e-3
_LEAST_DIRECTION: Final = 1e-3
"""Least strength of a direction of the student's embeddings, as a share of the strongest one's."""


@torch.no_grad()
def cut_head(teacher: PreTrainedModel, student: PreTrainedModel, text: Calibration) -> None:
    """Give a student's head for masked tokens the outputs of the teacher's, as far as its width holds them.

    The decoder is tied to the embeddings, which are cut already, so what it reads must be in their basis. An
    activation between two maps does not commute with that basis; it is bypassed where it is nearly linear.

    Args:
        teacher: teacher with its head.
        student: student with a head, whose encoder is cut.
        text: sequences to fit to.
    """
    names = [_NAMES.get(model.config.model_type) for model in (teacher, student)]
    if names[0] is None or names[1] is None:
        return
    own, theirs = _words(student), _words(teacher)
    has_same_width = student.config.hidden_size == teacher.config.hidden_size
    if has_same_width and own.shape == theirs.shape and torch.equal(own, theirs):
        return  # the whole head was copied, because both bases are the teacher's
    their_norm, norm = teacher.get_submodule(names[0][1]), student.get_submodule(names[1][1])
    dense = student.get_submodule(names[1][0])
    assert isinstance(dense, nn.Linear)
    sums = inputs_of(teacher, their_norm, text)
    change = _change(theirs, own)
    wanted = (sums - sums.mean(0)) @ change
    given = with_constant(inputs_of(student, dense, text), has_bias=True)
    matrix = corrected(
        given.new_zeros(given.shape[1], wanted.shape[1]), given, targets=wanted / wanted.std(), ridge=_RIDGE
    )
    matrix[-1] += _SHIFT
    whole(dense).write(matrix)
    fit_norm(norm, inputs_of(student, norm, text), their_norm(sums) @ change)
    student.get_output_embeddings().bias.copy_(teacher.get_output_embeddings().bias)


def _change(
    theirs: Float[Tensor, "words theirs"], own: Float[Tensor, "words own"]
) -> Float[Tensor, "theirs own"]:
    """Return the map of a head's outputs that keeps their products with embeddings.

    Where the student's embeddings are E C for the teacher's E, outputs x D have the products x D C^T E^T, so
    D is the pseudo-inverse of C^T, without directions that the student's embeddings hardly have.
    """
    embedded = torch.linalg.lstsq(theirs, own).solution
    change: Tensor = torch.linalg.pinv(embedded.T, rtol=_LEAST_DIRECTION).float()
    return change


def _words(model: PreTrainedModel) -> Float[Tensor, "words size"]:
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    return embeddings.weight.detach().double()
