"""The report's charts: each function takes tables and returns a picture that a page or a notebook shows.

Vega-Altair describes them, and Vega draws them: with hover, a legend that can be clicked, and lists that
choose an objective, a cache or a seed. Nothing in a name is ever read as an expression.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import altair as alt
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import vl_convert

from minilm_cache.errors import InvalidConfigError
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.similarity import LayerSimilarity, RelationAgreement
from minilm_cache.report.tables import KL_COLUMNS, curves_table, seed_of
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.train.record import StudentRecord

COLOURS: Final = ("#3b82c4", "#d9622b", "#4c9a52", "#b05fc0", "#c9a227", "#5aa7a7", "#c45b7c", "#8a7a5c")
"""Colours of series, of medium lightness: they stand out on white and on black."""
DASHES: Final = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
"""Styles of the lines of series with the same colour: lengths of dashes and gaps, in pixels."""
_MOST_POINTS: Final = 200
"""Most points of a curve; of a longer curve every n-th point is drawn."""
_WIDTH: Final = 640
HEIGHT: Final = 320
"""Width of a wide chart as an image, and its height, in pixels."""
_SMALL: Final = 210
"""Width and height of the charts that stand beside each other, in pixels."""
_CELL: Final = 34
_TOKEN: Final = 12
"""Width and height of a cell of a table of layers and of a map of tokens, in pixels."""
_KL: Final = "held-out KL, summed (nats)"
_CLOSENESS: Final = "held-out KL, summed (nats), or loss"
INK: Final = "currentColor"
"""Colour of text and axes: that of the text around the picture, and black in a notebook."""
_VEGA_LITE: Final = alt.SCHEMA_VERSION.rpartition(".")[0].removeprefix("v")
Rows = list[dict[str, Any]]
AnyChart = alt.Chart | alt.LayerChart | alt.FacetChart | alt.ConcatChart | alt.HConcatChart


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart, which notebooks show as an image and pages draw."""

    chart: AnyChart

    @property
    def spec(self) -> dict[str, Any]:
        """The chart in Vega-Lite, in JSON's types."""
        ink = {f"{part}Color": INK for part in ("label", "title", "domain", "tick", "grid")}
        legend = alt.LegendConfig(labelColor=INK, titleColor=INK, labelLimit=420, orient="bottom", columns=2)
        styled = self.chart.configure(
            background="transparent",
            axis=ink | {"gridOpacity": 0.12},
            legend=legend,
            title=alt.TitleConfig(color=INK),
            text=alt.MarkConfig(color=INK),
            range=alt.RangeConfig(category=list(COLOURS)),
            view=alt.ViewConfig(stroke=None, continuousHeight=HEIGHT),
        )
        # Validation takes longer than all else; tests draw the charts.
        spec: dict[str, Any] = styled.to_dict(validate=False)
        return spec

    def save(self, file: str | Path) -> None:
        """Write the picture as a PNG.

        Raises:
            InvalidConfigError: the file's name does not end in .png.
            StorageError: the file cannot be written.
        """
        if Path(file).suffix.lower() != ".png":
            raise InvalidConfigError(f"{file}: a picture is written as a PNG. Give a name that ends in .png.")
        with storage_errors("write", Path(file)):
            write_file(Path(file), self._repr_png_())

    def _repr_png_(self) -> bytes:
        spec = self.spec
        spec |= {"background": "white"} | ({"width": _WIDTH} if spec.get("width") == "container" else {})
        png: bytes = vl_convert.vegalite_to_png(spec, vl_version=_VEGA_LITE, scale=1.5)
        return png


@cache
def drawing_script() -> str:
    """Return the JavaScript that draws charts, whole: it defines `vegaEmbed` and loads nothing."""
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=_VEGA_LITE)
    return script


def curves_figure(runs: Sequence[TrainedRun]) -> Picture:
    """Draw the training loss of every student; crosses are the same loss on held-out sequences."""
    rows: Rows = []
    for run in runs:
        table = curves_table(run)
        for student in run.students:
            logged = table.filter(pc.field("student") == student.arch)
            losses = logged.filter((pc.field("what") == "students") & (pc.field("of") == "loss"))
            losses = losses.take(np.arange(0, len(losses), 1 + len(losses) // _MOST_POINTS))
            label = f"{student.arch}, {run.label}" if len(runs) > 1 else student.arch
            names = {
                "student": label,
                "objective": run.record.identity.in_words(),
                "cache": run.name,
                "seed": seed_of(run, student),
            }
            points = zip(losses["step"].to_pylist(), losses["nats"].to_pylist(), strict=True)
            looks = _held_out_losses(run, student, logged).items()
            for kind, found in (("training", points), ("held out", looks)):
                # A logarithmic axis has no place for 0 and below, nor has JSON a word for infinity.
                shown = [(step, loss) for step, loss in found if 0 < loss < math.inf]
                rows += [{**names, "step": step, kind: loss} for step, loss in shown]
    all_kls = all(run.record.identity.spec.is_relational for run in runs)
    title = "loss (nats)" if all_kls else "loss"
    clicked = alt.selection_point(fields=["student"], bind="legend")
    base = alt.Chart(inline_data(rows)).encode(
        x=alt.X("step:Q").axis(tickMinStep=1),
        color=colour_of(rows, "student"),
        opacity=alt.condition(clicked, alt.value(1), alt.value(0.1)),
        tooltip=shown_of_mark(rows),
    )
    trained = base.encode(y=alt.Y("training:Q", title=title).scale(type="log", nice=False))
    line = trained.mark_line(strokeWidth=1.6).encode(strokeDash=_dashes(rows, "student"))
    seen = base.mark_point(shape="cross", size=50, filled=True).encode(y=alt.Y("held out:Q", title=title))
    chart = alt.layer(line, trained.mark_point(size=40, filled=True, opacity=0), seen)
    return Picture(_chosen(chart.add_params(clicked), rows, one_of="objective"))


def _held_out_losses(run: TrainedRun, student: StudentRecord, logged: pa.Table) -> dict[int, float]:
    """Return a student's losses on held-out sequences by step: before, during and after its training."""
    looks = logged.filter((pc.field("what") == "held_out") & (pc.field("of") == "loss"))
    ends = {0: student.loss_before, student.best_step or run.record.identity.steps: student.loss_after}
    losses = ends | dict(zip(looks["step"].to_pylist(), looks["nats"].to_pylist(), strict=True))
    return {step: loss for step, loss in sorted(losses.items()) if loss is not None}


def tradeoff_figure(students: pa.Table) -> Picture:
    """Draw speed, in multiples of the teacher's, against closeness; areas show numbers of parameters.

    Closeness is the held-out KL, or where no student has one, the held-out loss of its objective.
    """
    found = _with_closeness(students)
    rows = [
        _named(row, column) | {"speed": row["speedup"], "closeness": row[column], "label": ""}
        for row, column in found
    ]
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["shape"], row["cache"], row["objective"], row["measure"])
        best[key] = min(best.get(key, row), row, key=lambda one: float(one["closeness"]))
    for row in best.values():
        row["label"] = row["shape"]
    base = alt.Chart(inline_data(rows)).encode(
        x=alt.X("speed:Q", title="tokens per second of inference, teacher = 1").scale(zero=False, padding=30),
        y=alt.Y("closeness:Q", title=_CLOSENESS).scale(zero=False, padding=20),
    )
    points = base.mark_point(filled=True, opacity=0.75).encode(
        size=alt.Size("parameters:Q", legend=None).scale(range=[30, 300]),
        color=colour_of(rows, "objective"),
        shape=_shape(rows, "cache"),
        tooltip=shown_of_mark(rows, without=("label",)),
    )
    text = base.mark_text(align="left", dx=9, dy=9).encode(text="label:N")
    return Picture(_chosen(alt.layer(points, text), rows, one_of="measure"))


def storage_figure(students: pa.Table, dense_bytes_per_token: int) -> Picture:
    """Draw bytes per token that each objective needs of its cache against students' KL, with a line a shape.

    Args:
        students: table of students (`report.tables.students_table`).
        dense_bytes_per_token: bytes per token of both relations in float16 without a codec, drawn as a line.
    """
    rows = [
        _named(row, column) | {"bytes": row["needed_bytes_per_token"], "KL": row[column]}
        for row, column in _with_closeness(students)
        if column != "held_out_loss" and row["needed_bytes_per_token"]
    ]
    for row in rows:
        row["student"] = f"{row['shape']}, {row['objective']}"
    bytes_axis = alt.X("bytes:Q", title="bytes per token that the objective needs").scale(
        type="log", nice=False, padding=20
    )
    line = (
        alt.Chart(inline_data(rows))
        .mark_line(point=alt.OverlayMarkDef(size=60, filled=True))
        .encode(
            x=bytes_axis,
            y=alt.Y("mean(KL):Q", title=_KL).scale(zero=False),
            color=colour_of(rows, "student"),
            strokeDash=_dashes(rows, "student"),
            tooltip=[*shown_of_mark(rows, without=("KL", "seed", "parameters", "shape")), "mean(KL):Q"],
        )
    )
    dense = named_line(bytes_axis, field="bytes", value=dense_bytes_per_token, name="dense")
    chosen = _chosen(line, rows, one_of="measure")
    return Picture(alt.layer(chosen, *dense).properties(width="container", height=HEIGHT))


def named_line(axis: alt.X, *, field: str, value: float, name: str) -> list[alt.Chart]:
    """Return a dotted vertical line at a value of a field's axis, and its name beside it."""
    marked = alt.Chart(inline_data([{field: value, "name": name}])).encode(x=axis)
    return [
        marked.mark_rule(strokeDash=[2, 3], color=INK),
        marked.mark_text(align="right", dx=-4, y=8).encode(text="name:N"),
    ]


def attention_maps(maps: Mapping[str, npt.NDArray[np.float32]], tokens: Sequence[str]) -> Picture:
    """Draw maps side by side: how much each token (row) attends to each other one (column).

    Args:
        maps: maps by the name of the model, each `(shown, shown)`.
        tokens: the shown tokens.
    """
    numbered = [f"{token}  {place}" for place, token in enumerate(tokens)]
    charts = []
    for name, weights in maps.items():
        rows = [
            {"from": numbered[row], "to": numbered[column], "probability": float(weight)}
            for (row, column), weight in np.ndenumerate(weights)
        ]
        shade = alt.Color("probability:Q").scale(type="sqrt", domain=[0, 1], scheme="blues").legend(None)
        encoded = (
            alt.Chart(inline_data(rows), title=name)
            .mark_rect()
            .encode(
                x=alt.X("to:N", sort=numbered, title=None),
                y=alt.Y("from:N", sort=numbered, title=None),
                color=shade,
                tooltip=shown_of_mark(rows),
            )
        )
        charts.append(encoded.properties(width=_TOKEN * len(tokens), height=_TOKEN * len(tokens)))
    return Picture(alt.hconcat(*charts))


def similarity_figure(layers: LayerSimilarity) -> Picture:
    """Draw linear CKA and SVCCA of every layer of the teacher with every layer of a student."""
    charts = []
    for name, values in (("linear CKA", layers.cka), ("SVCCA", layers.svcca)):
        rows = [
            {"teacher": row, "student": column, "value": float(value)}
            for (row, column), value in np.ndenumerate(values)
        ]
        base = alt.Chart(inline_data(rows), title=name).encode(
            x=alt.X("student:O", title="student, layer").axis(labelAngle=0),
            y=alt.Y("teacher:O", title="teacher, layer"),
            tooltip=shown_of_mark(rows),
        )
        cells = base.mark_rect().encode(
            color=alt.Color("value:Q").scale(domain=[0, 1], scheme="greys").legend(None)
        )
        # Each value stands on its cell, so that nobody has to compare shades.
        is_dark = alt.FieldGTPredicate(field="value", gt=0.5)
        text = base.mark_text(fontSize=10).encode(
            text=alt.Text("value:Q", format=".2f"),
            color=alt.condition(is_dark, alt.value("white"), alt.value("black")),
        )
        size = {"width": _CELL * values.shape[1], "height": _CELL * values.shape[0]}
        charts.append(alt.layer(cells, text).properties(**size))
    return Picture(alt.hconcat(*charts))


def agreement_figure(relations: Sequence[RelationAgreement]) -> Picture:
    """Draw KL and the share of rows with the same likeliest column, by head, position and length."""
    charts = []
    for measure, by in product(
        ("KL (nats)", "same likeliest column"), ("head", "eighth of the sequence", "tokens of the sequence")
    ):
        rows: Rows = []
        for relation in relations:
            rows += [
                {
                    "relation": str(relation.kind),
                    by: place,
                    "value": probe.kl if measure == "KL (nats)" else probe.same,
                }
                for place, probe in relation.probes[by].items()
            ]
        encoded = alt.Chart(inline_data(rows)).encode(
            x=alt.X(f"{by}:O").axis(labelAngle=0),
            y=alt.Y("value:Q", title=measure),
            color=colour_of(rows, "relation"),
            shape=_shape(rows, "relation"),
            tooltip=shown_of_mark(rows),
        )
        # Heads have no order, so that no line joins them.
        drawn = encoded.mark_point(filled=True) if by == "head" else encoded.mark_line(point=True)
        charts.append(drawn.properties(width=_SMALL, height=_SMALL * 2 // 3))
    return Picture(alt.concat(*charts, columns=3))


def inline_data(rows: Rows) -> alt.InlineData:
    """Return rows as the data of a chart."""
    return alt.InlineData(values=rows)


def _values(rows: Rows, name: str) -> list[Any]:
    """Return the values of a column, each once, in their order."""
    return list(dict.fromkeys(row[name] for row in rows))


def _chosen(chart: Any, rows: Rows, one_of: str) -> Any:  # noqa: ANN401 - a chart of any kind
    """Return a chart with a list for each column that tells its rows apart.

    Args:
        chart: the chart.
        rows: its rows.
        one_of: column whose values are never drawn together, because they cannot be compared.
    """
    for name in ("measure", "objective", "cache", "seed"):
        values = _values(rows, name) if rows and name in rows[0] else []
        if len(values) > 1:
            every = [] if name == one_of else [None]
            box = alt.binding_select(
                options=[*every, *values],
                labels=[*("all" for _ in every), *map(str, values)],
                name=f"{name} ",
            )
            first = alt.Undefined if every else [{name: values[0]}]
            chosen = alt.selection_point(name=f"{name}_shown", fields=[name], bind=box, value=first)
            chart = chart.add_params(chosen).transform_filter(chosen)
    return chart.properties(width="container", height=HEIGHT)


def colour_of(rows: Rows, name: str) -> alt.Color:
    """Return what colours series by a column; the eighth colour is followed by the first one."""
    values = _values(rows, name)
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(values))]
    return alt.Color(f"{name}:N", legend=_legend(values)).scale(domain=values, range=colours)


def _dashes(rows: Rows, name: str) -> alt.StrokeDash:
    """Return what tells series of the same colour apart."""
    values = _values(rows, name)
    styles = [DASHES[number // len(COLOURS) % len(DASHES)] for number in range(len(values))]
    return alt.StrokeDash(f"{name}:N", legend=_legend(values)).scale(domain=values, range=styles)


def _shape(rows: Rows, name: str) -> alt.Shape:
    """Return what tells series apart by the shape of their marks."""
    values = _values(rows, name)
    return alt.Shape(f"{name}:N", legend=_legend(values)).scale(domain=values)


def _legend(values: Sequence[object]) -> alt.Legend | None:
    """Return the legend of series. None means that there is nothing to tell apart."""
    return alt.Legend() if len(values) > 1 else None


def shown_of_mark(rows: Rows, without: Sequence[str] = ()) -> list[alt.Tooltip]:
    """Return what is shown of a mark under the pointer: all columns but some."""
    names = dict.fromkeys(name for row in rows for name in row if name not in without)
    numbers = {name for row in rows for name, value in row.items() if isinstance(value, float)}
    return [
        alt.Tooltip(f"{name}:Q", format=".4~g") if name in numbers else alt.Tooltip(f"{name}:N")
        for name in names
    ]


def _with_closeness(students: pa.Table) -> list[tuple[dict[str, Any], str]]:
    """Return students with the column that says how close they are: the first of these that has a value.

    Rows of different columns are never drawn together, as their measures have different names.
    """
    found = []
    for row in students.to_pylist():
        values = {name: row[name] for name in ("kl_common", "kl_sum", "held_out_loss")}
        column = next((name for name, value in values.items() if value is not None), None)
        if column is not None and math.isfinite(values[column]):
            found.append((row, column))
    return found


def _named(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return what names a student in a picture: only rows with the same measure can be compared."""
    names = {"shape": row["arch"], "measure": _measure(row, column)}
    names |= {name: row[name] for name in ("objective", "cache", "seed")}
    return names | {"parameters": row["num_parameters"]}


def _measure(row: Mapping[str, Any], column: str) -> str:
    """Return the relations whose KLs a column sums and the model that they are to, or whose loss it is."""
    if column == "held_out_loss":
        return f"loss of {row['objective']}"
    to = "" if row["kl_to"] == "teacher" else f", to {row['kl_to']}"
    if column == "kl_common":
        return f"KL of attention + value{to}"
    return f"KL of {' + '.join(kind for kind, of in KL_COLUMNS.items() if row[of] is not None)}{to}"
