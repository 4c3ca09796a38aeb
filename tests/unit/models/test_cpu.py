"""Dropout on a CPU: what torch's does, from other random numbers. Attention in bfloat16: as in float32."""

import torch
from torch import nn

from minilm_cache.models.cpu import CpuDropout, attention, attention_with_dropout, draw_faster, kept


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


def test_attention_of_bfloat16_vectors_is_trained_in_float32() -> None:
    vectors = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    upstream = torch.randn(2, 6, 4, 8, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    ours = vectors.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attention(nn.Module(), ours[0], ours[1], ours[2], mask)
    found.backward(upstream)
    plain = vectors.float().requires_grad_()
    expected = nn.functional.scaled_dot_product_attention(
        plain[0], plain[1], plain[2], attn_mask=mask
    ).transpose(1, 2)
    expected.backward(upstream)
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, plain.grad.bfloat16())
    with torch.no_grad():
        assert attention(nn.Module(), vectors[0], vectors[1], vectors[2], mask)[0].dtype == torch.bfloat16
