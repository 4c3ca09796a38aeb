"""Draw plots of the results, each from the JSON file of the same name.

python -m benchmarks.plots
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.report import RESULTS
from benchmarks.tables.cells import read
from benchmarks.tables.students import long_starts, short_starts

COLOURS = {
    "vectors": "#0b6e4f",
    "topk": "#c44536",
    "layer's": "#7d8597",
    "dense": "#1d3557",
    "online": "#1d3557",
}
LEAST_KL = 1e-4
"""Least KL of the plot, in nats. Lower values are drawn here."""
LEAST_EXCESS = 0.02
"""Least excess over online training, in per cent. Lower values are drawn here."""
MOST_IN_A_ROW = 4
"""Most panels next to each other."""
MARKERS = {"128": "o", "256": "s", "512": "^"}


def _per_cent(ratio: float) -> float:
    return max(100 * (ratio - 1), LEAST_EXCESS)


def _colour(setting: str) -> str:
    return COLOURS[setting.replace(",", " ").split()[0]]


@contextmanager
def _panels(name: str, size: tuple[float, float], count: int) -> Iterator[list[Axes]]:
    """Yield panels, at most `MOST_IN_A_ROW` side by side, and save them. The size of a row is in inches."""
    mpl.use("Agg")
    rows = ceil(count / MOST_IN_A_ROW)
    figure, grid = plt.subplots(
        rows,
        ceil(count / rows),
        figsize=(size[0], size[1] * rows),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count]:
        axes.spines[["top", "right"]].set_visible(False)
    yield panels[:count]
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)


@contextmanager
def _axes(name: str, size: tuple[float, float]) -> Iterator[Axes]:
    with _panels(name, size, 1) as (axes,):
        yield axes


START_COLOURS = {
    "random": "#999999",
    "embeddings": "#c9a227",
    "teacher-layers": "#4c78a8",
    "slice": "#0b6e4f",
}


def plot_fidelity(name: str) -> None:
    """Draw bytes per token against the greater KL of both relations; sampled rows have no KL."""
    result = read(name)
    with _axes(name, (7.5, 4.5)) as axes:
        for length, rows in result["lengths"].items():
            for family in ("vectors", "topk largest", "layer's input", "dense"):
                points = sorted(
                    (row["bytes_per_token"], max(*row["kl_teacher_to_stored"].values(), LEAST_KL))
                    for setting, row in rows.items()
                    if setting.startswith(family)
                )
                line = axes.plot(*zip(*points, strict=True), marker=MARKERS[length], color=_colour(family))
                if length == "128":
                    line[0].set_label(f"{family} (KL below 1e-6)" if family == "dense" else family)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes per token")
        axes.set_ylabel("KL(teacher, stored), worse relation, nats")
        axes.set_title(
            f"all-MiniLM-L6-v2 on {result['corpus']}, held out, length 128 (o), 256 (□), 512 (△)\n"
            "topk pps is not here: its rows are samples, unbiased instead of close",
            loc="left",
            fontsize=9,
        )
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=8, frameon=False)


def plot_student_quality() -> None:
    """Draw bytes per token against the student's held-out KL, relative to online training."""
    result = read("student_quality")
    quality, sizes = result["held_out_kl_nats"], result["bytes_per_token"]
    with _axes("student_quality", (7.5, 4)) as axes:
        for setting, size in sizes.items():
            excesses = [_per_cent(ratio) for ratio in quality[setting]["over_online_by_seed"]]
            mean = _per_cent(quality[setting]["over_online"])
            axes.plot([size] * len(excesses), excesses, "_", color=_colour(setting), alpha=0.6)
            axes.plot([size], [mean], "o", color=_colour(setting))
            label = f"{setting}\n{100 * quality[setting]['over_online'] - 100:+.2f} %"
            axes.annotate(label, (size, mean), xytext=(6, -2), textcoords="offset points", fontsize=8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(right=4 * max(sizes.values()))
        axes.set_xlabel("bytes per token of the cache")
        axes.set_ylabel("held-out KL above online training, %")
        axes.set_title(
            f"{result['student']}, {result['steps']} steps, {len(result['seeds'])} seeds", loc="left"
        )


def plot_dump_speed() -> None:
    """Draw tokens per second of each codec, over those of the plain forward pass, on each processor."""
    with _axes("dump_speed", (6, 3.5)) as axes:
        for offset, (cpu, measured) in enumerate(read("dump_speed")["cpus"].items()):
            ratios = measured["over_plain_forward"]
            places = [number + offset * 0.4 for number in range(len(ratios))]
            bars = axes.barh(places, list(ratios.values()), height=0.36, label=cpu)
            axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.set_yticks([number + 0.2 for number in range(len(ratios))], list(ratios))
        axes.invert_yaxis()
        axes.axvline(1, color=COLOURS["online"], linewidth=0.8)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
        axes.set_xlabel("tokens per second of a dump, over the teacher's plain forward pass")


def plot_head_start() -> None:
    """Draw held-out KLs by shape and start: bars after 300 steps, lines for slices before training."""
    rows = short_starts()
    shapes = list(dict.fromkeys(row["arch"] for row in rows))

    def kl(shape: str, start: str, when: str) -> float | None:
        sums = [sum(row[when].values()) for row in rows if (row["arch"], row["start"]) == (shape, start)]
        return sum(sums) / len(sums) if sums else None

    with _axes("head_start", (8, 3.5)) as axes:
        for offset, (start, colour) in enumerate(START_COLOURS.items()):
            heights = [kl(shape, start, "after") or 0.0 for shape in shapes]
            places = [number + (offset - 1.5) / 5 for number in range(len(shapes))]
            axes.bar(places, heights, width=0.18, color=colour, label=start)
        for number, shape in enumerate(shapes):
            height = kl(shape, "slice", "before") or 0.0
            axes.plot([number + 0.2, number + 0.4], [height, height], color="black", linewidth=1)
        axes.set_xticks(range(len(shapes)), shapes, fontsize=8)
        axes.set_ylabel("held-out KL, attention + value, nats")
        axes.set_title("After 300 steps, by start (black: slices before training)", loc="left")
        axes.legend(fontsize=8, frameon=False)


def plot_head_start_curves() -> None:
    """Draw held-out KLs over 3,000 steps, a line for each seed."""
    shapes = long_starts()
    with _panels("head_start_curves", (8, 2.8), len(shapes)) as panels:
        for axes, (shape, starts) in zip(panels, sorted(shapes.items()), strict=True):
            for start, curves in starts.items():
                for number, curve in enumerate(curves):
                    steps, kls = zip(*((step, kl) for step, kl in curve.items() if step), strict=True)
                    label = start if number == 0 else None
                    axes.plot(steps, kls, color=START_COLOURS[start], linewidth=1, label=label)
            axes.set_title(shape, loc="left")
            axes.set_xlabel("steps")
        panels[0].figure.supylabel("held-out KL, attention + value, nats", fontsize="medium")
        most = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
        most.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    for path in sorted(RESULTS.glob("fidelity_*.json")):
        plot_fidelity(path.stem)
    plot_student_quality()
    plot_dump_speed()
    plot_head_start()
    plot_head_start_curves()
