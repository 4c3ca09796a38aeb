"""A compiled forward pass is one graph: nothing in it is left to Python, and it computes the same."""

import subprocess
import sys

import pytest

SCRIPT = """
import functools, sys, torch
from minilm_cache.models.tap import ATTENTION, TappedModel
from tests.support import tiny_model

# A break in the graph is an error; kernels need not be generated to see that.
torch.compile = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
ids = torch.randint(5, 100, (3, 16))
mask = torch.ones_like(ids)
mask[1, 9:] = 0
for hidden, padding in (((), None), ((), mask), ((1,), mask)):
    plain = TappedModel(tiny_model(sys.argv[1], attention=ATTENTION))
    compiled = TappedModel(plain.model)
    for model in (plain, compiled):
        model.tap((plain.num_layers - 1,), hidden)
    compiled.compile_forward(None)
    expected, found = plain(ids, padding), compiled(ids, padding)
    for side in ("query", "key", "value"):
        values = (getattr(reading.vectors[0], side) for reading in (found, expected))
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    for number in hidden:
        torch.testing.assert_close(found.hidden[number], expected.hidden[number], rtol=1e-4, atol=1e-5)
    sum(part.square().mean() for part in found.vectors[0][:3]).backward()
"""


@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert"])
def test_every_family_is_one_graph(family: str) -> None:
    """In a process of its own: the compiler cannot look through the tests' type checks."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, family], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-3000:]
