"""The lower bound of a training's memory: below what torch keeps, and not far below."""

from contextlib import nullcontext

import pytest
import torch
from transformers import BertConfig, BertModel

from minilm_cache.errors import DeviceError
from minilm_cache.models.arch import parse_arch
from minilm_cache.train import setup
from minilm_cache.train.setup import lower_bounds, refuse_too_large

ROWS, LENGTH = 4, 32


def kept_bytes(num_layers: int, hidden: int, ffn: int) -> int:
    """Return the bytes that autograd keeps of a forward pass of BERT, weights left out."""
    config = BertConfig(
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        vocab_size=50,
    )
    model = BertModel(config).train()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.ones((ROWS, LENGTH), dtype=torch.int64)).last_hidden_state
    assert output.requires_grad  # the graph, and with it the storages, lived until here
    return sum(kept.values())


@pytest.mark.parametrize(("hidden", "ffn"), [(32, 128), (64, 64), (96, 384)])
def test_the_bound_is_below_what_autograd_keeps(hidden: int, ffn: int) -> None:
    shape = parse_arch(f"4x{hidden}:ff{ffn}", 4)
    _, step = lower_bounds(shape, rows=ROWS, length=LENGTH, bytes_each=4)
    kept = kept_bytes(4, hidden, ffn) - kept_bytes(1, hidden, ffn)
    assert 0.9 * kept < step <= kept


def test_what_cannot_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [parse_arch("3x96", 4), parse_arch("99x384", 4)]
    monkeypatch.setattr(setup, "free_bytes", lambda device: 10**9)
    cpu = torch.device("cpu")
    refuse_too_large(shapes[:1], rows=64, length=100, bytes_each=4, device=cpu)
    with pytest.raises(DeviceError, match=r"3x96, 99x384 takes more than 1\d\.\d GB, and 1\.0 GB are free"):
        refuse_too_large(shapes, rows=64, length=100, bytes_each=4, device=cpu)
    with pytest.raises(DeviceError, match="99x384 takes more than"):
        refuse_too_large(shapes, rows=64, length=100, bytes_each=0, device=cpu)


@pytest.mark.parametrize("bytes_each", [0, 4])
def test_only_one_student_at_a_time_needs_gradients_or_activations(
    monkeypatch: pytest.MonkeyPatch, bytes_each: int
) -> None:
    shapes = [parse_arch("5x96", 4), parse_arch("9x384", 4)]
    weights = [4 * 12 * 96**2, 8 * 12 * 384**2]
    activations = 64 * 100 * 8 * (8 + 2 * 4) * 384 * bytes_each
    least = 3 * 4 * sum(weights) + max(4 * weights[1], activations)
    for free, is_refused in ((least, False), (least - 1, True)):
        monkeypatch.setattr(setup, "free_bytes", lambda device, free=free: free)
        with pytest.raises(DeviceError) if is_refused else nullcontext():
            refuse_too_large(shapes, rows=64, length=100, bytes_each=bytes_each, device=torch.device("cpu"))
