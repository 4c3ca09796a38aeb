"""Measure halving against a full grid: whether `search` finds what training all shapes to the end would find.

    python -m benchmarks.halving --cache CACHE [--home HOME]

The 24 shapes of benchmarks/shapes.py learn the vectors of a cache of `mini` to the end, in one pass. Then
`search` looks for the best shape within several numbers of weights: with `--every`, so that it leaves no
shape out before training, and as it comes. Its tokens and seconds of training are shares of those of the
grid's shapes within the same budget; seconds of a pass are shared by operations, as in a study's table.
"""

import argparse
from pathlib import Path
from typing import Any, Final

from benchmarks.report import add_to_result, cpu
from benchmarks.shapes import ARCHS, RECIPE
from minilm_cache import TrainConfig, train_students
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.tables import students_table
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.workflows.config import SearchConfig
from minilm_cache.workflows.search import SearchResult, search

STEPS: Final = 108
BUDGETS: Final = (4_000_000, 9_000_000, 24_000_000)
"""Most weights: widths up to 96, up to 192, and all shapes."""
SPACE: Final = {"layers": "2,3,4,6", "widths": "96,192,384", "feed_forward": "2,4"}
_USUAL_RATIO: Final = 4


def main() -> None:
    """Train the grid, search within each budget, and write what was found for how much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("halving"))
    given = parser.parse_args()
    session = Session(given.home)
    recipe = {**RECIPE, "steps": STEPS, "eval_steps": None}
    grid = given.home / "grid"
    train_students(validated(TrainConfig, {**recipe, "arch": ARCHS}), given.cache, out=grid, session=session)
    trained = {row["arch"]: row for row in _rows(grid, given.cache)}
    found = {}
    for most in BUDGETS:
        within = {arch: row for arch, row in trained.items() if row["num_parameters"] <= most}
        ranked = sorted(within, key=lambda arch: within[arch]["held_out_loss"])
        for every in (True, False):
            config = validated(SearchConfig, {**SPACE, "max_parameters": most, "every": every})
            out = given.home / f"{most}-{'every' if every else 'uncovered'}"
            result = search(config, recipe, given.cache, out=out, session=session)
            chosen = _whole_name(result.winner.arch)
            steps, seconds = _spent(result, given.cache)
            found[out.name] = {
                "shapes": len(within),
                "tried": sum(each.is_tried for each in result.record.candidates),
                "best_of_grid": ranked[0],
                "found": chosen,
                "place_in_grid": ranked.index(chosen) + 1,
                "loss_of_best": round(within[ranked[0]]["held_out_loss"], 4),
                "loss_found": round(result.record.rounds[-1].losses[result.winner.name] or 0, 4),
                "share_of_tokens": round(steps / (STEPS * len(within)), 3),
                "share_of_seconds": round(seconds / sum(row["own_train_s"] for row in within.values()), 3),
            }
            add_to_result("halving", steps=STEPS, searches=found, cpu=cpu())


def _rows(run: Path, cache: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = students_table([TrainedRun.open(run, cache_place=str(cache))]).to_pylist()
    return rows


def _spent(result: SearchResult, cache: Path) -> tuple[int, float]:
    """Return the steps of all shapes and rounds, and the seconds that they took."""
    rows = [row for done in result.record.rounds for row in _rows(result.path / done.run, cache)]
    return sum(row["steps"] for row in rows), sum(row["own_train_s"] for row in rows)


def _whole_name(arch: str) -> str:
    """Return a shape with its feed-forward network, as the grid names it."""
    width = int(arch.split(":", maxsplit=1)[0].split("x")[1])
    return arch if ":ff" in arch else f"{arch}:ff{_USUAL_RATIO * width}"


if __name__ == "__main__":
    main()
