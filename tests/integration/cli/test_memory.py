"""A device with too little memory ends in one line that says what to lower."""

from typing import Any

import pytest
import torch

from minilm_cache.models.teacher import Teacher
from minilm_cache.train.trainer import StudentTrainer
from tests.fixtures import Command
from tests.support import World, dump_arguments


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines.")


def test_a_dump_names_its_batch_size(world: World, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Teacher, "read", full)
    code, _, err = command(*dump_arguments(world, "--device", "cpu", "--batch-size", 16))

    assert code == 1
    assert err.splitlines()[-1] == "error: cpu has too little memory. Choose a --batch-size below 16."


def test_a_training_names_its_batch_size(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.dump().path
    monkeypatch.setattr(StudentTrainer, "learn", full)
    train = ("train", cache, "--arch", "1x32", "--batch-size", 8, "--steps", 2, "--device", "cpu")
    code, _, err = command(*train, "--out", world.root / "run")

    assert code == 1
    assert err.splitlines()[-1] == (
        "error: cpu has too little memory for a step. Take a higher --accumulate, a lower --batch-size, or "
        "--gradient-checkpointing."
    )
