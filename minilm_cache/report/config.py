"""Settings of a report."""

from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from minilm_cache.errors import InvalidConfigError
from minilm_cache.settings import DeviceSettings, refuse_unreadable
from minilm_cache.store.durable import refuse_file

TEXT_NEEDS_TEACHER: Final = "--text needs --teacher, because the teacher must read the text. Give both."


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

    def refuse_page(self, path: Path) -> None:
        """Raise the error of a page that cannot be written to a file, before anything is measured."""
        refuse_no_page(path)
        refuse_unreadable([*self.text, self.title])
        if self.text and self.teacher is None:
            raise InvalidConfigError(TEXT_NEEDS_TEACHER)


def refuse_no_page(path: Path) -> None:
    """Raise InvalidConfigError for a file that is no page, so that nothing else is overwritten."""
    refuse_file(path.parent)
    if path.is_dir():
        raise InvalidConfigError(f"--out {path} is a folder. Name a file.")
    if path.suffix not in (".html", ".htm"):
        raise InvalidConfigError(f"--out {path}: a report is a page. Give a name that ends in .html.")
