"""Write and read results as JSON files, with the machine and versions that they were measured with."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """Return what figures were measured with."""
    return {
        "cpu": cpu(),
        "cores": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "zarr", "numpy")},
    }


def cpu() -> str:
    """Return the processor's name, and what it has for bfloat16, as Linux says."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({', '.join(units) or 'nothing for bfloat16'})"


def write_result(name: str, result: dict[str, object]) -> None:
    """Write `results/NAME.json` and print it."""
    text = json.dumps({"benchmark": name, "machine": machine(), **result}, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


def write_for_cpu(name: str, measured: Mapping[str, object]) -> None:
    """Write what was measured on this processor, in addition to what `results/NAME.json` has of others."""
    write_result(name, {"cpus": {**read_result(name).get("cpus", {}), cpu(): measured}})


def add_to_result(name: str, **parts: object) -> None:
    """Write parts of a result; those of an earlier run stay in it."""
    write_result(name, {**read_result(name), **parts})


def read_result(name: str) -> dict[str, Any]:
    """Return what an earlier run of a benchmark measured. Empty if there was none."""
    file = RESULTS / f"{name}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {part: value for part, value in result.items() if part not in {"benchmark", "machine"}}
