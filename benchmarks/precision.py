"""Measure what a teacher in bfloat16 does to stored relations and to students, on a CPU.

    python -m benchmarks.precision

Relations of both teachers are compared without any codec. Students learn from a cache of each, and both are
judged by the live teacher in float32. Seeds are as in benchmarks/student_quality.py.
"""

from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.inputs import KINDS, mini_relations, mini_teacher
from benchmarks.report import write_result
from benchmarks.student_quality import ARCH, SEEDS, STEPS, train_and_measure
from minilm_cache.cache import open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
LENGTH = 128
COMPARED_TOKENS = 2**14
MAX_TOKENS = 2**17


def main() -> None:
    """Compare relations, train students, and write the result."""
    plain = mini_teacher()
    rounded = Teacher(locate_teacher(MINI), torch.device("cpu"), precision="bfloat16")
    students: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            config = DumpConfig(teacher=MINI, max_tokens=MAX_TOKENS, precision=precision)
            cache = open_cache(
                dump_cache(config, out=Path(folder, precision), session=Session(Path(folder))).path
            )
            runs = [train_and_measure(cache, plain, seed, online=False)["sum"] for seed in SEEDS]
            students[precision] = {"mean": round(mean(runs), 5), "stdev": round(stdev(runs), 5)}
            students[precision]["by_seed"] = [round(run, 5) for run in runs]
    ratios = [
        rounded_kl / plain_kl
        for rounded_kl, plain_kl in zip(
            students["bfloat16"]["by_seed"], students["float32"]["by_seed"], strict=True
        )
    ]
    write_result(
        "precision",
        {
            "teacher": MINI,
            "kl_float32_to_bfloat16_nats": relations_kl(plain, rounded),
            "student": ARCH,
            "steps": STEPS,
            "tokens": MAX_TOKENS,
            "held_out_kl_nats": students,
            "bfloat16_over_float32_by_seed": [round(ratio, 4) for ratio in ratios],
        },
    )


def relations_kl(plain: Teacher, rounded: Teacher) -> dict[str, float]:
    """Return the mean KL(float32 || bfloat16) of each relation over heads and rows, nats."""
    first, _ = mini_relations(plain, LENGTH, COMPARED_TOKENS)
    second, _ = mini_relations(rounded, LENGTH, COMPARED_TOKENS)
    tiny = torch.finfo(torch.float32).tiny
    return {
        str(kind): float(
            (first[kind] * (first[kind].clamp(min=tiny).log() - second[kind].clamp(min=tiny).log()))
            .sum(-1)
            .mean()
        )
        for kind in KINDS
    }


if __name__ == "__main__":
    main()
