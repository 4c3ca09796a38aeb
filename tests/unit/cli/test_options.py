"""Options are derived from settings: none is missing, each says its default, headings group them."""

import re
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field

from minilm_cache.cli.main import app
from minilm_cache.cli.options import Given, GroupedCommand, options
from minilm_cache.dump.config import PLANNED, DumpConfig, PlanConfig, StateSettings
from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.settings import EmbeddingsConfig, EvaluateConfig, SpeedConfig
from minilm_cache.settings import FrozenSettings, flag_of, validated
from minilm_cache.train.config import CostConfig, TrainConfig
from tests.fixtures import Command

STAGES: dict[str, dict[type[FrozenSettings], set[str]]] = {
    "dump": {DumpConfig: {"signal"}},
    "train": {TrainConfig: set()},
    "chain": {
        DumpConfig: {"rank", "world_size", "serve", "batch_size", *StateSettings.model_fields}
        - {"pooling", "min_cosine"},
        TrainConfig: {"own_labels"},
    },
    "plan": {DumpConfig: set(PLANNED), PlanConfig: set(), CostConfig: set()},
    "evaluate": {EvaluateConfig: set()},
    "speed": {SpeedConfig: set()},
    "embeddings": {EmbeddingsConfig: set()},
}
"""What each command runs, and the settings that it decides itself."""


def option_names(command: str) -> set[str]:
    """Return every option of a command, read from the parser and not from its help."""
    group = typer.main.get_command(app)
    parser: Any = group.commands[command]  # type: ignore[attr-defined]
    return {name for param in parser.params for name in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("command", STAGES)
def test_a_command_has_every_option_of_the_stages_that_it_runs(command: str) -> None:
    offered = option_names(command)
    wanted, decided = set[str](), set[str]()
    for model, left_out in STAGES[command].items():
        for name, field in model.model_fields.items():
            (decided if name in left_out else wanted).update(flag_of(name, field).split("/"))

    assert wanted <= offered
    assert not (decided - wanted) & offered


@pytest.mark.parametrize("name", ["dump", "train", "chain", "plan"])
def test_short_help_shows_what_people_use_and_help_all_the_rest(command: Command, name: str) -> None:
    texts = [command(name, word)[1] for word in ("-h", "--help-all")]
    shown, whole = (set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) for text in texts)
    options_shown = re.findall(r"^ +(?:-\w, )?--[a-z-]+", texts[0], re.MULTILINE)

    assert {"--json", "--device", "--help-all"} <= shown
    assert len(options_shown) <= 18  # lines of a text may begin with the name of an option
    assert {each for each in option_names(name) if each.startswith("--")} - whole <= {"--no-compare-direct"}


def test_help_states_defaults_bounds_and_headings(command: Command) -> None:
    code, out, _ = command("train", "--help-all")
    words = " ".join(out.split())

    assert code == 0
    headings = re.findall(r"^([A-Z]\w+):$", out, re.MULTILINE)
    assert headings[0] == "Arguments"
    for heading in ("Students", "Objective", "Recipe", "Computing", "Run"):
        assert heading in headings
    for name in ("batch_size", "lr", "warmup", "buffer_shards", "checkpoint_steps", "local_bytes"):
        assert f"[default: {TrainConfig.model_fields[name].default}]" in words
    assert "[default: 5, or more until there are 300 steps, unless --steps is given]" in words
    assert "--compile" in words
    assert "--value-relation / --no-value-relation" in words
    assert "--precision float32|bfloat16" in words


class Small(FrozenSettings):
    """Settings of every type."""

    group = "Small"
    name: str
    """A name."""
    size: Annotated[int, Field(ge=1)] = 3
    """Size of it, in bytes."""
    rate: float | None = None
    """Rate of it. None means 2.5, or 1.5 with `--loud`."""
    loud: bool = False
    """Say more."""
    polite: bool = True
    """Say please."""
    way: Literal["up", "down"] = "up"
    """Way to go."""
    step: tuple[int, ...] = (1, 2)
    """Step; may be repeated."""


def run_small(*words: str) -> tuple[Given, bool]:
    """Run a command with the options of `Small`, and return what it was given."""
    seen: list[tuple[Given, bool]] = []
    small_app = typer.Typer(rich_markup_mode=None)

    @options(Small)
    def small(given: Given, *, extra: Annotated[bool, typer.Option("--extra")] = False) -> None:
        """Do little."""
        seen.append((given, extra))

    small_app.command(cls=GroupedCommand)(small)
    small_app(list(words), standalone_mode=False)
    return seen[0]


def test_only_what_was_given_reaches_the_command() -> None:
    assert run_small("--name", "x") == ({"name": "x"}, False)
    assert run_small("--name", "x", "--extra", "--no-polite", "--loud") == (
        {"name": "x", "polite": False, "loud": True},
        True,
    )
    given, _ = run_small("--name", "x", "--step", "4", "--step", "5", "--rate", "0.5", "--way", "down")
    assert validated(Small, given) == Small(name="x", step=(4, 5), rate=0.5, way="down")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "x", "size": 0}, "--size 0: give at least 1"),
        ({"name": "x", "way": "left"}, "--way left: give 'up' or 'down'"),
        ({"name": "x", "steep": 3}, "--steep 3: there is no such setting (did you mean step?)"),
    ],
)
def test_bounds_are_checked_where_the_field_states_them(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(says)):
        validated(Small, values)


def test_changed_settings_are_validated_again() -> None:
    settings = Small(name="x")

    assert settings.with_changes(size=9, step=(7,)) == Small(name="x", size=9, step=(7,))
    with pytest.raises(InvalidConfigError, match="--size -1"):
        settings.with_changes(size=-1)
    with pytest.raises(InvalidConfigError, match="--rank 3 is not below --world-size 1"):
        DumpConfig(teacher="mini").with_changes(rank=3)


def test_settings_that_objectives_need_survive_a_change() -> None:
    config = validated(DumpConfig, {"teacher": "mini", "for": "tinybert,mlm-kd"})
    changed = config.with_changes(seed=3)

    assert (changed.layers, changed.hidden, changed.labels, changed.seed) == ("all", "all", True, 3)
    assert changed.model_dump() == {**config.model_dump(), "seed": 3}


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="--corpus : too short"):
        validated(DumpConfig, {"teacher": "mini", "corpus": ""})


def test_bytes_that_are_no_text_name_their_option() -> None:
    with pytest.raises(InvalidConfigError, match=r"^--corpus .*: no text in UTF-8\. Rename the file"):
        validated(DumpConfig, {"teacher": "mini", "corpus": "na\udcefve.txt"})


def test_what_settings_do_not_store_survives_a_change() -> None:
    config = validated(DumpConfig, {"teacher": "mini", "for": "minilmv2"})

    assert config.with_changes() == config
    assert config.with_changes(seed=1).needs_vectors
