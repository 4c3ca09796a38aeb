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
    """Settings of the teacher's dump; assistants are dumped over the same sequences, with the same codec."""
    train: TrainConfig
    """Settings of the students' training; assistants are trained by the same recipe."""
    assistants: Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"flag": "--assistant"})]
    """Shape of an assistant; may be repeated, and then each assistant learns from the one before."""
    compare_direct: bool = False
    """Also train the students directly from the teacher, to compare them."""
