"""Measure a study of four passes on a Ray cluster of one worker, and of two."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.scale.processes import run
from minilm_cache.engines.ray_cluster import RayCluster
from minilm_cache.session import Session
from minilm_cache.workflows.study import run_study
from minilm_cache.workflows.study_spec import read_study

STUDY: Final = """
dump: {teacher: mini, max_tokens: 20000, device: cpu}
caches:
  vectors: {codec: vectors}
arch: [2x96, 3x192]
seed: [0, 1, 2, 3]
train: {steps: 100, batch_size: 16, init: random, device: cpu}
"""
_TIMED: Final = {"train_s", "own_train_s", "inference_tokens_per_s", "speedup", "cost"}
"""Columns of the table that no two runs have in common."""


def measure_study(home: Path) -> dict[str, Any]:
    """Return the seconds of a study by one worker and by two, and whether their tables are the same."""
    rows = {}
    for workers in (1, 2):
        folder = home / f"workers{workers}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        words = ["--part", "study", "--child", str(folder), "--length", str(workers)]
        rows[workers] = json.loads(run([sys.executable, "-m", "benchmarks.scale", *words]).splitlines()[-1])
    return {
        "passes": 4,
        "one_worker_s": rows[1]["seconds"],
        "two_workers_s": rows[2]["seconds"],
        "ratio": round(rows[1]["seconds"] / rows[2]["seconds"], 2),
        "same_results": rows[1]["students"] == rows[2]["students"],
    }


def studied(folder: Path, num_workers: int) -> dict[str, Any]:
    """Return the seconds of a study on a local cluster, which has begun before, and its students."""
    import ray  # noqa: PLC0415 - an extra

    (folder / "study.yaml").write_text(STUDY)
    ray.init(address="local", num_cpus=num_workers, include_dashboard=False, log_to_driver=False)
    cluster = RayCluster()
    started = time.perf_counter()
    result = run_study(
        read_study(folder / "study.yaml"), folder / "study", cluster=cluster, session=Session(folder)
    )
    seconds = time.perf_counter() - started
    students = [
        {name: value for name, value in row.items() if name not in _TIMED}
        for row in result.students.to_pylist()
    ]
    return {"seconds": round(seconds, 1), "students": students}
