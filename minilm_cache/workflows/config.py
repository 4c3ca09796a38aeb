"""Settings of workflows that run several dumps and trainings."""

from typing import Annotated

from pydantic import Field

from minilm_cache.dump.config import DumpConfig
from minilm_cache.settings import FrozenSettings
from minilm_cache.train.config import TrainConfig


class ChainConfig(FrozenSettings):
    """Settings of a chain of teacher, assistants and students."""

    group = "Chain"
    dump: DumpConfig
    """How the teacher is dumped; assistants are dumped over the same sequences, by the same codec."""
    train: TrainConfig
    """How the students at the end are trained; assistants are trained by the same recipe."""
    assistants: Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"flag": "--assistant"})]
    """Shape of an assistant; repeat it for several, each learns from the one before."""
    compare_direct: bool = False
    """Train the students straight from the teacher, too, to compare them."""
