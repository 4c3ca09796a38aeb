"""Relations of teacher and students on the same text, for people to look at (MiniLM, figures 1 to 3).

The teacher's are computed where it is at hand, of every layer; else they are what the cache holds, of the
layers that it holds. Long sequences run whole and are shown from their beginning: no row is made up.
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
from minilm_cache.models.load import load_tokenizer
from minilm_cache.models.tap import TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import relation_probs
from minilm_cache.report.compare import load_student
from minilm_cache.storage_schema.identity import RelationKind

KINDS: Final = (RelationKind.ATTENTION, RelationKind.VALUE)
MAX_SHOWN: Final = 64
"""Positions of a sequence, at most."""
_MAX_BYTES: Final = 900_000
"""Of all maps, a byte for each entry; base64 makes a third more of it."""

Maps = npt.NDArray[np.float32]
"""The beginning of one relation: `(layers, heads, shown, shown)`, 64 positions at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMaps:
    """What one model does with one text."""

    name: str
    note: str
    layers: tuple[int, ...]
    """Counted from 0."""
    relations: Mapping[RelationKind, Maps]

    @property
    def num_heads(self) -> int:
        """Heads of each layer."""
        return int(next(iter(self.relations.values())).shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One text and the relations of all models on it, the teacher first."""

    label: str
    tokens: tuple[str, ...]
    models: tuple[ModelMaps, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Texts to look at."""

    sequences: tuple[int, ...] = (0,)
    """Numbers among the held-out sequences, from 0."""
    texts: tuple[str, ...] = ()


def examples(
    cache: Cache, students: Sequence[tuple[str, Path]], *, teacher: Teacher | None, wanted: Wanted
) -> list[Example]:
    """Return relations of the teacher and of students on texts.

    Args:
        cache: whose teacher and held-out sequences these are.
        students: names and folders; they share the teacher's tokenizer.
        teacher: of that cache; none: what the cache holds of held-out sequences.
        wanted: which texts; texts of one's own only with a teacher (`page.check_page`).

    Raises:
        InvalidConfigError: there is no such sequence.
        TeacherError: a folder holds no student.
    """
    held_out = cache.manifest.num_held_out
    for number in wanted.sequences:
        if not 0 <= number < held_out:
            raise InvalidConfigError(
                f"--sequence {number}: the cache has {held_out} held-out sequences, counted from 0. "
                "Give one of them, or --text and --teacher."
            )
    tokenizer = load_tokenizer(students[0][1]) if teacher is None else teacher.tokenizer
    texts: list[tuple[str, int | None, Tensor]] = [
        (f"held-out sequence {number}", number, cache[cache.manifest.num_train + number].input_ids)
        for number in wanted.sequences
    ]
    most = cache.manifest.identity.packing.max_length
    for text in wanted.texts:
        ids = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")["input_ids"][0]
        texts.append((text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…", None, ids))
    models = [(name, load_student(folder, torch.device("cpu"))) for name, folder in students]
    found = []
    for label, at, ids in texts:
        first = _live(teacher, ids) if teacher is not None else _stored(cache, at or 0)
        own = [_of_model(name, "student", model=model, ids=ids) for name, model in models]
        found.append(Example(label=label, tokens=_words(tokenizer, ids), models=(first, *own)))
    return found


def _words(tokenizer: PreTrainedTokenizerFast, ids: Int[Tensor, " length"]) -> tuple[str, ...]:
    return tuple(map(str, tokenizer.convert_ids_to_tokens(ids.tolist())))


def _live(teacher: Teacher, ids: Int[Tensor, " length"]) -> ModelMaps:
    model = TappedModel(teacher.model)
    return _of_model(f"teacher {teacher.name}", "teacher, run again", model=model, ids=ids.to(teacher.device))


@torch.no_grad()
def _of_model(name: str, note: str, *, model: TappedModel, ids: Int[Tensor, " length"]) -> ModelMaps:
    layers = tuple(range(model.num_layers))
    lengths = torch.tensor([len(ids)], device=ids.device)
    vectors = model.tap(layers)(ids[None], torch.ones_like(ids)[None]).vectors
    relations = {
        kind: np.concatenate([_beginning(relation_probs(one, kind, lengths)) for one in vectors])
        for kind in KINDS
    }
    return ModelMaps(name=name, note=note, layers=layers, relations=relations)


def _beginning(probs: Float[Tensor, "layers heads query key"]) -> Maps:
    """Return the part of maps that is ever shown."""
    shown: Maps = probs[..., :MAX_SHOWN, :MAX_SHOWN].cpu().numpy()
    return shown


def _stored(cache: Cache, number: int) -> ModelMaps:
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


def packed(found: Sequence[Example]) -> dict[str, Any]:
    """Return examples as JSON for the page: an entry is one byte, 255 times the root of its probability.

    As many positions are kept as fit into 900 kB, 64 at most.
    """
    maps = sum(len(model.layers) * model.num_heads for one in found for model in one.models) * len(KINDS)
    most = min(MAX_SHOWN, math.isqrt(_MAX_BYTES // max(maps, 1)))
    blob = bytearray()
    described = []
    for one in found:
        shown = min(len(one.tokens), most)
        models = [_append(blob, model, shown) for model in one.models]
        described.append(
            {
                "label": one.label,
                "tokens": one.tokens[:shown],
                "length": len(one.tokens),
                "models": models,
            }
        )
    return {"examples": described, "kinds": list(KINDS), "blob": base64.b64encode(blob).decode()}


def _append(blob: bytearray, model: ModelMaps, shown: int) -> dict[str, Any]:
    offsets = {}
    for kind, maps in model.relations.items():
        offsets[str(kind)] = len(blob)
        blob += np.rint(255 * np.sqrt(np.clip(maps[..., :shown, :shown], 0, 1))).astype(np.uint8).tobytes()
    names = {"name": model.name, "note": model.note, "layers": model.layers}
    return {**names, "heads": model.num_heads, "offsets": offsets}
