"""Each row of the table of families says what models of the family show."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from minilm_cache.models.families import FAMILIES
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import draw_weights
from minilm_cache.models.tap import ATTENTION, Tap, TappedModel
from minilm_cache.slicing.parts import encoder_parts
from tests.support import VOCABULARY

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}
T5: dict[str, Any] = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_true_of_its_models(name: str) -> None:
    row = FAMILIES[name]
    sizes = T5 if name.endswith("t5") else SIZES
    config = AutoConfig.for_model(name, vocab_size=len(VOCABULARY), pad_token_id=1, **sizes)
    model = draw_weights(copy.deepcopy(config), None, attention=ATTENTION).eval()
    with torch.no_grad():
        (vectors,) = TappedModel(model)(Inputs.full(torch.tensor([[5, 6, 7, 8]])), Tap((1,))).vectors
    assert row.is_decoder == vectors.is_causal
    assert row.has_bias == (vectors.bias is not None)
    if row.factorised is not None:  # the family that it names has the same parts
        assert FAMILIES[row.factorised].parts is not None
    if row.parts is None:
        return
    parts = encoder_parts(model)
    assert len(parts.layers) == 2
    assert (parts.head_bias is None) == (row.parts.head_bias is None)
    head = draw_weights(copy.deepcopy(config), "tokens", attention=ATTENTION)
    for part in (row.parts.logits_dense, row.parts.logits_norm):
        assert part is None or head.get_submodule(part) is not None
