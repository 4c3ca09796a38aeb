"""Sequences of different lengths as one padded batch."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.relations.scores import key_mask


def pad(
    ids: Sequence[Int[Tensor, " _"]], pad_token: int
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, " batch"]]:
    """Return sequences as one padded batch, and the length of each in tokens."""
    lengths = torch.tensor([len(row) for row in ids])
    batch = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=pad_token)
    assert bool((key_mask(lengths, batch.shape[1]).sum(-1) == lengths).all())
    return batch, lengths
