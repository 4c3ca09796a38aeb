"""Slices of a cache's teacher: made once for each shape, kept in the home, and reused by every run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.models.arch import StudentShape
from minilm_cache.models.device import CPU, enough_memory
from minilm_cache.models.student import build_student
from minilm_cache.models.student_tokens import StudentTokens
from minilm_cache.models.tap import Head
from minilm_cache.models.truncate import saving
from minilm_cache.slicing.cut import Recipe, cut, cut_head
from minilm_cache.slicing.forward import Calibration, EncoderRun, num_tokens, of_cache, run_encoder
from minilm_cache.slicing.source import TeacherWeights
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.store.checked import sha256_file
from minilm_cache.store.durable import bounded_bytes, new_folder

_VERSION: Final = 1
"""Version of the recipe: slices of another version are not reused."""
_WEIGHTS: Final = "weights.safetensors"
_DOCUMENT: Final = "slice.json"
_SEED: Final = 0
"""Seed of what a slice has in addition to the teacher, such as further units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """A slice to be made or found: everything that determines its weights."""

    weights: TeacherWeights
    shape: StudentShape
    layers: tuple[int, ...]
    """The teacher's layer for each layer of the student, counted from 0."""
    recipe: Recipe
    cache: Cache
    head: Head | None
    tokens: StudentTokens | None = None
    """How a donor reads the sequences of the cache. None means that it has the tokenizer of the cache."""

    @property
    def key(self) -> str:
        """Hash of what determines the weights, hexadecimal."""
        identity, shape = self.cache.manifest.identity, self.shape
        text = identity.model_dump(mode="json", include={"corpus", "packing", "tokenizer_sha256"})
        sizes = (shape.num_layers, shape.hidden_size, shape.ffn_size, shape.num_heads, shape.embedding_size)
        recipe = [getattr(self.recipe, name) for name in Recipe.__slots__]
        teacher = [self.weights.sha256, identity.teacher.config_sha256]
        if self.weights.is_donor:
            teacher[1] = self.weights.config_sha256
        if self.tokens is not None:
            text["read_by"] = self.tokens.name
        return canonical_sha256(
            [_VERSION, teacher, sizes, self.layers, recipe, self.head, self.num_tokens, text]
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the slice is fitted to."""
        identity = self.cache.manifest.identity
        is_donor = self.weights.is_donor
        return num_tokens(self.weights.config.hidden_size if is_donor else identity.teacher.hidden_size)

    @property
    def in_words(self) -> str:
        """What is cut, for people."""
        if not self.recipe.cuts_layers:
            return f"random layers, and the embeddings of {self.weights.in_words}"
        layers = f"{'layer' if len(self.layers) == 1 else 'layers'} {', '.join(map(str, self.layers))}"
        return f"{layers}, cut to this shape, of {self.weights.in_words}"


class _Read(NamedTuple):
    """A teacher that has read the text that slices are fitted to."""

    teacher: PreTrainedModel
    lacking: frozenset[str]
    """Names of the teacher's weights that are random."""
    text: Calibration
    run: EncoderRun
    """What it gives at all layers."""

    @classmethod
    def of(cls, plan: SlicePlan, pad_token: int) -> "_Read":
        teacher, lacking = plan.weights.load(plan.head)
        packing = plan.cache.manifest.identity.packing
        sequences, pair = of_cache(plan.cache, plan.num_tokens), packing.pair
        if plan.tokens is not None:
            sequences = [plan.tokens.row(ids, packing.max_length) for ids in sequences]
            pair = plan.tokens.pair
        text = Calibration.of(sequences, pad_token, pair)
        return cls(
            teacher, lacking, text, run_encoder(teacher, text, range(teacher.config.num_hidden_layers))
        )


@dataclass(slots=True)
class SliceSource:
    """What the slices of one run are cut from, which all have the same teacher and text.

    The first slice that is made loads the teacher and lets it read the text, which takes half the time of a
    slice; the others use what it gave.
    """

    read: _Read | None = None

    def of(self, plan: SlicePlan, pad_token: int) -> _Read:
        """Return the teacher and what it gave, for a slice of the run.

        Raises:
            InvalidConfigError: the cache holds too few tokens to fit the slice to.
            TeacherError: the teacher cannot be loaded.
        """
        if self.read is None:
            self.read = _Read.of(plan, pad_token)
        return self.read


def has_slice(plan: SlicePlan, home: Path) -> bool:
    """Return whether this machine has a slice already."""
    return (_folder(plan, home) / _WEIGHTS).is_file()


def _folder(plan: SlicePlan, home: Path) -> Path:
    return home / "slices" / f"{plan.shape.num_layers}x{plan.shape.hidden_size}-{plan.key[:16]}"


def load_slice(
    plan: SlicePlan, home: Path, config: PreTrainedConfig, *, source: SliceSource
) -> dict[str, Tensor]:
    """Return the weights of a slice by name; they are made if this machine does not have them.

    Args:
        plan: the slice.
        home: folder of caches and runs; slices lie in its folder `slices`.
        config: configuration of the student.
        source: what all slices of the run are cut from.

    Raises:
        InvalidConfigError: the cache holds too few tokens to fit the slice to.
        TeacherError: the teacher cannot be loaded.
        StorageError: the file system refused.
    """
    folder = _folder(plan, home)
    known = _read(folder)  # before the lock, which another user's folder may not let us take
    if known is not None:
        return known
    with saving("write the slice", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            weights = _read(folder)
            if weights is None:
                weights, errors = _make(plan, config, source)
                with new_folder(folder) as new:
                    save_file(weights, new / _WEIGHTS)
                    (new / _DOCUMENT).write_text(
                        _document(plan, errors, sha256_file(new / _WEIGHTS)), encoding="utf-8"
                    )
            return weights


def _read(folder: Path) -> dict[str, Tensor] | None:
    """Return the weights of a slice. None means that it is missing or damaged, and is to be made."""
    try:
        sha256 = json.loads(bounded_bytes(folder / _DOCUMENT, 2**16))["sha256"]
        is_whole = sha256_file(folder / _WEIGHTS) == sha256
        return load_file(folder / _WEIGHTS) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError):
        return None


def _document(plan: SlicePlan, errors: Sequence[float], sha256: str) -> str:
    """Return what a slice is, as JSON: for people, and the SHA-256 that it is checked with."""
    content = {
        "arch": plan.shape.arch,
        "layers": plan.layers,
        "teacher_sha256": plan.weights.sha256,
        "relative_error_of_hidden_states": errors,
        "sha256": sha256,
    }
    return json.dumps(content, indent=1)


def _make(
    plan: SlicePlan, config: PreTrainedConfig, source: SliceSource
) -> tuple[dict[str, Tensor], list[float]]:
    """Cut a slice, and return the weights that come from the teacher, and the errors of its states."""
    with enough_memory(CPU, "Use --init random"):
        read = source.of(plan, config.pad_token_id or 0)
        return cut_weights(
            read.teacher,
            build_student(config, _SEED, plan.head).eval(),
            lacking=read.lacking,
            layers=plan.layers,
            text=read.text,
            head=plan.head,
            recipe=plan.recipe,
            run=read.run,
        )


def cut_weights(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    *,
    lacking: frozenset[str],
    layers: Sequence[int],
    text: Calibration,
    head: Head | None = None,
    recipe: Recipe | None = None,
    run: EncoderRun | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Cut a student, and return its weights that come from the teacher, and the errors of its states.

    A head for masked tokens is cut, too. A pooler, or a head for classes, is copied where it has the
    teacher's shapes, and stays as drawn elsewhere.

    Args:
        teacher: the teacher in evaluation mode.
        student: the student, whose weights are overwritten.
        lacking: names of the teacher's weights that are random.
        layers: the teacher's layer for each layer of the student.
        text: sequences to fit to.
        head: head of both. None means that they have none.
        recipe: choices of the fit. None means the defaults.
        run: what the teacher gives on the text, at the layers that are cut or at more. None means that it
            reads the text now.
    """
    drawn = {name: weight.clone() for name, weight in student.state_dict().items()}
    errors = cut(teacher, student, layers=layers, calibration=text, recipe=recipe, run=run)
    weights = student.state_dict()
    after = {}
    if recipe is None or recipe.cuts_layers:
        after = _after_the_encoder(teacher, student, lacking)
        student.load_state_dict(after, strict=False)
        if head == "tokens" and not lacking:
            cut_head(teacher, student, text)
    from_teacher = {
        name: weight.contiguous()
        for name, weight in weights.items()
        if name in after or not torch.equal(weight, drawn[name])
    }
    return _without_copies(from_teacher), errors


def _after_the_encoder(
    teacher: PreTrainedModel, student: PreTrainedModel, lacking: frozenset[str]
) -> dict[str, Tensor]:
    """Return the teacher's weights of pooler and head that have the student's shapes, by name."""
    parts = ("embeddings", "encoder.", "transformer.layer", "layers.", "final_norm")
    encoder = student.base_model_prefix
    shapes = {name: weight.shape for name, weight in student.state_dict().items()}
    return {
        name: weight
        for name, weight in teacher.state_dict().items()
        if shapes.get(name) == weight.shape
        and name not in lacking
        and not name.removeprefix(f"{encoder}.").startswith(parts)
    }


def _without_copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without those that share memory with an earlier one: a head's tied to the embeddings."""
    seen: dict[int, str] = {}
    for name, weight in weights.items():
        seen.setdefault(weight.data_ptr(), name)
    return {name: weights[name] for name in seen.values()}
