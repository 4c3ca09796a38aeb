"""The parts of an encoder that are cut: tables, projections, norms, by the names of its family.

It also says which shapes can be cut from a teacher, and from which of its layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import StudentShape, layers_for, refuse_larger
from minilm_cache.models.families import FAMILIES, PartNames, family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A linear map, which may be some rows of a larger one, as families fuse them."""

    linear: nn.Linear
    start: int
    count: int

    @property
    def has_bias(self) -> bool:
        """Whether the map adds a bias."""
        return self.linear.bias is not None

    @property
    def matrix(self) -> Float[Tensor, "inputs outputs"]:
        """The transposed weight; where there is a bias, it is the last row."""
        rows = slice(self.start, self.start + self.count)
        weight = self.linear.weight.detach()[rows].T
        if not self.has_bias:
            return weight
        return torch.cat([weight, self.linear.bias.detach()[rows][None]])

    def write(self, matrix: Float[Tensor, "inputs outputs"]) -> None:
        """Replace the map by a matrix of the form of `matrix`."""
        rows = slice(self.start, self.start + self.count)
        with torch.no_grad():
            if self.has_bias:
                self.linear.bias[rows] = matrix[-1].to(self.linear.bias)
                matrix = matrix[:-1]
            self.linear.weight[rows] = matrix.T.to(self.linear.weight)


def whole(linear: nn.Linear) -> Rows:
    """Return all rows of a linear map."""
    return Rows(linear=linear, start=0, count=linear.out_features)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The parts of one layer."""

    module: nn.Module
    query: Rows
    key: Rows
    value: Rows
    output: nn.Linear
    """From the heads' contexts back to the hidden size."""
    attention_norm: nn.Module
    """Norm after the attention, or before it where `is_pre_norm`."""
    up: Rows
    gate: Rows | None
    """Factors of the units. None means that the feed-forward network has no gates."""
    down: nn.Linear
    ffn_norm: nn.Module
    """Norm after the feed-forward network, or before it where `is_pre_norm`."""
    activation: Callable[[Tensor], Tensor]
    is_pre_norm: bool
    gives_tuple: bool
    """Whether it returns its hidden states as the first of several outputs."""

    def units(self, inputs: Tensor) -> Tensor:
        """Return the units of the feed-forward network, `(..., units)`."""
        raised = self.activation(_apply(self.up, inputs))
        return raised if self.gate is None else raised * _apply(self.gate, inputs)


def _apply(rows: Rows, inputs: Tensor) -> Tensor:
    matrix = rows.matrix
    product = inputs @ matrix[: inputs.shape[-1]]
    return product + matrix[-1] if rows.has_bias else product


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderParts:
    """The parts of an encoder."""

    tables: tuple[nn.Embedding, ...]
    """Tables whose rows are added: words, and positions and segments where the family has them."""
    norm: nn.LayerNorm
    """Norm of the sum of the tables' rows."""
    projection: nn.Linear | None
    """From the embedding size to the hidden size. None means that the two are the same."""
    layers: tuple[LayerParts, ...]
    final_norm: nn.LayerNorm | None
    """Norm after the last layer. None means that the family has none."""
    is_rotary: bool
    """Whether queries and keys are rotated by their positions."""
    head_bias: nn.Embedding | None
    """What is added to the scores of each head, by the distance of positions. None means nothing."""


def refuse_unsliceable(family: str) -> None:
    """Raise InvalidConfigError for a family whose parts are not known."""
    if family_of(family).parts is None:
        known = ", ".join(name for name, row in FAMILIES.items() if row.parts is not None)
        raise InvalidConfigError(
            f"--init slice: a model of family {family!r} cannot be cut; {known} can. Use --init random."
        )


def encoder_parts(model: PreTrainedModel) -> EncoderParts:
    """Return the parts of an encoder, or of the encoder of a model with a head.

    Raises:
        InvalidConfigError: the parts of its family are not known.
    """
    family = model.config.model_type
    refuse_unsliceable(family)
    names, encoder = family_of(family).parts, model.base_model
    assert names is not None
    embeddings: Any = encoder.embeddings
    layers = encoder.get_submodule(names.layers)
    assert isinstance(layers, nn.ModuleList)
    projection = getattr(encoder, "embeddings_project", None)
    return EncoderParts(
        tables=tuple(_tables(embeddings, names)),
        norm=getattr(embeddings, names.norm),
        projection=projection,
        layers=tuple(_layer_parts(layer, names) for layer in layers),
        final_norm=getattr(encoder, names.final_norm) if names.final_norm else None,
        is_rotary=names.is_fused,
        head_bias=_table(encoder.get_submodule(names.head_bias)) if names.head_bias else None,
    )


def _tables(embeddings: Any, names: PartNames) -> Iterator[nn.Embedding]:  # noqa: ANN401 - of any family
    for name in names.tables:
        yield _table(getattr(embeddings, name))


def _table(module: nn.Module) -> nn.Embedding:
    assert isinstance(module, nn.Embedding)
    return module


def _layer_parts(layer: nn.Module, names: PartNames) -> LayerParts:
    def linear(name: str) -> nn.Linear:
        module = layer.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module

    def rows(name: str, number: int, parts: int) -> Rows:
        module = linear(name)
        count = module.out_features // parts
        return Rows(linear=module, start=number * count, count=count)

    heads, halves = (3, 2) if names.is_fused else (1, 1)
    path, _, attribute = names.activation.rpartition(".")
    return LayerParts(
        module=layer,
        query=rows(names.query, 0, heads),
        key=rows(names.key, heads // 3, heads),
        value=rows(names.value, heads // 3 * 2, heads),
        output=linear(names.output),
        attention_norm=layer.get_submodule(names.attention_norm),
        up=rows(names.up, 0, halves),
        gate=rows(names.up, 1, halves) if names.is_fused else None,
        down=linear(names.down),
        ffn_norm=layer.get_submodule(names.ffn_norm),
        activation=getattr(layer.get_submodule(path), attribute),
        is_pre_norm=names.is_fused,
        gives_tuple=names.gives_tuple,
    )


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
