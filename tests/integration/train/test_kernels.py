"""Students train with fused kernels as with plain torch; the kernels run in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from minilm_cache.relations import trust
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import TrainResult, train_students
from tests.integration.train.test_graphs import Notes, losses
from tests.support import World

fused: Any = pytest.importorskip("minilm_cache.relations.fused", reason="Triton is for Linux")


def train(world: World, out: str, objective: str, **changes: Any) -> tuple[TrainResult, list[str]]:
    """Train a student for three steps; return the run and what was said."""
    notes = Notes()
    values = {"arch": ("2x16",), "steps": 3, "batch_size": 2, "init": "random", "device": "cpu"}
    config = TrainConfig.model_validate({**values, "dropout": "none", "objective": objective, **changes})
    session = Session(world.home, progress=notes)
    return train_students(config, world.root / "cache", out=world.root / out, session=session), notes.said


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that the CPU has kernels; return the relations that they are asked for."""
    kinds: list[str] = []
    original = fused.cross_entropy

    def counted(vectors: object, kind: str, **given: Any) -> Any:
        kinds.append(str(kind))
        return original(vectors, kind, **given)

    monkeypatch.setattr(trust, "has_kernels", lambda _: True)
    monkeypatch.setattr(trust, "_COMPARED", 2**10)  # the interpreter is slow
    monkeypatch.setattr(fused, "cross_entropy", counted)
    return kinds


@pytest.mark.parametrize(
    ("codec", "objective"), [("topk", "minilm"), ("vectors", "minilm"), ("vectors", "minilmv2")]
)
def test_students_train_as_with_plain_torch(
    world: World, codec: str, objective: str, request: pytest.FixtureRequest
) -> None:
    world.dump(codec=codec, max_kl=0.01) if codec == "vectors" else world.dump(codec=codec)
    plain, _ = train(world, "plain", objective)
    asked = request.getfixturevalue("asked")
    result, said = train(world, "fused", objective)

    kinds = {"minilm": {"attention", "value"}, "minilmv2": {"query", "key", "value"}}[objective]
    assert set(asked) == kinds
    assert len(asked) == len(kinds) * (3 + 1)  # one more for the comparison of each
    assert losses(result) == pytest.approx(losses(plain), abs=1e-5)
    assert not any("kernels" in note for note in said)
    without, _ = train(world, "without", objective, kernels=False)
    assert len(asked) == len(kinds) * (3 + 1)
    assert losses(without) == losses(plain)


def test_a_run_says_once_that_kernels_are_not_used(
    world: World, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    world.dump(codec="topk")
    monkeypatch.setattr(fused, "cross_entropy", fail)
    result, said = train(world, "run", "minilm")
    assert [note for note in said if "kernels" in note] == [
        "some relations are compared without fused kernels (--no-kernels): out of resource: shared memory"
    ]
    assert all(torch.isfinite(torch.tensor(losses(result))))
