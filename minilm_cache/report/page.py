"""The report: one HTML file that needs nothing else, from complete runs.

Everything that comes from a cache or a model is text to the template, never markup; the page loads nothing.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Final

import matplotlib as mpl
import pyarrow as pa
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from minilm_cache import __version__
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.teacher import Teacher
from minilm_cache.report.agreement import Probed, RelationAgreement, relation_agreement
from minilm_cache.report.compare import check_is_teacher_of
from minilm_cache.report.maps import Wanted, examples, packed
from minilm_cache.report.plots import (
    INK,
    agreement_figure,
    curves_figure,
    similarity_figure,
    storage_figure,
    tradeoff_figure,
)
from minilm_cache.report.provenance import provenance
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.similarity import LayerSimilarity, layer_similarity
from minilm_cache.report.tables import KL_COLUMNS, summary_table
from minilm_cache.store.durable import refuse_file, storage_errors, write_file
from minilm_cache.wording import number_text

MAX_STUDENTS: Final = 8
"""Whose maps and layers are shown; tables and curves show all."""
_FLOAT16_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was written."""

    path: Path
    num_bytes: int
    similarity: list[LayerSimilarity]
    """Of layers, where a teacher was at hand."""
    agreement: list[RelationAgreement]
    """Of relations, likewise."""


def write_report(
    path: Path,
    runs: Sequence[TrainedRun],
    students: pa.Table,
    *,
    teacher: Teacher | None = None,
    wanted: Wanted | None = None,
    title: str = "report",
    remarks: Sequence[str] = (),
    paths: bool = False,
) -> Report:
    """Write a page about runs.

    Args:
        path: of the file.
        runs: complete runs; attention maps are of those with the tokenizer of the first one.
        students: `results.students_table` of them.
        teacher: of the first run's cache; none: maps are what the cache holds, layers are not compared.
        wanted: texts for the attention maps; none: the first held-out sequence, if there is one.
        title: of the page.
        remarks: sentences at its top.
        paths: whether it shows whole paths, which tell of a machine and its user, or names alone.

    Raises:
        InvalidConfigError: a text that cannot be looked at.
        IdentityMismatchError: the teacher is another one.
        StorageError: the file system refused.
    """
    check_page(path, wanted, has_teacher=teacher is not None)
    first = runs[0].reference
    if teacher is not None:
        check_is_teacher_of(teacher, first)
    if wanted is None:
        wanted = Wanted(sequences=(0,) if first.manifest.num_held_out else ())
    shown = _shown_students(runs)
    found = examples(first, shown, teacher=teacher, wanted=wanted) if shown else []
    similarity = layer_similarity(first, teacher, shown) if teacher is not None and shown else []
    probed = _probed(runs, shown)
    of_folder = {run.folder(one): run for run in runs for one in run.students}
    agreement = [] if teacher is None else relation_agreement(first, teacher, probed)
    by_student = {one.student: [two for two in agreement if two.student == one.student] for one in agreement}
    heads, length = first.manifest.identity.relation_heads, first.manifest.identity.packing.max_length
    dense = heads * length * _FLOAT16_BYTES * 2
    summary = summary_table(students)
    folder = files("minilm_cache.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = number_text
    page = environment.from_string((folder / "page.html").read_text()).render(
        title=title,
        remarks=remarks,
        num_shown=len(shown),
        num_students=sum(len(run.students) for run in runs),
        version=__version__,
        style=Markup((folder / "page.css").read_text()),  # noqa: S704 - our own file
        script=Markup((folder / "page.js").read_text()),  # noqa: S704 - likewise
        students=summary.to_pylist(),
        has_agreement=summary["masked_agreement"].null_count < len(summary),
        kinds=[kind for kind, column in KL_COLUMNS.items() if summary[column].null_count < len(summary)],
        diverged=[row for row in students.to_pylist() if row["diverged_at"] is not None],
        teacher=first.manifest.labels.teacher,
        is_live=teacher is not None,
        curves=svg(curves_figure(runs), "curves"),
        tradeoff=svg(tradeoff_figure(students), "tradeoff"),
        storage=svg(storage_figure(students, dense), "storage"),
        maps=packed(found) if found else None,
        untrained={name: of_folder[folder].record.identity.spec.untrained for name, folder in shown},
        similarity=[(one, svg(similarity_figure(one), one.student)) for one in similarity],
        agreement=[
            (name, some, svg(agreement_figure(some), f"agreement {name}"))
            for name, some in by_student.items()
        ],
        provenance=[(run.path.name, provenance(run, paths=paths)) for run in runs],
    )
    content = page.encode()
    with storage_errors("write", path):
        write_file(path, content)
    return Report(path=path, num_bytes=len(content), similarity=similarity, agreement=agreement)


def check_page(path: Path, wanted: Wanted | None, *, has_teacher: bool) -> None:
    """Raise InvalidConfigError for a page that cannot be, before anything is measured."""
    refuse_file(path.parent)
    if path.is_dir():
        raise InvalidConfigError(f"--out {path} is a folder. Name a file.")
    if wanted is not None and wanted.texts and not has_teacher:
        raise InvalidConfigError("--text goes with --teacher, which must read it. Give both.")


def _shown_students(runs: Sequence[TrainedRun]) -> list[tuple[str, Path]]:
    """Return names and folders of students that read the first run's tokens, seed by seed."""
    first = runs[0].reference.manifest.identity
    found = []
    for run in sorted(runs, key=lambda one: one.record.identity.seed):
        own = run.reference.manifest.identity
        reads = own.tokenizer_sha256 == first.tokenizer_sha256
        if reads and own.packing.max_length >= first.packing.max_length:
            suffix = "" if len(runs) == 1 else f", {run.path.name}"
            found += [(f"{one.arch}{suffix}", run.folder(one)) for one in run.students]
    return found[:MAX_STUDENTS]


def _probed(runs: Sequence[TrainedRun], shown: Sequence[tuple[str, Path]]) -> list[Probed]:
    """Return the students that are shown, with the heads and the layer that they are compared by."""
    found = {run.folder(one): run for run in runs for one in run.students}
    return [
        Probed(
            name=name,
            folder=folder,
            relation_heads=found[folder].objective.wanted.relation_heads,
            layer=found[folder].layer,
        )
        for name, folder in shown
    ]


def svg(figure: Figure, name: str) -> Markup:
    """Return a figure as markup whose ink is the page's, and whose identifiers are its own."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    prefix = sha256(name.encode()).hexdigest()[:8]
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    # The size is the column's; the view box keeps the shape.
    return Markup(re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1))  # noqa: S704 - matplotlib escapes
