"""Settings of a report."""

from typing import Annotated

from pydantic import Field

from minilm_cache.settings import DeviceSettings


class ReportConfig(DeviceSettings):
    """What a report shows."""

    group = "Report"
    teacher: str | None = None
    """Run this teacher, too, for exact KLs, maps of every layer and the similarity of layers. None means that
    maps show what the caches hold."""
    sequence: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Held-out sequence whose attention maps are shown; may be repeated. None means the first."""
    text: tuple[str, ...] = ()
    """Text of your own whose attention maps are shown, with `--teacher`; may be repeated."""
    cache: str | None = None
    """Folder or URL of the runs' cache. None means where it was when the runs began."""
    title: str = "Distilled students"
    """Title of the page."""
    paths: bool = False
    """Show whole paths of folders, not their names alone."""
