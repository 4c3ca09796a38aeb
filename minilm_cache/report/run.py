"""Makes a report: opens the runs in folders, measures their students and writes the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from minilm_cache.models.device import choose_device
from minilm_cache.models.load import locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.report.config import ReportConfig
from minilm_cache.report.maps import MapTexts
from minilm_cache.report.page import Report, check_page, write_report
from minilm_cache.report.runs import open_runs
from minilm_cache.report.tables import students_table
from minilm_cache.session import ALONE, Session
from minilm_cache.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """A page and the table that it shows."""

    report: Report
    students: pa.Table
    """A row for each student (`report.tables.students_table`)."""


def report_runs(
    folders: Sequence[Path], config: ReportConfig, *, out: Path, session: Session = ALONE
) -> ReportResult:
    """Write one self-contained page about runs.

    Args:
        folders: folders of runs, chains or studies.
        config: what the page shows.
        out: file of the page.
        session: its home is the folder for local copies of caches at URLs. Its progress shows what is being
            measured.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`.
    """
    map_texts = None
    if config.sequence or config.text:
        map_texts = MapTexts(sequences=config.sequence, texts=config.text)
    check_page(out, map_texts, has_teacher=config.teacher is not None)
    resolved = dict.fromkeys(path.resolve() for path in folders)
    runs = [run for path in resolved for run in open_runs(path, cache_place=config.cache, home=session.home)]
    teacher = None
    if config.teacher is not None:
        teacher = Teacher(locate_teacher(config.teacher), choose_device(config.device))
    (session.progress).note(f"measuring {counted(sum(len(run.students) for run in runs), 'student')}")
    students = students_table(runs, teacher, device=config.device)
    report = write_report(
        out, runs, students, teacher=teacher, map_texts=map_texts, title=config.title, paths=config.paths
    )
    return ReportResult(report=report, students=students)
