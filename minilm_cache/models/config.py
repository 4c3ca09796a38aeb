"""Settings of the commands that change models."""

from minilm_cache.settings import NamedTeacherSettings


class TruncateConfig(NamedTeacherSettings):
    """Settings of `truncate`: a teacher and the layers of it to keep."""

    group = "Layers"
    layers: str
    """Layers to keep, counted from 0, with commas between them, like 0,1,2."""
