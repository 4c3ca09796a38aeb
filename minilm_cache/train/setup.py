"""What a run begins with: its number of steps, and its students with their initial weights."""

import math
from collections.abc import Sequence

from minilm_cache.cache import Cache
from minilm_cache.models.arch import StudentShape, parse_arch
from minilm_cache.models.student import build_student, student_config
from minilm_cache.models.tap import TappedModel
from minilm_cache.objectives.check import Objective
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, CacheManifest
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import DEFAULT_EPOCHS, LEAST_STEPS, TrainConfig
from minilm_cache.train.initial import Beginnings, random_weights
from minilm_cache.train.memory import refuse_too_large
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.trainer import StudentTrainer, precision_of

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
    return [
        parse_arch(
            arch,
            heads,
            split_into=objective.wanted.relation_heads,
            compares_heads=config.spec.compares_heads,
        )
        for arch in config.arch
    ]


def build_trainers(
    config: TrainConfig,
    cache: Cache,
    *,
    shapes: Sequence[StudentShape],
    objective: Objective,
    steps: int,
    ranks: Ranks,
    beginnings: Beginnings | None = None,
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
    teacher_config = cache.reader.attachment(TEACHER_CONFIG)
    trainers = []
    for shape in shapes:
        seed = config.seed if shape.seed is None else shape.seed
        model_config = student_config(shape, teacher_config, manifest)
        if objective.num_classes is not None:
            model_config.num_labels = objective.num_classes
        initial = random_weights() if beginnings is None else beginnings.of[shape.arch]
        initial.adapt(model_config)
        model = build_student(model_config, seed, objective.head)
        initial.begin(model, objective.head)
        tapped = TappedModel(model).to(ranks.device)
        trainers.append(
            StudentTrainer(shape, tapped, config=config, objective=objective, steps=steps, ranks=ranks)
        )
    return trainers


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
