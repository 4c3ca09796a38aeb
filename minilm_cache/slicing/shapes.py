"""Which shapes can be cut from a teacher, and from which of its layers."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import StudentShape, layers_for, refuse_larger
from minilm_cache.models.families import family_of
from minilm_cache.slicing.parts import refuse_unsliceable


def check_cut(
    shape: StudentShape,
    teacher: PreTrainedConfig,
    layers: str | None = None,
    *,
    option: str = "--init-layers",
) -> tuple[int, ...]:
    """Return the teacher's layers that a shape is cut from.

    Args:
        shape: shape of the student.
        teacher: configuration of the teacher.
        layers: layers like `0,2,5`. None means layers at even distances, the last one included.
        option: command-line option that gave them.

    Raises:
        InvalidConfigError: the shape cannot be cut from this teacher; the message says why.
    """
    check_sizes(shape, teacher)
    return layers_for(shape, teacher.num_hidden_layers, layers, option=option)


def check_sizes(shape: StudentShape, teacher: PreTrainedConfig) -> None:
    """Raise InvalidConfigError if a shape, whatever its layers, cannot be cut from a teacher."""
    refuse_unsliceable(teacher.model_type)
    if shape.bottleneck_size is not None:
        raise InvalidConfigError(
            f"--arch {shape.arch}: layers with bottlenecks are unlike the teacher's and cannot be cut from "
            "them. Use --init random."
        )
    parts, heads = family_of(teacher.model_type).parts, teacher.num_attention_heads
    if parts is not None and parts.head_bias is not None and shape.num_heads < heads:
        raise InvalidConfigError(
            f"--arch {shape.arch}: a position bias belongs to each of the teacher's {heads} heads, so "
            f"{shape.num_heads} heads cannot be cut from them. Give the student {heads}, with :h{heads}."
        )
    width = teacher.hidden_size
    refuse_larger(shape, width, getattr(teacher, "embedding_size", width))


def take_layer_types(config: PreTrainedConfig, teacher: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Give a student's layers the kinds of attention that the teacher's layers have, if there are several."""
    types = getattr(teacher, "layer_types", None)
    if types:
        config.layer_types = [types[layer] for layer in layers]
