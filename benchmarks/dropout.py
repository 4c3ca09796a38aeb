"""Time a training step of a 3x384 student with torch's dropout and with ours, on a CPU.

python -m benchmarks.dropout
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, PreTrainedModel

from benchmarks.report import write_result
from minilm_cache.models.dropout import draw_faster, kept
from minilm_cache.models.tap import ATTENTION

ROUNDS = 12
LENGTH = 128


def student(attention: str) -> PreTrainedModel:
    """Return a 3x384 student with this attention implementation."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536)
    model = AutoModel.from_config(config, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    return model


def stepper(forward: Callable[[Tensor], Tensor], model: nn.Module) -> Callable[[Tensor], None]:
    """Return a function that runs a forward pass, a backward pass and an optimizer step on ids."""
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], fused=True
    )
    model.train()

    def step(ids: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(ids).square().mean().backward()
        optimizer.step()

    return step


def ways() -> dict[str, Callable[[Tensor], None]]:
    """Return a training step for each dropout; both run the whole model."""
    with_torch, with_ours = student("sdpa"), student(ATTENTION)
    draw_faster(with_ours)
    return {
        "torch": stepper(lambda ids: with_torch(input_ids=ids).last_hidden_state, with_torch),
        "ours": stepper(lambda ids: with_ours(input_ids=ids).last_hidden_state, with_ours),
    }


def timed(work: Callable[[], object]) -> float:
    """Return how many milliseconds a call takes."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    """Time both in turns, and write their medians."""
    result: dict[str, object] = {}
    shape = torch.Size([8, 12, LENGTH, LENGTH])
    masks: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.empty(shape).bernoulli_(0.9).div_(0.9),
        "ours": lambda: kept(shape, 0.1),
    }
    times: dict[str, list[float]] = {name: [] for name in masks}
    for _ in range(ROUNDS):
        for name, mask in masks.items():
            times[name].append(timed(mask))
    result["milliseconds for 8 x 12 x 128 x 128 elements"] = _medians(times)
    for batch in (8, 32):
        ids = torch.randint(0, 30522, (batch, LENGTH), generator=torch.Generator().manual_seed(0))
        steps = ways()
        times = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                times[name].append(timed(partial(step, ids)))
        result[f"milliseconds of a step of 3x384, batch {batch}"] = _medians(times)
    write_result("dropout", result)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(median(values[2:]), 2) for name, values in times.items()}


if __name__ == "__main__":
    main()
