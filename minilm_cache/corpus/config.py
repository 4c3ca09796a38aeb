"""What is tokenised, and where."""

from typing import Annotated, Literal

from pydantic import Field

from minilm_cache.settings import CorpusSettings, NamedTeacherSettings


class TokenizeConfig(NamedTeacherSettings, CorpusSettings):
    """Settings of `minilm-cache tokenize`."""

    group = "Computing"
    processes: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise at the same time. None means one for each core of the machine, or of the
    cluster."""
    engine: Literal["ray"] | None = None
    """`ray` tokenises on the cluster that RAY_ADDRESS names, or on a local one; its machines need a common
    file system. None means this machine."""
