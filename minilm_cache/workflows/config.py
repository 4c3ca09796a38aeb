"""Settings of workflows that run several dumps and trainings."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from minilm_cache.dump.config import DumpConfig, StateSettings
from minilm_cache.settings import FrozenSettings
from minilm_cache.storage_schema.upgrades import defaults_of_later, without_defaults
from minilm_cache.train.config import TrainConfig

_CHANGES_NO_STUDENT: Final[Mapping[str, Any]] = {
    **{
        name: TrainConfig.model_fields[name].default
        for name in ("max_hours", "tracker", "local_bytes", "gradient_checkpointing")
    },
    "keep_checkpoints": 0,
}
"""Settings of a training that may differ between commands for the same students, with the values that chains
and studies are named with."""


def naming_settings(train: Mapping[str, Any], earlier: Collection[str]) -> dict[str, Any]:
    """Return the settings of a training that name a chain, or a pass of a study, as the first releases did.

    Args:
        train: settings of the training, as JSON.
        earlier: settings that the first releases had.
    """
    settings = {**train, **_CHANGES_NO_STUDENT, "init": train["init"] or "random"}
    return without_defaults(settings, defaults_of_later(TrainConfig, earlier))


NOT_OF_A_CHAIN: Final = frozenset({"rank", "world_size", "serve", "for", *StateSettings.model_fields}) - {
    "pooling",
    "min_cosine",
}
"""Settings of a dump that a chain sets itself: torchrun sets ranks, a cache stores what students learn."""


class ChainConfig(FrozenSettings):
    """Settings of a chain of teacher, assistants and students."""

    group = "Chain"
    dump: DumpConfig
    """Settings of the teacher's dump; assistants are dumped over the same sequences, with the same codec."""
    train: TrainConfig
    """Settings of the students' training; assistants are trained by the same recipe."""
    assistants: Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"flag": "--assistant"})]
    """Shape of an assistant; may be repeated, and then each assistant learns from the one before."""
    compare_direct: bool = False
    """Also train the students directly from the teacher, to compare them."""


class TaskStageConfig(FrozenSettings):
    """Settings of a task stage, beside those of its dump and of its training."""

    group = "Task stage"
    task: str | None = None
    """Task of GLUE, like sst2, or a .csv, .tsv, .jsonl or .parquet file of labelled texts. Students learn the
    answers of a teacher that was fine-tuned on it. None means a chain with assistants."""
    data: str | None = None
    """Folder of the task's published files, or a folder of such folders; `hf` or `hf:ID` for the hub. None
    means that the task is a file."""
    student: str | None = None
    """Folder of a student, or of a run, that training begins with. None means `--init`."""
    augment: str | None = None
    """Model with a head for masked tokens that makes copies of the texts with other words. None means no
    copies."""
    copies: Annotated[int, Field(ge=1, le=1000)] = 20
    """Copies of each text."""
    intermediate: bool = False
    """Learn the teacher's layers before its answers, as TinyBERT does; a token then takes about 2 kB."""
    max_train: Annotated[int, Field(ge=1)] | None = None
    """Most training examples whose texts are taken, the same as those of evaluate. None means all of them."""
    text_columns: str = "text"
    """Column of the texts of a task of your own, or of both texts of pairs, like question,answer."""
    label_column: str = "label"
    """Column of its labels."""
    dev: Path | None = None
    """File with the same columns that a task of your own is scored on."""
