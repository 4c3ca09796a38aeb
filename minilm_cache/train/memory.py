"""Refuses trainings that cannot fit into memory before they begin, by a lower bound of what they take."""

from collections.abc import Sequence
from typing import Final

import psutil
import torch
from rich.filesize import decimal

from minilm_cache.errors import DeviceError
from minilm_cache.models.arch import StudentShape

_WEIGHT_BYTES: Final = 12
"""Bytes of a weight and the two moments of AdamW, float32."""
_GRADIENT_BYTES: Final = 4
"""Bytes of the gradient of a weight, float32."""
_VECTORS: Final = 8
"""Vectors of the hidden size that a layer of BERT keeps of a token for its backward pass, without dropout."""


def lower_bounds(shape: StudentShape, *, rows: int, length: int | float, bytes_each: int) -> tuple[int, int]:
    """Return lower bounds of a student's number of weights, and of the bytes that its forward pass keeps.

    Embeddings, losses, dropout, attention distributions and what libraries keep are not counted, and neither
    is the last layer, which objectives may stop in.

    Args:
        shape: shape of the student.
        rows: sequences that one backward pass is about.
        length: mean number of tokens of a sequence.
        bytes_each: bytes of a number that is kept for the backward pass.
    """
    width, layers = shape.bottleneck_size or shape.hidden_size, shape.num_layers - 1
    weights = layers * (4 * width * width + 2 * width * shape.ffn_size)
    of_token = _VECTORS * width + 2 * shape.ffn_size
    return weights, int(rows * length * layers * of_token * bytes_each)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory of a device that are not in use. None means that it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


def refuse_too_large(
    shapes: Sequence[StudentShape], *, rows: int, length: int | float, bytes_each: int, device: torch.device
) -> None:
    """Raise DeviceError for students that are surely too large for the free memory of a device.

    Args:
        shapes: shapes of the students of one process; their backward passes follow each other.
        rows: sequences that one backward pass is about.
        length: mean number of tokens of a sequence.
        bytes_each: bytes of a number that is kept for the backward pass; 0 with gradient checkpointing.
        device: device that computes.
    """
    bounds = [lower_bounds(shape, rows=rows, length=length, bytes_each=bytes_each) for shape in shapes]
    free = free_bytes(device)
    least = sum(_WEIGHT_BYTES * weights for weights, _ in bounds)
    # Gradients come while what the forward pass kept is freed, and go before the next student's pass.
    least += max((max(_GRADIENT_BYTES * weights, step) for weights, step in bounds), default=0)
    if free is not None and least > free:
        names = ", ".join(shape.arch for shape in shapes)
        raise DeviceError(
            f"{device} has too little memory: training {names} takes more than {decimal(least)}, and "
            f"{decimal(free)} are free. Take a smaller --arch or --batch-size, --accumulate or "
            "--gradient-checkpointing."
        )
