"""Recipes by name; every setting of a recipe can be overridden."""

from collections.abc import Mapping
from typing import Any

from minilm_cache.errors import InvalidConfigError
from minilm_cache.objectives.spec import OBJECTIVES, Preset
from minilm_cache.train.config import TrainConfig


def presets() -> dict[str, Preset]:
    """Return the recipes of all objectives, by name."""
    return {
        name: Preset(settings={"objective": spec.name, **preset.settings}, source=preset.source)
        for spec in OBJECTIVES.values()
        for name, preset in spec.presets.items()
    }


def with_preset(name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe, overridden by those that are given and not None.

    Args:
        name: name of the recipe. None means no recipe.
        given: settings of `TrainConfig`, by name.

    Raises:
        InvalidConfigError: there is no recipe of this name.
    """
    given = {option: value for option, value in given.items() if value is not None}
    settings = {} if name is None else dict(_preset(name).settings)
    if "epochs" in given:
        settings.pop("steps", None)
    if given.get("objective", settings.get("objective")) != settings.get("objective"):
        settings.pop("relation_heads", None)
    return settings | given


def describe_preset(name: str, config: TrainConfig) -> str:
    """Return one line about a recipe: its settings as `config` has them, and its source."""
    recipe = _preset(name)
    shown = {option: getattr(config, option) for option in ("epochs", *recipe.settings)}
    settings = ", ".join(f"{option} {value}" for option, value in shown.items() if value is not None)
    return f"preset {name}: {settings} ({recipe.source})"


def _preset(name: str) -> Preset:
    known = presets()
    if name not in known:
        raise InvalidConfigError(f"--preset {name}: give one of {', '.join(known)}.")
    return known[name]
