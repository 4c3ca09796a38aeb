"""The record of a run, `run.json`, and its log `log.jsonl`, with one line per logged step."""

import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, InvalidConfigError
from minilm_cache.objectives.config import ObjectiveFields
from minilm_cache.storage_schema.base import StoredModel, refuse_costly
from minilm_cache.storage_schema.identity import RelationKind, canonical_sha256
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.storage_schema.upgrades import OBJECTIVE_OF_RUNS, refuse_lacking
from minilm_cache.store.durable import bounded_bytes, regular_bytes, storage_errors, write_file
from minilm_cache.store.layout import described_otherwise
from minilm_cache.store.urls import without_secrets
from minilm_cache.train.config import FROM_TEACHER, RANDOM, TrainConfig
from minilm_cache.train.folder import RunFolder, arch_slug, is_run
from minilm_cache.train.sampler import StepPlan
from minilm_cache.wording import differing_values

ANOTHER_MODEL: Final = "another model"
"""What a student began with that was not cut from the cache's teacher."""
_MAX_RECORD_BYTES: Final = 2**20
_WORSE: Final = 1.05
FEW_HELD_OUT: Final = 4
"""Fewer held-out sequences than these say nothing about a student."""
MAX_LOG_BYTES: Final = 2**28
_LOG_END_BYTES: Final = 2**20
_LOG_END_LINES: Final = 1000
"""Bytes and lines of the end of a log that are looked at for the last step."""
Arch = Annotated[str, Field(max_length=96, pattern=r"^[0-9]+x[0-9]+(:[a-z]+[0-9]+)*$")]
"""A student's shape; it is part of the path of the student's folder."""
_Place = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
"""A folder or URL."""
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Share = Annotated[float, Field(ge=0, le=1)]
_OfLayers = dict[Annotated[str, Field(max_length=64)], list[bool | int | float | str | None]]
_Figures = dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_DERIVED: Final = frozenset(
    {"teacher_layer", "steps", "dropout", "batches", "frozen", "form", "num_parts", "precision", "init"}
    | {"vocab", "also", "own_labels"}
)
"""Fields of an identity whose value is not that of the setting with the same name."""


class RunIdentity(ObjectiveFields, StoredModel):
    """Everything that determines the students of a run; what they learn is the settings of the objective."""

    fingerprint: str
    """Fingerprint of the cache."""
    arch: Annotated[tuple[Arch, ...], Field(min_length=1, max_length=1024)]
    init: str = "random"
    """Initial weights of students: `random`, or the source of the weights, named by their SHA-256."""
    form: Literal["authors"] | None = None
    """`authors`: the loss of the published code. None means the paper's equation, or that there is no
    other."""
    steps: Annotated[int, Field(ge=1, lt=2**53)]
    batch_size: int
    lr: float
    warmup: float
    dropout: Literal["none"] | None = None
    """`none`: students are trained without dropout. None means with that of the teacher's configuration."""
    frozen: Literal["embeddings"] | None = None
    """`embeddings`: word embeddings are not trained. None means that all weights are."""
    vocab: Annotated[str, Field(pattern="^[0-9a-f]{12}$")] | None = None
    """Hash of the students' vocabulary: of some of the teacher's pieces, or of a donor's tokenizer. None
    means that they have the teacher's tokenizer."""
    batches: Literal["by-length", "by-query"] | None = None
    """Which sequences share a batch: `by-length`, those of about the same length; `by-query`, pairs of one
    query. None means that they come at random."""
    weight_decay: float
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    buffer_shards: int
    shard_tokens: int
    """Tokens of a shard of the cache; the order of sequences depends on it."""
    num_streams: int
    dealing: Literal["sequences"] | None = None
    """What an epoch deals to several streams. None means a single stream, or a run of the first releases,
    which dealt whole shards and so gave streams different numbers of epochs."""
    num_parts: int
    """Parts of a step; dropout is drawn for each of them."""
    precision: Literal["float32", "bfloat16"]
    max_grad_norm: float | None
    compiled: bool
    """True: layers are compiled, which draw other dropout."""
    eval_steps: int | None
    """Steps between evaluations on held-out sequences; the best weights become the student. None means an
    evaluation at the end alone."""

    sections: ClassVar[frozenset[str]] = frozenset(ObjectiveFields.model_fields) - OBJECTIVE_OF_RUNS | {
        "dealing",
        "dropout",
        "batches",
        "frozen",
        "vocab",
    }

    @model_validator(mode="after")
    def _is_whole(self) -> "RunIdentity":
        refuse_lacking(self.model_fields_set, OBJECTIVE_OF_RUNS)
        return self

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        manifest: CacheManifest,
        *,
        layer: int | None,
        steps: int,
        plan: StepPlan,
        precision: Literal["float32", "bfloat16"],
        init: str,
        vocab: str | None = None,
        also: tuple[str, ...] = (),
        own_labels: str | None = None,
    ) -> "RunIdentity":
        """Return the identity of a run with these settings on this cache.

        Args:
            config: settings of the run.
            manifest: manifest of the cache.
            layer: layer of the teacher, counted from 0. None means the layers of the map.
            steps: optimizer steps of the run.
            plan: parts and streams of a step.
            precision: precision of matrix products.
            init: name of the initial weights.
            vocab: hash of the pieces that students have. None means all.
            also: fingerprints of the caches of other teachers.
            own_labels: SHA-256 (hex) of labels of one's own. None means that there are none.
        """
        derived = {
            "fingerprint": manifest.fingerprint,
            "shard_tokens": manifest.shard_tokens,
            "teacher_layer": layer,
            "steps": steps,
            "num_streams": len(plan.streams),
            "dropout": "none" if config.dropout == "none" else None,
            "batches": None if config.batches == "shuffled" else config.batches,
            "frozen": "embeddings" if config.frozen == "embeddings" else None,
            "form": "authors" if config.form == "authors" else None,
            "dealing": "sequences" if len(plan.streams) > 1 else None,
            "num_parts": plan.num_parts,
            "precision": precision,
            "init": init,
            "vocab": vocab,
            "also": also,
            "own_labels": own_labels,
        }
        return cls(**{**cls.settings_of(config), **derived})

    @classmethod
    def settings_of(cls, config: TrainConfig) -> dict[str, Any]:
        """Return what settings alone say of a run, by field: all but what depends on cache and machine."""
        return {
            name: getattr(config, name)
            for name in cls.model_fields
            if name in TrainConfig.model_fields and name not in _DERIVED
        }

    def describes_layers(self) -> str:
        """Return what students learned from, in words: layers of a teacher, or its outputs."""
        return self.spec.describes_layers(self.layer_map, self.teacher_layer)

    def name(self) -> str:
        """Return the name of the run's folder: the shapes, for people, and a hash of the whole identity."""
        shapes = "_".join(map(arch_slug, self.arch))
        return f"{shapes[:64]}-{canonical_sha256(self.model_dump(mode='json'))[:12]}"


class StudentRecord(_Record):
    """One student of a run."""

    arch: Arch
    num_parameters: _Count
    init: str | None = None
    """What the student began with, as `--init` names it, or `another model`. None means a run of the first
    releases."""
    begun_with: str | None = None
    """The same in words. None means a run of the first releases."""
    of_layers: _OfLayers | None = None
    """Settings of its configuration that differ by layer, such as kinds of attention, with an entry for each
    layer. None means that its family has none, or an earlier release."""
    target: Literal["teacher", "stored rows"]
    """Target of the KL: the teacher, which unbiased rows estimate, or the stored rows, if they are biased."""
    held_out_before: _Figures | None
    """Losses of the initial weights on held-out sequences, by part of the objective; the part of a relation
    is KL(target || student), nats. None means that the cache has no held-out sequences."""
    held_out_after: _Figures | None = None
    """The same for the trained weights. None also means that the student is not trained yet, or diverged."""
    loss_before: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Held-out loss of the initial weights, weighted as in training. None means that nothing is held out."""
    loss_after: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The same of the trained weights. None also means that the student is not trained yet, or diverged."""
    best_step: _Count | None = None
    """Step whose weights the student has. None means the last step."""
    weights_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 (hex) of the weights in its folder. None means that it is not trained yet, that it diverged, or
    that an earlier release trained it."""
    diverged_at: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    """Step at which its loss or weights were seen to be NaN or infinite; it has no folder then. None means
    that it did not diverge."""

    @property
    def ended_worse(self) -> bool:
        """Whether its held-out loss ended more than a twentieth above that of its initial weights.

        Less than that is what the first steps of a training change either way.
        """
        if self.held_out_before is None or self.held_out_after is None:
            return False
        before, after = self.loss_before, self.loss_after
        if before is None or after is None:  # a run that an earlier release began
            before, after = sum(self.held_out_before.values()), sum(self.held_out_after.values())
        return after > _WORSE * before

    @property
    def ended_level(self) -> bool:
        """Whether its held-out loss ended no lower than that of its initial weights, and not much higher."""
        before, after = self.loss_before, self.loss_after
        return before is not None and after is not None and after >= before and not self.ended_worse


class VocabularyRecord(_Record):
    """The pieces that the students of a run have, and what they cover of its held-out sequences."""

    asked: _Place
    """Value of `--vocab`."""
    pieces: _Count
    of_pieces: _Count
    """Pieces of the teacher's tokenizer."""
    texts: _Share | None = None
    """Share of sequences all of whose pieces are kept. None means that nothing is held out."""
    tokens: _Share | None = None
    """Share of tokens whose pieces are kept. None means that nothing is held out."""
    unknown: _Share | None = None
    """Share of tokens that are unknown to students. None means that nothing is held out."""

    @property
    def in_words(self) -> str:
        """What is kept, for people."""
        kept = f"{self.pieces:,} of {self.of_pieces:,} pieces"
        if self.texts is None or self.tokens is None or self.unknown is None:
            return kept
        return (
            f"{kept}; of held-out sequences, {self.texts:.1%} are cut as before, {self.tokens:.2%} of tokens "
            f"are kept, {self.unknown:.2%} are unknown"
        )


class RunRecord(_Record):
    """The record of one run."""

    format: Literal["minilm-cache run 1"] = "minilm-cache run 1"
    identity: RunIdentity
    cache: _Place
    """Folder or URL of the cache when the run began."""
    init: _Place | None = None
    """Folder that `--init` named, absolute but in the first releases. None means that it named none."""
    init_recipe: Annotated[str, Field(pattern="^[0-9a-f]{12}$")] | None = None
    """`recipe` of the run that `init` names. None means that it names no run."""
    init_teacher: str | None = None
    """Value of `--init-teacher`. None means that it was not given."""
    init_layers: str | None = None
    """Value of `--init-layers`. None means that it was not given."""
    also: Annotated[tuple[_Place, ...], Field(max_length=16)] = ()
    """Folders or URLs of `--also` when the run began."""
    own_labels: _Place | None = None
    """File of `--own-labels` when the run began. None means that it was not given."""
    label_column: str | None = None
    """Value of `--label-column`. None means that there are no labels."""
    continued_at: tuple[_Count, ...] = ()
    """Steps at which the run was over and then went on, because a larger `--steps` was asked for. The
    learning rate then went on as in a run of the larger number of steps."""
    complete: bool
    """True: training is over, and the students' folders are written."""
    train_s: float | None = None
    """Seconds spent on steps. None means that the run is not complete."""
    bytes_read: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Bytes of shard files read by all processes, up to the last step. None means that the run is not
    complete."""
    vocabulary: VocabularyRecord | None = None
    """The pieces that students have. None means all of the teacher's."""
    students: Annotated[tuple[StudentRecord, ...], FailFast(), Field(min_length=1)]

    @property
    def recipe(self) -> str:
        """Hash of the identity without shapes and seed, which runs of several seeds share.

        Weights that are taken from a teacher follow from its name and the rest: their hash, which is over all
        shapes of a run, is left out, and the table says how each student began.
        """
        content = self.identity.model_dump(mode="json", exclude={"arch", "seed"})
        if self.init_recipe is not None:
            content["init"] = self.init_recipe  # the weights themselves differ by seed
        elif {student.init for student in self.students} <= {RANDOM, *FROM_TEACHER}:
            content["init"] = [self.init_teacher, self.init_layers]
        if self.continued_at:
            content["continued_at"] = self.continued_at
        return canonical_sha256(content)[:12]

    @property
    def trained(self) -> list[StudentRecord]:
        """Students that have weights in the end: those that did not diverge."""
        return [student for student in self.students if student.diverged_at is None]

    @property
    def diverged(self) -> list[str]:
        """Shapes of the students that diverged."""
        return [student.arch for student in self.students if student.diverged_at is not None]

    def ended_worse(self, num_held_out: int) -> list[str]:
        """Return the shapes of the students that ended worse than they began, as far as that can be told.

        Args:
            num_held_out: held-out sequences of the cache.
        """
        if num_held_out < FEW_HELD_OUT:
            return []
        return [student.arch for student in self.students if student.ended_worse]

    @model_validator(mode="after")
    def _students_are_the_runs(self) -> "RunRecord":
        if tuple(student.arch for student in self.students) != self.identity.arch:
            raise ValueError("students are not those of the identity")
        if self.identity.spec.is_relational:
            kinds = {str(kind) for kind in RelationKind}
            for student in self.students:
                if not {*(student.held_out_before or ()), *(student.held_out_after or ())} <= kinds:
                    raise ValueError(f"student {student.arch} has figures that are not of a relation")
        return self


class LogLine(BaseModel):
    """One line of the log."""

    model_config = ConfigDict(extra="ignore")

    step: Annotated[int, Field(ge=0, lt=2**53)]
    students: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Means of training losses since the previous line, by student and part; those of relations in nats."""
    held_out: dict[str, dict[str, float]] = Field(default_factory=dict)
    """The loss (weighted as in training) and its parts on held-out sequences, by student; the part of a
    relation is the KL, nats. Logs of the first releases have the parts alone."""


def measure_in_words(identity: RunIdentity, record: StudentRecord) -> str:
    """Return the words that introduce the held-out figures of a student."""
    if identity.spec.is_relational:
        return f"KL({record.target}, student), nats,"
    return f"Losses of {identity.objective} (lower is better)"


def has_trained_nothing(folder: Path, record: RunRecord) -> bool:
    """Return whether a run has no state, as where its tracker did not start: its folder is free."""
    return not record.complete and not any(RunFolder(path=folder).checkpoints.glob("*"))


def refuse_other_run(folder: Path, record: RunRecord, asked: Mapping[str, Any]) -> None:
    """Raise IdentityMismatchError if what a run was trained with is not what is asked now.

    Args:
        folder: folder of the run.
        record: record of the run.
        asked: fields of an identity; those that are left out are not compared.
    """
    there = {name: value for name, value in record.identity if name in asked}
    differing = list(differing_values(there, asked))
    if differing:
        names = {difference.partition(" ")[0] for difference in differing}
        hint = next((words for name, words in _HINTS_ON_OLDER_RUNS.items() if name in names), "")
        raise IdentityMismatchError(
            f"{folder} holds another run, which differs in {', '.join(differing)}.{hint} "
            "Choose another --out."
        )


_HINTS_ON_OLDER_RUNS: Final = {
    "fingerprint": " It was trained from another cache.",
    "form": " Runs of the first releases go on with --form paper.",
    "init": " Students of a complete run stay what they began with: name the same --init to see it again.",
    "dealing": " It was begun by a release that dealt shards to streams, and can only go on with that one.",
}
"""Hints to add to the message where a setting differs because a newer release changed its meaning."""


def write_record(folder: Path, record: RunRecord) -> None:
    """Write `run.json` to the run's folder, durably."""
    write_file(RunFolder(path=folder).record, record.model_dump_json(indent=1).encode())


def run_recipe(init: str | None) -> str | None:
    """Return the recipe of the run that `--init` names. None means that it names no run."""
    if init is None or not is_run(Path(init)):
        return None
    return load_record(Path(init)).recipe


_REMEDY: Final = "Remove the folder of the run to train it again, or give another folder."


def load_record(folder: Path) -> RunRecord:
    """Return the record of a run.

    Raises:
        InvalidConfigError: the folder holds no run.
        IdentityMismatchError: the record is damaged.
    """
    file = RunFolder(path=folder).record
    if not folder.exists():
        raise InvalidConfigError(f"there is no folder {folder}. Give that of a run, a chain or a study.")
    if not file.exists():
        raise InvalidConfigError(
            f"{folder} is not a run: {file.name} is "
            f"missing.{described_otherwise(folder) or ' Give a folder that train made.'}"
        )
    try:
        content = regular_bytes(file, _MAX_RECORD_BYTES + 1)
        refuse_costly(content, str(file))
        record = RunRecord.model_validate_json(content)
        others = tuple(map(without_secrets, record.also))
        return record.model_copy(update={"cache": without_secrets(record.cache), "also": others})
    except CacheCorruptError as error:
        raise IdentityMismatchError(f"{file} is damaged: it is not a record of a run. {_REMEDY}") from error
    except OSError as error:
        raise IdentityMismatchError(f"cannot read {file}: {error.strerror}. {_REMEDY}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise IdentityMismatchError(f"{file} is damaged: {problem}. {_REMEDY}") from error


def last_logged_step(folder: Path) -> int | None:
    """Return the last step in the log of a run, which another process may be writing. None means no step."""
    try:
        path = RunFolder(path=folder).log
        content = regular_bytes(path, _LOG_END_BYTES, first=max(0, path.stat().st_size - _LOG_END_BYTES))
    except (OSError, IdentityMismatchError):
        return None
    steps = map(_step_of, reversed(content.splitlines()[-_LOG_END_LINES:]))
    return next((step for step in steps if step is not None), None)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of the log. None means that it is none, as where a kill cut it short."""
    try:
        return LogLine.model_validate_json(line).step
    except ValidationError:
        return None


def _lines_up_to(content: bytes, last_step: int) -> list[bytes]:
    """Return the lines of a log up to a step; the log ends where a line is none."""
    steps = ((line, _step_of(line)) for line in content.splitlines())
    whole = takewhile(lambda known: known[1] is not None, steps)
    return [line for line, step in whole if step is not None and step <= last_step]


class TrainingLog:
    """Writer of `log.jsonl`; lines after the checkpoint that a run resumes from are dropped."""

    def __init__(self, folder: RunFolder, first_step: int) -> None:
        """Open the log of a run that has taken `first_step` steps."""
        self._path = path = folder.log
        with storage_errors("write", path):
            content = bounded_bytes(path, MAX_LOG_BYTES) if path.exists() else b""
            kept = _lines_up_to(content, first_step)
            write_file(path, b"".join(line + b"\n" for line in kept))
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, line: dict[str, object]) -> None:
        """Add a line."""
        with storage_errors("write", self._path):
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        with storage_errors("write", self._path):
            self._file.close()
