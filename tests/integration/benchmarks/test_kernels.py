"""The kernels of the relation loss compile for GPUs that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, torch
from benchmarks import kernels
kernels.GPUS = {90: "H100"}
cases = [("vectors", torch.bfloat16, 32, 64), ("topk", torch.bfloat16, 32, 16)]
print(json.dumps([row for case in cases for row in kernels.compiled(*case)]))
"""


def test_kernels_compile_for_a_gpu_and_fit_into_it(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="Triton for Linux brings the compiler")
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    rows = json.loads(made.stdout)
    assert [(row["codec"], row["kernel"]) for row in rows] == [
        (codec, kernel)
        for codec in ("vectors", "topk")
        for kernel in ("losses_of_rows", "gradients_of_vectors, rows", "gradients_of_vectors, columns")
    ]
    for row in rows:
        assert row["matrix_instructions"] > 0
        assert row["registers"] <= 255
        assert row["spilled_bytes"] < 64
        assert row["shared_bytes"] <= 99 * 1024
