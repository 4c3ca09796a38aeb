"""Complete runs, opened with the caches that they were trained from."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from transformers import PreTrainedConfig

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import (
    CacheNotFoundError,
    IdentityMismatchError,
    InvalidConfigError,
    MiniLMCacheError,
)
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.load import read_config
from minilm_cache.models.student import student_config, teacher_config
from minilm_cache.objectives.check import Objective, choose_objective, live_objective
from minilm_cache.objectives.config import ObjectiveConfig, split_into
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.storage_schema.states import LABELS, LOGITS, POOLED, SignalName, StateFamily
from minilm_cache.store.reader import read_manifest
from minilm_cache.store.urls import is_url, without_secrets
from minilm_cache.train.folder import TEACHER_CACHE, VIA, RunFolder, is_run, rounds_of, runs_of
from minilm_cache.train.record import ANOTHER_MODEL, FEW_HELD_OUT, RunRecord, StudentRecord, load_record
from minilm_cache.train.students import refuse_other_weights
from minilm_cache.wording import Described, counted, printable, some_of

_COMPARED_SETTINGS: Final = {"arch", "objective", "relation_heads", "query_key_relations"}
"""Settings of a run that also decide by which relations its students are compared with the teacher."""


_DIGEST: Final = "-(?=[0-9]*[a-f])[0-9a-f]{8}"
"""Begin of a SHA-256; eight decimal digits may be a date of the user's."""
_OF_ASSISTANT: Final = re.compile(rf"({VIA}\d.*?){_DIGEST}(?=-|$)")
"""Digest in the name of an assistant's cache, and of passes over it."""
_OF_PASS: Final = re.compile(rf"(.){_DIGEST}$")
"""Digest at the end of a pass's name."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Student(Described):
    """A trained student of a run: a Hugging Face folder and its record."""

    path: Path
    """Folder that `AutoModel.from_pretrained` opens."""
    record: StudentRecord
    objective: str
    """Name of the objective that it was trained with."""

    @property
    def arch(self) -> str:
        """Shape of the student, like `3x384`."""
        return self.record.arch

    def describe(self) -> dict[str, object]:
        """Return the lines of its description, by the names that people read."""
        before, after = self.record.held_out_before or {}, self.record.held_out_after or {}
        changes = [f"{part} {before[part]:.4f} -> {after[part]:.4f}" for part in before if part in after]
        return {
            "student": self.arch,
            "parameters": f"{self.record.num_parameters:,}",
            "objective": self.objective,
            "held-out loss": ", ".join(changes) or "nothing held out",
            "folder": self.path,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainedRun(Described):
    """A complete run and the cache that it was trained from."""

    path: Path
    record: RunRecord
    cache: Cache
    reference: Cache
    """Cache whose teacher the students are compared with: the run's own, or in a chain the first one."""
    layer: int | None
    """Layer of the reference's teacher that they are compared with. None means its last layer."""
    name: str
    """Name of the cache in tables and figures."""
    label: str
    """Name of the run in figures."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        cache_place: str | None = None,
        home: Path | None = None,
        name: str | None = None,
        reference: Path | None = None,
        reference_layer: int | None = None,
    ) -> "TrainedRun":
        """Open a run.

        Args:
            path: folder of the run.
            cache_place: folder or URL of its cache. None means the folder where it was when the run began.
            home: folder for local copies of caches at URLs. None means MINILM_CACHE_HOME.
            name: name of the cache in tables. None means the last part of its path or URL.
            reference: cache whose teacher the students are compared with. None means the run's own cache.
            reference_layer: layer of that teacher. None means its last layer.

        Raises:
            InvalidConfigError: the folder holds no run, or its cache is at a URL not given by the caller.
            IdentityMismatchError: the run is not complete, or the cache is another one.
            MiniLMCacheError: the cache cannot be opened.
        """
        folder = Path(path)
        record = load_record(folder)
        if not record.complete:
            raise IdentityMismatchError(
                f"run {folder} is not complete. Finish it with the command that began it; it resumes."
            )
        refuse_other_weights(folder, record)
        place = cache_place or record.cache
        if cache_place is None and is_url(place):
            raise InvalidConfigError(
                f"run {folder} says that its cache is at {without_secrets(place)}, but a URL from a run is "
                "not opened by itself. Give it by --cache if you trust it."
            )
        if cache_place is None and not Path(place).exists():
            raise CacheNotFoundError(
                f"the cache {place}, from which run {folder} was trained, is not there. Give its place by "
                "--cache."
            )
        cache = open_cache(place, home=home)
        if cache.manifest.fingerprint != record.identity.fingerprint:
            raise IdentityMismatchError(
                f"{place} is not the cache that run {folder} was trained from "
                f"(fingerprint {record.identity.fingerprint[:12]}). Give that one by --cache."
            )
        compared = cache if reference is None else open_cache(reference)
        is_same = compared.manifest.fingerprint == cache.manifest.fingerprint
        return cls(
            path=folder,
            record=record,
            cache=cache,
            reference=compared,
            layer=record.identity.teacher_layer if is_same else reference_layer,
            name=printable(name or Path(str(place).rstrip("/")).name),
            label=printable(folder.name),
        )

    def describe(self) -> dict[str, object]:
        """Return the lines of its description, by the names that people read."""
        identity = self.record.identity
        return {
            "run": self.path,
            "objective": identity.objective,
            "students": ", ".join(student.arch for student in self.record.students),
            "steps": f"{identity.steps:,} of {identity.batch_size} sequences",
            "cache": self.name,
            "teacher": self.cache.manifest.labels.teacher,
        }

    def __len__(self) -> int:
        """Return the number of students that have weights."""
        return len(self.students)

    def __iter__(self) -> Iterator[Student]:
        """Yield the students that have weights."""
        for record in self.students:
            yield Student(path=self.folder(record), record=record, objective=self.record.identity.objective)

    def __getitem__(self, arch: str) -> Student:
        """Return the student of a shape.

        Raises:
            KeyError: the run has no student of this shape, or it diverged.
        """
        for student in self:
            if student.arch == arch:
                return student
        known = ", ".join(student.arch for student in self)
        raise KeyError(f"run {self.path} has no student {arch}; it has {known or 'none'}")

    @property
    def is_compared_with_own(self) -> bool:
        """True where students are compared with the teacher whose relations they learned."""
        return self.reference.manifest.fingerprint == self.cache.manifest.fingerprint

    @property
    def students(self) -> list[StudentRecord]:
        """Students that have weights: those that did not diverge."""
        return self.record.trained

    @property
    def objective(self) -> Objective:
        """Objective that students are compared by: relations of one layer, for every objective they learned.

        For `minilmv2` these are the relations that it learned. For every other objective they are attention
        distributions and value relations, and also query and key relations where those were learned.
        """
        return self._compared_by("minilmv2" if self.record.identity.objective == "minilmv2" else "minilm")

    @property
    def common_objective(self) -> Objective:
        """Attention and value at the teacher's heads, by which students of all objectives are compared."""
        return self._compared_by("minilm", relation_heads=None, query_key_relations=False)

    def _compared_by(self, objective: str, **changes: object) -> Objective:
        identity = self.record.identity
        settings = {**identity.model_dump(include=_COMPARED_SETTINGS), "objective": objective, **changes}
        arch = settings.pop("arch")
        config = ObjectiveConfig.model_validate({**settings, "teacher_layer": self.layer})
        if not self.reference.manifest.identity.has_relations:  # only a teacher that runs again has them
            return live_objective(config, self.reference, arch=arch)
        return choose_objective(config, self.reference, arch=arch)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of what a cache for its objective alone must hold, of the layers that this one has.

        Caches that it was trained from besides (`--also`) are not counted.
        """
        needs, measured = self.record.identity.spec.needs, self.cache.manifest.measured
        assert measured is not None
        asked = {
            POOLED.folder: needs.pooled,
            LABELS.folder: needs.labels,
            LOGITS.folder: needs.logits,
            SignalName(StateFamily.HIDDEN).folder: needs.hidden is not None,
            SignalName(StateFamily.MASKED).folder: needs.masked_hidden is not None,
            SignalName(StateFamily.FIRST).folder: needs.first is not None,
            **{SignalName(name).folder: True for name in needs.signals},
        }
        folders = {folder.removesuffix("/0") for folder, is_asked in asked.items() if is_asked}
        sizes = {state.path: state.bytes_per_token for state in measured.states or ()}
        relations = measured.bytes_per_token - sum(sizes.values())
        states = sum(size for path, size in sizes.items() if {path, path.rpartition("/")[0]} & folders)
        return states + (relations if needs.relations or needs.vectors else 0.0)

    @property
    def length(self) -> int:
        """Most tokens of a sequence."""
        return self.reference.manifest.identity.packing.max_length

    def folder(self, student: StudentRecord) -> Path:
        """Return a student's folder."""
        return RunFolder(path=self.path).student(student.arch)

    def config(self, student: StudentRecord) -> PreTrainedConfig:
        """Return the configuration of a student, built from its shape and the teacher's configuration.

        A student with another vocabulary, or cut from another model, has its own.
        """
        is_of_donor = student.init == ANOTHER_MODEL and self.record.init is None
        if student.diverged_at is None and (is_of_donor or not self.has_teachers_pieces):
            return read_config(self.folder(student))
        manifest = self.cache.manifest
        identity, heads = self.record.identity, manifest.identity.relation_heads
        split = split_into(identity.objective, identity.relation_heads, heads)
        shape = parse_arch(student.arch, heads, split_into=split, compares_heads=identity.spec.compares_heads)
        return student_config(shape, self.cache.reader.attachment(TEACHER_CONFIG), manifest)

    @property
    def has_teachers_pieces(self) -> bool:
        """Whether students read token ids of the cache: they have every piece of the teacher's vocabulary."""
        return self.record.identity.vocab is None

    def has_teachers_heads(self, student: StudentRecord, objective: Objective | None = None) -> bool:
        """Return whether a student's relations can be compared with the teacher's, head by head.

        Args:
            student: one of the run's students.
            objective: objective that it is compared by. None means `self.objective`.
        """
        split = (objective or self.objective).wanted.relation_heads is not None
        heads = self.reference.manifest.identity.relation_heads
        return split or self.config(student).num_attention_heads == heads

    @property
    def teacher_config(self) -> PreTrainedConfig:
        """Configuration of the teacher that students are compared with."""
        return teacher_config(self.reference.reader.attachment(TEACHER_CONFIG), self.reference.manifest)


def open_runs(path: Path, *, cache_place: str | None = None, home: Path | None = None) -> list[TrainedRun]:
    """Open a run, or every complete run of a chain, a study or a search.

    Args:
        path: folder of a run, a chain, a study or a search.
        cache_place: folder or URL of the cache of a run, or the URL that runs of a study may name. None means
            the folders where their caches were when they began.
        home: folder for local copies of caches at URLs. None means MINILM_CACHE_HOME.

    Raises:
        InvalidConfigError: the folder holds no run, or one folder is given for the caches of several runs.
        MiniLMCacheError: same as for `TrainedRun.open`.
    """
    rounds, inner = rounds_of(path), runs_of(path)
    if complete := [run for run in rounds if load_record(run).complete]:
        return [TrainedRun.open(run, cache_place=cache_place, home=home) for run in complete]
    if is_run(path) or not (inner or rounds):
        return [TrainedRun.open(path, cache_place=cache_place, home=home)]
    if cache_place is not None and not is_url(cache_place):
        raise InvalidConfigError(
            f"--cache goes with one run, but {path} holds several. Leave it out, or give the URL that they "
            "name."
        )
    first = path / "caches" / TEACHER_CACHE
    reference = first if first.is_dir() else None
    opened = []
    layer: int | None = None
    for run in inner:
        record = load_record(run)
        if not record.complete:
            continue
        place = _cache_of(path, record)
        trusted = None if is_url(place) and place != cache_place else place
        of_teacher = path / "caches" / Path(record.cache).name.partition(VIA)[0]
        compared = of_teacher if VIA in Path(record.cache).name and of_teacher.is_dir() else reference
        trained = TrainedRun.open(run, cache_place=trusted, home=home, reference=compared)
        layer = trained.layer if trained.is_compared_with_own else layer
        opened.append(trained)
    if not opened:
        raise InvalidConfigError(f"no run in {path} is complete. Finish it with the command that began it.")
    return [run if run.is_compared_with_own else replace(run, layer=layer) for run in opened]


def _cache_of(path: Path, record: RunRecord) -> str:
    """Return the place of the cache of a run of a chain or a study.

    The folder may have been moved since the run began, and its caches with it. A cache of the same name that
    is not the run's is that of another run.
    """
    moved = path / "caches" / Path(record.cache).name
    if not moved.is_dir():
        return record.cache
    with suppress(MiniLMCacheError):
        is_other = read_manifest(moved).fingerprint != record.identity.fingerprint
        return record.cache if is_other and Path(record.cache).is_dir() else str(moved)
    return str(moved)  # it is damaged, which whoever opens it says


def with_short_names(runs: Sequence[TrainedRun]) -> list[TrainedRun]:
    """Return runs whose names have no digests of settings, where they stay apart without."""
    folders = folder_names([run.path for run in runs])
    names = _short([run.name for run in runs], _OF_ASSISTANT)
    labels = _short(folders.values(), _OF_ASSISTANT, _OF_PASS)
    return [replace(run, name=names[run.name], label=labels[folders[run.path]]) for run in runs]


def folder_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the names of folders, with those of the folders around them where several have one name."""
    counts = Counter(folder.name for folder in set(folders))
    return {
        folder: printable(folder.name if counts[folder.name] == 1 else "/".join(folder.resolve().parts[-2:]))
        for folder in folders
    }


def short_models(models: Iterable[str]) -> dict[str, str]:
    """Return short names of models by their names in evaluations, as `with_short_names` has them of runs."""
    parts = {model: model.rpartition("/") for model in models}
    runs = _short([run for run, _, _ in parts.values()], _OF_ASSISTANT, _OF_PASS)
    return {model: f"{runs[run]}{slash}{arch}" for model, (run, slash, arch) in parts.items()}


def cautions(runs: Sequence[TrainedRun]) -> list[str]:
    """Return what readers of a comparison must know: little or cut text, and students that ended worse."""
    lines = []
    caches = {(run.name, run.cache.manifest.fingerprint): run.cache.manifest for run in runs}
    for (name, _), manifest in caches.items():
        if manifest.num_held_out < FEW_HELD_OUT:
            held_out = counted(manifest.num_held_out, "held-out sequence")
            lines.append(f"{name}: {held_out}, too few to tell students apart. Give more text.")
        if manifest.cut is not None:
            lines.append(f"{name}: cut off {manifest.cut.in_words}.")
    texts = {
        (each.texts_sha256, each.identity.packing, each.identity.tokenizer_sha256)
        for each in (run.reference.manifest for run in runs)
    }
    if len(texts) > 1:
        lines.append(
            "Caches hold out other texts, or sequences of other lengths: compare KLs and losses within a "
            "cache only."
        )
    if rounded := _rounded_otherwise(runs):
        lines.append(
            f"Caches hold what students of {some_of(rounded)} learn, rounded within different bounds "
            "(--max-error, --min-cosine). Losses to what caches hold cannot be compared with each other. "
            "Scores can be, and so can cosines to the teacher's own vectors (in a study, or in a report with "
            "--teacher)."
        )
    worse = [
        f"{arch} of {run.label}"
        for run in runs
        for arch in run.record.ended_worse(run.cache.manifest.num_held_out)
    ]
    if worse:
        lines.append(
            f"These ended worse than with the weights that training began with: {some_of(worse)}. Give more "
            "steps, a lower rate, or more text."
        )
    return lines


def _rounded_otherwise(runs: Sequence[TrainedRun]) -> list[str]:
    """Return the objectives, in words, whose states several caches have rounded in other ways."""
    bounds: dict[str, set[tuple[float | None, float | None]]] = {}
    for run in runs:
        needs, states = run.record.identity.spec.needs, run.cache.manifest.identity.states
        is_hidden = needs.hidden is not None or needs.masked_hidden is not None
        if states is not None and (is_hidden or needs.pooled):
            least = states.pooled.min_cosine if needs.pooled and states.pooled is not None else None
            most = states.max_error if is_hidden else None
            bounds.setdefault(run.record.identity.in_words(), set()).add((most, least))
    return [objective for objective, found in bounds.items() if len(found) > 1]


def _short(names: Iterable[str], *digests: re.Pattern[str]) -> dict[str, str]:
    short = {name: name for name in names}
    for digest in digests:
        short = {name: digest.sub(r"\1", left) for name, left in short.items()}
    return short if len({*short.values()}) == len(short) else {name: name for name in short}
