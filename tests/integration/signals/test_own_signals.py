"""What a signal of one's own must be, checked where it is registered, asked for and stored."""

from typing import Literal

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from minilm_cache.cache import open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.tap import Tap
from minilm_cache.signals.base import OwnSignal, Taken
from minilm_cache.signals.table import SIGNALS, register_signal
from minilm_cache.storage_schema.identity import TeacherIdentity
from minilm_cache.storage_schema.states import SignalName
from tests.support import World


class Squares(OwnSignal):
    """Numbers beyond what float16 holds."""

    name, axis = "squares", "sequence"

    def width(self, teacher: TeacherIdentity) -> int:
        del teacher
        return 1

    def tap(self, name: SignalName, num_layers: int) -> Tap:
        del name
        return Tap(hidden=(num_layers,))

    def values(self, name: SignalName, taken: Taken) -> Tensor:
        del name
        return 1e6 + taken.outputs.hidden[taken.num_layers].square().sum((1, 2))[:, None]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "my_norms"}, "a name begins with a letter"),
        ({"name": "pooled"}, "is one of this release"),
        ({"is_masked": True}, "Leave out is_masked"),
    ],
)
def test_a_signal_that_cannot_be_stored_is_not_registered(change: dict[str, object], says: str) -> None:
    before = dict(SIGNALS)
    with pytest.raises(InvalidConfigError, match=says):
        register_signal(type("Changed", (Squares,), change)())
    assert before == SIGNALS


def test_a_signal_is_asked_for_once_and_must_be_known(world: World) -> None:
    with pytest.raises(ValidationError, match="name each signal once"):
        DumpConfig(teacher="mini", signal=("squares", "squares"))
    with pytest.raises(ValidationError, match="at most 16"):
        DumpConfig(teacher="mini", signal=tuple(f"s{number}" for number in range(17)))
    with pytest.raises(InvalidConfigError, match="no signal of this name is registered"):
        world.dump(signal=("nothing",))


@pytest.mark.parametrize("axis", ["token", "sequence"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 3)], ids=str)
def test_rows_of_another_shape_than_declared_are_not_stored(
    world: World, monkeypatch: pytest.MonkeyPatch, axis: Literal["token", "sequence"], shape: tuple[int, ...]
) -> None:
    """Also where numpy would repeat the one number that is given."""

    class Other(Squares):
        def width(self, teacher: TeacherIdentity) -> int:
            del teacher
            return 4

        def values(self, name: SignalName, taken: Taken) -> Tensor:
            del name
            batch, length = taken.inputs.ids.shape
            return torch.ones((batch, length, *shape) if axis == "token" else (batch, *shape))

    monkeypatch.setattr(Other, "axis", axis)
    monkeypatch.setitem(SIGNALS, "squares", Other())
    with pytest.raises(InvalidConfigError, match=r"Change (the signal's|its) `values`"):
        world.dump(signal=("squares",), packing="records")


def test_numbers_that_cannot_be_held_are_not_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNALS, "squares", Squares())
    with pytest.raises(TeacherError, match=r"squares would have NaN, infinity or a number"):
        world.dump(signal=("squares",))
    monkeypatch.setattr(Squares, "dtype", "float32")
    cache = open_cache(world.dump("exact", signal=("squares",)).path)
    assert float(cache[0].states()[SignalName("squares")]) > 1e6
