"""State of a run between two steps: safetensors and JSON, so that resuming is exact and runs no code.

Only weights and optimizer state are stored of a student: order, dropout and learning rate are functions of
seed and step. Files are named by student, so that a run can resume with its students on other processes.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from minilm_cache.errors import IdentityMismatchError, first_line
from minilm_cache.models.saving import saving
from minilm_cache.store.durable import PARTIAL, sync_directories, sync_file
from minilm_cache.train.folder import arch_slug, state_name
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.trainer import StudentTrainer

_STATE = "state.json"


class BestStudent(BaseModel):
    """The step of a run whose weights of a student were closest to the teacher so far."""

    model_config = ConfigDict(extra="forbid")

    step: int
    """Number of steps taken when the weights were saved."""
    held_out: dict[str, float]
    """Losses on held-out sequences, by part."""


class RunState(BaseModel):
    """How far a run has come; the weights of its students are stored separately."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """Steps taken."""
    diverged: dict[str, int] = {}
    """Students that diverged and were stopped, and the step at which that was noticed."""
    train_s: float = 0.0
    """Seconds spent on steps, in all sessions of the run."""
    bytes_read: int = 0
    """Bytes of shard files read, by all processes in all sessions of the run."""
    best: dict[str, BestStudent] = {}
    """Best weights of each student so far."""


def save_checkpoint(
    folder: Path, trainers: Sequence[StudentTrainer], *, state: RunState, ranks: Ranks, keep: int
) -> None:
    """Write the state to a folder below `folder`, then remove all but the `keep` newest checkpoints.

    All processes of a run call this together.

    Raises:
        StorageError: the file system refused; older checkpoints are kept.
    """
    name = state_name(state.step)
    new = folder / f".{name}{PARTIAL}"
    (is_there,) = ranks.sum([float(ranks.is_first and (folder / name).exists())])
    if is_there:  # an interrupt right after a checkpoint
        return
    with saving("write checkpoint in", folder):
        if ranks.is_first:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        ranks.barrier()
        if ranks.is_writer:
            for trainer in trainers:
                save_file(_tensors(trainer), new / _file_name(trainer))
                sync_file(new / _file_name(trainer))
        ranks.barrier()
        if ranks.is_first:
            (new / _STATE).write_text(state.model_dump_json())
            sync_file(new / _STATE)
            sync_directories([new])
            new.rename(folder / name)
            sync_directories([folder])
            for old in _checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
        ranks.barrier()


def load_state(folder: Path) -> RunState:
    """Return the newest state, or the state of a new run where there is no checkpoint.

    Raises:
        IdentityMismatchError: the state is damaged.
    """
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return RunState()
    file = checkpoints[-1] / _STATE
    try:
        return RunState.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise _unusable(file, error) from error


def load_students(
    folder: Path, state: RunState, *, trainers: Sequence[StudentTrainer], device: torch.device
) -> None:
    """Restore weights and optimizers of students from the checkpoint of a state.

    Raises:
        IdentityMismatchError: the checkpoint does not fit these students, or is damaged.
    """
    if not state.step:
        return
    for trainer in trainers:
        file = folder / state_name(state.step) / _file_name(trainer)
        try:
            _restore(trainer, load_file(file, device=str(device)))
        except (OSError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            raise _unusable(file, error) from error


def remove_checkpoints(folder: Path) -> None:
    """Remove every checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)


def save_best(folder: Path, trainer: StudentTrainer, step: int) -> None:
    """Write the weights of a student, which are its best so far, after a step.

    Raises:
        StorageError: the file system refused.
    """
    file = _best_file(folder, trainer, step)
    with saving("write", file):
        folder.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}{PARTIAL}")
        save_file(_weights(trainer), new)
        sync_file(new)
        new.replace(file)
        sync_directories([folder])


def drop_superseded(folder: Path, trainers: Sequence[StudentTrainer], state: RunState) -> None:
    """Remove weights that are no longer the best; a checkpoint that names the better ones must be written."""
    for trainer in trainers:
        best = state.best.get(trainer.shape.arch)
        for file in folder.glob(f"{arch_slug(trainer.shape.arch)}.*.safetensors") if best else ():
            if best and file != _best_file(folder, trainer, best.step):
                file.unlink()


def _best_file(folder: Path, trainer: StudentTrainer, step: int) -> Path:
    return folder / f"{arch_slug(trainer.shape.arch)}.{step:08d}.safetensors"


def load_best(folder: Path, trainer: StudentTrainer, step: int) -> None:
    """Load the best weights of a student, which were saved after `step`.

    Raises:
        IdentityMismatchError: the file is damaged.
    """
    file = _best_file(folder, trainer, step)
    try:
        _load_weights(trainer, load_file(file))
    except (OSError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise _unusable(file, error) from error


def _unusable(file: Path, error: Exception) -> IdentityMismatchError:
    return IdentityMismatchError(
        f"checkpoint {file} cannot be used: {first_line(error)}. "
        "Remove the run's folder to start over, or choose another --out."
    )


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _file_name(trainer: StudentTrainer) -> str:
    return f"{arch_slug(trainer.shape.arch)}.safetensors"


def _weights(trainer: StudentTrainer) -> dict[str, Tensor]:
    """Return weights by name; a weight that has several names is returned once."""
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, value in trainer.learner.state_dict(keep_vars=True).items():
        weights.setdefault(id(value), (name, value.detach().contiguous()))
    return dict(weights.values())


def _load_weights(trainer: StudentTrainer, weights: dict[str, Tensor]) -> None:
    if weights.keys() != _weights(trainer).keys():
        raise KeyError("it holds other weights than this student has")
    trainer.learner.load_state_dict(weights, strict=False)


def _tensors(trainer: StudentTrainer) -> dict[str, Tensor]:
    tensors = {f"model/{name}": value for name, value in _weights(trainer).items()}
    for name, weight in trainer.learner.named_parameters():
        for key, value in trainer.optimizer.state.get(weight, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value.contiguous()
    return tensors


def _restore(trainer: StudentTrainer, tensors: dict[str, Tensor]) -> None:
    weights = {
        name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")
    }
    _load_weights(trainer, weights)
    parameters = dict(trainer.learner.named_parameters())
    for path, value in tensors.items():
        if path.startswith("optimizer/"):
            name, key = path.removeprefix("optimizer/").rsplit("/", 1)
            trainer.optimizer.state[parameters[name]][key] = value
