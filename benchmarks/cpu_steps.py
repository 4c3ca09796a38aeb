"""Time training steps of a 3x384 student on a CPU: dropout and bfloat16, torch's way and ours.

python -m benchmarks.cpu_steps

Results keep what was measured on other processors.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel, BertConfig, PreTrainedModel

from benchmarks.report import write_for_cpu
from minilm_cache.models.device import draw_faster, kept
from minilm_cache.models.tap import ATTENTION

ROUNDS = 12
LENGTH = 128


def student(attention: str, dropout: float) -> PreTrainedModel:
    """Return a 3x384 student with this attention implementation and probability of dropout."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=12,
        intermediate_size=1536,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = AutoModel.from_config(config, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    return model


def stepper(attention: str, *, dropout: float = 0.0, rounded: bool = False) -> Callable[[Tensor], None]:
    """Return a function that runs a forward pass, a backward pass and an optimizer step on ids."""
    model = student(attention, dropout)
    if attention == ATTENTION:
        draw_faster(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, fused=True)
    model.train()

    def step(ids: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            loss = model(input_ids=ids).last_hidden_state.square().mean()
        loss.backward()
        optimizer.step()

    return step


def timed(work: Callable[[], object]) -> float:
    """Return how many milliseconds a call takes."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def in_turns(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of each way, called in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(timed(way))
    return {name: round(median(values[2:]), 2) for name, values in times.items()}


def attention_alone(batch: int, length: int) -> dict[str, float]:
    """Return the milliseconds of attention's forward and backward pass, 12 heads of size 32."""
    vectors = torch.randn(3, batch, 12, length, 32)
    rounded = vectors.bfloat16()
    upstream = torch.randn(batch, 12, length, 32)

    def fused(parts: Tensor, *, widened: bool = False) -> None:
        parts = parts.requires_grad_()
        query, key, value = parts.float() if widened else parts
        output = scaled_dot_product_attention(query, key, value)
        output.backward(upstream.to(output.dtype))

    def three_operations() -> None:
        query, key, value = rounded.requires_grad_()
        output = (query @ key.mT * 32**-0.5).softmax(-1) @ value
        output.backward(upstream.bfloat16())

    return in_turns(
        {
            "float32": partial(fused, vectors),
            "bfloat16_torch": partial(fused, rounded),
            "bfloat16_three_operations": three_operations,
            "bfloat16": partial(fused, rounded, widened=True),
        }
    )


def precision(batch: int, length: int, dropout: float) -> dict[str, float]:
    """Return the milliseconds of a step in float32, and in bfloat16 with PyTorch's attention and ours."""
    ids = torch.randint(0, 30522, (batch, length), generator=torch.Generator().manual_seed(0))
    steps = {
        "float32": stepper(ATTENTION, dropout=dropout),
        "bfloat16_torch": stepper("sdpa", dropout=dropout, rounded=True),
        "bfloat16": stepper(ATTENTION, dropout=dropout, rounded=True),
    }
    return in_turns({name: partial(step, ids) for name, step in steps.items()})


def dropping(batch: int) -> dict[str, float]:
    """Return the milliseconds of a step in float32 with torch's dropout and ours."""
    ids = torch.randint(0, 30522, (batch, LENGTH), generator=torch.Generator().manual_seed(0))
    steps = {"torch": stepper("sdpa", dropout=0.1), "ours": stepper(ATTENTION, dropout=0.1)}
    return in_turns({name: partial(step, ids) for name, step in steps.items()})


def main() -> None:
    """Time the ways in turns, and write their medians in addition to those of other processors."""
    shape = torch.Size([8, 12, LENGTH, LENGTH])
    mask = {"torch": lambda: torch.empty(shape).bernoulli_(0.9).div_(0.9), "ours": lambda: kept(shape, 0.1)}
    measured = {
        "dropout of 8 x 12 x 128 x 128 elements": in_turns(mask),
        "dropout, steps": [{"batch": batch, "milliseconds": dropping(batch)} for batch in (8, 32)],
        "attention": [
            {"batch": batch, "length": length, "milliseconds": attention_alone(batch, length)}
            for batch, length in ((64, 64), (32, 128), (8, 512))
        ],
        "precision": [
            {
                "batch": batch,
                "length": length,
                "dropout": dropout,
                "milliseconds": precision(batch, length, dropout),
            }
            for batch, length, dropout in ((64, 32, 0.0), (64, 64, 0.0), (32, 128, 0.0), (32, 128, 0.1))
        ],
    }
    write_for_cpu("cpu_steps", measured)


if __name__ == "__main__":
    main()
