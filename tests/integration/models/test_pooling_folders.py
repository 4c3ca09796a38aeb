"""Folders whose pooling cannot be computed, or is damaged: one line each."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.conftest import Command
from tests.encoders import save_encoder
from tests.support import World, dump_arguments


def damaged(world: World, change: dict[str, object], file: str) -> None:
    """Change a JSON file of the teacher."""
    path = world.teacher / file
    content = json.loads(path.read_text())
    if isinstance(content, list):
        content[1] |= change
    else:
        content |= change
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("modules.json", {"type": "sentence_transformers.models.LSTM"}, ("modules.json names LSTM",)),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, ("pools by mean and cls",)),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, ("pools by weightedmean",)),
        ("2_Dense/config.json", {"use_residual": True}, ("2_Dense", "a residual")),
        ("2_Dense/config.json", {"activation_function": "os.system"}, ("2_Dense", "os.system")),
    ],
)
def test_what_no_pooling_here_computes_is_refused(
    world: World, command: Command, file: str, change: dict[str, object], says: tuple[str, ...]
) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    damaged(world, change, file)
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=says)


def test_weights_of_a_dense_layer_are_safetensors(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    weights = world.teacher / "2_Dense/model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says="model.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "../elsewhere"}, "outside the model's folder"),
        ({"path": "/etc"}, "outside the model's folder"),
        ({"path": "1_Nowhere"}, "1_Nowhere"),
    ],
)
def test_modules_lie_in_the_folder(
    world: World, command: Command, change: dict[str, object], says: str
) -> None:
    save_encoder(world.teacher, "mean")
    damaged(world, change, "modules.json")
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=says)


@pytest.mark.parametrize("content", ["[", "{}", '[{"type": 1}]', "[1]", " " * (2**23 + 1)])
def test_damaged_modules_are_one_line(world: World, command: Command, content: str) -> None:
    (world.teacher / "modules.json").write_text(content)
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says="modules.json")


@pytest.mark.parametrize(
    ("shape", "value", "says"), [((24, 31), 0.5, "width 31 to 24"), ((24, 32), float("nan"), "NaN")]
)
def test_linear_maps_of_another_size_or_without_numbers(
    world: World, command: Command, shape: tuple[int, int], value: float, says: str
) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    weights = {"linear.weight": torch.full(shape, value), "linear.bias": torch.zeros(24)}
    save_file(weights, world.teacher / "2_Dense/model.safetensors")
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=says)
