"""Parameters and operations against the paper's table and against counting by hand."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig

from minilm_cache.errors import CacheCorruptError
from minilm_cache.models.student import Timed, inference_rates, model_size
from tests.support import TINY


@pytest.mark.parametrize(
    ("layers", "hidden", "expected"),
    [(12, 768, 85.1e6), (6, 768, 42.5e6), (12, 384, 21.3e6), (6, 384, 10.6e6), (3, 384, 5.3e6)],
)
def test_transformer_parameters_are_those_of_the_papers_table(
    layers: int, hidden: int, expected: float
) -> None:
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=12, intermediate_size=4 * hidden
    )
    found = model_size(config, 128)
    assert found.transformer_parameters == pytest.approx(expected, rel=5e-3)
    assert found.embedding_parameters == (30522 + 512 + 2) * hidden


def test_operations_are_two_for_each_weight_and_the_attention() -> None:
    hidden, length, layers = 384, 128, 3
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=12, intermediate_size=4 * hidden
    )
    weights = layers * 12 * hidden**2
    attention = layers * 2 * 2 * length * hidden
    pooler = 2 * hidden**2 / length
    found = model_size(config, length)
    assert found.flops_per_token == pytest.approx(2 * weights + attention + pooler)
    stopped = (2 * weights + attention) * (layers - 1) / layers + 2 * 3 * hidden**2
    assert found.stopped_flops_per_token == pytest.approx(stopped)


def test_a_configuration_that_fills_memory_or_describes_nothing_is_refused() -> None:
    big = BertConfig(hidden_size=2**14, intermediate_size=2**16, num_attention_heads=4, num_hidden_layers=24)
    with pytest.raises(CacheCorruptError, match="asks for"):
        inference_rates({"big": Timed(big, 16)}, torch.device("cpu"))
    for changes in ({"hidden_act": "nosuch"}, {"intermediate_size": 2**62}):
        with pytest.raises(CacheCorruptError, match="cannot be used"):
            model_size(BertConfig(**changes), 16)


@pytest.mark.parametrize("family", TINY)
def test_every_family_has_a_size(family: str) -> None:
    config = AutoConfig.for_model(family, vocab_size=100, max_position_embeddings=66, **TINY[family])
    model = AutoModel.from_config(config)
    found = model_size(config, 16)
    assert found.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert found.embedding_parameters + found.transformer_parameters <= found.num_parameters
    assert found.flops_per_token > 0


def test_layers_that_share_their_weights_have_a_size() -> None:
    sizes = {"hidden_size": 32, "embedding_size": 16, "intermediate_size": 64, "num_attention_heads": 4}
    config = AutoConfig.for_model("albert", vocab_size=100, num_hidden_layers=4, **sizes)
    once, found = 4 * 32**2 + 2 * 32 * 64, model_size(config, 8)  # products of one layer
    assert found.embedding_parameters == (100 + 512 + 2) * 16
    assert found.transformer_parameters == found.num_parameters - found.embedding_parameters
    assert found.flops_per_token == pytest.approx(4 * (2 * once + 4 * 8 * 32), rel=0.05)
    assert found.stopped_flops_per_token == pytest.approx(0.75 * found.flops_per_token + 6 * 32**2)


@pytest.mark.parametrize("family", ["deberta", "squeezebert"])
def test_layers_that_torch_counts_in_another_way_have_a_size(family: str) -> None:
    """DeBERTa looks at values, so that weights are made; SqueezeBERT calls layers past torch's hooks."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    own = {"embedding_size": 32} if family == "squeezebert" else {"relative_attention": True}
    config = AutoConfig.for_model(family, vocab_size=100, pos_att_type=["p2c", "c2p"], **sizes, **own)
    found = model_size(config, 8)
    assert found.num_parameters == sum(each.numel() for each in AutoModel.from_config(config).parameters())
    assert 0.7 < (found.stopped_flops_per_token - 6 * 32**2) / found.flops_per_token < 0.8


def test_every_model_has_a_rate() -> None:
    families = {"bert": 16, "distilbert": 32}
    models = {
        name: Timed(AutoConfig.for_model(name, **TINY[name]), length) for name, length in families.items()
    }
    rates = inference_rates(models, torch.device("cpu"))
    assert rates.keys() == families.keys()
    assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())
