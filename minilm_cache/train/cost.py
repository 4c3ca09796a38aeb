"""What a dump and trainings cost in operations, and in hours at a rate: arithmetic, before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from minilm_cache.models.arch import parse_arch
from minilm_cache.models.load import locate_teacher, read_config
from minilm_cache.models.size import model_size
from minilm_cache.models.student import shape_config
from minilm_cache.train.config import CostConfig
from minilm_cache.train.presets import with_preset

_PASSES: Final = 3
"""Of a training step, in forward passes: the backward pass is two (Kaplan et al. 2020, arXiv 2001.08361)."""
_SECONDS_PER_HOUR: Final = 3600
TERA: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one part of the work."""

    what: str
    flops: float
    hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a dump and of trainings from it."""

    flops_per_s: float
    is_measured: bool
    """That the teacher's forward pass reaches here; else it was given."""
    train_tokens: int
    """Of one student's training."""
    parts: list[Cost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Per token, up to where dump and training stop: layers and embeddings, not the loss."""

    teacher: float
    """Of a forward pass."""
    students: Mapping[str, float]
    """Of a step, by shape."""


def train_tokens(config: CostConfig, num_tokens: int, length: int) -> int:
    """Return the tokens that one training reads.

    Args:
        config: how long trainings are.
        num_tokens: tokens of the corpus.
        length: tokens of a sequence.

    Returns:
        Tokens; 0 where no training is estimated.

    Raises:
        InvalidConfigError: there is no recipe of this name.
    """
    if not config.arch:
        return 0
    if config.epochs is not None:
        return config.epochs * num_tokens
    recipe: Mapping[str, int] = with_preset(config.preset, {})
    return recipe["steps"] * recipe["batch_size"] * length


def operations(config: CostConfig, teacher: str, *, revision: str | None, length: int) -> Operations:
    """Return the operations per token of a dump and of students' training.

    Args:
        config: shapes of students.
        teacher: its name; no weights are loaded.
        revision: of a teacher from the hub.
        length: tokens of a sequence.

    Raises:
        TeacherError: there is no such teacher.
        InvalidConfigError: a shape that cannot be, or no such recipe.
    """
    train_tokens(config, 1, length)
    own = read_config(locate_teacher(teacher, revision))
    students = {}
    for arch in config.arch:
        shape = parse_arch(arch, own.num_attention_heads)
        built = shape_config(shape, own.to_dict(), own.model_type)
        students[arch] = _PASSES * model_size(built, length).stopped_flops_per_token
    return Operations(teacher=model_size(own, length).stopped_flops_per_token, students=students)


def estimate(
    config: CostConfig, found: Operations, *, num_tokens: int, length: int, teacher_tokens_per_s: float
) -> Costs:
    """Return what a dump, each training, and each training with the teacher along cost.

    Args:
        config: how long trainings are, and the machine that is meant.
        found: operations per token.
        num_tokens: of the corpus.
        length: tokens of a sequence.
        teacher_tokens_per_s: of the teacher's forward pass here.
    """
    own = teacher_tokens_per_s * found.teacher
    rate = own if config.tflops is None else config.tflops * TERA
    num_read = train_tokens(config, num_tokens, length)

    def cost(what: str, flops: float) -> Cost:
        return Cost(what=what, flops=flops, hours=flops / rate / _SECONDS_PER_HOUR)

    parts = [cost("dump", found.teacher * num_tokens)]
    for arch, step in found.students.items():
        parts += [
            cost(f"train {arch}", step * num_read),
            cost(f"train {arch} with the teacher along", (step + found.teacher) * num_read),
        ]
    return Costs(flops_per_s=rate, is_measured=config.tflops is None, train_tokens=num_read, parts=parts)
