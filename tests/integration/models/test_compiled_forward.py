"""A compiled forward pass is one graph: nothing in it is left to Python, and it computes the same."""

import subprocess
import sys

import pytest
import torch

from minilm_cache.models.tap import ATTENTION, TappedModel
from minilm_cache.train.trainer import faster_option, replays_graphs
from tests.integration.train.test_train import settings
from tests.support import tiny_model

SCRIPT = """
import functools, torch
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.tap import ATTENTION, Tap, TappedModel
from tests.support import tiny_model

# A break in the graph is an error; kernels need not be generated to see that, nor gradients more than once.
compiles = torch.compile
ids = torch.randint(5, 100, (3, 16))
full, padded = Inputs.full(ids), Inputs(ids, torch.tensor([16, 9, 16]))
forms = (((), full), ((), padded), ((1,), padded))
families = (("bert", forms), ("modernbert", forms[2:]), ("distilbert", forms[2:]))
for family, (hidden, inputs) in ((name, form) for name, of_family in families for form in of_family):
    backend = "aot_eager" if hidden and family == "bert" else "eager"
    torch.compile = functools.partial(compiles, fullgraph=True, backend=backend)
    layers = {"num_hidden_layers": 1} if family == "bert" else {}
    plain = TappedModel(tiny_model(family, attention=ATTENTION, **layers))
    compiled = TappedModel(plain.model)
    tap = Tap((plain.num_layers - 1,), hidden)
    compiled.compile_forward(None, taps_layers=True)
    expected, found = plain(inputs, tap), compiled(inputs, tap)
    for side in ("query", "key", "value"):
        values = (getattr(reading.vectors[0], side) for reading in (found, expected))
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    for number in hidden:
        torch.testing.assert_close(found.hidden[number], expected.hidden[number], rtol=1e-4, atol=1e-5)
    sum(part.square().mean() for part in found.vectors[0][:3]).backward()

from torch._dynamo.utils import counters

torch.compile = functools.partial(compiles, backend="eager")
torch._dynamo.reset()
counters.clear()
models = [
    TappedModel(
        tiny_model(
            "bert", attention=ATTENTION, num_hidden_layers=1, hidden_size=width, num_attention_heads=4
        )
    )
    for width in (16, 32)
]
for model in models:
    model.compile_forward(None, taps_layers=True)
for length in (7, 9, 12):
    inputs = Inputs.full(torch.randint(5, 100, (2, length)))
    for model in models:
        tap = Tap((model.num_layers - 1,))
        model.train()(inputs, tap)
        with torch.no_grad():
            model.eval()(inputs, tap)
print(counters["frames"]["total"], counters["frames"]["ok"])
"""


def test_every_family_is_one_graph_and_every_student_of_a_run_has_its_own() -> None:
    """In a process of its own: the compiler cannot look through the tests' type checks."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-3000:]
    total, compiled = map(int, done.stdout.split())
    assert total == compiled == 2 * 2 * 2, done.stderr[-3000:]  # twice for lengths: one, then any


def test_students_with_whole_steps_are_replayed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str | None] = []

    def compiled(function: object, *, mode: str | None) -> object:
        modes.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for changes, device in (
        ({}, gpu),
        ({}, cpu),
        ({"accumulate": 2}, gpu),
        ({"arch": ("1x16", "1x32")}, gpu),
    ):
        replays = replays_graphs(settings(**{"arch": ("1x16",), **changes}), device)
        TappedModel(tiny_model("bert", attention=ATTENTION)).compile_forward(
            None, taps_layers=True, replays=replays
        )

    assert modes == ["reduce-overhead", None, None, "reduce-overhead"]


def test_a_gpu_says_what_compiling_is_worth_where_it_is_possible() -> None:
    gpu = torch.device("cuda")

    assert "--compile" in str(faster_option(settings(), gpu, None, has_graphs=False))
    assert faster_option(settings(), gpu, None, has_graphs=True) is None
    assert faster_option(settings(), gpu, "tokens", has_graphs=False) is None
    for changes in ({"compiled": True}, {"gradient_checkpointing": True}, {"accumulate": 2}):
        assert faster_option(settings(**changes), gpu, None, has_graphs=False) is None
