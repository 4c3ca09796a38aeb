"""The benchmark of a GPU runs on a CPU in small, so that it will run when a GPU is there."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import PARTS, main
from tests.replay import Replayer


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> dict[str, Any]:
    words = ["benchmarks.gpu", "--small", "--device", "cpu", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", words)
    main()
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_every_part_runs_and_a_cpu_computes_what_a_cpu_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = [part for part in PARTS if part != "compiled"]
    result = run(monkeypatch, tmp_path / "gpu.json", *(word for part in parts for word in ("--part", part)))

    assert result["not_measured"] == []
    assert result.keys() >= set(parts)
    assert not any("error" in row for part in parts for row in result[part])
    assert len(result["correctness"]) == 3
    for codec in result["correctness"]:
        assert set(codec["equal_stored_values"].values()) == {1.0}
        assert codec["loss_relative_difference"] < 1e-6
        assert codec["gradient_relative_difference"] < 1e-6
    for part, precisions in {"dump": ["bfloat16"], "dump_otherwise": ["float32", "int8"]}.items():
        rows = [(row["precision"], row["codec"]) for row in result[part]]
        assert rows == list(product(precisions, ("topk", "vectors", "dense")))
    (row,) = result["train"]
    assert all(rate > 0 for rate in row["tokens_per_s"].values())
    assert row["over_usual_online"] > 0
    (profile,) = result["profile"]
    assert profile["slowest_calls_ms"]


def test_ways_that_are_replayed_as_graphs_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Replayer()
    monkeypatch.setattr("benchmarks.loops.recorder_for", lambda _: recorder)
    result = run(monkeypatch, tmp_path / "gpu.json", "--part", "replayed", "--part", "train")

    (row,) = result["replayed"]
    assert row["graphs_are_used"]
    assert row["loss_relative_differences"] == pytest.approx([0, 0], abs=1e-5)
    (row,) = result["train"]
    assert row["tokens_per_s"].keys() >= {"as graphs", "online, as graphs"}
    assert recorder.replays > 10


def test_compiled_students_learn_the_same(tmp_path: Path, soak: int) -> None:
    """In a process of its own: the compiler cannot look through the tests' type checks."""
    if soak == 1:
        pytest.skip("compiled layers train the same in tests/integration/train, too; tried with --soak")
    out = tmp_path / "gpu.json"
    words = ["--small", "--device", "cpu", "--part", "compiled", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words], check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(out.read_text())["compiled"]
    assert "error" not in row
    assert len(row["loss_relative_differences"]) == len(row["students"]) == 2
    assert max(row["loss_relative_differences"]) < 1e-3


def test_what_no_time_is_left_for_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run(monkeypatch, tmp_path / "gpu.json", "--minutes", "0", "--part", "train")

    assert result["not_measured"] == ["train"]


def test_an_error_ends_one_part_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    monkeypatch.setitem(PARTS, "profile", fails)
    result = run(monkeypatch, tmp_path / "gpu.json", "--part", "profile", "--part", "forms_of_the_loss")

    assert result["profile"] == [{"error": "RuntimeError: CUDA error: an illegal memory access"}]
    assert result["forms_of_the_loss"][0]["tokens_per_s"]["dense"] > 0
