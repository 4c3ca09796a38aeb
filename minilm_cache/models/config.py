"""Settings of what is done to models."""

from minilm_cache.settings import TeacherSettings


class TruncateConfig(TeacherSettings):
    """Settings of a teacher that is cut down to some of its layers."""

    group = "Layers"
    layers: str
    """Layers to keep, counted from 0, with commas between them, like 0,1,2."""
