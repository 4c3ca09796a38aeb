"""The layout of a run's folder; no other module knows it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minilm_cache.errors import IdentityMismatchError, InvalidConfigError, TeacherError
from minilm_cache.models.locate import CONFIG
from minilm_cache.store.durable import linked_part
from minilm_cache.store.layout import described_otherwise

VIA: Final = "-via-"
"""Stands between the names of a cache and of the assistant whose relations a further cache of a study
holds."""
TEACHER_CACHE: Final = "0-teacher"
"""Folder of the cache in a chain whose teacher all students of the chain are compared with."""
SEARCH_RECORD: Final = "search.json"
"""File name of the record of a search."""
ROUND: Final = "round-"
"""Begin of the folders of the rounds of a search; their number follows."""
RUN_FILE = "run.json"
"""File name of the run's record."""
SUFFIX: Final = "-first"
"""End of the name of the first run's folder, behind that of the second."""
REMOVED = ".removed"
"""End of the hidden name that a folder has while it is removed."""


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
        return self._own("log.jsonl")

    @property
    def lock(self) -> Path:
        """Lock file that the process that trains here holds."""
        return self.path / ".run.lock"

    @property
    def checkpoints(self) -> Path:
        """Folder of the states that a run resumes from."""
        return self._own("checkpoints")

    @property
    def best(self) -> Path:
        """Folder of the weights with the least held-out loss so far."""
        return self._own("best")

    def student(self, arch: str) -> Path:
        """Return the folder of a trained student, a Hugging Face model."""
        return self._own(f"students/{arch_slug(arch)}")

    def _own(self, path: str) -> Path:
        """Return a path of the run, which is written, removed or listed.

        Raises:
            IdentityMismatchError: a part of it is a symbolic link, which may lead out of the run.
        """
        link = linked_part(self.path, path)
        if link is not None:
            raise IdentityMismatchError(
                f"{link} is a symbolic link, which no run has. Put the folder itself there, or choose "
                f"another --out."
            )
        return self.path / path


def state_name(step: int) -> str:
    """Return the name of the folder with the state after a step."""
    return f"step-{step:08d}"


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return RunFolder(path=folder).record.is_file()


def runs_in(folder: Path) -> list[Path]:
    """Return the runs right below a folder, and those of its chains, studies and searches, by path."""
    patterns = (f"*/{RUN_FILE}", f"*/runs/*/{RUN_FILE}", f"*/{ROUND}*/{RUN_FILE}")
    runs = {record.parent for pattern in patterns for record in folder.glob(pattern)}
    return sorted(run for run in runs if not run.name.endswith(REMOVED))


def runs_of(folder: Path) -> list[Path]:
    """Return the runs of a chain or a study, finished or not, without those that others began with."""
    return _without_first(folder.glob(f"runs/*/{RUN_FILE}"))


def rounds_of(folder: Path) -> list[Path]:
    """Return the runs of the rounds of a search, finished or not; empty for another folder."""
    if not (folder / SEARCH_RECORD).is_file():
        return []
    return _without_first(folder.glob(f"{ROUND}*/{RUN_FILE}"))


def _without_first(records: Iterable[Path]) -> list[Path]:
    runs = sorted(file.parent for file in records)
    names = {run.name for run in runs}
    return [run for run in runs if not (run.name.endswith(SUFFIX) and run.name.removesuffix(SUFFIX) in names)]


def refuse_no_models(folder: Path) -> None:
    """Raise TeacherError for a folder that holds neither a model nor runs."""
    if not (folder / CONFIG).is_file() and not is_run(folder) and not runs_of(folder):
        raise TeacherError(
            f"{folder} is neither a model nor a run: it has no {CONFIG} and no {RUN_FILE}."
            f"{described_otherwise(folder) or ' Name a folder that has one of them.'}"
        )


def refuse_run_as_teacher(names: Sequence[str]) -> None:
    """Raise InvalidConfigError if the first name, that of the teacher, is a run."""
    if names and (is_run(Path(names[0])) or runs_of(Path(names[0]))):
        raise InvalidConfigError(
            f"the first model is the teacher that the others are compared with, and {names[0]} is a run of "
            f"students. Name its teacher first, like: mini {names[0]}."
        )
