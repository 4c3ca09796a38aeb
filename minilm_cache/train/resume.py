"""What a run goes on with: an objective learned before, its folder, record, identity and initial weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.errors import DivergedError, IdentityMismatchError, InvalidConfigError
from minilm_cache.models.load import lists_of_layers, read_config
from minilm_cache.models.locate import CONFIG
from minilm_cache.models.tap import Head
from minilm_cache.objectives.check import choose_objective
from minilm_cache.slicing.slices import SliceSource
from minilm_cache.store.durable import is_vacant, refuse_file
from minilm_cache.store.layout import refuse_begun
from minilm_cache.train.checkpoint import load_state
from minilm_cache.train.config import RANDOM, SLICE, TrainConfig, check_parts, first_config, with_first
from minilm_cache.train.folder import SUFFIX, RunFolder, is_run, state_name
from minilm_cache.train.initial import Beginnings, InitialWeights, refuse_donor_of_first
from minilm_cache.train.ranks import refuse_ranks
from minilm_cache.train.record import (
    ANOTHER_MODEL,
    RunIdentity,
    RunRecord,
    StudentRecord,
    has_trained_nothing,
    load_record,
    refuse_other_run,
)
from minilm_cache.train.setup import num_steps, student_shapes
from minilm_cache.train.vocabulary import student_vocabulary


def recorded(
    config: TrainConfig, out: Path | None, *, identity: RunIdentity, beginnings: Beginnings, home: Path
) -> tuple[Path, RunIdentity, Beginnings]:
    """Return the folder of a run, its identity and its initial weights, as its record has them.

    Without `--init`, `--init-teacher` and `--init-layers`, an unfinished run goes on with what it began with:
    with random weights, as those of the first releases, or as a slice of a teacher that is not at hand any
    more. A complete run is shown again only where it began as it would by default, which is as a slice.
    """
    path = out or home / "runs" / identity.name()
    if config.names_beginning:
        return path, identity, beginnings
    older = identity.model_copy(update={"init": RANDOM})
    older_path = home / "runs" / older.name()
    if out is None and is_run(older_path) and _is_of_first_releases(load_record(older_path)):
        path = older_path
    if not is_run(path):
        return path, identity, beginnings
    record, folder = load_record(path), RunFolder(path=path)
    if record.init_teacher is not None and record.students[0].init == ANOTHER_MODEL:
        raise IdentityMismatchError(
            f"{path} holds students that were cut from another model. Repeat --init and --init-teacher "
            f"{record.init_teacher}, or choose another --out."
        )
    began_by_default = record.identity.init.startswith(f"{SLICE}-")
    is_unfinished = record.identity.init == RANDOM or load_state(folder.checkpoints).step > 0
    if not (began_by_default if record.complete else is_unfinished):
        return path, identity, beginnings
    begun = record.identity.init
    if begun == beginnings.name:
        return path, identity, beginnings
    kept = {student.arch: _KeptWeights.of(student, folder, begun) for student in record.students}
    return path, identity.model_copy(update={"init": begun}), Beginnings(of=kept, of_record=begun)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptWeights(InitialWeights):
    """Weights of a run that goes on without their source: its checkpoint has them."""

    folder: Path
    of_layers: Mapping[str, list[Any]] | None
    """See `StudentRecord.of_layers`."""

    @classmethod
    def of(cls, student: StudentRecord, folder: RunFolder, name: str) -> "_KeptWeights":
        """Return those of a student of a run, which began with weights of this name."""
        of_layers, trained = student.of_layers, folder.student(student.arch)
        if of_layers is None and (trained / CONFIG).is_file():  # an earlier release trained it
            config = read_config(trained)
            of_layers = lists_of_layers(config.to_dict(), config.num_hidden_layers)
        elif of_layers is None and name == RANDOM:  # layers are of the kinds that their places have
            of_layers = {}
        words = student.begun_with or student.init or name
        return cls(kind=RANDOM, name=name, in_words=words, folder=folder.path, of_layers=of_layers)

    def adapt(self, config: PreTrainedConfig) -> None:
        """Give layers the settings that they began with.

        Raises:
            IdentityMismatchError: they differ by layer, and nothing says how they did.
        """
        expected = lists_of_layers(config.to_dict(), config.num_hidden_layers)
        if expected and self.of_layers is None:
            raise IdentityMismatchError(
                f"{self.folder} began with {self.in_words}, in an earlier release, and nothing there says "
                f"which of its layers have which {' and '.join(expected)}. Give the teacher by "
                "--init-teacher, or choose another --out."
            )
        for name, values in (self.of_layers or {}).items():
            if name not in expected or len(values) != config.num_hidden_layers:
                raise IdentityMismatchError(
                    f"{self.folder}: of_layers of its record is not of these students."
                )
            setattr(config, name, list(values))

    def begin(self, model: PreTrainedModel, head: Head | None, shared: SliceSource) -> None:
        """Leave the weights as they are: the checkpoint replaces them."""


def _is_of_first_releases(record: RunRecord) -> bool:
    """Return whether a run is unfinished and of the first releases, whose default was random weights."""
    return not record.complete and record.students[0].init is None


def refuse_beginning(path: Path, config: TrainConfig, *, beginnings: Beginnings, resume: bool) -> None:
    """Raise the error of a run that cannot begin as requested, or not in this folder.

    Args:
        path: folder of the run.
        config: settings of the run.
        beginnings: what its students begin with.
        resume: whether the folder may exist.
    """
    if config.frozen == "embeddings":
        beginnings.refuse_random()
    refuse_file(path)
    if not resume:
        refuse_begun(path)


def read_record(folder: Path, identity: RunIdentity) -> RunRecord | None:
    """Return the record of a run's folder. None means that the folder is new.

    A run that is over and has fewer steps than the identity is returned as one that goes on.

    Raises:
        IdentityMismatchError: the folder holds another run, or something else.
    """
    if not is_run(folder):
        if folder.is_dir() and not is_vacant(folder, apart_from=RunFolder(path=folder).lock):
            raise IdentityMismatchError(f"{folder} is not empty and holds no run. Choose another --out.")
        return None
    record = load_record(folder)
    record = _continued(folder, record, identity) or record
    if record.identity != identity and has_trained_nothing(folder, record):
        return None
    refuse_other_run(folder, record, dict(identity))
    return record


def _continued(folder: Path, record: RunRecord, identity: RunIdentity) -> RunRecord | None:
    """Return the record of a run that is over and is to take more steps. None means that it is not to.

    Raises:
        IdentityMismatchError: the state of the run was not kept.
    """
    before = record.identity.steps
    longer = record.identity.model_copy(update={"steps": identity.steps})
    if not record.complete or longer != identity or identity.steps <= before:
        return None
    if not (RunFolder(path=folder).checkpoints / state_name(before)).is_dir():
        raise IdentityMismatchError(
            f"{folder} holds a run of {before:,} steps that is over, and the state of its last step is not "
            f"there (as with --keep-checkpoints 0). Go on from its students with --init {folder} and another "
            "--out."
        )
    changes = {"identity": identity, "complete": False, "continued_at": (*record.continued_at, before)}
    return record.model_copy(update=changes)


def check_first(config: TrainConfig, cache: Cache, *, out: Path | None, home: Path) -> None:
    """Check both objectives against the cache, before the first is trained.

    Raises:
        InvalidConfigError: the cache does not serve one of them, several processes train, or the second run
            is over and is to go on, and so would the first.
        IdentityMismatchError: students of the second run began after another number of steps of the first.
    """
    if out is not None and is_run(out) and config.first_steps is None:
        steps = load_record(out).identity.steps
        if steps != num_steps(config, cache.manifest):
            raise InvalidConfigError(
                f"{out} holds a run of {steps} steps. To go on with it, give --first-steps {steps}, too: "
                f"without it, students would also take more steps of {config.first}."
            )
    if out is not None and is_run(out):
        _refuse_other_first(config, cache, out)
    refuse_ranks("--first", "the two trainings wrote, the second with --init FIRST-RUN")
    check_parts(config)
    for checked in with_first(config):
        objective = choose_objective(checked, cache, arch=config.arch)
    refuse_donor_of_first(config, cache, student_shapes(config, objective), home=home)
    if config.vocab is not None:  # the first run has all pieces
        student_vocabulary(config, cache)


def _refuse_other_first(config: TrainConfig, cache: Cache, out: Path) -> None:
    """Raise IdentityMismatchError if the first run would go on after students of the second began with it."""
    begun = first_folder(out)
    if begun is None or not is_run(begun):
        return
    steps, asked = load_record(begun).identity.steps, num_steps(first_config(config), cache.manifest)
    if asked != steps:
        raise IdentityMismatchError(
            f"students in {out} began after {steps} steps of {config.first}, and {asked} are asked for. Give "
            f"--first-steps {steps}, or another --out."
        )


def first_folder(out: Path | None) -> Path | None:
    """Return the folder of the first run, next to that of the second. None means one named by content."""
    if out is None:
        return None
    place = out.resolve()
    return place.with_name(f"{place.name}{SUFFIX}")


def after_first(config: TrainConfig, record: RunRecord, path: Path) -> TrainConfig:
    """Return the settings of the second run, whose students begin as those of the first ended.

    Raises:
        DivergedError: a student diverged in the first run.
    """
    if record.diverged:
        raise DivergedError(
            f"student {', '.join(record.diverged)} diverged while it learned --first {config.first}, in "
            f"{path}. Leave it out, or take another --first."
        )
    return config.with_changes(
        first=None, first_steps=None, init=str(path), init_teacher=None, init_layers=None
    )
