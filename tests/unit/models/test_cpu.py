"""Dropout on a CPU does what torch's does, from other random numbers. Attention of bfloat16 is float32's."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minilm_cache.models.device import CpuDropout, attention, attention_with_dropout, draw_faster, kept
from minilm_cache.models.tap import ATTENTION
from tests.support import BIASED, DECODERS, TINY, VOCABULARY, tiny_model


def test_elements_are_dropped_with_the_probability_and_the_rest_scaled() -> None:
    torch.manual_seed(0)
    found = kept(torch.Size([1000, 1001]), 0.1)
    assert set(found.unique().tolist()) == {0.0, found.max().item()}
    assert abs(float((found == 0).float().mean()) - 0.1) < 1e-3
    assert abs(float(found.mean()) - 1) < 2e-3
    # Neighbours are as independent as they are from afar.
    dropped = (found == 0).float()
    assert abs(float((dropped[:, 1:] * dropped[:, :-1]).mean()) - 0.01) < 1e-3


def test_draws_follow_torchs_seed() -> None:
    def draws(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [kept(torch.Size([7, 9]), 0.5) for _ in range(2)]

    first, second, other = draws(1), draws(1), draws(2)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_modules_drop_in_training_only_and_pass_gradients_of_what_is_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.2)))
    draw_faster(model)
    assert [type(module) for module in model.modules() if isinstance(module, nn.Dropout)] == 2 * [CpuDropout]
    x = torch.ones(4, 8, requires_grad=True)
    dropout = CpuDropout(0.5)
    y = dropout(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert 0 < int((y == 0).sum()) < y.numel()
    assert torch.equal(dropout.eval()(x), x)
    assert bool((CpuDropout(1.0)(x) == 0).all())


def test_attention_is_that_of_torch_but_for_what_is_dropped() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(
        attention_with_dropout(query, key, value=value, mask=mask, scaling=8**-0.5, probability=0.0), expected
    )
    torch.manual_seed(0)
    draws = [
        attention_with_dropout(query, key, value=value, mask=mask, scaling=8**-0.5, probability=0.2)
        for _ in range(4000)
    ]
    torch.testing.assert_close(torch.stack(draws).mean(0), expected, atol=0.06, rtol=0.0)


@pytest.mark.parametrize("masked", [True, False])
def test_attention_of_bfloat16_vectors_is_trained_in_float32(masked: bool) -> None:
    vectors = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    upstream = torch.randn(2, 6, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril() if masked else None
    ours = vectors.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attention(nn.Module(), ours[0], ours[1], ours[2], mask, is_causal=False)
    found.backward(upstream)
    plain = vectors.float().requires_grad_()
    expected = nn.functional.scaled_dot_product_attention(plain[0], plain[1], plain[2], attn_mask=mask)
    expected.transpose(1, 2).backward(upstream.float())
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(found, expected.transpose(1, 2).bfloat16())
    torch.testing.assert_close(ours.grad, plain.grad.bfloat16())
    with torch.no_grad():
        evaluated, _ = attention(nn.Module(), vectors[0], vectors[1], vectors[2], mask, is_causal=False)
        assert evaluated.dtype == torch.bfloat16


WHOLE_HEADS = {"num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("family", "changes"), [*product([*TINY, *DECODERS, *BIASED], [{}]), *product(DECODERS, [WHOLE_HEADS])]
)
def test_dropout_that_drops_nothing_changes_nothing(family: str, changes: dict[str, Any]) -> None:
    """A student sees in training what it sees in use, with padding and without, also one of a decoder."""
    config = tiny_model(family, **changes).config.to_dict()
    nothing: dict[str, Any] = {
        name: 1e-9 for name, value in config.items() if "drop" in name and isinstance(value, float)
    }
    model = tiny_model(family, attention=ATTENTION, **changes, **nothing)
    draw_faster(model)
    ids = torch.randint(5, len(VOCABULARY), (2, 12), generator=torch.Generator().manual_seed(0))
    for seen in (torch.ones(2, 12), (torch.arange(12) < torch.tensor([[12], [7]])).float()):
        with torch.no_grad():
            trained, used = (
                model.train(is_trained)(input_ids=ids, attention_mask=seen.long()).last_hidden_state[
                    seen.bool()
                ]
                for is_trained in (True, False)
            )
        torch.testing.assert_close(trained, used, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", TINY)
def test_every_family_trains_attention_in_float32_under_autocast(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = nn.functional.scaled_dot_product_attention
    dtypes: list[torch.dtype] = []

    def recorded(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtypes.append(query.dtype)
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    ids = torch.randint(5, len(VOCABULARY), (2, 12), generator=torch.Generator().manual_seed(0))
    seen = torch.arange(12) < torch.tensor([[12], [7]])

    def gradients(checkpointing: bool) -> list[Tensor]:
        model = tiny_model(family, attention=ATTENTION)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        dtypes.clear()
        with torch.autocast("cpu", torch.bfloat16):
            states = model(input_ids=ids, attention_mask=seen.long()).last_hidden_state
        states.float()[seen].square().mean().backward()
        calls = model.config.num_hidden_layers * (2 if checkpointing else 1)
        assert dtypes == calls * [torch.float32]
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    for kept_states, computed_again in zip(gradients(False), gradients(True), strict=True):
        assert bool(kept_states.isfinite().all())
        assert torch.equal(kept_states, computed_again)
