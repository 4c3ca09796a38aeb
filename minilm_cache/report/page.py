"""The report: one self-contained HTML file about complete runs.

Everything that comes from a cache or a model enters the template as text, never as markup. The page loads no
other file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from minilm_cache.cache import Cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.device import choose_device
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.student import model_size
from minilm_cache.models.teacher import Teacher
from minilm_cache.report.compare import check_is_teacher_of
from minilm_cache.report.config import TEXT_NEEDS_TEACHER, ReportConfig, refuse_no_page
from minilm_cache.report.front import SearchRecord, front_figure, read_search
from minilm_cache.report.maps import Example, MapTexts, check_sequences, examples, packed
from minilm_cache.report.plots import (
    agreement_figure,
    curves_figure,
    drawing_script,
    similarity_figure,
    storage_figure,
    tradeoff_figure,
)
from minilm_cache.report.provenance import provenance
from minilm_cache.report.runs import TrainedRun, cautions, open_runs, with_short_names
from minilm_cache.report.similarity import (
    ComparedStudent,
    LayerSimilarity,
    RelationAgreement,
    layer_similarity,
    relation_agreement,
)
from minilm_cache.report.tables import (
    KL_COLUMNS,
    NAMES,
    SCORE,
    heading_of,
    known_scores,
    measured_text,
    measures,
    of_several_codecs,
    row_names,
    students_table,
    summary_table,
)
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.versions import RELEASE
from minilm_cache.store.durable import refuse_unwritable, storage_errors, write_file
from minilm_cache.wording import counted, number_text, printable

MAX_STUDENTS: Final = 8
"""Most students whose maps and layers are shown; tables and curves show all students."""
_FLOAT16_BYTES: Final = 2
_SOURCES: Final = "minilm_cache.report"
"""Package that holds the template, the style sheet and the script of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The page that was written, and what was compared for it."""

    path: Path
    num_bytes: int
    similarity: list[LayerSimilarity]
    """Similarity of each shown student's layers to the teacher's; empty without a teacher."""
    agreement: list[RelationAgreement]
    """Agreement of each shown student's relations with the teacher's; empty without a teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparisons:
    """What is measured for the page: maps, similarity of layers and agreement of relations."""

    maps: list[Example]
    similarity: list[LayerSimilarity]
    agreement: list[RelationAgreement]


def write_report(
    path: Path,
    runs: Sequence[TrainedRun],
    students: pa.Table,
    *,
    teacher: Teacher | None = None,
    map_texts: MapTexts | None = None,
    title: str = "report",
    remarks: Sequence[str] = (),
    paths: bool = False,
    teachers_scores: Mapping[str, float] | None = None,
    searches: Sequence[SearchRecord] = (),
) -> Report:
    """Write a page about runs.

    Args:
        path: path of the file.
        runs: complete runs; attention maps show the students of those that have the first run's tokenizer.
        students: table of their students (`report.tables.students_table`).
        teacher: teacher of the first run's cache. None means that maps are read from the cache, and that
            layers and relations are not compared.
        map_texts: texts of the attention maps. None means the first held-out sequence, if there is one.
        title: title of the page.
        remarks: sentences at the top of the page, without their full stops.
        paths: True shows whole paths, which reveal a machine and its user; False shows only names of folders.
        teachers_scores: scores of the teacher by metric, as the table has them of students. None means that
            it was not scored.
        searches: records of the searches that the runs are rounds of.

    Raises:
        InvalidConfigError: a text or a held-out sequence cannot be shown.
        IdentityMismatchError: the cache was dumped from another teacher.
        StorageError: the file cannot be written.
    """
    cache = runs[0].reference
    check_page(path, cache, teacher=teacher, map_texts=map_texts)
    map_texts = map_texts or MapTexts(sequences=(0,) if cache.manifest.num_held_out else ())
    shown = _shown_students(runs)
    compared = _compare(runs, shown, teacher=teacher, map_texts=map_texts)
    page = _render(
        {
            "title": title,
            "remarks": [*remarks, *_left_out(runs)],
            "version": RELEASE,
            "teacher": cache.manifest.labels.teacher,
            "is_live": teacher is not None,
            **_student_values(runs, students, teachers_scores or {}),
            **_figure_values(runs, students, searches),
            **_comparison_values(runs, shown, compared),
            "provenance": [(run.label, provenance(run, paths=paths)) for run in runs],
        }
    )
    content = page.encode(errors="backslashreplace")
    with storage_errors("write", path):
        write_file(path, content)
    return Report(
        path=path, num_bytes=len(content), similarity=compared.similarity, agreement=compared.agreement
    )


def _compare(
    runs: Sequence[TrainedRun],
    shown: Sequence[tuple[str, Path]],
    *,
    teacher: Teacher | None,
    map_texts: MapTexts,
) -> _Comparisons:
    """Compute the maps of the shown students, and compare their layers and relations with the teacher's."""
    cache = runs[0].reference
    maps = examples(cache, shown, teacher=teacher, map_texts=map_texts) if shown else []
    similarity = layer_similarity(cache, teacher, shown) if teacher is not None and shown else []
    compared = _compared_students(runs, shown)
    agreement = [] if teacher is None else relation_agreement(cache, teacher, compared)
    return _Comparisons(maps=maps, similarity=similarity, agreement=agreement)


def _render(values: Mapping[str, Any]) -> str:
    """Return the page: the template, filled with values, with its style sheet and its script."""
    folder = files(_SOURCES)
    return _template().render(
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - a file of this package
        script=Markup((folder / "page.js").read_text(encoding="utf-8")),  # noqa: S704 - a file of this package
        drawing=Markup(drawing_script()),  # noqa: S704 - Vega, from a package
        **values,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = number_text
    environment.filters["measured_text"] = measured_text
    return environment.from_string((files(_SOURCES) / "page.html").read_text(encoding="utf-8"))


def _student_values(
    runs: Sequence[TrainedRun], students: pa.Table, teachers_scores: Mapping[str, float]
) -> dict[str, Any]:
    """Return what the template shows in its table of students."""
    summary = summary_table(students)
    differing, shared = row_names(summary)
    measured = measures(summary)
    scores = [name for name in measured if name.startswith(SCORE)]
    return {
        "of_teacher": _teachers_row(runs, scores, teachers_scores),
        "measured": {name: heading_of(name) for name in measured},
        "assistants": {
            run.name: run.cache.manifest.labels.teacher for run in runs if not run.is_compared_with_own
        },
        "num_students": sum(len(run.students) for run in runs),
        "cautions": _cautions(runs, students),
        "students": summary.to_pylist(),
        "names": {name: NAMES[name] for name in differing},
        "shared": {NAMES[name]: summary[name][0].as_py() for name in shared if len(summary)},
        "kinds": [kind for kind, column in KL_COLUMNS.items() if summary[column].null_count < len(summary)],
        "diverged": [row for row in students.to_pylist() if row["diverged_at"] is not None],
    }


def _cautions(runs: Sequence[TrainedRun], students: pa.Table) -> list[str]:
    """Return what readers of the table of students must know."""
    return [*cautions(runs), *of_several_codecs(students)]


def _teachers_row(
    runs: Sequence[TrainedRun], columns: Sequence[str], scores: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the size and the scores of the teacher of all runs. None means that they have several."""
    if len({run.reference.manifest.identity.teacher for run in runs}) > 1:
        return None
    size = model_size(runs[0].teacher_config, runs[0].length)
    return {**asdict(size), **{name: scores.get(name.removeprefix(SCORE)) for name in columns}}


def _figure_values(
    runs: Sequence[TrainedRun], students: pa.Table, searches: Sequence[SearchRecord]
) -> dict[str, Any]:
    """Return the figures about all students: searches, curves, trade-off and storage."""
    identity = runs[0].reference.manifest.identity
    num_relations = 2  # attention distribution and value relation
    dense_bytes = identity.relation_heads * identity.packing.max_length * _FLOAT16_BYTES * num_relations
    has_kls = students["kl_sum"].null_count < len(students)
    return {
        "searches": [(record, front_figure(record).spec) for record in searches],
        "curves": curves_figure(runs).spec,
        "tradeoff": tradeoff_figure(students).spec if len(students) > 1 else None,
        "learned_maps": any(run.record.identity.spec.is_relational for run in runs),
        "storage": storage_figure(students, dense_bytes).spec if has_kls else None,
    }


def _comparison_values(
    runs: Sequence[TrainedRun], shown: Sequence[tuple[str, Path]], compared: _Comparisons
) -> dict[str, Any]:
    """Return what the template shows of single students: maps, similarity and agreement with the teacher."""
    runs_of = _runs_by_folder(runs)
    by_student: dict[str, list[RelationAgreement]] = {}
    for relation in compared.agreement:
        by_student.setdefault(relation.student, []).append(relation)
    return {
        "num_shown": len(shown),
        "maps": packed(compared.maps) if compared.maps else None,
        "untrained": {name: runs_of[folder].record.identity.spec.untrained for name, folder in shown},
        "similarity": [(layers, similarity_figure(layers).spec) for layers in compared.similarity],
        "agreement": [
            (name, relations, agreement_figure(relations).spec) for name, relations in by_student.items()
        ],
    }


def check_page(
    path: Path, cache: Cache, *, teacher: Teacher | None, map_texts: MapTexts | None = None
) -> None:
    """Check what a page shows, before anything is measured; see `write_report`."""
    refuse_no_page(path)
    if map_texts is not None and map_texts.texts and teacher is None:
        raise InvalidConfigError(TEXT_NEEDS_TEACHER)
    if teacher is not None:
        check_is_teacher_of(teacher, cache)
    check_sequences(cache, () if map_texts is None else map_texts.sequences)
    refuse_unwritable(path.parent)


def _left_out(runs: Sequence[TrainedRun]) -> list[str]:
    """Return what to say of students that are in no map: of other pieces, or of another teacher."""
    lines, first = [], runs[0].reference.manifest
    if labels := [run.label for run in runs if not run.has_teachers_pieces]:
        lines.append(
            f"{', '.join(labels)}: these students have another vocabulary than the teacher, so there are no "
            "maps of them, and their figures are those that their training recorded"
        )
    if labels := [run.label for run in runs if not _has_teacher_of(run, runs[0])]:
        lines.append(
            f"{', '.join(labels)}: these students learned from another teacher than "
            f"{printable(first.labels.teacher)}, so there are no maps of them"
        )
    return lines


def _has_teacher_of(run: TrainedRun, other: TrainedRun) -> bool:
    """Return whether two runs are compared with the same teacher."""
    return run.reference.manifest.identity.teacher == other.reference.manifest.identity.teacher


def _shown_students(runs: Sequence[TrainedRun]) -> list[tuple[str, Path]]:
    """Return names and folders of students that are in maps, at most 8, by seed.

    They have the first run's teacher, and can read its sequences.
    """
    first = runs[0].reference.manifest.identity
    shown = []
    for run in sorted(runs, key=lambda run: run.record.identity.seed):
        identity = run.reference.manifest.identity
        has_tokenizer = identity.tokenizer_sha256 == first.tokenizer_sha256
        is_long = identity.packing.max_length >= first.packing.max_length
        if has_tokenizer and is_long and run.has_teachers_pieces and _has_teacher_of(run, runs[0]):
            suffix = "" if len(runs) == 1 else f", {run.label}"
            shown += [(f"{student.arch}{suffix}", run.folder(student)) for student in run.students]
    return shown[:MAX_STUDENTS]


def _runs_by_folder(runs: Sequence[TrainedRun]) -> dict[Path, TrainedRun]:
    """Return the run of each student, by the student's folder."""
    return {run.folder(student): run for run in runs for student in run.students}


def _compared_students(
    runs: Sequence[TrainedRun], shown: Sequence[tuple[str, Path]]
) -> list[ComparedStudent]:
    """Return the students that are shown, with the relation heads and the layer that they are compared by."""
    runs_of = _runs_by_folder(runs)
    return [
        ComparedStudent(
            name=name,
            folder=folder,
            relation_heads=runs_of[folder].objective.wanted.relation_heads,
            layer=runs_of[folder].layer,
        )
        for name, folder in shown
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """A page and the table that it shows."""

    report: Report
    students: pa.Table
    """A row for each student (`report.tables.students_table`)."""
    cautions: tuple[str, ...] = ()
    """What readers of a comparison must know."""


_OF_SEVERAL: Final = (
    "Scores on tasks are those of several studies, which may have measured other examples, lengths or seeds: "
    "compare them within a study"
)


def report_runs(
    folders: Sequence[Path], config: ReportConfig, *, out: Path, session: Session = ALONE
) -> ReportResult:
    """Write one self-contained page about runs.

    Args:
        folders: folders of runs, chains, studies or searches.
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
    resolved = dict.fromkeys(path.resolve() for path in folders)
    opened = [
        run for path in resolved for run in open_runs(path, cache_place=config.cache, home=session.home)
    ]
    runs = with_short_names(opened)
    teacher = None
    if config.teacher is not None:
        teacher = Teacher(locate_teacher(config.teacher), choose_device(config.device))
    check_page(out, runs[0].reference, teacher=teacher, map_texts=map_texts)
    session.progress.note(f"measuring {counted(sum(len(run.students) for run in runs), 'student')}")
    by_folder = [known_scores(path) for path in resolved]
    scores = {name: scored for known, _ in by_folder for name, scored in known.items()}
    remarks = [_OF_SEVERAL] if sum(bool(known) for known, _ in by_folder) > 1 else []
    remarks += [line for _, left_out in by_folder for line in left_out]
    students = students_table(runs, teacher, device=config.device, scores=scores)
    report = write_report(
        out,
        runs,
        students,
        teacher=teacher,
        map_texts=map_texts,
        title=config.title,
        paths=config.paths,
        remarks=remarks,
        searches=[record for path in resolved if (record := read_search(path)) is not None],
    )
    said = (*_cautions(runs, students), *(f"{line}." for line in remarks))
    return ReportResult(report=report, students=students, cautions=said)
