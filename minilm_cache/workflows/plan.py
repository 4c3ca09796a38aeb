"""Plans a dump: compares settings on a sample, and estimates the cost of the dump and of trainings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from minilm_cache.dump.config import DumpConfig, PlanConfig
from minilm_cache.dump.plan import Plan, PlannedSetting, plan
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.load import read_config
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.student import model_size, shape_config
from minilm_cache.objectives.spec import spec_of
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import validated
from minilm_cache.train.config import CostConfig, with_preset

_FORWARD_PASSES_PER_STEP: Final = 3
"""Cost of a training step in forward passes: the backward pass costs two (Kaplan et al. 2020, arXiv
2001.08361)."""
_SECONDS_PER_HOUR: Final = 3600
TERA: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one part of the work."""

    what: str
    """The part, for people: `dump`, `train ARCH`, ..."""
    flops: float
    """Floating point operations."""
    hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Cost of a dump and of trainings from it."""

    flops_per_s: float
    """Rate that hours are computed with, operations per second."""
    is_measured: bool
    """True: the rate is that of the teacher's forward pass on this machine. False: the rate was given."""
    train_tokens: int
    """Tokens that the training of one student reads."""
    parts: list[Cost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations per token of a dump and of training, up to where each of them stops; without the loss."""

    teacher: float
    """Operations per token of the teacher's forward pass."""
    timed: float
    """Operations per token of the pass that is timed: up to the teacher's last queries, keys and values."""
    students: Mapping[str, float]
    """Operations per token of a training step, by the shape of the student."""


def train_tokens(config: CostConfig, num_tokens: int, length: int) -> int:
    """Return the tokens that one training reads.

    Args:
        config: length of trainings.
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


def operations(config: CostConfig, dump: DumpConfig) -> Operations:
    """Return the operations per token of a dump and of students' training.

    Students are counted whole if one of the objectives that the cache is to serve needs their last outputs.

    Args:
        config: shapes of students.
        dump: teacher, length and what is stored; the teacher's weights are not loaded.

    Raises:
        TeacherError: there is no such teacher.
        InvalidConfigError: a shape is not valid, or there is no recipe of this name.
    """
    length = dump.max_length
    train_tokens(config, 1, length)
    teacher_config = read_config(locate_teacher(dump.teacher, dump.revision).folder)
    served = dump.serve or (("minilm",) if dump.codec != "none" else ())
    stops_early = bool(served) and all(spec_of(name).stops_early for name in served)
    students = {}
    for arch in config.arch:
        shape = parse_arch(arch, teacher_config.num_attention_heads)
        built = shape_config(shape, teacher_config.to_dict(), teacher_config.model_type)
        one_pass = model_size(built, length).pass_flops(stops_early=stops_early)
        students[arch] = _FORWARD_PASSES_PER_STEP * one_pass
    size = model_size(teacher_config, length)
    of_masked = dump.labels or dump.masked_hidden is not None
    masked = size.flops_per_token * (dump.maskings or 1) * of_masked
    others = dump.model_copy(update={"labels": False, "masked_hidden": None})
    has_plain = dump.codec != "none" or others.has_states
    teacher = masked + has_plain * size.pass_flops(stops_early=not others.has_states)
    return Operations(teacher=teacher, timed=size.stopped_flops_per_token, students=students)


def estimate(
    config: CostConfig, per_token: Operations, *, num_tokens: int, length: int, teacher_tokens_per_s: float
) -> Costs:
    """Return the costs of a dump, of each training, and of each training with the teacher run alongside.

    Args:
        config: length of trainings, and the rate of the machine.
        per_token: operations per token.
        num_tokens: tokens of the corpus.
        length: tokens of a sequence.
        teacher_tokens_per_s: tokens per second of the teacher on this machine, up to its last queries, keys
            and values.
    """
    measured_rate = teacher_tokens_per_s * per_token.timed
    rate = measured_rate if config.tflops is None else config.tflops * TERA
    num_read = train_tokens(config, num_tokens, length)

    def cost(what: str, flops: float) -> Cost:
        return Cost(what=what, flops=flops, hours=flops / rate / _SECONDS_PER_HOUR)

    parts = [cost("dump", per_token.teacher * num_tokens)]
    for arch, step in per_token.students.items():
        parts += [
            cost(f"train {arch}", step * num_read),
            cost(f"train {arch} with the teacher along", (step + per_token.teacher) * num_read),
        ]
    return Costs(flops_per_s=rate, is_measured=config.tflops is None, train_tokens=num_read, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A plan, the costs of trainings, and the best setting."""

    plan: Plan
    costs: Costs
    best: PlannedSetting | None
    """The most faithful setting that needs at most the allowed bytes. None means that no limit was given, or
    that every setting needs more."""


def settings_to_compare(dump: Mapping[str, Any], config: PlanConfig) -> list[DumpConfig]:
    """Return the settings of the dumps that a plan compares.

    Args:
        dump: settings of `DumpConfig` that all of them share, by name, without those of `PLANNED`.
        config: the codecs to compare.

    Raises:
        InvalidConfigError: a value is out of range, or settings contradict each other.
    """
    alone = validated(DumpConfig, dump)
    if alone.codec == "none":
        return [alone]
    shared = validated(DumpConfig, {**dump, "codec": "vectors"})
    # Only codec vectors stores several layers, so the other codecs are measured on the last layer.
    several = shared.layers == "all" or len(shared.layers) > 1
    others = {**dump, "layers": "last"} if several and shared.layers != "last" else dict(dump)
    compared: list[Mapping[str, Any]] = [
        {**dump, "codec": "vectors", "max_kl": bound} for bound in config.max_kl
    ]
    if not shared.needs_vectors:
        ks = config.k
        if "k" not in config.model_fields_set:  # sequences may be shorter than the defaults
            ks = tuple(sorted({min(k, shared.max_length) for k in ks}))
        compared = [{**others, "codec": "topk", "k": k} for k in ks] + compared
        compared += [{**others, "codec": "dense"}] if config.dense else []
    return [validated(DumpConfig, values) for values in compared]


def plan_dump(
    dump: Mapping[str, Any],
    config: PlanConfig | None = None,
    *,
    cost: CostConfig | None = None,
    session: Session = ALONE,
) -> PlanResult:
    """Dump a sample with each setting, and estimate cost and fidelity of the whole dump.

    Args:
        dump: settings of `DumpConfig` that all dumps share, by name.
        config: the codecs to compare. None means the defaults.
        cost: trainings whose cost is estimated. None means the defaults, which name no student.
        session: its progress shows tokens done. Its `should_stop` is called before each batch; True stops.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`.
    """
    config, cost = config or PlanConfig(), cost or CostConfig()
    configs = settings_to_compare(dump, config)
    first = configs[0]
    work = operations(cost, first)
    measured = plan(configs, config.sample_tokens, session=session)
    costs = estimate(
        cost,
        work,
        num_tokens=measured.num_tokens,
        length=first.max_length,
        teacher_tokens_per_s=measured.teacher_tokens_per_s,
    )
    best = None if config.max_bytes is None else measured.best_within(config.max_bytes)
    return PlanResult(plan=measured, costs=costs, best=best)


def refuse_too_large(result: PlanResult, config: PlanConfig) -> None:
    """Raise InvalidConfigError if every setting of a plan needs more bytes than allowed."""
    if config.max_bytes is None or result.best is not None:
        return
    least = min(result.plan.settings, key=lambda setting: setting.total_bytes)
    raise InvalidConfigError(
        f"--max-bytes {config.max_bytes}: every setting needs more; the smallest is {least.words} with "
        f"{least.total_bytes:,} bytes. Allow more bytes, or dump fewer --max-tokens."
    )
