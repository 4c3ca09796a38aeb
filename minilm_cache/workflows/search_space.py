"""The shapes of a search: what training would make of them, and what they cost before any is trained."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import le
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.deploy.forms import FORMS, write_form
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import StudentShape
from minilm_cache.models.device import enough_memory
from minilm_cache.models.exported import FILES, IDS, MASK, SEGMENTS
from minilm_cache.models.files import distinct_weights
from minilm_cache.models.load import check_positions
from minilm_cache.models.pooling import projection_to
from minilm_cache.models.student import build_model, num_weights, seconds_in_turns, teacher_config
from minilm_cache.models.student_tokens import Vocabulary
from minilm_cache.models.tap import Head
from minilm_cache.models.vocabulary import trimmed_config
from minilm_cache.objectives.check import choose_objective
from minilm_cache.report.front import candidate_name
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.slicing.source import source_config
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.initial import initial_weights
from minilm_cache.train.setup import config_of, num_steps, refuse_other_texts, student_shapes
from minilm_cache.train.vocabulary import student_vocabulary
from minilm_cache.workflows.config import (
    SearchConfig,
    about,
    numbers_of,
    refuse_of_one_shape,
    vocabularies_of,
)

_LAYERS: Final = (2, 3, 4, 6, 9, 12)
_SHARES: Final = (0.25, 0.5, 0.75, 1.0)
"""Widths that are tried, as shares of the teacher's."""
_USUAL_RATIO: Final = 4
"""Size of the feed-forward network, in multiples of the width, of a shape that does not name it."""
_ANY: Final = "2x32"
"""Stands for shapes while settings are read that say which shapes there are."""
_FLOAT32_BYTES: Final = 4
_HEADER_UNIT: Final = 8
_TURNS: Final = 3
_REPEATS: Final = 7
_WEIGHT_STD: Final = 0.02
_TEACHER: Final = "teacher"
_PASS_LENGTH: Final = 128
_CHANGE_NO_STUDENT: Final = {
    *("checkpoint_steps", "device", "keep_checkpoints", "local_bytes", "max_hours", "tracker")
}
"""Settings of trainings that may differ between commands for the same search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a shape costs."""

    latency_ms: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A student that a search measures."""

    arch: str
    vocab: str | None
    """Value of `--vocab`. None means all pieces."""
    size: StudentShape
    config: PreTrainedConfig
    """Configuration that training gives it."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers, width, feed-forward size, width of the embeddings and pieces."""
        size = self.size
        tables = size.embedding_size or size.hidden_size
        return size.num_layers, size.hidden_size, size.ffn_size, tables, self.config.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The shapes of a search, and how they are measured."""

    config: SearchConfig
    train: Mapping[str, Any]
    cache: Cache
    last_steps: int
    shapes: Mapping[str, Shape]
    """What is measured, by `Candidate.name`."""
    vocabularies: Mapping[str | None, Vocabulary | None]
    """Pieces of each vocabulary, by the value of `--vocab`. None means all."""
    teacher: PreTrainedConfig
    head: Head | None
    """Head that students are saved with. None means that they have none."""

    @property
    def arch(self) -> tuple[str, ...]:
        """The shapes, each once."""
        return tuple(dict.fromkeys(each.arch for each in self.shapes.values()))

    @classmethod
    def of(cls, config: SearchConfig, train: Mapping[str, Any], cache: Cache, *, home: Path) -> "SearchSpace":
        """Return the shapes that a search measures, as training will make them.

        Args:
            config: budget, form and shapes.
            train: settings of `TrainConfig` that are given.
            cache: cache that the students learn from.
            home: folder of caches, runs and slices.

        Raises:
            InvalidConfigError: a setting does not go with a search, a shape is none, nothing is held out, or
                the cache does not serve the objective.
        """
        manifest = cache.manifest
        if not manifest.num_held_out:
            raise InvalidConfigError(
                "a search compares students on held-out sequences, and this cache has none. Dump more text."
            )
        teacher = teacher_config(cache.reader.attachment(TEACHER_CONFIG), manifest)
        given = validated(TrainConfig, {**train, "arch": (_ANY,)})
        source = source_config(given.init_teacher, teacher)
        archs = _archs(config, source, heads=manifest.identity.relation_heads)
        probe = validated(TrainConfig, {**train, "arch": tuple(archs)})
        refuse_of_one_shape(probe, sorted({depth for depth, _ in archs.values()}))
        objective = choose_objective(probe, cache, arch=probe.arch, home=home)
        with about("--arch", "--widths: shape", 1):
            sizes = {shape.arch: shape for shape in student_shapes(probe, objective)}
        begun = initial_weights(probe, cache, shapes=list(sizes.values()), head=objective.head, home=home)
        if begun.tokens is not None:
            raise InvalidConfigError(
                f"--init-teacher {probe.init_teacher} has another tokenizer than this cache, and rounds "
                "of a search go on from each other's weights. Search without it, or train shapes yourself."
            )
        shapes = {}
        vocabularies = _vocabularies(config, probe, cache)
        for vocab, chosen in vocabularies.items():
            with about("--vocab", "--vocabularies"):
                refuse_other_texts(cache, objective, chosen)
            for arch, size in sizes.items():
                described = config_of(size, cache, objective=objective, initial=begun.of[arch])
                kept = described if chosen is None else trimmed_config(described, chosen.kept)
                shapes[candidate_name(arch, vocab)] = Shape(arch=arch, vocab=vocab, size=size, config=kept)
        return cls(
            config=config,
            train=train,
            cache=cache,
            last_steps=num_steps(probe, manifest),
            shapes=shapes,
            vocabularies=vocabularies,
            teacher=teacher,
            head=objective.head,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What a search depends on, as JSON."""
        probe = validated(TrainConfig, {**self.train, "arch": self.arch})
        trained = probe.model_dump(mode="json", exclude=_CHANGE_NO_STUDENT)
        return {"search": self.config.model_dump(mode="json"), "train": trained}

    @property
    def pass_length(self) -> int:
        """Tokens of each text of a timed pass."""
        longest = self.cache.manifest.identity.packing.max_length
        return self.config.pass_length or min(_PASS_LENGTH, longest)

    def map_weights(self, name: str) -> int:
        """Return the weights of a student's linear map to the teacher's vectors; 0 where it needs none."""
        probe = validated(TrainConfig, {**self.train, "arch": (self.shapes[name].arch,)})
        pooled = self.cache.manifest.identity.pooled
        if not probe.spec.needs.pooled or pooled is None:
            return 0
        hidden_size = self.shapes[name].config.hidden_size
        if probe.also:  # students of several teachers keep a turned map of their own width
            return int(hidden_size**2)
        with torch.device("meta"):
            layers = projection_to(pooled.width, hidden_size)
        return sum(weight.numel() for layer in layers for weight in layer.parameters())

    def num_weights(self, name: str) -> int:
        """Return the weights that a student is saved with: of its model, its head and its linear map."""
        return num_weights(self.shapes[name].config, "sdpa", self.head) + self.map_weights(name)

    def is_covered(self, name: str, fitting: Sequence[str]) -> bool:
        """Return whether another one of these shapes is at least as large in everything."""
        mine = self.shapes[name].sizes
        others = (self.shapes[other].sizes for other in fitting)
        return any(other != mine and all(map(le, mine, other)) for other in others)

    def _file_bytes(self, shape: Shape) -> int:
        """Return the bytes of a student's weights as a file of safetensors, with its header."""
        with torch.device("meta"):
            model = build_model(shape.config, "sdpa", self.head)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        num_bytes = 0
        for name, weight in sorted(distinct_weights(model).items()):  # as such files have them
            end = num_bytes + _FLOAT32_BYTES * weight.numel()
            header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [num_bytes, end]}
            num_bytes = end
        length = len(json.dumps(header, separators=(",", ":")))
        return _HEADER_UNIT + -(-length // _HEADER_UNIT) * _HEADER_UNIT + num_bytes

    def measured(self, names: Sequence[str], session: Session) -> tuple[dict[str, Measured], float]:
        """Return latency and bytes of shapes with random weights, and the teacher's latency in torch, ms.

        A pass takes as long with any vocabulary, so that each shape is timed, and in memory, once.
        """
        with enough_memory(torch.device("cpu"), "Take a smaller --pass-texts or --pass-length"):
            return self._measured(names, session)

    def _measured(self, names: Sequence[str], session: Session) -> tuple[dict[str, Measured], float]:
        config, form = self.config, FORMS.get(self.config.runtime)
        answers = self.head == "sequences"  # no other head is exported
        ids = torch.full((config.pass_texts, self.pass_length), 1)
        values = {IDS: ids, MASK: torch.ones_like(ids), SEGMENTS: torch.zeros_like(ids)}
        passes: dict[str, Any] = {}
        num_bytes = {}
        session.progress.start("measure", len(names), "shapes")
        with tempfile.TemporaryDirectory() as scratch:
            for each in names:
                session.stop_if_asked("interrupted while shapes were measured. Run the same command again.")
                shape = self.shapes[each]
                is_timed = shape.arch in passes
                with torch.device("meta" if is_timed and form is None else "cpu"):
                    model = build_model(shape.config, "sdpa", self.head if answers else None).eval()
                    model.config.architectures = [type(model).__name__]  # as a saved model says it
                num_bytes[each] = self._file_bytes(shape)
                if not is_timed:
                    check_positions(model, model.config, name=each, ids=ids[:1], option="--pass-length")
                    passes[shape.arch] = partial(_run, model, values)
                if form is not None:
                    _draw_all(model)
                    folder = Path(scratch) / each.replace(":", "-").replace(" ", "")
                    folder.mkdir()
                    run, wanted = write_form(
                        model, folder, form, inputs=[values] * 2, name=each, reads_pairs=answers
                    )
                    if not is_timed:
                        passes[shape.arch] = partial(run, {name: values[name] for name in wanted})
                    file = (folder / FILES[form.runtime]).parent
                    num_bytes[each] = sum(part.stat().st_size for part in file.iterdir())
                session.progress.advance(1)
            teacher = build_model(self.teacher, "sdpa").eval()
            passes[_TEACHER] = partial(_run, teacher, values)
            seconds = seconds_in_turns(passes, torch.device("cpu"), _TURNS, repeats=_REPEATS)
        measured = {
            each: Measured(
                latency_ms=1e3 * seconds[self.shapes[each].arch],
                num_bytes=num_bytes[each] + _FLOAT32_BYTES * self.map_weights(each),
            )
            for each in names
        }
        return measured, 1e3 * seconds[_TEACHER]


@torch.no_grad()
def _draw_all(model: PreTrainedModel) -> None:
    """Draw every weight, as none is like another after training: a file stores equal biases once."""
    for weight in model.parameters():
        weight.normal_(std=_WEIGHT_STD)


def _archs(config: SearchConfig, source: PreTrainedConfig, *, heads: int) -> dict[str, tuple[int, int]]:
    """Return the layers and the width of all shapes, by the value of `--arch`.

    `source` is the configuration of the model that students are cut from. Widths that are not given are those
    that `heads` divides.

    Raises:
        InvalidConfigError: a value is none, or no embeddings are narrower than a shape.
    """
    depth, width = source.num_hidden_layers, source.hidden_size
    usual = [each for each in _LAYERS if each <= depth] or [depth]
    layers = numbers_of(config.layers, "--layers") or usual
    widths = numbers_of(config.widths, "--widths") or [
        round(share * width) for share in _SHARES if not share * width % heads
    ]
    tables = numbers_of(config.embedding_widths, "--embedding-widths")
    if tables and tables[0] >= max(widths):
        raise InvalidConfigError(
            f"--embedding-widths {config.embedding_widths}: none is below the shapes' widths, which "
            f"are at most {max(widths)}. Give smaller ones."
        )
    ratios = numbers_of(config.feed_forward, "--feed-forward")
    archs = {}
    for num_layers, size, ratio, table in product(layers, widths, ratios, [None, *tables]):
        if table is None or table < size:
            arch = f"{num_layers}x{size}" + ("" if ratio == _USUAL_RATIO else f":ff{ratio * size}")
            archs[arch + ("" if table is None else f":e{table}")] = num_layers, size
    return archs


def _vocabularies(
    config: SearchConfig, probe: TrainConfig, cache: Cache
) -> dict[str | None, Vocabulary | None]:
    """Return the vocabularies that differ, by the value of `--vocab`; None is all pieces.

    A cache has each piece once at most, so that large numbers of pieces may all mean the same ones.

    Raises:
        InvalidConfigError: there are fewer pieces than have to stay, or none may go.
    """
    found: dict[str | None, Vocabulary | None] = {}
    known: set[tuple[int, ...] | None] = set()
    for vocab in sorted(vocabularies_of(config), key=lambda name: name is not None):
        with about("--vocab", "--vocabularies"):
            chosen = student_vocabulary(probe.model_copy(update={"vocab": vocab}), cache)
        kept = None if chosen is None or len(chosen.kept) == chosen.pieces.size else chosen.kept
        if kept not in known:
            known.add(kept)
            found[vocab] = chosen
    return found


def _run(model: PreTrainedModel, values: Mapping[str, torch.Tensor]) -> object:
    return model(input_ids=values[IDS], attention_mask=values[MASK])
