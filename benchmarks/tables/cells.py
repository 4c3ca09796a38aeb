"""Read results, and write tables and their cells."""

import json
from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.report import RESULTS


def read(name: str) -> Any:  # noqa: ANN401 - JSON of any benchmark
    """Return the results of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def signed(ratio: float) -> str:
    """Return a ratio as a difference from 1, in percent with its sign."""
    return f"{100 * (ratio - 1):+.2f} %"


def mean_of(values: Sequence[float]) -> str:
    """Return the mean over seeds and its deviation; a dash if there is no value."""
    if not values:
        return "-"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else " (one seed)")


def spread_of(values: Sequence[float]) -> str:
    """Return the mean over seeds, its deviation, and the number of seeds."""
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread} ({len(values)})"
