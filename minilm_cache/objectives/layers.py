"""Maps layers of a student to the layers of the teacher that they learn from."""

import math
from typing import Final, NamedTuple

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import num_layers_of
from minilm_cache.objectives.base import ObjectiveRequest
from minilm_cache.objectives.spec import LayerMap

_MAPS_OF_TWO_LAYERS: Final = ("last-two", "first-last")


class LayerPair(NamedTuple):
    """A layer of a student, and the layer of the teacher that it learns from."""

    teacher: int
    """Layer of the teacher, counted from 0."""
    student: int
    """Layer of the student, counted from 0."""


def map_layers(layer_map: LayerMap, num_layers: int, num_teacher_layers: int) -> list[LayerPair]:
    """Return pairs of layers, ascending.

    `last`: the last of both (MiniLM's own). `last-two`, `first-last`: MiniLM's table 8. `all`: layer m of M
    learns from the teacher's layer m N / M of N, rounded, as TinyBERT maps them (Jiao et al. 2020, arXiv
    1909.10351, section 3.1); MiniLM's table 7. `top`, `bottom`: from the teacher's last, or first, M layers
    (TinyBERT, table 4).

    Raises:
        InvalidConfigError: the student has fewer layers than the map, or more than the teacher.
    """
    least = 2 if layer_map in _MAPS_OF_TWO_LAYERS else 1
    if not least <= num_layers <= num_teacher_layers:
        raise InvalidConfigError(
            f"--layer-map {layer_map} is for students of {least} to {num_teacher_layers} layers, and a "
            f"student has {num_layers}. Take another map or other shapes."
        )
    last = LayerPair(num_teacher_layers - 1, num_layers - 1)
    if layer_map == "last":
        return [last]
    if layer_map == "last-two":
        return [LayerPair(last.teacher - 1, last.student - 1), last]
    if layer_map == "first-last":
        return [LayerPair(0, 0), last]
    if layer_map == "top":
        return [LayerPair(num_teacher_layers - num_layers + layer, layer) for layer in range(num_layers)]
    if layer_map == "bottom":
        return [LayerPair(layer, layer) for layer in range(num_layers)]
    rounded = [math.floor((layer + 1) * num_teacher_layers / num_layers + 0.5) for layer in range(num_layers)]
    return [LayerPair(teacher - 1, student) for student, teacher in enumerate(rounded)]


def pairs_of(request: ObjectiveRequest, num_layers: int) -> list[LayerPair]:
    """Return the pairs of layers of a student with `num_layers` layers, ascending.

    Raises:
        InvalidConfigError: the student does not fit the map.
    """
    config, cache = request.config, request.cache
    if config.layer_map != "last":
        return map_layers(config.layer_map, num_layers, request.teacher.num_layers)
    layer = cache.manifest.identity.last_layer if config.teacher_layer is None else config.teacher_layer
    return [LayerPair(layer, num_layers - 1)]


def mapped_layers(request: ObjectiveRequest) -> tuple[int, ...]:
    """Return the teacher's layers that the students of a run learn from, ascending.

    Raises:
        InvalidConfigError: a student does not fit the map.
    """
    depths = {num_layers_of(arch) for arch in request.arch}
    return tuple(sorted({pair.teacher for depth in depths for pair in pairs_of(request, depth)}))
