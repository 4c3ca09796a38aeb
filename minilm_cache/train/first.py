"""Students that learn one objective before another: two runs, and what the second takes from the first."""

from pathlib import Path
from typing import Final

from minilm_cache.cache import Cache
from minilm_cache.errors import DivergedError, InvalidConfigError
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.settings import validated
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import is_run
from minilm_cache.train.ranks import refuse_ranks
from minilm_cache.train.record import RunRecord, load_record
from minilm_cache.train.sampler import check_parts
from minilm_cache.train.setup import num_steps

SUFFIX: Final = "-first"
"""End of the name of the first run's folder, behind that of the second."""


def check_first(config: TrainConfig, cache: Cache, out: Path | None) -> None:
    """Check both objectives against the cache, before the first is trained.

    Raises:
        InvalidConfigError: the cache does not serve one of them, several processes train, or the second run
            is over and is to go on, and so would the first.
    """
    if out is not None and is_run(out) and config.first_steps is None:
        steps = load_record(out).identity.steps
        if steps != num_steps(config, cache.manifest):
            raise InvalidConfigError(
                f"{out} holds a run of {steps} steps. To go on with it, give --first-steps {steps}, too: "
                f"without it, students would also take more steps of {config.first}."
            )
    refuse_ranks("--first", "the two trainings wrote, the second with --init FIRST-RUN")
    check_parts(config)
    for checked in (first_config(config), config):
        choose_objective(checked, cache, arch=config.arch)


def first_config(config: TrainConfig) -> TrainConfig:
    """Return the settings of what students learn first: its own objective and recipe, batches as they are."""
    own = ObjectiveConfig.model_fields
    shared = {name: value for name, value in dict(config).items() if name not in own and name != "lr"}
    shared |= {"objective": config.first, "steps": config.first_steps or config.steps}
    if config.first_steps is not None:
        shared["epochs"] = None
    return validated(TrainConfig, shared)


def first_folder(out: Path | None) -> Path | None:
    """Return the folder of the first run, next to that of the second. None means one named by content."""
    if out is None:
        return None
    place = out.resolve()
    return place.with_name(f"{place.name}{SUFFIX}")


def after_first(config: TrainConfig, record: RunRecord, path: Path) -> TrainConfig:
    """Return the settings of the second run, whose students begin as those of the first ended.

    Raises:
        DivergedError: a student diverged in the first run.
    """
    diverged = [student.arch for student in record.students if student.diverged_at is not None]
    if diverged:
        raise DivergedError(
            f"student {', '.join(diverged)} diverged while it learned --first {config.first}, in {path}. "
            "Leave it out, or take another --first."
        )
    return config.with_changes(
        first=None, first_steps=None, init=str(path), init_teacher=None, init_layers=None
    )
