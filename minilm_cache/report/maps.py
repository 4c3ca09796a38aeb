"""Relations of teacher and students on the same text, shown as maps (MiniLM, figures 1 to 3).

Where the teacher is loaded, its relations are computed for every layer. Otherwise they are read from the
cache, for the layers that it holds. A long sequence runs through the models whole and only its beginning is
shown, so that every shown row is a part of a real one.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from minilm_cache.cache import Cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.relations.scores import relation_probs
from minilm_cache.report.compare import check_is_teacher_of, load_student
from minilm_cache.report.plots import Picture, attention_maps
from minilm_cache.report.runs import TrainedRun
from minilm_cache.storage_schema.identity import RelationKind

KINDS: Final = (RelationKind.ATTENTION, RelationKind.VALUE)
MAX_SHOWN: Final = 64
"""Most positions of a sequence that are shown."""
_MAX_BYTES: Final = 900_000
"""Most bytes of all maps together, one byte for each entry; base64 makes them a third longer."""

Maps = npt.NDArray[np.float32]
"""The beginning of one relation, `(layers, heads, shown, shown)`, with at most 64 positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMaps:
    """The relations of one model on one text."""

    name: str
    note: str
    """Where the maps come from, as the page shows it."""
    layers: tuple[int, ...]
    """Numbers of the layers, counted from 0."""
    relations: Mapping[RelationKind, Maps]

    @property
    def num_heads(self) -> int:
        """Number of heads of each layer."""
        return int(next(iter(self.relations.values())).shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One text and the relations of all models on it, the teacher first if its relations are known."""

    label: str
    tokens: tuple[str, ...]
    models: tuple[ModelMaps, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapTexts:
    """Texts whose maps are shown."""

    sequences: tuple[int, ...] = (0,)
    """Numbers of held-out sequences, counted from 0."""
    texts: tuple[str, ...] = ()
    """Texts of the user, which need a teacher."""


def check_sequences(cache: Cache, numbers: Sequence[int]) -> None:
    """Raise InvalidConfigError for a number that no held-out sequence of a cache has."""
    held_out = cache.manifest.num_held_out
    for number in numbers:
        if not 0 <= number < held_out:
            raise InvalidConfigError(
                f"--sequence {number}: the cache has {held_out} held-out sequences, counted from 0. "
                "Give one of them, or --text and --teacher."
            )


def examples(
    cache: Cache, students: Sequence[tuple[str, Path]], *, teacher: Teacher | None, map_texts: MapTexts
) -> list[Example]:
    """Return relations of the teacher and of students on texts.

    Args:
        cache: cache that was dumped from the teacher, with the held-out sequences.
        students: names and folders of students that share the teacher's tokenizer.
        teacher: teacher that the cache was dumped from. None means that its maps are read from the cache.
        map_texts: the texts; texts of the user need a teacher (`page.check_page`).

    Raises:
        InvalidConfigError: the cache has no held-out sequence of this number.
        TeacherError: a folder holds no student.
    """
    check_sequences(cache, map_texts.sequences)
    tokenizer = load_tokenizer(students[0][1], has_ends=False) if teacher is None else teacher.tokenizer
    texts: list[tuple[str, int | None, Tensor]] = [
        (f"held-out sequence {number}", number, cache[cache.manifest.num_train + number].input_ids)
        for number in map_texts.sequences
    ]
    most = cache.manifest.identity.packing.max_length
    for text in map_texts.texts:
        ids = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")["input_ids"][0]
        texts.append((text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…", None, ids))
    models = [(name, load_student(folder, torch.device("cpu"))) for name, folder in students]
    shown = []
    for label, sequence, ids in texts:
        # Texts that users give are single ones, also beside a cache of pairs.
        pair = None if sequence is None else cache.manifest.identity.packing.pair
        inputs = Inputs.full(ids[None]).paired(pair)
        expected = _teacher_maps(cache, teacher, inputs=inputs, sequence=sequence)
        learned = [_model_maps(name, "student", model=model, inputs=inputs) for name, model in models]
        shown.append(Example(label=label, tokens=_tokens(tokenizer, ids), models=(*expected, *learned)))
    return shown


def _tokens(tokenizer: PreTrainedTokenizerFast, ids: Int[Tensor, " length"]) -> tuple[str, ...]:
    return tuple(map(str, tokenizer.convert_ids_to_tokens(ids.tolist())))


def _teacher_maps(
    cache: Cache, teacher: Teacher | None, *, inputs: Inputs, sequence: int | None
) -> list[ModelMaps]:
    """Return the teacher's relations of a text, run again or as stored; none where none are stored."""
    if teacher is not None:
        return [_live_maps(teacher, inputs)]
    return [_stored_maps(cache, sequence or 0)] if cache.manifest.identity.has_relations else []


def _live_maps(teacher: Teacher, inputs: Inputs) -> ModelMaps:
    model, name = TappedModel(teacher.model), f"teacher {teacher.name}"
    return _model_maps(name, "teacher, run again", model=model, inputs=inputs.to(teacher.device))


@torch.no_grad()
def _model_maps(name: str, note: str, *, model: TappedModel, inputs: Inputs) -> ModelMaps:
    layers = tuple(range(model.num_layers))
    vectors = model(inputs, Tap(layers)).vectors
    relations = {
        kind: np.concatenate([_beginning(relation_probs(layer, kind, inputs.lengths)) for layer in vectors])
        for kind in KINDS
    }
    return ModelMaps(name=name, note=note, layers=layers, relations=relations)


def _beginning(probs: Float[Tensor, "layers heads query key"]) -> Maps:
    """Return the part of maps that can be shown, at most 64 positions."""
    shown: Maps = probs[..., :MAX_SHOWN, :MAX_SHOWN].cpu().numpy()
    return shown


def _stored_maps(cache: Cache, number: int) -> ModelMaps:
    sequence = cache[cache.manifest.num_train + number]
    relations = {
        kind: _beginning(torch.stack([sequence.relation(kind, layer) for layer in cache.layers]))
        for kind in KINDS
    }
    return ModelMaps(
        name=f"teacher {cache.manifest.labels.teacher}",
        note=f"teacher, as the cache holds it ({cache.manifest.identity.codec.name})",
        layers=cache.layers,
        relations=relations,
    )


def attention_figure(
    run: TrainedRun | str | Path, text: str, *, teacher: str, head: int | None = None
) -> Picture:
    """Draw how the last layers of a teacher and of a run's students attend on a text, side by side.

    Args:
        run: complete run, or its folder.
        text: the text, of which the first 64 tokens are shown.
        teacher: name or folder of the teacher that the run's cache was dumped from.
        head: number of the head, from 0 on. None means the mean over heads.

    Raises:
        InvalidConfigError: a model has no such head, or students have other pieces than the teacher.
        IdentityMismatchError: the cache was dumped from another teacher.
        TeacherError: the teacher does not exist.
    """
    run = run if isinstance(run, TrainedRun) else TrainedRun.open(run)
    if not run.has_teachers_pieces:
        raise InvalidConfigError(
            f"students of {run.path} do not have all pieces of the teacher's vocabulary, so that they would "
            "read other words in its token ids. Take a run without --vocab and without a donor's tokenizer."
        )
    loaded = Teacher(locate_teacher(teacher), torch.device("cpu"))
    check_is_teacher_of(loaded, run.reference)
    students = [(student.arch, run.folder(student)) for student in run.students]
    (shown,) = examples(
        run.reference, students, teacher=loaded, map_texts=MapTexts(sequences=(), texts=(text,))
    )
    fewest = min(model.num_heads for model in shown.models)
    if head is not None and not 0 <= head < fewest:
        raise InvalidConfigError(f"head {head}: give a number from 0 to {fewest - 1}, or none for the mean.")
    maps = {
        model.name: last.mean(0) if head is None else last[head]
        for model in shown.models
        for last in [model.relations[RelationKind.ATTENTION][-1]]
    }
    return attention_maps(maps, shown.tokens[:MAX_SHOWN])


def packed(shown_texts: Sequence[Example]) -> dict[str, Any]:
    """Return examples as JSON for the page: an entry is one byte, 255 times the root of its probability.

    As many positions are kept as fit into 900 kB, at most 64.
    """
    models_of_all = [model for example in shown_texts for model in example.models]
    maps = sum(len(model.layers) * model.num_heads for model in models_of_all) * len(KINDS)
    most = min(MAX_SHOWN, math.isqrt(_MAX_BYTES // max(maps, 1)))
    blob = bytearray()
    described = []
    for example in shown_texts:
        shown = min(len(example.tokens), most)
        models = [_append(blob, model, shown) for model in example.models]
        described.append(
            {
                "label": example.label,
                "tokens": example.tokens[:shown],
                "length": len(example.tokens),
                "models": models,
            }
        )
    return {"examples": described, "kinds": list(KINDS), "blob": base64.b64encode(blob).decode()}


def _append(blob: bytearray, model: ModelMaps, shown: int) -> dict[str, Any]:
    """Append a model's maps to the bytes, and return its description with the offsets of its maps."""
    offsets = {}
    for kind, maps in model.relations.items():
        offsets[str(kind)] = len(blob)
        blob += np.rint(255 * np.sqrt(np.clip(maps[..., :shown, :shown], 0, 1))).astype(np.uint8).tobytes()
    names = {"name": model.name, "note": model.note, "layers": model.layers}
    return {**names, "heads": model.num_heads, "offsets": offsets}
