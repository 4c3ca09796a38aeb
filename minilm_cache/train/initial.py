"""Initial weights of students: random weights, a teacher's layers, or the weights of another model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers import PreTrainedModel

from minilm_cache.errors import IdentityMismatchError, InvalidConfigError
from minilm_cache.models.files import weights_sha256
from minilm_cache.models.load import keep_layers, load_weights, locate_teacher
from minilm_cache.models.tap import Head
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import RunFolder, is_run

RANDOM: Final = "random"
TEACHER_LAYERS: Final = "teacher-layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """Gives students their initial weights."""

    name: str
    """`random`, or the source of the weights, named by their SHA-256."""
    folder: Path | None = None
    """Folder of a model, or of a run with students of the same shapes. None means that weights are drawn."""
    of_teacher: bool = False
    """True: the folder holds the teacher, and some of its layers are taken."""

    def begin(self, model: PreTrainedModel, arch: str, head: Head | None) -> None:
        """Give a student its initial weights; a head or pooler that the source lacks stays as drawn.

        `teacher-layers`: layer m of M begins with the teacher's layer m N / M of N, rounded down, as
        DistilBERT takes one layer out of two (arXiv 1910.01108, section 3).

        Raises:
            InvalidConfigError: the source does not fit the student.
            TeacherError: the folder holds no model.
        """
        if self.folder is None:
            return
        source, lacking = load_weights(_model_folder(self.folder, arch), head)
        if self.of_teacher:
            teacher_layers, student_layers = source.config.num_hidden_layers, model.config.num_hidden_layers
            if student_layers > teacher_layers:
                raise InvalidConfigError(
                    f"--init {TEACHER_LAYERS}: student {arch} has more layers than the "
                    f"teacher's {teacher_layers}."
                )
            kept_layers = [number * teacher_layers // student_layers for number in range(student_layers)]
            source = keep_layers(source, kept_layers)
        problem = _first_difference(model, source, lacking)
        if problem is not None:
            raise InvalidConfigError(
                f"--init {self.folder}: {problem} is not of the same shape there as in student {arch}, or "
                "not in both. Take a model of the student's family and shape."
            )
        kept = {name: value for name, value in source.state_dict().items() if name not in lacking}
        model.load_state_dict(kept, strict=False)


def _first_difference(model: PreTrainedModel, source: PreTrainedModel, lacking: frozenset[str]) -> str | None:
    """Return the first weight, or the number of heads, that differs. None means that the models fit."""
    student_weights, source_weights = model.state_dict(), source.state_dict()
    for name in [*student_weights, *source_weights]:
        if name not in student_weights or name not in source_weights:
            return name
        if name not in lacking and student_weights[name].shape != source_weights[name].shape:
            return name
    if source.config.num_attention_heads != model.config.num_attention_heads:
        return "the number of heads"
    return None


def initial_weights(config: TrainConfig, manifest: CacheManifest) -> InitialWeights:
    """Return the initial weights of a run's students.

    Raises:
        InvalidConfigError: there is no such folder.
        IdentityMismatchError: `--init-teacher` is not the teacher that the cache was dumped from.
        TeacherError: there is no such teacher.
    """
    if config.init == RANDOM:
        return InitialWeights(name=RANDOM)
    if config.init == TEACHER_LAYERS:
        assert config.init_teacher is not None
        source = locate_teacher(config.init_teacher)
        sha256 = weights_sha256(source.folder)
        expected = manifest.identity.teacher.weights_sha256
        if sha256 != expected:
            raise IdentityMismatchError(
                f"--init-teacher {config.init_teacher} (weights {sha256[:12]}) is not the teacher of this "
                f"cache ({manifest.labels.teacher}, weights {expected[:12]}). Give that teacher."
            )
        return InitialWeights(name=f"{TEACHER_LAYERS}-{sha256}", folder=source.folder, of_teacher=True)
    folder = Path(config.init)
    if not folder.is_dir():
        raise InvalidConfigError(
            f"--init {config.init}: there is no such folder. Give {RANDOM}, {TEACHER_LAYERS}, or the folder "
            "of a model or of a run."
        )
    return InitialWeights(name=_hash_of(folder, config.arch), folder=folder)


def _hash_of(folder: Path, arch: Sequence[str]) -> str:
    folders = [_model_folder(folder, shape) for shape in arch]
    return canonical_sha256([weights_sha256(model_folder) for model_folder in folders])


def _model_folder(folder: Path, arch: str) -> Path:
    """Return the folder of a run's student of this shape, or the folder itself if it is not a run."""
    if not is_run(folder):
        return folder
    student_folder = RunFolder(path=folder).student(arch)
    if not student_folder.is_dir():
        raise InvalidConfigError(
            f"--init {folder}: this run has no student {arch}. Give a run with students of the same shapes."
        )
    return student_folder
