"""State of a run between two steps: safetensors and JSON, so that resuming is exact and runs no code.

Only weights and optimizer state are stored of a student: order, dropout and learning rate are functions of
seed and step. Files are named by student, so that a run can resume with its students on other processes.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from minilm_cache.errors import IdentityMismatchError, first_line
from minilm_cache.models.files import TENSOR_ERRORS, StoredFile, distinct_weights, load_tensors, save_tensors
from minilm_cache.models.truncate import saving
from minilm_cache.storage_schema.base import Sha256
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.store.durable import PARTIAL, bounded_bytes, sync_directories, sync_file
from minilm_cache.train.folder import arch_slug, state_name
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.trainer import StudentTrainer

_STATE: Final = "state.json"
_MAX_STATE_BYTES: Final = 2**20
_Step = Annotated[int, Field(ge=0, lt=2**53)]


class BestStudent(BaseModel):
    """The step of a run whose weights of a student were closest to the teacher so far."""

    model_config = ConfigDict(extra="forbid")

    step: _Step
    """Number of steps taken when the weights were saved."""
    held_out: dict[str, float]
    """Losses on held-out sequences, by part."""
    file: StoredFile | None = None
    """The file of the weights. None means that another process, or an earlier release, wrote it."""


class RunState(BaseModel):
    """How far a run has come; the weights of its students are stored separately."""

    model_config = ConfigDict(extra="forbid")

    step: _Step = 0
    """Steps taken."""
    diverged: dict[str, _Step] = {}
    """Students that diverged and were stopped, and the step at which that was noticed."""
    train_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds spent on steps, in all sessions of the run."""
    bytes_read: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Bytes of shard files read, by all processes in all sessions of the run."""
    best: dict[str, BestStudent] = {}
    """Best weights of each student so far."""
    files: dict[str, StoredFile] | None = None
    """Files of the students' weights and moments, by name. None means that a release that did not note them
    wrote this, or that nothing is written yet."""
    checksum: Sha256 | None = None
    """SHA-256 over the canonical JSON of all else. None means the same as for `files`."""

    def sealed(self, files: dict[str, StoredFile]) -> "RunState":
        """Return the state with the files that are written, and its checksum."""
        whole = self.model_copy(update={"files": files})
        return whole.model_copy(update={"checksum": _sum(whole)})

    def problem(self, name: str) -> str | None:
        """Return what is wrong with a state that was read from a folder of this name. None means nothing."""
        if self.checksum not in (None, _sum(self)):
            return "it is not what was written"
        if state_name(self.step) != name:
            return f"it is of step {self.step}"
        steps = (*self.diverged.values(), *(best.step for best in self.best.values()))
        return "it names a step that was not taken yet" if max(steps, default=0) > self.step else None

    def check(self, file: Path, *, arch: Sequence[str], steps: int) -> None:
        """Raise IdentityMismatchError if the state cannot belong to a run.

        Args:
            file: where it was read, for the message.
            arch: shapes of the run's students.
            steps: steps of the run.
        """
        others = {*self.diverged, *self.best} - {*arch}
        if others or len(self.diverged) >= len(arch) or self.step > steps:
            raise _unusable(file, ValueError("it is the state of another run"))


def _sum(state: RunState) -> str:
    return canonical_sha256(state.model_dump(mode="json", exclude={"checksum"}))


def save_checkpoint(
    folder: Path, trainers: Sequence[StudentTrainer], *, state: RunState, ranks: Ranks, keep: int
) -> None:
    """Write the state to a folder below `folder`, then remove all but the `keep` newest checkpoints.

    All processes of a run call this together.

    Raises:
        StorageError: the file system refused; older checkpoints are kept.
    """
    place = folder / state_name(state.step)
    new = folder / f".{place.name}{PARTIAL}"
    written: dict[str, StoredFile] = {}
    (is_there,) = ranks.sum([float(ranks.is_first and place.exists())])
    if is_there:  # an interrupt right after a checkpoint
        return
    with saving("write checkpoint in", folder):
        if ranks.is_first:
            for partial in folder.glob(f".step-*{PARTIAL}"):
                shutil.rmtree(partial, ignore_errors=True)
            new.mkdir(parents=True)
        ranks.barrier()
        if ranks.is_writer:
            for trainer in trainers:
                name = _file_name(trainer)
                written[name] = save_tensors(_tensors(trainer), new / name)
        files = ranks.union(written)
        ranks.barrier()
        if ranks.is_first:
            (new / _STATE).write_text(state.sealed(files).model_dump_json(), encoding="utf-8")
            sync_file(new / _STATE)
            sync_directories([new])
            new.rename(place)
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
        state = RunState.model_validate_json(bounded_bytes(file, _MAX_STATE_BYTES))
        problem = state.problem(checkpoints[-1].name)
    except (OSError, ValueError) as error:
        raise _unusable(file, error) from error
    if problem is not None:
        raise _unusable(file, ValueError(problem))
    return state


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
            stored = None if state.files is None else state.files.get(file.name)
            if state.files is not None and stored is None:
                raise ValueError(f"{_STATE} does not list it")
            _restore(trainer, load_tensors(file, _expected(trainer), stored=stored, device=device))
        except TENSOR_ERRORS as error:
            raise _unusable(file, error) from error


def save_best(folder: Path, trainer: StudentTrainer, step: int) -> StoredFile:
    """Write the weights of a student, which are its best so far, after a step; return what was written.

    Raises:
        StorageError: the file system refused.
    """
    file = _best_file(folder, trainer, step)
    with saving("write", file):
        folder.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}{PARTIAL}")
        new.unlink(missing_ok=True)
        stored = save_tensors(_weights(trainer), new)
        new.replace(file)
        sync_directories([folder])
    return stored


def drop_superseded(folder: Path, trainers: Sequence[StudentTrainer], state: RunState) -> None:
    """Remove weights that are no longer the best; a checkpoint that names the better ones must be written."""
    for trainer in trainers:
        best = state.best.get(trainer.shape.arch)
        for file in folder.glob(f"{arch_slug(trainer.shape.arch)}.*.safetensors") if best else ():
            if best and file != _best_file(folder, trainer, best.step):
                file.unlink()


def _best_file(folder: Path, trainer: StudentTrainer, step: int) -> Path:
    return folder / f"{arch_slug(trainer.shape.arch)}.{step:08d}.safetensors"


def load_best(folder: Path, trainer: StudentTrainer, state: RunState) -> None:
    """Load the best weights of a student so far.

    Raises:
        IdentityMismatchError: the file is damaged.
    """
    best = state.best.get(trainer.shape.arch)
    if best is None:
        raise _unusable(folder, ValueError(f"it names no best weights of {trainer.shape.arch}"))
    file = _best_file(folder, trainer, best.step)
    try:
        weights = load_tensors(file, _weights(trainer), stored=best.file)
    except TENSOR_ERRORS as error:
        raise _unusable(file, error) from error
    trainer.learner.load_state_dict(weights, strict=False)


def _unusable(file: Path, error: Exception) -> IdentityMismatchError:
    """Return the error of a file of a state; an older state that is there is named as a remedy."""
    state = next((path for path in (file, *file.parents) if path.name.startswith("step-")), None)
    older = [] if state is None else [each for each in state.parent.glob("step-[0-9]*") if each < state]
    remedy = "Remove the run's folder to start over, or choose another --out."
    if older:
        remedy = f"Remove {state}: the run then goes on from {max(older).name}. Or choose another --out."
    return IdentityMismatchError(f"checkpoint {file} cannot be used: {first_line(error)}. {remedy}")


def _checkpoints(folder: Path) -> list[Path]:
    """Return the folders of the states, the newest last.

    Raises:
        IdentityMismatchError: one is a link, which may lead out of the run.
    """
    states = sorted(folder.glob("step-[0-9]*"))
    linked = next((state for state in states if state.is_symlink()), None)
    if linked is not None:
        raise _unusable(linked, ValueError("it is a symbolic link"))
    return states


def _file_name(trainer: StudentTrainer) -> str:
    return f"{arch_slug(trainer.shape.arch)}.safetensors"


def _weights(trainer: StudentTrainer) -> dict[str, Tensor]:
    """Return weights by name; a weight that has several names is returned once."""
    weights = distinct_weights(trainer.learner)
    return {name: value.detach().contiguous() for name, value in weights.items()}


def _tensors(trainer: StudentTrainer) -> dict[str, Tensor]:
    tensors = {f"model/{name}": value for name, value in _weights(trainer).items()}
    for name, weight in trainer.learner.named_parameters():
        for key, value in trainer.optimizer.state.get(weight, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value.contiguous()
    return tensors


def _expected(trainer: StudentTrainer) -> dict[str, Tensor]:
    """Return tensors like those of a checkpoint: weights, and the moments of each trained one."""
    tensors = {f"model/{name}": weight for name, weight in _weights(trainer).items()}
    count = torch.zeros(())
    for name, weight in trainer.learner.named_parameters():
        if weight.requires_grad:
            moments = {"step": count, "exp_avg": weight, "exp_avg_sq": weight}
            tensors |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
    return tensors


def _restore(trainer: StudentTrainer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(trainer.learner.named_parameters())
    weights: dict[str, Tensor] = {}
    for path, value in tensors.items():
        kind, _, rest = path.partition("/")
        if kind == "model":
            weights[rest] = value
        else:
            name, _, key = rest.rpartition("/")
            trainer.optimizer.state[parameters[name]][key] = value
    trainer.learner.load_state_dict(weights, strict=False)
