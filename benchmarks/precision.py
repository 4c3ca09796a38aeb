"""Measure what a teacher in bfloat16 or in 8 bits does to what is stored, and to students, on a CPU.

    python -m benchmarks.precision
    python -m benchmarks.precision --vectors TEACHER --data DATA

Relations of `mini` in float32 and in bfloat16 are compared without any codec. Students learn from a cache of
each, and both are judged by the live teacher in float32. Seeds are as in benchmarks/student_quality.py. With
`--vectors` a sentence encoder's vectors of STS-B's dev texts are compared in all precisions of a CPU.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.embeddings import similarity
from benchmarks.inputs import KINDS, mini_relations, mini_teacher
from benchmarks.report import add_to_result, read_result
from benchmarks.student_quality import ARCH, SEEDS, STEPS, train_and_measure
from minilm_cache.cache import open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.tap import Tap
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
LENGTH = 128
COMPARED_TOKENS = 2**14
MAX_TOKENS = 2**17


def main() -> None:
    """Compare what is asked for, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", help="teacher whose vectors are compared")
    parser.add_argument("--data", type=Path, help="folder with glue/STS-B")
    given = parser.parse_args()
    if given.vectors is None:
        compare_relations()
        return
    rows = read_result("precision").get("vectors", {})
    rows[Path(given.vectors).name] = vectors_by_precision(given.vectors, given.data)
    add_to_result("precision", vectors=rows)


def vectors_by_precision(name: str, data: Path) -> dict[str, dict[str, float]]:
    """Return STS-B's Spearman correlation, the memory of weights on a GPU, and cosines with float32."""
    found: dict[str, dict[str, float]] = {}
    plain: list[torch.Tensor] = []
    for precision in (*PRECISIONS, "int8"):
        teacher = Teacher(locate_teacher(name), torch.device("cpu"), layers=(), precision=precision)
        sides: list[torch.Tensor] = []
        spearman = similarity(partial(_encoded, teacher, sides), data)
        plain = plain or sides
        cosines = torch.cosine_similarity(torch.cat(sides), torch.cat(plain))
        on_gpu = teacher.memory._replace(device=torch.device("cuda"))
        found[precision] = {
            "stsb_dev": spearman,
            "weights_mb": round(on_gpu.num_bytes / 1e6, 1),
            "mean_cosine": round(float(cosines.mean()), 5),
            "least_cosine": round(float(cosines.min()), 5),
        }
    return found


def _encoded(teacher: Teacher, kept: list[torch.Tensor], texts: Sequence[str]) -> np.ndarray:
    """Return the teacher's vectors of texts, of length 1, and keep them."""
    vectors = torch.cat([_vectors(teacher, texts[at : at + 32]) for at in range(0, len(texts), 32)])
    kept.append(vectors)
    return torch.nn.functional.normalize(vectors, dim=1).numpy()


def _vectors(teacher: Teacher, texts: Sequence[str]) -> torch.Tensor:
    encoded = teacher.tokenizer(list(texts), truncation=True, max_length=LENGTH)["input_ids"]
    inputs = Inputs.of(list(map(torch.tensor, encoded)), int(teacher.tokenizer.pad_token_id))
    last = teacher.num_layers
    vectors: torch.Tensor = teacher.pooler(None)(
        teacher.read(inputs, Tap(hidden=(last,))).hidden[last], inputs.lengths
    )
    return vectors


def compare_relations() -> None:
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
    add_to_result(
        "precision",
        teacher=MINI,
        kl_float32_to_bfloat16_nats=relations_kl(plain, rounded),
        student=ARCH,
        steps=STEPS,
        tokens=MAX_TOKENS,
        held_out_kl_nats=students,
        bfloat16_over_float32_by_seed=[round(ratio, 4) for ratio in ratios],
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
