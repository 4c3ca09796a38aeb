"""Measure whether shapes can be ranked early: by a tenth of a training, and by their weights alone.

    python -m benchmarks.shapes --data DATA --cache CACHE [--name TEACHER --teacher FOLDER] [--home HOME]

24 shapes (2, 3, 4 and 6 layers, widths 96, 192 and 384, feed-forward networks of 2 and 4 times the width)
learn the vectors of a teacher's cache in one pass, and are evaluated on held-out texts ten times. Kendall's
tau compares orders: of losses after a tenth of the steps with losses at the end, of numbers of weights with
these, and of these with STS-B. Half of the shapes predict the losses of the others: by the law E + a N^-alpha
+ b D^-beta of weights N and tokens D (Hoffmann et al. 2022, arXiv 2203.15556, equation 2), and by the losses
after a tenth and a fifth of the steps alone. The rest is what halving, as `search` does it, would have kept.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from benchmarks.report import add_to_result, cpu, read_result
from minilm_cache import TrainConfig, train_students
from minilm_cache.evaluate.embeddings import compare_embeddings
from minilm_cache.evaluate.settings import EmbeddingsConfig
from minilm_cache.models.locate import MINI
from minilm_cache.session import Session
from minilm_cache.settings import validated

ARCHS: Final = tuple(
    f"{layers}x{width}:ff{width * ratio}"
    for layers, width, ratio in product((2, 3, 4, 6), (96, 192, 384), (2, 4))
)
STEPS: Final = 320
LOOKS: Final = 10
_HALVES: Final = 10
RECIPE: Final[dict[str, Any]] = {
    "objective": "embedding",
    "init": "slice",
    "steps": STEPS,
    "batch_size": 32,
    "lr": 1e-3,
    "precision": "bfloat16",
    "eval_steps": STEPS // LOOKS,
}


def main() -> None:
    """Train what is missing, compare orders, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--name", default=MINI, help="the teacher's name in the results")
    parser.add_argument("--teacher", help="its folder; those of packages need none")
    parser.add_argument("--home", type=Path, default=Path("shapes"))
    given = parser.parse_args()
    session = Session(given.home)
    config = validated(TrainConfig, {**RECIPE, "arch": ARCHS, "init_teacher": given.teacher})
    run = train_students(config, given.cache, out=given.home / "grid", session=session)
    weights = {each.arch: each.num_parameters for each in run.record.students}
    looks = _looks(run.path)
    last = looks[max(looks)]
    settings = validated(EmbeddingsConfig, {"data": str(given.data / "glue"), "device": "cpu"})
    _, *scored = compare_embeddings(settings, [given.teacher or given.name, str(run.path)], session=session)
    similar = dict(
        zip((each.arch for each in run.record.students), (s.spearman for s in scored), strict=True)
    )
    measured = {
        "tau_by_share": {f"{step / STEPS:.1f}": _tau(looks[step], last) for step in sorted(looks)},
        "tau_weights_loss": _tau({arch: -count for arch, count in weights.items()}, last),
        "tau_loss_stsb": _tau(last, {arch: -score for arch, score in similar.items()}),
        "predicted": predicted(looks, weights),
        "best_after_a_tenth": {str(kept): _kept(looks, last, kept) for kept in (1, 3, 8)},
        "shapes": {
            arch: {"weights": weights[arch], "loss": round(last[arch], 4), "stsb": round(similar[arch], 2)}
            for arch in ARCHS
        },
        "cpu": cpu(),
    }
    teachers = read_result("shapes").get("teachers", {}) | {given.name: measured}
    add_to_result("shapes", recipe={**RECIPE, "shapes": len(ARCHS)}, teachers=teachers)


def _looks(run: Path) -> dict[int, dict[str, float]]:
    """Return the held-out loss of each shape, by step."""
    found: dict[int, dict[str, float]] = {}
    for line in (run / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "held_out" in row:
            found[row["step"]] = {arch: losses["loss"] for arch, losses in row["held_out"].items()}
    return found


def _tau(one: dict[str, float], other: dict[str, float]) -> float:
    return round(float(kendalltau([one[arch] for arch in ARCHS], [other[arch] for arch in ARCHS])[0]), 3)


def predicted(looks: dict[int, dict[str, float]], weights: dict[str, int]) -> dict[str, float]:
    """Return the mean relative error of predicted losses at the end, over ten halves of shapes, per cent."""
    errors: dict[str, list[float]] = {}
    for seed in range(_HALVES):
        order = np.random.default_rng(seed).permutation(len(ARCHS))
        known, others = ([ARCHS[number] for number in half] for half in np.array_split(order, 2))
        truth = np.array([looks[STEPS][arch] for arch in others])
        guesses = {"law": _by_law(looks, weights, known=known, others=others)}
        for step in (STEPS // LOOKS, STEPS // LOOKS * 2):
            early, late = (np.log([looks[at][arch] for arch in known]) for at in (step, STEPS))
            line = np.polyfit(early, late, 1)
            seen = np.log([looks[step][arch] for arch in others])
            guesses[f"loss after {step / STEPS:.0%}"] = np.exp(np.polyval(line, seen))
        for name, guess in guesses.items():
            errors.setdefault(name, []).append(float(np.mean(np.abs(guess / truth - 1))))
    return {name: round(100 * float(np.mean(each)), 1) for name, each in errors.items()}


def _by_law(
    looks: dict[int, dict[str, float]], weights: dict[str, int], *, known: list[str], others: list[str]
) -> Any:  # noqa: ANN401 - an array
    """Return the losses at the end that the law, fitted to all looks at known shapes, has for the others."""

    def law(parameters: Any, size: Any, share: Any) -> Any:  # noqa: ANN401 - arrays
        least, of_size, size_power, of_data, data_power = parameters
        return np.exp(least) + np.exp(of_size) * size**-size_power + np.exp(of_data) * share**-data_power

    rows = [(weights[arch] / 1e6, step / STEPS, looks[step][arch]) for arch in known for step in looks]
    size, share, loss = np.array(rows).T
    fits = [
        least_squares(
            lambda parameters: np.log(law(parameters, size, share)) - np.log(loss),
            [np.log(least), 0, power, 0, power],
            loss="soft_l1",
            f_scale=0.05,
        )
        for least in (0.01, 0.1)
        for power in (0.2, 0.5)
    ]
    best = min(fits, key=lambda fit: float(fit.cost)).x
    return law(best, np.array([weights[arch] for arch in others]) / 1e6, 1.0)


def _kept(looks: dict[int, dict[str, float]], last: dict[str, float], count: int) -> bool:
    """Return whether the best shape in the end is among the best ones after a tenth of the steps."""
    first = looks[min(looks)]
    return min(ARCHS, key=lambda arch: last[arch]) in sorted(ARCHS, key=lambda arch: first[arch])[:count]


if __name__ == "__main__":
    main()
