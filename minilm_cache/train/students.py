"""The folders of a run's students: whether they are what the run has written."""

from pathlib import Path

from minilm_cache.errors import IdentityMismatchError, TeacherError
from minilm_cache.models.files import weight_files, weights_sha256
from minilm_cache.train.folder import RunFolder, rounds_of, runs_of
from minilm_cache.train.record import RunRecord, load_record
from minilm_cache.wording import some_of


def refuse_other_weights(folder: Path, record: RunRecord, arch: str | None = None) -> None:
    """Raise IdentityMismatchError for a student whose weights are not those that its run has written.

    Args:
        folder: folder of the run.
        record: record of the run. Students whose weights are gone are not looked at.
        arch: shape of the student that is looked at. None means all of them.
    """
    for student in record.students:
        path, expected = RunFolder(path=folder).student(student.arch), student.weights_sha256
        is_asked = arch in (None, student.arch) and expected is not None
        if is_asked and _has_weights(path) and weights_sha256(path) != expected:
            raise IdentityMismatchError(
                f"{path} has other weights than those that the run has written, so its recorded losses are "
                "not theirs. Put them back; or move that folder away and run the same `minilm-cache train` "
                "again, which writes it from the state that the run keeps."
            )


def refuse_unfinished(folder: Path, record: RunRecord) -> None:
    """Raise IdentityMismatchError for a run that has not written its students yet."""
    if not record.complete and lost_students(folder, record):
        raise IdentityMismatchError(
            f"run {folder} is not complete, and its students are not written yet. Finish it with the command "
            "that began it; it resumes."
        )


def finished_record(folder: Path) -> RunRecord:
    """Return the record of a run whose students are written, and have the weights that it has written.

    Raises:
        InvalidConfigError: the folder holds no run.
        IdentityMismatchError: the run is not complete, or a student has other weights.
    """
    record = load_record(folder)
    refuse_unfinished(folder, record)
    refuse_other_weights(folder, record)
    return record


def unfinished_in_words(folder: Path) -> str | None:
    """Return which runs of a chain, a study or a search are not complete. None means none, or all of them."""
    runs = [*runs_of(folder), *rounds_of(folder)]
    left = [run.name for run in runs if not load_record(run).complete]
    if not left or len(left) == len(runs):
        return None
    are = "is" if len(left) == 1 else "are"
    return f"{folder.resolve().name}: {some_of(left)} {are} not complete, and {are} left out"


def lost_students(folder: Path, record: RunRecord) -> list[Path]:
    """Return the folders that a complete run has written and that are gone, or have lost their weights."""
    paths = (RunFolder(path=folder).student(student.arch) for student in record.trained)
    return [path for path in paths if not _has_weights(path)]


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except TeacherError:
        return False
