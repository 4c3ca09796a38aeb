"""What a run begins with: its steps, the memory it needs, and its students with their initial weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from rich.filesize import decimal
from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.corpus.template import template_of
from minilm_cache.errors import DeviceError, InvalidConfigError
from minilm_cache.models.arch import StudentShape, parse_arch
from minilm_cache.models.device import free_bytes
from minilm_cache.models.inputs import query_numbers
from minilm_cache.models.student import (
    build_student,
    class_names,
    num_weights,
    shape_config,
    student_config,
    teacher_config,
)
from minilm_cache.models.student_tokens import StudentTokens, Vocabulary
from minilm_cache.models.tap import Head, TappedModel
from minilm_cache.models.vocabulary import trim_model, trimmed_config
from minilm_cache.objectives.check import Objective
from minilm_cache.slicing.slices import SliceSource
from minilm_cache.slicing.source import donor_config
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, CacheManifest
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.card import cached_tokenizer
from minilm_cache.train.config import DEFAULT_EPOCHS, LEAST_STEPS, TrainConfig
from minilm_cache.train.graph import Graphs
from minilm_cache.train.initial import Beginnings, InitialWeights, random_weights
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.trainer import StudentTrainer, precision_of

_WEIGHT_BYTES: Final = 12
"""Bytes of a weight and the two moments of AdamW, float32."""
_GRADIENT_BYTES: Final = 4
"""Bytes of the gradient of a weight, float32."""
_VECTORS: Final = 8
"""Vectors of the hidden size that a layer of BERT keeps of a token for its backward pass, without dropout."""
_LOOKED_AT: Final = 4096
"""Pairs that are looked at for a query with two documents; those of a query follow each other."""


def lower_bounds(shape: StudentShape, *, rows: int, length: int | float, bytes_each: int) -> tuple[int, int]:
    """Return lower bounds of a student's number of weights, and of the bytes that its forward pass keeps.

    Embeddings, losses, dropout, attention distributions and what libraries keep are not counted, and neither
    is the last layer, which objectives may stop in.

    Args:
        shape: shape of the student.
        rows: sequences that one backward pass is about.
        length: mean number of tokens of a sequence.
        bytes_each: bytes of a number that is kept for the backward pass.
    """
    width, layers = shape.bottleneck_size or shape.hidden_size, shape.num_layers - 1
    weights = layers * (4 * width * width + 2 * width * shape.ffn_size)
    of_token = _VECTORS * width + 2 * shape.ffn_size
    return weights, int(rows * length * layers * of_token * bytes_each)


def refuse_too_large(
    shapes: Sequence[StudentShape], *, rows: int, length: int | float, bytes_each: int, device: torch.device
) -> None:
    """Raise DeviceError for students that are surely too large for the free memory of a device.

    Args:
        shapes: shapes of the students of one process; their backward passes follow each other.
        rows: sequences that one backward pass is about.
        length: mean number of tokens of a sequence.
        bytes_each: bytes of a number that is kept for the backward pass; 0 with gradient checkpointing.
        device: device that computes.
    """
    bounds = [lower_bounds(shape, rows=rows, length=length, bytes_each=bytes_each) for shape in shapes]
    free = free_bytes(device)
    least = sum(_WEIGHT_BYTES * weights for weights, _ in bounds)
    # Gradients come while what the forward pass kept is freed, and go before the next student's pass.
    least += max((max(_GRADIENT_BYTES * weights, step) for weights, step in bounds), default=0)
    if free is not None and least > free:
        names = ", ".join(shape.arch for shape in shapes)
        raise DeviceError(
            f"{device} has too little memory: training {names} takes more than {decimal(least)}, and "
            f"{decimal(free)} are free. Take a smaller --arch or --batch-size, --accumulate or "
            "--gradient-checkpointing."
        )


_FIT_SEQUENCES = 2048
"""Training sequences that objectives' own weights are fitted to."""
_FIT_BATCH = 32


def num_steps(config: TrainConfig, manifest: CacheManifest) -> int:
    """Return the number of optimizer steps of a run."""
    if config.steps is not None:
        return config.steps
    epochs = config.epochs or DEFAULT_EPOCHS
    least = 1 if config.epochs else LEAST_STEPS
    return max(least, math.ceil(epochs * manifest.num_train / config.batch_size))


def student_shapes(config: TrainConfig, objective: Objective) -> list[StudentShape]:
    """Return the shapes of a run's students.

    Raises:
        InvalidConfigError: a shape is not valid, or does not fit the objective.
    """
    heads = objective.request.cache.manifest.identity.relation_heads
    if config.init_teacher is not None and not config.spec.compares_heads:
        heads = donor_config(config.init_teacher).num_attention_heads
    return [
        parse_arch(
            arch, heads, split_into=objective.wanted.relation_heads, compares_heads=config.spec.compares_heads
        )
        for arch in config.arch
    ]


def larger_than_teacher(config: TrainConfig, shapes: Sequence[StudentShape], cache: Cache) -> list[str]:
    """Return a sentence for each student that has more weights than the teacher, without its full stop.

    Args:
        config: settings of the run. Students with another table of words than the teacher's are not compared.
        shapes: shapes of the students.
        cache: cache that they learn from.
    """
    if config.vocab is not None or config.init_teacher is not None:
        return []
    document = cache.reader.attachment(TEACHER_CONFIG)
    teacher = teacher_config(document, cache.manifest)
    # Weights are counted where a shape may have more of them: counting makes models.
    depth, width = teacher.num_hidden_layers, teacher.hidden_size
    larger = [shape for shape in shapes if shape.num_layers > depth or shape.hidden_size > width]
    counts = {
        shape.arch: num_weights(student_config(shape, document, cache.manifest), "eager") for shape in larger
    }
    of_teacher = num_weights(teacher, "eager") if larger else 0
    return [
        f"{arch} has {count / of_teacher:.1f} times the weights of its teacher, so each step costs more than "
        "the teacher's own pass, and a student learns no more than what its teacher knows"
        for arch, count in counts.items()
        if count > of_teacher
    ]


def config_of(
    shape: StudentShape, cache: Cache, *, objective: Objective, initial: InitialWeights
) -> PreTrainedConfig:
    """Return the configuration of a student of a run, which has all pieces.

    Args:
        shape: shape of the student.
        cache: cache that it learns from.
        objective: the objective of the run.
        initial: initial weights of the student.

    Raises:
        InvalidConfigError: the family has no such shape.
        CacheCorruptError: the configuration in the cache is not that of the teacher.
    """
    document, donor = cache.reader.attachment(TEACHER_CONFIG), initial.donor
    config = (
        student_config(shape, document, cache.manifest)
        if donor is None
        else shape_config(shape, donor.to_dict(), donor.model_type)
    )
    if objective.head == "sequences" and objective.num_classes is not None:
        _name_classes(config, class_names(document, cache.manifest), objective.num_classes)
    initial.adapt(config)
    return config


def build_trainers(
    config: TrainConfig,
    cache: Cache,
    *,
    shapes: Sequence[StudentShape],
    objective: Objective,
    steps: int,
    ranks: Ranks,
    beginnings: Beginnings | None = None,
    tokens: StudentTokens | None = None,
    graphs: Graphs | None = None,
) -> list[StudentTrainer]:
    """Return students with their initial weights, which do not depend on the other students of the run.

    Args:
        config: settings of the run.
        cache: cache that the students learn from.
        shapes: shapes of the students to build.
        objective: the objective of the run.
        steps: optimizer steps of the whole run.
        ranks: the processes of the run.
        beginnings: initial weights of the students. None means random weights.
        tokens: how students read the sequences of the cache. None means that they read its token ids.
        graphs: graphs that take steps. None means that a device is given kernel by kernel.

    Raises:
        InvalidConfigError: the objective or the initial weights do not fit the shape of a student.
        DeviceError: the students are surely too large for the memory.
    """
    manifest = cache.manifest
    activation_bytes = 4 if precision_of(config, ranks.device) == "float32" else 2
    refuse_too_large(
        shapes,
        rows=config.batch_size // (config.accumulate * ranks.num_data),
        length=manifest.num_tokens / manifest.num_sequences,
        bytes_each=0 if config.gradient_checkpointing else activation_bytes,
        device=ranks.device,
    )
    trainers, shared = [], SliceSource()
    for shape in shapes:
        seed = config.seed if shape.seed is None else shape.seed
        initial = random_weights() if beginnings is None else beginnings.of[shape.arch]
        model_config = config_of(shape, cache, objective=objective, initial=initial)
        model = _begun(model_config, initial, tokens, seed=seed, head=objective.head, shared=shared)
        tapped = TappedModel(model).to(ranks.device)
        trainers.append(
            StudentTrainer(
                shape, tapped, config=config, objective=objective, steps=steps, ranks=ranks, graphs=graphs
            )
        )
    return trainers


def _begun(
    config: PreTrainedConfig,
    initial: InitialWeights,
    tokens: StudentTokens | None,
    *,
    seed: int,
    head: Head | None,
    shared: SliceSource,
) -> PreTrainedModel:
    """Return a student with its initial weights, and with no other pieces than it is to have."""
    kept = tokens.kept if isinstance(tokens, Vocabulary) else None
    if kept is not None and initial.is_trimmed:
        config, kept = trimmed_config(config, kept), None
    model = build_student(config, seed, head)
    initial.begin(model, head, shared)
    return model if kept is None else trim_model(model.eval(), kept)


def _name_classes(config: PreTrainedConfig, names: Mapping[int, str], num_classes: int) -> None:
    """Give a student as many classes as its teacher tells apart, with their names if these are known.

    One number is a value, which pipelines then return as it is, without a sigmoid.
    """
    config.num_labels = num_classes
    config.problem_type = "regression" if num_classes == 1 else None
    if names:
        config.id2label = dict(names)
        config.label2id = {name: number for number, name in names.items()}


def same_students(trainers: Sequence[StudentTrainer], config: TrainConfig) -> list[str]:
    """Return the names of students that would end as another one does: nothing of them is drawn.

    Args:
        trainers: students with their initial weights.
        config: settings of the run.
    """
    same, different = list[str](), list[StudentTrainer]()
    for trainer in trainers:
        shares = [value for name, value in trainer.model.model.config.to_dict().items() if "drop" in name]
        if config.dropout != "none" and any(isinstance(share, float) and share > 0 for share in shares):
            continue
        twin = next((other for other in different if _has_same_weights(other, trainer)), None)
        if twin is None:
            different.append(trainer)
        else:
            same.append(f"{trainer.shape.arch} as {twin.shape.arch}")
    return same


def _has_same_weights(one: StudentTrainer, other: StudentTrainer) -> bool:
    if [weight.shape for weight in one.trained] != [weight.shape for weight in other.trained]:
        return False
    return all(map(torch.equal, one.trained, other.trained))


def fit_objectives(trainers: Sequence[StudentTrainer], reader: BatchReader, num_train: int) -> None:
    """Fit the objectives' own weights to the untrained students, where objectives want that.

    Args:
        trainers: students with their initial weights.
        reader: reads batches for the objective.
        num_train: number of training sequences of the cache.
    """
    for trainer in trainers:
        objective = trainer.learner.objective
        if objective.is_fitted:
            batches = reader.batches_of(range(min(_FIT_SEQUENCES, num_train)), _FIT_BATCH)
            objective.fit(trainer.outputs(batches))


def refuse_other_texts(cache: Cache, objective: Objective, tokens: StudentTokens | None) -> None:
    """Raise InvalidConfigError for students that would not read in use what they learned of pairs of texts.

    These are bi-encoders whose tokenizer puts other tokens around a text alone: they learn it between the
    tokens that are before and after a pair. An objective that compares the documents of a query is refused
    where queries have one each.
    """
    pair = cache.manifest.identity.packing.pair
    if pair is None:
        return
    if objective.wanted.apart:
        read_as = pair if tokens is None else tokens.pair
        single = template_of(cached_tokenizer(cache.reader) if tokens is None else tokens.tokenizer)
        if read_as is None or (single.before, single.after) != (read_as.before, read_as.after):
            raise InvalidConfigError(
                "--encoder bi: the students' tokenizer puts other tokens around a text than a pair, so that "
                "bi-encoders would read other texts than they learned. Take --encoder cross."
            )
    looked_at = range(min(_LOOKED_AT, cache.manifest.num_train))
    if objective.wanted.groups and len(looked_at) > 1:
        rows = (segment.rows_of("tokens", number) for segment, number in cache.reader.sequences(looked_at))
        if len(query_numbers(rows, pair).unique()) == len(looked_at):
            raise InvalidConfigError(
                f"the first {len(looked_at):,} pairs of this cache have as many queries, and this "
                "objective compares the documents of a query. Dump queries with several documents "
                "(minilm-cache mine adds hard negatives), or take --objective score."
            )
