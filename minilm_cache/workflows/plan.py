"""Plans a dump: compares settings on a sample, and estimates the cost of the dump and of trainings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minilm_cache.dump.config import DumpConfig, PlanConfig
from minilm_cache.dump.plan import Plan, PlannedSetting, plan
from minilm_cache.errors import InvalidConfigError
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import validated
from minilm_cache.train.config import CostConfig
from minilm_cache.workflows.cost import Costs, estimate, operations


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
    measured = plan(
        configs,
        config.sample_tokens,
        session=Session(progress=session.progress, should_stop=session.should_stop),
    )
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
