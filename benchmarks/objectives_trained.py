"""Measure a student of each objective from each start: random weights, a slice, whole layers of the teacher.

All students train from one cache. The runs are short: they show that everything works, and which start is
better for an objective, not which objective is best.

    python -m benchmarks.objectives_trained
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import write_result
from minilm_cache.dump.config import DumpConfig, HeadConfig
from minilm_cache.dump.mlm_head import fit_head
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.device import choose_device
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.report.compare import live_held_out_kl
from minilm_cache.report.runs import TrainedRun
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students

STEPS = 20
BATCH_SIZE = 16
MAX_TOKENS = 59_904
ARCH = {"mobilebert": "6x384:b96"}
STARTS = ("random", "slice", "teacher-layers")
RUNS: dict[str, dict[str, Any]] = {
    "minilm": {},
    "minilmv2": {},
    "value-mse": {},
    "hidden-mse": {},
    "tinybert": {},
    "tinybert, paper": {"form": "paper"},
    "distilbert": {},
    "distilbert, paper": {"form": "paper"},
    "mlm-kd": {},
    "mlm-kd, half ground truth": {"ground_truth": 0.5},
    "bert-pkd": {},
    "bert-pkd, paper": {"form": "paper"},
    "mobilebert": {},
    "mobilebert, paper": {"form": "paper"},
}
"""Settings by name of the run, which begins with the name of the objective."""


def measured(cache: Path, teacher: Teacher, *, home: Path, name: str, start: str) -> dict[str, Any]:
    """Train a student, and return its losses on held-out sequences, and its KL to the live teacher, nats."""
    objective = name.split(",", maxsplit=1)[0]
    config = TrainConfig.model_validate(
        {
            "arch": (ARCH.get(objective, "3x384"),),
            "objective": objective,
            "steps": STEPS,
            "batch_size": BATCH_SIZE,
            **RUNS[name],
            "init": start,
        }
    )
    run = TrainedRun.open(
        train_students(config, cache, out=home / f"{name} {start}", session=Session(home)).path
    )
    (kls,) = live_held_out_kl(
        run.reference, teacher, objective=run.objective, students=[run.folder(run.students[0])]
    )
    student = run.students[0]
    parts = {"before": student.held_out_before, "after": student.held_out_after, "kl": kls}
    return {
        part: {name: round(value, 7) for name, value in (values or {}).items()}
        for part, values in parts.items()
    }


def main() -> None:
    """Dump a cache for all objectives, and measure a student of each."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        model = home / "teacher"
        fit_head(HeadConfig(teacher="mini", max_tokens=2**17, epochs=1), model)
        served = {"for": ",".join(name for name, spec in OBJECTIVES.items() if not spec.needs.logits)}
        settings = {"teacher": str(model), "max_tokens": MAX_TOKENS, **served}
        cache = dump_cache(
            DumpConfig.model_validate(settings), out=home / "cache", session=Session(home)
        ).path
        measure_all(cache, model, home)


def measure_all(cache: Path, model: Path, home: Path) -> None:
    """Train one student for each objective from a cache of a teacher, and write the results."""
    teacher = Teacher(locate_teacher(str(model)), choose_device("cpu"))
    results: dict[str, dict[str, Any]] = {}
    for name in RUNS:
        is_variant, is_cut = "," in name, name.split(",")[0] not in ARCH
        starts = STARTS if is_cut and not is_variant else ("random",)
        results[name] = {
            start: measured(cache, teacher, home=home, name=name, start=start) for start in starts
        }
        write_result(
            "objectives_trained",
            {"steps": STEPS, "batch_size": BATCH_SIZE, "tokens": MAX_TOKENS, "results": results},
        )


if __name__ == "__main__":
    main()
