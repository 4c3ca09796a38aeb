"""How many sequences a teacher reads at once."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.dump.reading import CPU_BATCH, batch_size_for, batch_within, sequences_at_once
from minilm_cache.storage_schema.identity import (
    CacheIdentity,
    CorpusIdentity,
    NoRelationsParameters,
    Packing,
    TeacherIdentity,
)
from minilm_cache.storage_schema.states import Masking, SoftLabels, StatesIdentity

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

    assert 1 <= size <= 1024
    assert size & (size - 1) == 0


def test_a_batch_grows_with_memory_and_shrinks_with_length() -> None:
    sizes = [batch_within(20 * 2**30, BERT_BASE, length) for length in (64, 128, 512, 4096)]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] >= 256
    assert batch_within(2**30, BERT_BASE, 128) <= batch_within(2**33, BERT_BASE, 128)
    assert batch_size_for(BERT_BASE, 128, torch.device("cpu")) == CPU_BATCH


def test_a_gpu_gives_a_quarter_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * 2**30, 80 * 2**30))

    size = batch_size_for(BERT_BASE, 128, torch.device("cuda", 1))
    assert size == batch_within(20 * 2**30, BERT_BASE, 128)
    assert batch_within(2**30, BERT_BASE, 8192) == 1


@pytest.mark.parametrize(("tokens", "most"), [(None, 53), ("all", 8)])
def test_labels_of_a_large_vocabulary_make_batches_smaller(tokens: Literal["all"] | None, most: int) -> None:
    """XLM-R has 250,002 tokens: probabilities of a batch take at most 1 GiB."""
    states = StatesIdentity(
        hidden=(),
        masked_hidden=(),
        first=(),
        max_error=None,
        calibration_tokens=None,
        masking=Masking(share=0.15, mask_token=4, seed=0, readings=None),
        labels=SoftLabels(k=32, temperature=1.0, weight_ratio=1.03, tokens=tokens),
        num_classes=None,
    )
    identity = CacheIdentity(
        teacher=BERT_BASE.model_copy(update={"vocab_size": 250_002}),
        tokenizer_sha256="0" * 64,
        corpus=CorpusIdentity(sha256="0" * 64, num_documents=1),
        packing=Packing(mode="packed", max_length=128, max_tokens=None, seed=0),
        layers=(),
        relation_heads=12,
        relations=(),
        codec=NoRelationsParameters(),
        states=states,
    )

    assert sequences_at_once(identity, 1024) == most
    assert sequences_at_once(identity, 4) == 4
    assert sequences_at_once(identity.model_copy(update={"states": None}), 1024) == 1024
