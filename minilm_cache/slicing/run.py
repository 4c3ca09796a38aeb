"""Cuts a teacher to a shape, and writes the slice as a model that opens everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.arch import StudentShape, parse_arch
from minilm_cache.models.device import CPU, enough_memory
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import load_weights, read_config, take_settings
from minilm_cache.models.locate import TeacherSource, locate_teacher
from minilm_cache.models.pooling import copy_pooling, num_map_weights
from minilm_cache.models.student import build_student, shape_config
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import check_length
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.models.truncate import saving
from minilm_cache.relations.loss import relation_kl
from minilm_cache.relations.scores import DenseRows, Targets, relation_probs, relation_scores, row_mask
from minilm_cache.settings import SliceConfig, refuse_other_kind
from minilm_cache.slicing.forward import Calibration, check_text, num_tokens, of_corpus
from minilm_cache.slicing.parts import check_cut
from minilm_cache.slicing.slices import cut_weights
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.store.durable import new_folder, prepare_new
from minilm_cache.wording import Made

_KINDS = (RelationKind.ATTENTION, RelationKind.VALUE)
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SliceResult(Made):
    """A slice that was written."""

    path: Path
    """Folder of the model."""
    layers: tuple[int, ...]
    """The teacher's layers that were cut, counted from 0."""
    num_parameters: int
    teacher_parameters: int
    errors: tuple[float, ...]
    """Relative error of each hidden state on the text that was fitted to, that of the embeddings first."""
    kl: dict[RelationKind, float] | None
    """KL(teacher || slice) of the last layer's relations on further text, nats. None means that there was
    none, or that the two have different numbers of heads."""
    left_out: str | None = None
    """What of the teacher's pooling the slice lacks, and why. None means that it lacks nothing."""

    def describe(self) -> dict[str, object]:
        """Return the lines of its description, by the names that people read."""
        return {
            "model": self.path,
            "teacher's layers": ", ".join(map(str, self.layers)),
            "weights": f"{self.num_parameters:,} of {self.teacher_parameters:,}",
        }


def slice_teacher(config: SliceConfig, out: str | Path) -> SliceResult:
    """Cut a teacher to a shape, and write the model and its tokenizer.

    Args:
        config: the teacher, the shape and the text to fit to.
        out: new folder for the model; it must not exist.

    Raises:
        InvalidConfigError: the shape cannot be cut, the text is too short, or the folder exists.
        TeacherError: the teacher does not exist or cannot be loaded.
        CorpusError: the text cannot be read.
        StorageError: the folder cannot be written.
    """
    refuse_other_kind(config, SliceConfig)
    out = Path(out)
    source = locate_teacher(config.teacher, config.revision)
    teacher_config = read_config(source.folder)
    shape = parse_arch(config.arch, teacher_config.num_attention_heads, compares_heads=False)
    layers = check_cut(shape, teacher_config, config.layers, option="--layers")
    if shape.seed is not None:
        raise InvalidConfigError(f"--arch {config.arch}: a slice is not drawn. Leave out :s{shape.seed}.")
    prepare_new(out)
    fitted, checked = of_corpus(config, source.folder, num_tokens(teacher_config.hidden_size))
    check_text(sum(map(len, fitted)), shape.hidden_size)
    teacher, lacking = load_weights(source.folder)
    check_length(TappedModel(teacher), source.name, token=int(fitted[0][0]), max_length=max(map(len, fitted)))
    student_config = shape_config(shape, teacher_config.to_dict(), teacher_config.model_type)
    take_settings(student_config, teacher_config, layers)
    student = build_student(student_config, _SEED).eval()
    pad_token = teacher_config.pad_token_id or 0
    text = Calibration.of(fitted, pad_token)
    with enough_memory(CPU, "Take a smaller teacher, or cut it on a machine with more"):
        _, errors = cut_weights(teacher.eval(), student, lacking=lacking, layers=layers, text=text)
    same_heads = shape.num_heads == teacher_config.num_attention_heads
    kl = (
        last_layer_kl(teacher, student, Calibration.of(checked, pad_token))
        if checked and same_heads
        else None
    )
    result = SliceResult(
        path=out,
        layers=layers,
        num_parameters=student.num_parameters(),
        teacher_parameters=teacher.num_parameters(),
        errors=tuple(errors),
        kl=kl,
    )
    with saving("write", out), new_folder(out, replaces=False) as folder:
        student.save_pretrained(folder)
        load_tokenizer(source.folder).save_pretrained(folder)
        try:
            copy_pooling(source.folder, folder, student_config)
            if num_map_weights(folder) < num_map_weights(source.folder):
                widths = f"{teacher_config.hidden_size} dimensions, and not {shape.hidden_size}"
                result = replace(result, left_out=f"its linear maps (Dense) take {widths}")
        except TeacherError as error:  # it is not needed to begin students with
            result = replace(result, left_out=str(error))
        (folder / "README.md").write_text(_card(source, shape, result), encoding="utf-8")
    return result


@torch.no_grad()
def last_layer_kl(
    teacher: PreTrainedModel, student: PreTrainedModel, text: Calibration
) -> dict[RelationKind, float]:
    """Return KL(teacher || student) of the last layer's relations, means over heads and tokens, nats."""
    models = [TappedModel(model).eval() for model in (teacher, student)]
    totals = dict.fromkeys(_KINDS, 0.0)
    for ids, valid in zip(text.ids, text.valid, strict=True):
        lengths = valid.sum(1)
        inputs = Inputs(ids, lengths)
        theirs, mine = (model(inputs, Tap((model.num_layers - 1,))).vectors[0] for model in models)
        for kind in _KINDS:
            probs = relation_probs(theirs, kind, lengths)
            scores = relation_scores(mine, kind, row_mask(mine, kind, lengths))
            kl = relation_kl(scores, Targets(DenseRows(probs, is_causal=theirs.is_causal), None), lengths)
            totals[kind] += float(kl) * int(lengths.sum())
    return {kind: total / text.num_tokens for kind, total in totals.items()}


def _card(source: TeacherSource, shape: StudentShape, result: SliceResult) -> str:
    """Return the model card."""
    lines: Sequence[str] = [
        f"# {source.name}, cut to {shape.arch}",
        "",
        f"{result.num_parameters:,} of {result.teacher_parameters:,} parameters. Layers "
        f"{', '.join(map(str, result.layers))} of the teacher, counted from 0, were cut to this shape and "
        "fitted by least squares on a little text. This is not trained: distil or fine-tune it first.",
    ]
    if result.kl is not None:
        words = ", ".join(f"{kind} {kl:.4f}" for kind, kl in result.kl.items())
        lines = [
            *lines,
            "",
            f"KL(teacher, slice) of the last layer's relations on further text, nats: {words}.",
        ]
    if result.left_out is not None:
        lines = [*lines, "", f"Left out of the teacher's pooling: {result.left_out}"]
    return "\n".join([*lines, ""])
