"""Measure on one GPU what the project claims of one: `python -m benchmarks.gpu`.

It needs the project and PyTorch, no network, and at most nine minutes and the row that is being measured
then: what is left is named in the result, `results/gpu.json`, which is written after each part. `--small
--device cpu` runs everything in small, to see that it runs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.correctness import compiled, correctness, replayed
from benchmarks.gpu.dumping import dumping, dumping_otherwise
from benchmarks.gpu.inputs import LARGE, SMALL, Bench, prepare
from benchmarks.gpu.profiling import profiling
from benchmarks.gpu.training import forms, training
from benchmarks.report import add_to_result, machine

PARTS: dict[str, Callable[[Bench], Iterable[dict[str, Any]]]] = {
    "dump": dumping,
    "profile": profiling,
    "forms_of_the_loss": forms,
    "replayed": replayed,
    "compiled": compiled,
    "correctness": correctness,
    "train": training,
    "dump_otherwise": dumping_otherwise,
}


def main() -> None:
    """Measure the parts one after the other, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="torch device to measure")
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="part to measure; all of them by default"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="most minutes that it takes")
    parser.add_argument("--small", action="store_true", help="measure little, to see that it runs")
    parser.add_argument("--out", type=Path, help="file of the result; results/gpu.json by default")
    given = parser.parse_args()
    device = torch.device(given.device)
    end = time.perf_counter() + 60 * given.minutes
    result: dict[str, Any] = {"device": _name(device), "not_measured": []}
    with TemporaryDirectory() as folder:
        bench = prepare(Path(folder), device, SMALL if given.small else LARGE)
        for name in given.part or PARTS:
            _measure(name, bench, end=end, result=result)
            if given.out is None:
                add_to_result("gpu", **result)
            else:
                given.out.write_text(
                    json.dumps({"benchmark": "gpu", "machine": machine(), **result}, indent=1)
                )


def _measure(name: str, bench: Bench, *, end: float, result: dict[str, Any]) -> None:
    """Add the rows of a part to the result, until the time is over; an error ends the part alone."""
    if time.perf_counter() > end:
        result["not_measured"].append(name)
        return
    began = time.perf_counter()
    rows = result[name] = []
    try:
        for row in PARTS[name](bench):
            rows.append(row)
            print(name, json.dumps(row), flush=True)
            if time.perf_counter() > end:
                result["not_measured"].append(f"{name}, after row {len(rows)}")
                break
    except Exception as error:  # noqa: BLE001 - the other parts are worth having
        rows.append({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        print(name, rows[-1], flush=True)
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    main()
