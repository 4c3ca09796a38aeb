"""The report's figures: each function takes tables and returns a matplotlib figure, also for notebooks.

Series differ in marker and line style in addition to colour. Text and axes have one ink colour, which a page
can replace by its own.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.similarity import LayerSimilarity, RelationAgreement
from minilm_cache.report.tables import KL_COLUMNS, curves_table
from minilm_cache.train.record import StudentRecord

COLOURS: Final = ("#3b82c4", "#d9622b", "#4c9a52", "#b05fc0", "#c9a227", "#5aa7a7", "#c45b7c", "#8a7a5c")
"""Colours of series, of medium lightness: they stand out on white and on black."""
MARKERS: Final = "os^Dv<>P"
STYLES: Final = ("-", "--", "-.", ":")
_MOST_POINTS: Final = 400
"""Most points of a curve; of a longer curve every n-th point is drawn."""
_MARKS: Final = 8
"""Number of markers along a curve."""
_NOTEBOOK_DPI: Final = 100
INK: Final = "#121314"
"""Colour of text and axes, which a page replaces by its own."""


class ShownFigure(Figure):
    """A figure that notebooks show, without pyplot, which keeps figures alive and needs a display."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_NOTEBOOK_DPI, facecolor="white")
        return buffer.getvalue()


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one set of axes."""
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    figure.patch.set_alpha(0)
    _style_axes(axes)
    return figure, axes


def _style_axes(axes: Axes) -> None:
    """Remove background and frame, and draw the rest in the ink colour."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(which="both", colors=INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with numbers like 0.15, where matplotlib would write powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 4, 5, 7)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _legend(axes: Axes, title: str) -> None:
    """Draw a legend to the right of the axes, if there is anything to name."""
    if not axes.get_legend_handles_labels()[0]:
        return
    legend = axes.legend(
        title=title, frameon=False, labelcolor=INK, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1)
    )
    legend.get_title().set_color(INK)


def curves_figure(runs: Sequence[TrainedRun]) -> Figure:
    """Draw the training loss of every student; crosses are the same loss on held-out sequences."""
    figure, axes = _axes(8.5, 4.2)
    all_kls = all(run.record.identity.spec.is_relational for run in runs)
    drawn = 0
    for run in runs:
        table = curves_table(run)
        for student in run.students:
            logged = table.filter(pc.field("student") == student.arch)
            losses = logged.filter((pc.field("what") == "students") & (pc.field("of") == "loss"))
            losses = losses.take(np.arange(0, len(losses), 1 + len(losses) // _MOST_POINTS))
            colour = COLOURS[drawn % len(COLOURS)]
            style = STYLES[(drawn + drawn // len(COLOURS)) % len(STYLES)]  # the first 32 pairs all differ
            label = _literal(f"{student.arch}, {run.label}" if len(runs) > 1 else student.arch)
            axes.plot(
                losses["step"],
                losses["nats"],
                style,
                marker=MARKERS[drawn % len(MARKERS)],
                markevery=max(1, len(losses) // _MARKS),
                ms=4,
                color=colour,
                lw=1.4,
                label=label,
            )
            held_out = _held_out_losses(run, student, logged)
            axes.plot(list(held_out), list(held_out.values()), "x", color=colour)
            drawn += 1
    axes.set(xlabel="step", ylabel="loss (nats)" if all_kls else "loss", yscale="log")
    _plain_numbers(axes.yaxis)
    _legend(axes, "student")
    return figure


def _held_out_losses(run: TrainedRun, student: StudentRecord, logged: pa.Table) -> dict[int, float]:
    """Return a student's losses on held-out sequences by step: before, during and after its training."""
    looks = logged.filter((pc.field("what") == "held_out") & (pc.field("of") == "loss"))
    ends = {0: student.loss_before, student.best_step or run.record.identity.steps: student.loss_after}
    losses = ends | dict(zip(looks["step"].to_pylist(), looks["nats"].to_pylist(), strict=True))
    return {step: loss for step, loss in sorted(losses.items()) if loss is not None}


def tradeoff_figure(students: pa.Table) -> Figure:
    """Draw speed, in multiples of the teacher's, against closeness; areas show numbers of parameters.

    Closeness is the held-out KL, or where no student has one, the held-out loss of its objective.
    """
    figure, axes = _axes(8.5, 4.2)
    column = "kl_sum" if _with(students, "kl_sum") else "held_out_loss"
    rows = _with(students, column)
    most = max((row["num_parameters"] for row in rows), default=1)
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        key = (row["arch"], _relations_of(row))
        place = (row["speedup"], row[column])
        best[key] = min(best.get(key, place), place, key=lambda position: position[1])
    caches = list(dict.fromkeys(map(_cache_label, rows)))
    for number, cache in enumerate(caches):
        members = [row for row in rows if _cache_label(row) == cache]
        axes.scatter(
            [row["speedup"] for row in members],
            [row[column] for row in members],
            s=[30 + 270 * row["num_parameters"] / most for row in members],
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            alpha=0.75,
            label=_literal(cache),
        )
    for (arch, _), place in best.items():
        axes.annotate(
            _literal(arch), place, xytext=(6, -10), textcoords="offset points", color=INK, fontsize=8
        )
    closeness = {"kl_sum": "held-out KL, summed (nats)", "held_out_loss": "held-out loss"}
    axes.set(xlabel="tokens per second of inference, teacher = 1", ylabel=closeness[column])
    axes.margins(0.12)
    if len(caches) > 1:
        _legend(axes, "cache")
    return figure


def attention_maps(maps: Mapping[str, npt.NDArray[np.float32]], tokens: Sequence[str]) -> Figure:
    """Draw maps side by side: how much each token (row) attends to each other one (column).

    Args:
        maps: maps by the name of the model, each `(shown, shown)`.
        tokens: the shown tokens.
    """
    side = 1.5 + 0.11 * len(tokens)
    figure = ShownFigure(figsize=(side * len(maps), side), layout="constrained")
    for axes, (name, weights) in zip(
        figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True
    ):
        axes.imshow(np.sqrt(weights), cmap="Blues", vmin=0, vmax=1)
        axes.set_title(_literal(name), fontsize=9)
        axes.set_xticks(range(len(tokens)), list(map(_literal, tokens)), rotation=90, fontsize=6)
        axes.set_yticks(range(len(tokens)), list(map(_literal, tokens)), fontsize=6)
        axes.tick_params(length=0)
    return figure


def storage_figure(students: pa.Table, dense_bytes_per_token: int) -> Figure:
    """Draw bytes per token of each cache against its students' KL, with a line for each shape.

    Args:
        students: table of students (`report.tables.students_table`).
        dense_bytes_per_token: bytes per token of both relations in float16 without a codec, drawn as a line.
    """
    figure, axes = _axes(8.5, 4.2)
    rows = _with(students, "kl_sum")
    for number, key in enumerate(dict.fromkeys(map(_line_label, rows))):
        means: dict[float, list[float]] = {}
        for row in rows:
            if _line_label(row) == key:
                means.setdefault(row["cache_bytes_per_token"], []).append(row["kl_sum"])
        sizes = sorted(means)
        axes.plot(
            sizes,
            [float(np.mean(means[size])) for size in sizes],
            STYLES[number % len(STYLES)],
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            label=_literal(key),
        )
    axes.axvline(dense_bytes_per_token, color=INK, lw=0.8, ls=":")
    transform = axes.get_xaxis_transform()
    axes.text(
        dense_bytes_per_token,
        0.98,
        " dense ",
        color=INK,
        fontsize=8,
        va="top",
        ha="right",
        transform=transform,
    )
    axes.set(xlabel="bytes per token of the cache", ylabel="held-out KL, summed (nats)", xscale="log")
    _plain_numbers(axes.xaxis)
    _legend(axes, "student")
    return figure


def similarity_figure(layers: LayerSimilarity) -> Figure:
    """Draw linear CKA and SVCCA of every layer of the teacher with every layer of a student."""
    rows, columns = layers.cka.shape
    figure = ShownFigure(figsize=(1.6 + 1.1 * columns, 0.9 + 0.34 * rows), layout="constrained")
    figure.patch.set_alpha(0)
    for number, (name, values) in enumerate((("linear CKA", layers.cka), ("SVCCA", layers.svcca))):
        axes = figure.add_subplot(1, 2, number + 1)
        axes.imshow(values, vmin=0, vmax=1, cmap="Greys", aspect="auto")
        axes.set_title(name, fontsize=9, color=INK)
        axes.set_xlabel("student, layer", color=INK)
        axes.set_xticks(range(columns))
        axes.set_yticks(range(rows))
        axes.tick_params(colors=INK)
        if number == 0:
            axes.set_ylabel("teacher, layer", color=INK)
        _write_values(axes, values)
    return figure


def agreement_figure(relations: Sequence[RelationAgreement]) -> Figure:
    """Draw KL and the share of rows with the same likeliest column, by head, position and length."""
    figure = ShownFigure(figsize=(9.5, 4.6), layout="constrained")
    figure.patch.set_alpha(0)
    grid = figure.subplots(2, 3, sharex="col", sharey="row")
    for number, relation in enumerate(relations):
        series = (
            (range(len(relation.heads)), relation.heads),
            (range(1, len(relation.positions) + 1), relation.positions),
            (list(relation.lengths), list(relation.lengths.values())),
        )
        for column, (places, means) in enumerate(series):
            line = "none" if column == 0 else STYLES[number % len(STYLES)]  # heads have no order
            style = {"marker": MARKERS[number], "linestyle": line, "color": COLOURS[number]}
            kls, shares = [mean.kl for mean in means], [mean.same for mean in means]
            for axes, values in zip(grid[:, column], (kls, shares), strict=True):
                axes.plot(places, values, markersize=4, label=str(relation.kind), **style)
    for axes in grid.flat:
        _style_axes(axes)
    grid[0, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[0, 2].set_xscale("log", base=2)
    lengths = sorted({length for relation in relations for length in relation.lengths})
    grid[0, 2].set_xticks(lengths, map(str, lengths))
    for axes, words in zip(
        grid[1], ("head", "eighth of the sequence", "tokens of the sequence"), strict=True
    ):
        axes.set_xlabel(words, color=INK)
    for axes, words in zip(grid[:, 0], ("KL (nats)", "same likeliest column"), strict=True):
        axes.set_ylabel(words, color=INK)
    _legend(grid[0, 2], "relation")
    return figure


def _write_values(axes: Axes, values: npt.NDArray[np.float64]) -> None:
    """Write each value on its cell, so that nobody has to compare shades."""
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > 0.5 else "black"  # noqa: PLR2004 - the middle of the scale
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)


def _literal(text: str) -> str:
    """Return text with escaped dollar signs, so that matplotlib does not read it as a formula."""
    return text.replace("$", r"\$")


def _line_label(row: dict[str, Any]) -> str:
    """Return the label of a line: a shape, its objective, and the relations and the target of its KLs."""
    return f"{row['arch']}, {row['objective']}, {_sum_label(row)}"


def _cache_label(row: dict[str, Any]) -> str:
    """Return a cache's name with the relations and the target of the KLs: only equal sums are comparable."""
    return f"{row['cache']}, {_sum_label(row)}"


def _sum_label(row: dict[str, Any]) -> str:
    """Return the relations whose KLs a row sums and the model that they are to, or the loss that it has."""
    if row["kl_sum"] is None:
        return f"loss of {row['objective']}"
    to = "" if row["kl_to"] == "teacher" else f", to {row['kl_to']}"
    return f"KL of {_relations_of(row)}{to}"


def _relations_of(row: dict[str, Any]) -> str:
    """Return the relations whose KLs a row sums."""
    return " + ".join(kind for kind, column in KL_COLUMNS.items() if row[column] is not None)


def _with(students: pa.Table, column: str) -> list[dict[str, Any]]:
    """Return the rows of students that have a value in a column."""
    rows: list[dict[str, Any]] = students.to_pylist()
    return [row for row in rows if row[column] is not None]
