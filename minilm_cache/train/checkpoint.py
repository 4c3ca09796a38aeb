"""State of a run between two steps: safetensors and JSON, so that resuming is exact and runs no code.

Weights and optimizer state are all that there is: order, dropout and learning rate are functions of seed
and step.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minilm_cache.errors import IdentityMismatchError
from minilm_cache.store.durable import new_folder, storage_errors
from minilm_cache.train.record import arch_slug
from minilm_cache.train.trainer import StudentTrainer

_STATE = "state.json"


def save_checkpoint(folder: Path, trainers: Sequence[StudentTrainer], step: int) -> None:
    """Write the state after `step` steps below `folder`, then remove older ones.

    Raises:
        StorageError: the file system refused; older checkpoints are kept.
    """
    with storage_errors("write checkpoint in", folder):
        with new_folder(folder / f"step-{step:08d}") as new:
            for trainer in trainers:
                save_file(_tensors(trainer), new / _file_name(trainer))
            (new / _STATE).write_text(json.dumps({"step": step}))
        for old in _checkpoints(folder)[:-1]:
            shutil.rmtree(old)


def load_checkpoint(folder: Path, trainers: Sequence[StudentTrainer], device: torch.device) -> int:
    """Restore the newest state, and return how many steps have been taken; 0 where there is none.

    Raises:
        IdentityMismatchError: a checkpoint does not fit these students, or is damaged.
    """
    found = _checkpoints(folder)
    if not found:
        return 0
    for trainer in trainers:
        file = found[-1] / _file_name(trainer)
        try:
            _restore(trainer, load_file(file, device=str(device)))
        except (OSError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            raise IdentityMismatchError(
                f"checkpoint {file} cannot be used: {str(error).splitlines()[0]}. "
                f"Remove {found[-1]} to start over, or choose another --out."
            ) from error
    return int(json.loads((found[-1] / _STATE).read_text())["step"])


def remove_checkpoints(folder: Path) -> None:
    """Remove every checkpoint: the run is complete."""
    shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _file_name(trainer: StudentTrainer) -> str:
    return f"{arch_slug(trainer.shape.arch)}.safetensors"


def _tensors(trainer: StudentTrainer) -> dict[str, Tensor]:
    tensors = {f"model/{name}": value for name, value in trainer.model.state_dict().items()}
    for name, weight in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state.get(weight, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value
    return {name: value.contiguous() for name, value in tensors.items()}


def _restore(trainer: StudentTrainer, tensors: dict[str, Tensor]) -> None:
    weights = {
        name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")
    }
    trainer.model.load_state_dict(weights)
    parameters = dict(trainer.model.named_parameters())
    for path, value in tensors.items():
        if path.startswith("optimizer/"):
            name, key = path.removeprefix("optimizer/").rsplit("/", 1)
            trainer.optimizer.state[parameters[name]][key] = value
