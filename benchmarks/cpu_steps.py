"""Time a training step of a 3x384 student on a CPU: dropout and bfloat16, torch's way and ours.

python -m benchmarks.cpu_steps
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import AutoModel, BertConfig, PreTrainedModel

from benchmarks.report import write_result
from minilm_cache.models.cpu import draw_faster, kept
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


def main() -> None:
    """Time both ways in turns, and write their medians."""
    shape = torch.Size([8, 12, LENGTH, LENGTH])
    result: dict[str, object] = {
        "milliseconds for 8 x 12 x 128 x 128 elements": in_turns(
            {
                "torch": lambda: torch.empty(shape).bernoulli_(0.9).div_(0.9),
                "ours": lambda: kept(shape, 0.1),
            }
        )
    }
    generator = torch.Generator().manual_seed(0)
    for batch in (8, 32):
        ids = torch.randint(0, 30522, (batch, LENGTH), generator=generator)
        steps = {"torch": stepper("sdpa", dropout=0.1), "ours": stepper(ATTENTION, dropout=0.1)}
        result[f"milliseconds of a step of 3x384, batch {batch}"] = in_turns(
            {name: partial(step, ids) for name, step in steps.items()}
        )
    rows = []
    for batch, length in ((64, 32), (64, 64), (32, 128)):
        ids = torch.randint(0, 30522, (batch, length), generator=generator)
        steps = {
            "float32": stepper(ATTENTION),
            "bfloat16_torch": stepper("sdpa", rounded=True),
            "bfloat16": stepper(ATTENTION, rounded=True),
        }
        times = in_turns({name: partial(step, ids) for name, step in steps.items()})
        rows.append({"batch": batch, "length": length, "milliseconds": times})
    result["precision"] = rows
    write_result("cpu_steps", result)


if __name__ == "__main__":
    main()
