"""Settings of a report."""

from typing import Annotated

from pydantic import Field

from minilm_cache.settings import DeviceSettings


class ReportConfig(DeviceSettings):
    """What a report shows."""

    group = "Report"
    teacher: str | None = None
    """Also run this teacher, for exact KLs, maps of every layer and the similarity of layers. None means maps
    of what the caches hold."""
    sequence: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Number of a held-out sequence whose attention maps are shown, from 0; may be repeated. None means the
    first."""
    text: tuple[str, ...] = ()
    """Text of your own whose attention maps are shown; needs `--teacher`; may be repeated."""
    cache: str | None = None
    """Folder or URL of the runs' cache. None means where it was when the runs began."""
    title: str = "Distilled students"
    """Title of the page."""
    paths: bool = False
    """Show whole paths of folders, not only their names."""
