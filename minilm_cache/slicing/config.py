"""Settings of `slice`."""

from typing import Annotated

from pydantic import Field

from minilm_cache.settings import CorpusSettings, NamedTeacherSettings


class SliceConfig(NamedTeacherSettings, CorpusSettings):
    """Settings of `slice`: a teacher, the shape to cut, and the text that the cut is fitted to."""

    group = "Slice"
    arch: str
    """Shape of the student, `LAYERSxHIDDEN[:ffN][:hN][:eN]`, at most as deep and as wide as the teacher."""
    layers: str | None = None
    """The teacher's layers that are cut, counted from 0, like 0,2,5. None means evenly spaced ones, the last
    included."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Most tokens of a sequence of the text, special tokens included."""
