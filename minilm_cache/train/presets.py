"""Recipes by name; every value can be overridden."""

from dataclasses import dataclass
from typing import Any, Final

from minilm_cache.config import TrainConfig
from minilm_cache.errors import InvalidConfigError

_LENGTH: Final = {"steps": 400_000, "warmup": 0.01, "weight_decay": 0.01}
"""400,000 steps, of which the learning rate rises in 4,000."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of `TrainConfig`, and where they are from."""

    settings: dict[str, Any]
    source: str


PRESETS: Final = {
    "minilm-6x768": Preset(
        {**_LENGTH, "objective": "minilm", "batch_size": 1024, "lr": 5e-4},
        "MiniLM (arXiv 2002.10957) for students of 6 layers of width 768",
    ),
    "minilm": Preset(
        {**_LENGTH, "objective": "minilm", "batch_size": 256, "lr": 3e-4},
        "MiniLM (arXiv 2002.10957) for all other students",
    ),
    "minilmv2": Preset(
        {**_LENGTH, "objective": "minilmv2", "relation_heads": 48, "batch_size": 256, "lr": 6e-4},
        "MiniLMv2 (arXiv 2012.15828) for teachers of width 768, as its public reimplementations train",
    ),
    "minilmv2-large": Preset(
        {**_LENGTH, "objective": "minilmv2", "relation_heads": 64, "batch_size": 256, "lr": 6e-4},
        "MiniLMv2 for teachers of width 1024; the teacher's layer is the dump's `--layers`, the 21st of "
        "BERT-large and the 19th of RoBERTa-large and XLM-R-large, which count as 20 and 18 here",
    ),
}


def with_preset(name: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a recipe, those of the options that are not None put above them.

    Raises:
        InvalidConfigError: there is no recipe of this name.
    """
    given = {option: value for option, value in options.items() if value is not None}
    settings = {} if name is None else dict(_preset(name).settings)
    if "epochs" in given:
        settings.pop("steps", None)
    if given.get("objective", settings.get("objective")) != settings.get("objective"):
        settings.pop("relation_heads", None)
    return settings | given


def describe_preset(name: str, config: TrainConfig) -> str:
    """Return one line about a recipe: what it has come to, and where it is from."""
    recipe = _preset(name)
    shown = {option: getattr(config, option) for option in ("epochs", *recipe.settings)}
    settings = ", ".join(f"{option} {value}" for option, value in shown.items() if value is not None)
    return f"preset {name}: {settings} ({recipe.source})"


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InvalidConfigError(f"--preset {name}: give one of {', '.join(PRESETS)}.")
    return PRESETS[name]
