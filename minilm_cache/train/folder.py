"""The layout of a run's folder; no other module knows it."""

from dataclasses import dataclass
from pathlib import Path

RUN_FILE = "run.json"
"""File name of the run's record."""


def arch_slug(arch: str) -> str:
    """Return a shape as part of a path."""
    return arch.replace(":", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The files and folders of a run."""

    path: Path
    """The folder itself."""

    @property
    def record(self) -> Path:
        """The run's record, `run.json`; a folder without it is not a run."""
        return self.path / RUN_FILE

    @property
    def log(self) -> Path:
        """Training losses and held-out figures, one JSON object per line."""
        return self.path / "log.jsonl"

    @property
    def lock(self) -> Path:
        """Lock file that the process that trains here holds."""
        return self.path / ".run.lock"

    @property
    def checkpoints(self) -> Path:
        """Folder of the states that a run resumes from."""
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """Folder of the weights with the least held-out loss so far."""
        return self.path / "best"

    def student(self, arch: str) -> Path:
        """Return the folder of a trained student, a Hugging Face model."""
        return self.path / "students" / arch_slug(arch)


def state_name(step: int) -> str:
    """Return the name of the folder with the state after a step."""
    return f"step-{step:08d}"


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return RunFolder(path=folder).record.is_file()


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of the runs right below a folder, in the order of their names."""
    return sorted(record.parent for record in folder.glob(f"*/{RUN_FILE}"))
