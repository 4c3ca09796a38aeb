"""A study from its document to its table and page: caches, then passes, then results.

What can share a pass does: all shapes of one cache, one objective and one seed are trained from each batch
together. Caches and runs are ordinary ones, below the study's folder; complete ones are not done again.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from minilm_cache.cache import open_cache
from minilm_cache.config import DumpConfig
from minilm_cache.device import choose_device
from minilm_cache.dump.run import dump
from minilm_cache.dump.teacher import Teacher, locate_teacher, num_heads_of
from minilm_cache.errors import InvalidConfigError
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.report.page import write_report
from minilm_cache.results import TrainedRun, students_table, summary_table
from minilm_cache.store.durable import storage_errors
from minilm_cache.study.spec import Study
from minilm_cache.train.run import train
from minilm_cache.train.student import parse_arch

PARQUET_FILE = "students.parquet"
CSV_FILE = "students.csv"
SUMMARY_FILE = "summary.csv"
REPORT_FILE = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What a study has come to."""

    path: Path
    students: pa.Table
    """A row for each student of each seed (`results.students_table`)."""
    summary: pa.Table
    """Means and deviations over seeds (`results.summary_table`)."""

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / REPORT_FILE


def run_study(
    study: Study,
    folder: Path,
    home: Path,
    *,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> StudyResult:
    """Do what is left of a study, then write its table and its page.

    Args:
        study: what to do.
        folder: of the study.
        home: folder of what is kept of caches at URLs.
        progress: told of each cache and pass.
        should_stop: asked between steps.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; what is complete is kept whatever happens.
    """
    progress = progress or Silent()
    _check_shapes(study, home)
    places = _dump_caches(study, folder, home, progress, should_stop)
    for number, one in enumerate(study.passes, 1):
        progress.note(f"pass {number} of {len(study.passes)}: {one.name}")
        path = folder / "runs" / one.name
        train(one.config, places[one.cache], path, home, progress=progress, should_stop=should_stop)
    runs = [TrainedRun.open(folder / "runs" / one.name, None, home) for one in study.passes]
    progress.note("measuring sizes, speed and closeness to the teacher")
    teacher = _teacher(study)
    students = students_table(runs, teacher, device=_device(study), price_per_hour=study.price_per_hour)
    summary = summary_table(students)
    with storage_errors("write results in", folder):
        pq.write_table(students, folder / PARQUET_FILE)
        pa_csv.write_csv(students, folder / CSV_FILE)
        pa_csv.write_csv(summary, folder / SUMMARY_FILE)
    write_report(folder / REPORT_FILE, runs, students, teacher=teacher, title=study.source.path.stem)
    return StudyResult(path=folder, students=students, summary=summary)


def _check_shapes(study: Study, home: Path) -> None:
    """Raise for shapes that do not fit a cache's heads, before hours are spent."""
    for name, cache in study.caches.items():
        if isinstance(cache, DumpConfig):
            heads = num_heads_of(locate_teacher(cache.teacher, cache.revision))
        else:
            heads = open_cache(cache, home).manifest.identity.relation_heads
        for one in study.passes:
            if one.cache != name:
                continue
            split_into = one.config.relation_heads or heads if one.config.objective == "minilmv2" else None
            for at, arch in enumerate(study.arch):
                try:
                    parse_arch(arch, heads, split_into)
                except InvalidConfigError as error:
                    study.source.fail(("arch", at), str(error))


def _dump_caches(
    study: Study, folder: Path, home: Path, progress: Progress, should_stop: ShouldStop
) -> dict[str, str]:
    """Return the place of every cache, those that are not there dumped, with token files shared."""
    places = {}
    first: Path | None = None
    for name, cache in study.caches.items():
        if isinstance(cache, str):
            places[name] = cache
            continue
        path = folder / "caches" / name
        progress.note(f"cache {name}")
        dump(cache, path, home, tokens_of=first, progress=progress, should_stop=should_stop)
        first = first or path
        places[name] = str(path)
    return places


def _teacher(study: Study) -> Teacher | None:
    """Return the teacher, where all caches are of one that the study names."""
    dumped = [cache for cache in study.caches.values() if isinstance(cache, DumpConfig)]
    if len(dumped) < len(study.caches) or len({(cache.teacher, cache.revision) for cache in dumped}) > 1:
        return None
    config = dumped[0]
    return Teacher(locate_teacher(config.teacher, config.revision), choose_device(config.device))


def _device(study: Study) -> str | None:
    return study.passes[0].config.device
