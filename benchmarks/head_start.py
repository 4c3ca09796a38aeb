"""Measure what a head start is worth: students of several shapes that begin with different weights.

    python -m benchmarks.head_start                     # every part
    python -m benchmarks.head_start --part starts --steps 300 --seeds 3
    python -m benchmarks.head_start --part recipe

Parts: `starts` trains students of relations from each start, `recipe` takes parts of the fit away, `tasks`
fine-tunes students of relations from random weights and from slices (needs `--data`, a folder of GLUE).
Runs are kept in `--home`. A command replaces the results of the students that it trains, and keeps others.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import add_to_result, machine, read_result
from minilm_cache import Cache, DumpConfig, TrainConfig, dump_cache, open_cache, train_students
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.models.arch import parse_arch, spaced_layers
from minilm_cache.models.load import load_model
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.student import build_student, student_config
from minilm_cache.models.tap import ATTENTION
from minilm_cache.session import Session
from minilm_cache.slicing.cut import Recipe, cut
from minilm_cache.slicing.forward import Calibration, of_cache
from minilm_cache.slicing.run import last_layer_kl
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.train.folder import RunFolder
from minilm_cache.train.record import LogLine

SHAPES = ("2x96", "3x192", "4x192", "6x192", "3x384", "4x312:ff1200", "3x384:e128")
FINE_TUNED = ("3x192", "3x384")
"""Shapes that are fine-tuned."""
FULL_WIDTH = ("3x384",)
"""Shapes that can begin with whole layers of the teacher, width 384."""
STARTS = {"random": SHAPES, "embeddings": SHAPES, "teacher-layers": FULL_WIDTH, "slice": SHAPES}
RECIPES: dict[str, Recipe] = {
    "all of it": Recipe(),
    "values: directions of the output": Recipe(keeps_values=False),
    "outputs fitted to the layer's own": Recipe(absorbs_layers=False),
    "queries, keys, values, units projected": Recipe(follows_student=False),
    "none of the three": Recipe(keeps_values=False, absorbs_layers=False, follows_student=False),
    "ridge 0.1": Recipe(ridge=0.1),
    "ridge 0.001": Recipe(ridge=0.001),
    "embeddings alone": Recipe(cuts_layers=False),
}
"""Recipes by what they leave out or change."""
TOKENS = (2**12, 2**13, 2**14, 2**15)
LAYERS = ((1, 3, 5), (1, 4, 5), (0, 3, 5), (0, 2, 5), (3, 4, 5), (0, 2, 4))
MAX_TOKENS = 300_000
HELD_OUT = 96


def main() -> None:
    """Measure the parts, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["starts", "recipe", "tasks"], action="append")
    parser.add_argument("--home", type=Path, default=Path("head_start"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--shape", action="append", help="shapes; all of them by default")
    parser.add_argument("--start", action="append", choices=list(STARTS), help="all of them by default")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--data", type=Path, help="folder of GLUE, for part `tasks`")
    given = parser.parse_args()
    parts = given.part or ["starts", "recipe"]
    place = given.home / "cache"
    dumped = dump_cache(
        DumpConfig(teacher="mini", max_tokens=MAX_TOKENS), out=place, session=Session(given.home)
    )
    cache = open_cache(dumped.path)
    if "starts" in parts:
        add_to_result("head_start", tokens=MAX_TOKENS, starts=_starts(given, cache))
    if "recipe" in parts:
        add_to_result("head_start", tokens=MAX_TOKENS, recipe=dict(_recipes(cache)))
    if "tasks" in parts:
        add_to_result("head_start", tokens=MAX_TOKENS, tasks=_tasks(given))


def _starts(given: argparse.Namespace, cache: Cache) -> list[dict[str, Any]]:
    """Return a row for each student: its shape, start, steps, seed, and KLs before and after training."""
    rows: list[dict[str, Any]] = read_result("head_start").get("starts", [])
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for start in given.start or STARTS:
            arch = tuple(shape for shape in STARTS[start] if shape in (given.shape or SHAPES))
            if arch:
                new = _trained(given, cache, arch=arch, start=start, seed=seed)
                replaced = [_student(row) for row in new]
                rows = [*(row for row in rows if _student(row) not in replaced), *new]
                add_to_result("head_start", tokens=MAX_TOKENS, starts=rows)
    return rows


def _student(row: dict[str, Any]) -> tuple[object, ...]:
    """Return what tells a row's student from others."""
    return tuple(row[key] for key in ("arch", "start", "steps", "precision", "seed"))


def _trained(
    given: argparse.Namespace, cache: Cache, *, arch: tuple[str, ...], start: str, seed: int
) -> list[dict[str, Any]]:
    """Train the students of one start and seed in one pass, or read those that are there."""
    steps = given.steps
    config = TrainConfig(
        arch=arch,
        steps=steps,
        seed=seed,
        init=start,
        eval_steps=None if steps <= 300 else steps // 20,
        precision=given.precision,
    )
    name = [start, str(steps), str(seed), *(() if arch == STARTS[start] else arch)]
    name += () if given.precision == "float32" else (given.precision,)
    out = given.home / "runs" / "-".join(name)
    record = train_students(config, cache.reader.root, out=out, session=Session(given.home)).record
    return [
        {
            "arch": student.arch,
            "start": start,
            "steps": steps,
            "precision": given.precision,
            "seed": seed,
            "gpu": machine()["gpu"],
            "before": _rounded(student.held_out_before),
            "after": _rounded(student.held_out_after),
            "curve": _curve(out, student.arch),
        }
        for student in record.students
    ]


def _curve(run: Path, arch: str) -> dict[int, float]:
    """Return the held-out KL, attention + value, after each evaluation of a student while it was trained."""
    lines = [LogLine.model_validate_json(line) for line in RunFolder(path=run).log.read_text().splitlines()]
    return {
        line.step: round(line.held_out[arch]["attention"] + line.held_out[arch]["value"], 4)
        for line in lines
        if arch in line.held_out
    }


def _rounded(kls: dict[str, float] | None) -> dict[str, float]:
    assert kls is not None
    return {kind: round(kl, 4) for kind, kl in kls.items()}


def _recipes(cache: Cache) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield held-out KLs of untrained slices, and the errors of their states, by what was changed."""
    for shape in ("3x192", "3x384"):
        for name, recipe in RECIPES.items():
            yield f"{shape}, {name}", _cut(cache, shape, recipe=recipe)
    for num_tokens in TOKENS:
        yield f"3x192, {num_tokens} tokens", _cut(cache, "3x192", num_tokens=num_tokens)
    for layers in LAYERS:
        yield f"3x192, layers {layers}", _cut(cache, "3x192", layers=layers)


def _cut(
    cache: Cache,
    arch: str,
    *,
    recipe: Recipe | None = None,
    num_tokens: int = TOKENS[2],
    layers: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Cut one slice, and measure it."""
    manifest = cache.manifest
    teacher = load_model(locate_teacher("mini").folder, attention=ATTENTION).eval()
    shape = parse_arch(arch, teacher.config.num_attention_heads)
    student = build_student(
        student_config(shape, cache.reader.attachment(TEACHER_CONFIG), manifest), 0
    ).eval()
    text = Calibration.of(of_cache(cache, num_tokens), 0)
    layers = layers or spaced_layers(shape.num_layers, teacher.config.num_hidden_layers)
    errors = cut(teacher, student, layers=layers, calibration=text, recipe=recipe)
    numbers = range(manifest.num_train, min(manifest.num_sequences, manifest.num_train + HELD_OUT))
    held_out = Calibration.of([cache[number].input_ids for number in numbers], 0)
    kls = last_layer_kl(teacher, student, held_out)
    row = {
        **_rounded({str(kind): kl for kind, kl in kls.items()}),
        "errors": [round(error, 3) for error in errors],
    }
    print(arch, recipe, num_tokens, layers, row, flush=True)
    return row


def _tasks(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return scores of students of relations, fine-tuned on 2,000 examples, by start."""
    folders = []
    for start in ("random", "slice"):
        for shape in FINE_TUNED:  # folders of names that tell them apart in tables
            folder = given.home / "models" / f"{start}-{shape}"
            student = given.home / "runs" / f"{start}-{given.steps}-0" / "students" / shape
            shutil.copytree(student, folder, dirs_exist_ok=True)
            folders.append(folder)
    config = EvaluateConfig(
        task=("sst2", "stsb"), data=str(given.data), seeds=given.seeds, max_train=2000, lr=(1e-4,)
    )
    evaluation = evaluate_models(config, [str(folder) for folder in folders], out=given.home / "evaluations")
    models = [folder.name for _ in config.task for folder in folders for _ in range(given.seeds)]
    return [
        {"model": model, "task": trial.identity.task, "seed": trial.identity.seed, "scores": trial.scores}
        for model, trial in zip(models, evaluation.trials, strict=True)
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
