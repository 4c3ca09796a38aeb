"""How many sequences a teacher reads at once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.dump.reading import LEAST_BATCH, batch_size_for, batch_within
from minilm_cache.storage_schema.identity import TeacherIdentity

BERT_BASE = TeacherIdentity(
    model_type="bert",
    weights_sha256="0" * 64,
    config_sha256="0" * 64,
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    vocab_size=30522,
)


@given(st.integers(0, 2**40), st.integers(4, 8192))
def test_a_batch_is_a_power_of_two_within_its_bounds(num_bytes: int, max_length: int) -> None:
    size = batch_within(num_bytes, BERT_BASE, max_length)

    assert 32 <= size <= 1024
    assert size & (size - 1) == 0


def test_a_batch_grows_with_memory_and_shrinks_with_length() -> None:
    sizes = [batch_within(20 * 2**30, BERT_BASE, length) for length in (64, 128, 512, 4096)]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] >= 256
    assert batch_within(2**30, BERT_BASE, 128) <= batch_within(2**33, BERT_BASE, 128)
    assert batch_size_for(BERT_BASE, 128, torch.device("cpu")) == LEAST_BATCH
