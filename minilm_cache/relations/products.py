"""In what precision a GPU computes products of float32 matrices."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minilm_cache.storage_schema.identity import Precision


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Let a GPU compute float32 products in TF32 or not, whatever the process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
